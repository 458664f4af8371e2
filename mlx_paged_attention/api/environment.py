"""What a newcomer's machine may lack, found before MLX is imported and said in one helpful line each.

Without these checks the same machines fail inside MLX with a linker's or an import's message.
"""

import importlib.metadata
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, field

from mlx_paged_attention.errors import MlxPagedError

_PACKAGE = "mlx-paged-attention"
_RELATED = ("mlx", "mlx-lm", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
_OLDEST_PYTHON = (3, 11)
_OLDEST_MACOS = (14,)
_OLDEST_GLIBC = (2, 35)


@dataclass(frozen=True)
class Facts:
    """What decides whether MLX can run here.

    Attributes:
        system: ``"Darwin"``, ``"Linux"`` or another, as :func:`platform.system` says.
        machine: the processor this Python was built for.
        macos: version of macOS, ``""`` elsewhere.
        glibc: version of glibc, ``""`` where the C library is another.
        translated: this process runs under Rosetta.
        installed: version of every installed package of ``mlx``.
        ranges: by package, the versions that this package declares, as ``">=1,<2"``.
    """

    system: str
    machine: str
    python: tuple[int, int]
    macos: str = ""
    glibc: str = ""
    translated: bool = False
    installed: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, str] = field(default_factory=dict)


def gather_facts() -> Facts:
    """Ask this machine."""
    libc, libc_version = platform.libc_ver()
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        python=sys.version_info[:2],
        macos=platform.mac_ver()[0],
        glibc=libc_version if libc == "glibc" else "",
        translated=platform.system() == "Darwin" and _is_translated(),
        installed={name: version for name in _RELATED if (version := _version(name)) is not None},
        ranges=_declared_ranges(),
    )


def require_supported(facts: Facts | None = None) -> None:
    """Raise MlxPagedError with the first problem of this machine, if it has any."""
    for problem in problems(facts or gather_facts()):
        raise MlxPagedError(problem)


def problems(facts: Facts) -> list[str]:
    """Everything that keeps MLX from running here, with what to do; empty if nothing does."""
    found = []
    if facts.python < _OLDEST_PYTHON:
        found.append(
            f"Python {_dotted(facts.python)} is too old: {_PACKAGE} needs {_dotted(_OLDEST_PYTHON)} or newer"
        )
    match facts.system:
        case "Darwin":
            found += _macos_problems(facts)
        case "Linux":
            found += _linux_problems(facts)
        case _:
            found.append(f"MLX runs on macOS and Linux, not on {facts.system}; on Windows use WSL 2")
    return found + _package_problems(facts)


def _macos_problems(facts: Facts) -> list[str]:
    if facts.translated or facts.machine == "x86_64":
        if facts.translated:
            return [
                "this Python was built for Intel and runs under Rosetta, where MLX cannot: install an arm64 "
                "Python (python.org's universal2 installer, or Homebrew under /opt/homebrew) and make a new "
                "virtual environment with it"
            ]
        return ["MLX needs Apple silicon: this Mac, or the Python on it, is Intel (x86_64)"]
    if facts.macos and _numbers(facts.macos) < _OLDEST_MACOS:
        return [
            f"macOS {facts.macos} is too old: MLX needs macOS {_dotted(_OLDEST_MACOS)} or newer; update macOS"
        ]
    return []


def _linux_problems(facts: Facts) -> list[str]:
    found = []
    if not facts.glibc:
        found.append("MLX's Linux wheels need glibc, and this system has another C library (Alpine's musl?)")
    elif _numbers(facts.glibc) < _OLDEST_GLIBC:
        found.append(
            f"glibc {facts.glibc} is too old: MLX needs {_dotted(_OLDEST_GLIBC)} or newer "
            "(Ubuntu 22.04, Debian 12, Fedora 36)"
        )
    back_ends = [name for name in ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13") if name in facts.installed]
    if not back_ends:
        found.append(
            f"MLX has no back end on this Linux machine: run pip install '{_PACKAGE}[cpu]', "
            f"or '{_PACKAGE}[cuda13]' (or cuda12) for an NVIDIA GPU"
        )
    elif len(back_ends) > 1:
        found.append(
            f"{' and '.join(back_ends)} are installed together and overwrite each other's files: run "
            f"pip uninstall {' '.join(back_ends)}, then pip install '{_PACKAGE}[cpu]' (or [cuda12], [cuda13])"
        )
    return found


def _package_problems(facts: Facts) -> list[str]:
    found = []
    for name, wanted in facts.ranges.items():
        version = facts.installed.get(name)
        if version is None:
            if name != "mlx" or facts.system == "Darwin":  # on Linux the missing back end says it better
                found.append(f"{name} is not installed: run pip install '{name}{wanted}'")
        elif not _within(version, wanted):
            found.append(
                f"{name} {version} is installed, but this version of {_PACKAGE} needs {name}{wanted}: "
                f"run pip install '{name}{wanted}'"
            )
    return found


def _within(version: str, wanted: str) -> bool:
    """Whether a version lies in a range such as ``>=0.32.2,<0.33``."""
    have = _numbers(version)
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", wanted):
        if (have >= _numbers(bound)) != (operator == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``"0.32.4.dev1"`` is ``(0, 32, 4)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _declared_ranges() -> dict[str, str]:
    """The versions of ``mlx`` and ``mlx-lm`` in this package's metadata, whatever their markers."""
    ranges = {}
    try:
        requirements = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []  # run from a source tree that is not installed: nothing is declared
    for requirement in requirements:
        match = re.match(r"(mlx|mlx-lm)(\[\w+\])?((?:>=|<)[^;]*)", requirement.replace(" ", ""))
        if match:
            ranges[match[1]] = ",".join(sorted(match[3].split(","), reverse=True))
    return ranges


def _is_translated() -> bool:
    # Apple: "Determine whether your app is running as a translated binary".
    result = subprocess.run(
        ["/usr/sbin/sysctl", "-n", "sysctl.proc_translated"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() == "1"
