"""clang, and the cache of what it made."""

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mlx_paged_attention.paths import cache_dir

from .errors import CompileError, EmulatorError

HERE = Path(__file__).parent
INSTALL = "apt-get install --no-install-recommends clang-19"
_OLDEST = 16
_NEWEST = 22
_KEPT_SECONDS = 7 * 24 * 3600


def runs_on_this_machine() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def what_is_missing() -> str | None:
    """Why the emulator cannot run here, and what would help; ``None`` where it can."""
    if not runs_on_this_machine():
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


@functools.cache
def cache_folder() -> Path:
    """Of this version of the emulator, MLX and clang. What other versions left a while ago goes."""
    folder = cache_dir() / "emulator" / _fingerprint()[:24]
    if not folder.exists():
        for other in folder.parent.glob("*/"):
            if time.time() - other.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cached(key: object, suffix: str, make: Callable[[Path], None]) -> Path:
    """The file that ``make`` wrote for ``key``."""
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    path = cache_folder() / f"{digest}{suffix}"
    if not path.exists():
        unfinished = path.with_name(f"{digest}.{os.getpid()}{suffix}")
        make(unfinished)
        unfinished.replace(path)
    return path


@functools.cache
def mlx_include() -> Path:
    """Where the installed MLX keeps the headers of its Metal kernels."""
    import mlx

    return Path(next(iter(mlx.__path__))) / "include"


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{compiler()} {_version(compiler())}".encode())
    headers = mlx_include() / "mlx/backend/metal/kernels"
    for folder in (HERE, headers):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".h", ".cpp", ".py") and not path.name.startswith("test_"):
                digest.update(path.read_bytes())
    return digest.hexdigest()
