"""Runs Metal compute kernels on a CPU, and is strict about them.

``metal_kernel`` stands in for ``mx.fast.metal_kernel``. It builds the source that MLX would hand to Metal's
compiler (``mlx_source``), translates it to C++ (``translate``) over a small Metal library
(``metal_library/``), has clang instrument every memory access (``program``) and runs the threads as fibers
(``runtime/``), with simdgroups and barriers as Metal has them.

These are faults, reported with thread and line:

- divergence: lanes or threads that wait in different simd operations or barriers, or never reach them;
- accesses out of bounds, misaligned, or through null;
- races, within a simdgroup, within a threadgroup, between threadgroups;
- reads of threadgroup memory or outputs that were never written; unset variables are NaN;
- writes to inputs that are not declared mutable;
- signed overflow, impossible shifts, division by zero, vector and lane indices out of range;
- more than 32 KiB of threadgroup memory; endless loops.

A second compilation, as OpenCL C++, finds errors of address spaces (``address_spaces``).

What it cannot tell: all that Apple's compiler accepts, register pressure, speed, the accuracy of ``fast::``
functions and the order of reductions (``Conditions`` varies these two), order between atomics, hazards
between kernels.
Words that look like swizzles (``xy``, ``rgb``) cannot be members of a struct.
"""

from .buffers import Buffer, SparseArray, output
from .conditions import STRICT, Conditions
from .custom_kernel import MetalKernel, emulate, metal_kernel
from .dispatch import Statistics, launch
from .errors import CompileError, EmulatorError, KernelError
from .program import Program, compile_kernel
from .requirement import require_emulator
from .toolchain import INSTALL, what_is_missing

__all__ = [
    "INSTALL",
    "STRICT",
    "Buffer",
    "CompileError",
    "Conditions",
    "EmulatorError",
    "KernelError",
    "MetalKernel",
    "Program",
    "SparseArray",
    "Statistics",
    "compile_kernel",
    "emulate",
    "launch",
    "metal_kernel",
    "output",
    "require_emulator",
    "what_is_missing",
]
