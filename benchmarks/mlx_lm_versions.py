"""Which releases of mlx-lm and MLX the engine runs on: a fast part of the tests against each.

Every pair gets an environment of its own in a temporary directory, with this checkout installed and its
declared ranges narrowed to that pair. Needs ``uv`` and a package index; a minute or two a pair on two cores.
What it found last is in docs/loading.md; the floor in pyproject.toml is the oldest that passed.

    python benchmarks/mlx_lm_versions.py 0.32.0 0.32.1 0.32.2
    python benchmarks/mlx_lm_versions.py 0.32.2:0.32.0        # mlx-lm 0.32.2 on MLX 0.32.0
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/models/test_parity.py", "tests/models/test_seam.py"]
TOOLS = ["pytest", "pytest-timeout", "pytest-asyncio", "hypothesis", "gguf", "httpx"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("versions", nargs="+", help="of mlx-lm, or MLX_LM:MLX")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files to run")
    options = parser.parse_args()
    results = [(version, run(version, options.tests)) for version in options.versions]
    print("\n| mlx-lm | MLX | result |\n|---|---|---|")
    for version, (mlx, result) in results:
        print(f"| {version.partition(':')[0]} | {mlx} | {result} |")
    return int(any("passed" not in result or "failed" in result for _, (_, result) in results))


def run(version: str, tests: list[str]) -> tuple[str, str]:
    """MLX's version and the result of one pair, in words; what went wrong is printed."""
    mlx_lm, _, mlx = version.partition(":")
    with tempfile.TemporaryDirectory(prefix="mlx-lm-versions-") as scratch:
        tree, python = Path(scratch) / "tree", Path(scratch) / "env" / "bin" / "python"
        shutil.copytree(
            ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "benchmarks", "examples")
        )
        project = (tree / "pyproject.toml").read_text()
        project = re.sub(r'"mlx-lm[^"]*"', f'"mlx-lm=={mlx_lm}"', project)
        if mlx:
            project = re.sub(r'("mlx(?:\[\w+\])?)>=[^;"]*', rf"\1=={mlx}", project)
        (tree / "pyproject.toml").write_text(project)
        steps = [
            ["uv", "venv", "-q", "--python", sys.executable, str(python.parent.parent)],
            ["uv", "pip", "install", "-q", "--python", str(python), "-e", f"{tree}[cpu]", *TOOLS],
        ]
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return mlx or "-", "cannot be installed"
        found = "import importlib.metadata as m; print(m.version('mlx'))"
        mlx = subprocess.run([python, "-c", found], capture_output=True, text=True, check=True).stdout.strip()
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        command = [str(python), "-m", "pytest", "--tb=line", *tests]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        lines = done.stdout.strip().splitlines()
        if done.returncode:
            print(
                f"mlx-lm {mlx_lm} on MLX {mlx}:", *lines[-30:], done.stderr[-2000:], sep="\n", file=sys.stderr
            )
        return mlx, lines[-1] if lines else "no tests ran"


if __name__ == "__main__":
    sys.exit(main())
