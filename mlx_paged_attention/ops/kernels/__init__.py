"""The attention kernels of GPU back ends: each body is written once and runs on Metal and on CUDA."""
