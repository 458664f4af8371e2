"""The direction of imports, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_paged_attention

PACKAGE = Path(mlx_paged_attention.__file__).parent
NAME = "mlx_paged_attention"

# Values that every layer may use.
SHARED = {
    "config",
    "errors",
    "paths",
    "sampling.params",
    "sampling.structured_outputs",
    "cache.layer_groups",
    "cache.spec",
    "scheduler.step_plan",
}

# Which folders each folder may import from, besides its own and what is shared.
ALLOWED = {
    "cache": set(),
    "text": set(),
    "ops": set(),
    "sampling": {"text.reasoning_tokens"},
    "scheduler": {"cache"},
    "models": {"ops"},
    # The engine's blocks are the scheduler's; the cache for mlx-lm's generation keeps a table of its own.
    "runner": {"models", "ops", "sampling", "cache.block_table"},
    "engine": {"scheduler", "cache", "runner", "models", "sampling", "text"},
    "api": {"engine", "text", "models.source", "models.gguf_header", "models.default_model", "blas"},
    # Between the API it measures (start, report) and the command that shows what it measured.
    "bench": {"api.start", "api.report", "engine", "models", "blas"},
    "kernel_check": {"ops", "bench.spread"},
}
ALLOWED["api"] |= {"bench", "kernel_check"}

# These must run, and start fast, where there is no MLX.
WITHOUT_MLX = ("cache", "scheduler", "text", "api")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, *, at_start_only: bool = False) -> set[str]:
    """Modules a file imports; with ``at_start_only``, not those inside functions or for types."""
    tree = ast.parse(path.read_text())
    if at_start_only:
        nodes: list[ast.AST] = [n for n in tree.body if not isinstance(n, ast.If)]
    else:
        nodes = list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_go_down_only(path):
    folder = dotted(path).split(".")[0]
    if folder not in ALLOWED:
        return
    for name in imports(path):
        if not name.startswith(NAME + "."):
            continue
        target = name.removeprefix(NAME + ".")
        allowed = ALLOWED[folder]
        assert (
            target.split(".")[0] == folder
            or target in SHARED
            or target in allowed
            or target.split(".")[0] in allowed
        ), f"{dotted(path)} may not import {target}"


@pytest.mark.parametrize("folder", WITHOUT_MLX)
def test_importing_everything_in_a_folder_imports_no_mlx(folder):
    names = [f"{NAME}.{dotted(path)}" for path in modules() if dotted(path).split(".")[0] == folder]
    assert len(names) > 1
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "heavy = ('mlx', 'mlx_lm', 'torch', 'transformers')\n"
        "loaded = sorted(m for m in sys.modules if m.split('.')[0] in heavy)\n"
        "assert not loaded, loaded\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_public_name_can_be_imported():
    for name in mlx_paged_attention.__all__:
        assert getattr(mlx_paged_attention, name).__name__ == name


def test_the_public_names_are_listed_before_they_are_used():
    code = "import mlx_paged_attention as m; print(set(m.__all__) - set(dir(m)), dir(m) == sorted(dir(m)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set() True\n"


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        mlx_paged_attention.Nonsense  # noqa: B018
