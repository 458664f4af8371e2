"""``mlx-paged doctor``: what a bug report needs, and whether this machine can run the package."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import psutil
from cyclopts import Parameter

from mlx_paged_attention import __version__
from mlx_paged_attention.api.environment import Facts, gather_facts, problems
from mlx_paged_attention.api.report import size
from mlx_paged_attention.blas import load_blas
from mlx_paged_attention.errors import MlxPagedError
from mlx_paged_attention.kernel_check.jobs import all_jobs
from mlx_paged_attention.kernel_check.report import KernelReport
from mlx_paged_attention.kernel_check.session import check_kernels
from mlx_paged_attention.models.default_model import DEFAULT_MODEL_NAME, cached_default_model
from mlx_paged_attention.paths import cache_dir

# In a process of its own: MLX may be missing or crash, and nothing of the API imports it.
_PROBE = """
import importlib.util, json
import mlx_paged_attention
import mlx.core as mx
from mlx_paged_attention.ops.kernels.make import backend
right = mx.sum(mx.ones((8, 8)) @ mx.ones((8, 8))).item() == 512
info = {"device": str(mx.default_device()), "matmul": "right" if right else "wrong"}
info["metal"] = mx.metal.is_available()
info["cuda"] = mx.cuda.is_available()
info["kernels"] = backend() or "none"
on_host = mx.default_device() == mx.Device(mx.cpu) and importlib.util.find_spec("numba")
info["pool"] = "host memory" if on_host else "MLX arrays, written " + ("in place" if backend() else "anew")
info["device_info"] = {key: str(value) for key, value in mx.device_info().items()}
print(json.dumps(info))
"""
_PROBE_SECONDS = 120

EXAMPLES = """Examples:

    mlx-paged doctor
    mlx-paged doctor --json > report.json
    mlx-paged doctor --kernels
"""


def doctor(
    *,
    as_json: Annotated[
        bool, Parameter(name="--json", help="Print JSON.", negative="", show_default=False)
    ] = False,
    kernels: Annotated[
        bool,
        Parameter(
            help="On a GPU: compile, check and time the attention kernels, which takes minutes, and print a "
            "block to paste into an issue instead. Exit 1 if a kernel is wrong.",
            negative="",
            show_default=False,
        ),
    ] = False,
) -> int:
    """Print versions, back end, memory and caches; exit 1 if something keeps models from running."""
    facts = gather_facts()
    report = examine(facts)
    checked = _check_kernels(report) if kernels else None
    if checked is not None and not as_json:
        print(checked.as_markdown(_short_facts(report)))
    elif as_json:
        print(json.dumps(report | ({} if checked is None else {"kernels": checked.as_json()}), indent=2))
    else:
        for name, value in report.items():
            if name != "problems":
                print(f"{name:<14} {_line(value)}")
        for problem in report["problems"]:
            print(f"{'problem':<14} {problem}")
        if not report["problems"]:
            print(f"{'problems':<14} none")
    return 1 if report["problems"] or (checked is not None and checked.failures) else 0


def _check_kernels(report: dict[str, Any]) -> KernelReport:
    backend = report["backend"]
    if "error" in backend:
        raise MlxPagedError(f"the kernels cannot be checked: {report['problems'][0]}")
    if backend["kernels"] == "none":
        raise MlxPagedError(
            f"--kernels needs a GPU that MLX can use: here MLX runs on {backend['device']} and there are no "
            "kernels to check; mlx-paged doctor alone works here"
        )
    return check_kernels(all_jobs(backend["kernels"]))


def _short_facts(report: dict[str, Any]) -> list[str]:
    """What a reader of kernel timings must know; no paths, since it is made to be published."""
    backend, machine = report["backend"], report["machine"]
    device = backend["device_info"]
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    return [
        f"mlx-paged-attention {report['version']}, {packages}, Python {platform.python_version()}",
        f"{machine['platform']}, {machine['cores']} cores, {machine['memory']}",
        f"{device.get('device_name', '?')} ({device.get('architecture', '?')}), "
        f"kernels for {backend['kernels']}",
        *(f"problem: {problem}" for problem in report["problems"]),
    ]


def examine(facts: Facts) -> dict[str, Any]:
    """The report, as JSON-compatible data."""
    found = problems(facts)
    backend = _probe_mlx()
    if "error" in backend and not found:
        found.append(f"MLX does not work here: {backend['error']}")
    memory = psutil.virtual_memory()
    return {
        "version": __version__,
        "location": str(Path(__file__).parents[2]),
        "python": f"{platform.python_version()} ({platform.python_implementation()}) at {sys.executable}",
        "machine": {
            "platform": platform.platform(),
            "processor": facts.machine,
            "cores": os.cpu_count(),
            "memory": size(memory.total),
            "available": size(memory.available),
        },
        "packages": facts.installed,
        "backend": backend,
        "blas": load_blas().detail,
        **_caches(found),
        "problems": found,
    }


def _probe_mlx() -> dict[str, Any]:
    try:
        result = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_PROBE_SECONDS} s"}
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        return {"error": lines[-1]}
    return dict(json.loads(result.stdout))


def _caches(found: list[str]) -> dict[str, Any]:
    try:
        directory = cache_dir()
    except OSError as error:
        found.append(f"the cache directory cannot be made ({error}); set MLX_PAGED_CACHE to another")
        return {}
    model = cached_default_model()
    state = f"{DEFAULT_MODEL_NAME}: " + (
        f"fetched, {size(model.stat().st_size)} unpacked" if model else "not fetched yet (93 MB)"
    )
    return {
        "cache": {"directory": str(directory), "free disk": size(shutil.disk_usage(directory).free)},
        "default model": state,
    }


def _line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_line(item)}" for name, item in value.items())
    return str(value)
