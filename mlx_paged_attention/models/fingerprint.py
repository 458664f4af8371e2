"""A fingerprint of everything about a model that changes its keys and values.

Block hashes begin with it, so that blocks of two models never mix: not across processes, and not after
a file was replaced under the same name.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlx_paged_attention.errors import ModelLoadError
from mlx_paged_attention.paths import cache_dir


def model_fingerprint(files: Sequence[Path], config: dict[str, Any], dtype: str) -> str:
    """64 hex digits that change with the weights' content, the configuration or the dtype.

    The names and places of the files do not matter. Hashing reads every file once (about 1 GB/s
    each); its digest is remembered in the cache directory until the file changes.

    Args:
        files: all weight files.
        config: the model's configuration, as JSON values.
        dtype: of the computation, such as ``"float32"``.

    Raises:
        ModelLoadError: a file cannot be read, or changed while it was.
    """
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = sorted(pool.map(_content_digest, files))
    identity = json.dumps(
        {"weights": digests, "config": config, "dtype": dtype}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(identity.encode()).hexdigest()


def _content_digest(path: Path) -> str:
    """sha256 of the file's content, from the cache if the file is the one that was hashed."""
    try:
        path = path.resolve()
        before = _stamp(path)
        remembered = cache_dir() / "digests" / hashlib.sha256(before.encode()).hexdigest()
        if remembered.is_file():
            return remembered.read_text()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _stamp(path) != before:
            raise ModelLoadError(f"{path} changed while it was being read; load it again")
        remembered.parent.mkdir(mode=0o700, exist_ok=True)
        partial = remembered.with_suffix(f".{os.getpid()}")
        partial.write_text(digest)
        partial.replace(remembered)
    except OSError as error:
        raise ModelLoadError(f"cannot fingerprint {path}: {error}") from error
    return digest


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{path}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}"
