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
from mlx_paged_attention.models.default_model import DEFAULT_MODEL_NAME, cached_default_model
from mlx_paged_attention.paths import cache_dir

# In a process of its own: MLX may be missing or crash, and nothing of the API imports it.
_PROBE = """
import json
import mlx_paged_attention
import mlx.core as mx
info = {"device": str(mx.default_device()), "matmul": float(mx.sum(mx.ones((8, 8)) @ mx.ones((8, 8))))}
info["metal"] = mx.metal.is_available()
info["cuda"] = mx.cuda.is_available()
info["device_info"] = {key: str(value) for key, value in mx.device_info().items()}
print(json.dumps(info))
"""
_PROBE_SECONDS = 120

EXAMPLES = """Examples:

    mlx-paged doctor
    mlx-paged doctor --json > report.json
"""


def doctor(
    *,
    as_json: Annotated[
        bool, Parameter(name="--json", help="Print JSON.", negative="", show_default=False)
    ] = False,
) -> int:
    """Print versions, back end, memory and caches; exit 1 if something keeps models from running."""
    facts = gather_facts()
    report = examine(facts)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            if name != "problems":
                print(f"{name:<14} {_line(value)}")
        for problem in report["problems"]:
            print(f"{'problem':<14} {problem}")
        if not report["problems"]:
            print(f"{'problems':<14} none")
    return 1 if report["problems"] else 0


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
