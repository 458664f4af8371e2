"""The machine a benchmark ran on: what a number means nothing without."""

import ctypes
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import psutil

from mlx_paged_attention import __version__
from mlx_paged_attention.api.report import size
from mlx_paged_attention.blas import load_blas

Facts = dict[str, str | int | float]

# What a person may have set that changes how threads share the cores.
_THREAD_VARIABLES = re.compile(r"(OPENBLAS|NUMBA|OMP|GOMP|MKL|MLX)_\w+")


def machine_facts() -> Facts:
    """Machine and versions, asked before anything runs: the load is that of others."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "memory": size(psutil.virtual_memory().total),
        "load average before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "mlx-paged-attention": __version__,
        "mlx": importlib.metadata.version("mlx"),
        "mlx-lm": importlib.metadata.version("mlx-lm"),
        **_blas_facts(),
        **{name: value for name, value in sorted(os.environ.items()) if _THREAD_VARIABLES.fullmatch(name)},
    }


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def blas_threads() -> int | None:
    """Threads of the BLAS that this package has loaded; ``None`` if it is MLX's own."""
    if not load_blas().loaded:
        return None
    return int(ctypes.CDLL(None).scipy_openblas_get_num_threads())


def _blas_facts() -> Facts:
    threads = blas_threads()
    return {"blas": load_blas().detail} | ({} if threads is None else {"blas threads": threads})


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
