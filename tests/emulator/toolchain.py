"""clang, and the cache of what it made."""

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from mlx_paged_attention.paths import cache_dir

from .errors import CompileError, EmulatorError

HERE = Path(__file__).parent
INSTALL = "apt-get install --no-install-recommends clang-19"
_OLDEST = 16
_NEWEST = 22


@functools.cache
def what_is_missing() -> str | None:
    """Why the emulator cannot run here, and what would help; ``None`` where it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the Metal emulator runs on Linux on x86-64"
    if not _compilers():
        return f"the Metal emulator needs clang {_OLDEST} or newer: {INSTALL}"
    return None


@functools.cache
def compiler() -> str:
    if reason := what_is_missing():
        raise EmulatorError(reason)
    return _compilers()[0]


@functools.cache
def _compilers() -> list[str]:
    names = ["clang++-19", *(f"clang++-{n}" for n in range(_NEWEST, _OLDEST - 1, -1)), "clang++"]
    return [path for name in names if (path := shutil.which(name)) and _version(path) >= _OLDEST]


def _version(path: str) -> int:
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"clang version (\d+)", text)
    return int(found.group(1)) if found and "Apple" not in text else 0


def run(arguments: Iterable[str | Path], source: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [compiler(), *map(str, arguments)], input=source, capture_output=True, text=True, check=False
    )


def compile_or_raise(arguments: Iterable[str | Path], source: str | None = None) -> str:
    result = run(arguments, source)
    if result.returncode:
        raise CompileError(result.stderr[:6000].strip())
    return result.stdout


def cached(key: object, suffix: str, make: Callable[[Path], None]) -> Path:
    """The file that ``make`` wrote for ``key`` and this version of the emulator, MLX and clang."""
    digest = hashlib.sha256(f"{_fingerprint()}{key!r}".encode()).hexdigest()[:24]
    path = cache_dir() / "emulator" / f"{digest}{suffix}"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_name(f"{digest}.{os.getpid()}{suffix}")
        make(unfinished)
        unfinished.replace(path)
    return path


@functools.cache
def mlx_include() -> Path:
    """Where the installed MLX keeps the headers of its Metal kernels."""
    import mlx

    return Path(next(iter(mlx.__path__))) / "include"


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256(compiler().encode())
    headers = mlx_include() / "mlx/backend/metal/kernels"
    for folder in (HERE, headers):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".h", ".cpp", ".py") and not path.name.startswith("test_"):
                digest.update(path.read_bytes())
    return digest.hexdigest()
