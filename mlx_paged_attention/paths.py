"""Where the package keeps what it fetches or derives once."""

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The package's cache directory, created readable by its owner only.

    ``$MLX_PAGED_CACHE`` if set; else ``~/Library/Caches/mlx-paged-attention`` on macOS and
    ``$XDG_CACHE_HOME/mlx-paged-attention`` (by default under ``~/.cache``) elsewhere.

    Raises:
        OSError: the directory cannot be created.
    """
    path = cache_location()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def cache_location() -> Path:
    """Where :func:`cache_dir` is or would be."""
    if chosen := os.environ.get("MLX_PAGED_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-paged-attention"
    # The XDG specification tells readers to ignore a relative path.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "mlx-paged-attention"
