#!/usr/bin/env bash
# What this project says about NVIDIA GPUs, checked and measured anew in about thirteen minutes.
#
#     benchmarks/cuda.sh                  # installs into the Python at hand: use a virtual environment
#     CUDA=cuda12 benchmarks/cuda.sh      # for CUDA 12
#     benchmarks/cuda.sh --no-install
#
# Each part has a limit of its own and does not stop the others. Ends with 1 if any of them failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python="${PYTHON:-python3}"
if [ "${1:-}" != --no-install ]; then
  "$python" -m pip install -q -e ".[${CUDA:-cuda13}]" pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis || exit
fi

failed=()
part() {
  local name=$1 seconds=$2
  shift 2
  printf '\n=== %s\n' "$name"
  timeout "$seconds" "$@" || failed+=("$name")
}

part doctor 200 "$python" -m mlx_paged_attention doctor --kernels
# Products of float32 as float32: MLX rounds their factors to tf32 otherwise, and the references do not.
MLX_ENABLE_TF32=0 part tests 120 "$python" -m pytest -m gpu -n 8 --timeout 100 \
  tests/runner tests/ops/test_large_pools.py tests/ops/test_packing.py
part kernels 80 "$python" benchmarks/cuda_kernels.py --skip-check
part latents 80 "$python" benchmarks/cuda_kernels.py --latents
part recipe 200 "$python" benchmarks/cuda_engine.py --parts recipe
part decode 110 "$python" benchmarks/cuda_engine.py --parts decode --models "0.6B bf16,8B bf16"
part memory 80 "$python" benchmarks/cuda_engine.py --parts identity,long

if [ ${#failed[@]} -gt 0 ]; then
  printf '\nfailed: %s\n' "${failed[*]}"
  exit 1
fi
