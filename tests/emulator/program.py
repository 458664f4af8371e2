"""A kernel compiled for the CPU, with every memory access under watch."""

import ctypes
import functools
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .address_spaces import address_space_errors
from .errors import CompileError
from .preprocess import preprocess
from .toolchain import HERE, cached, compile_or_raise
from .translate import FunctionConstants, translate

_COMMON = [
    *("-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-gdwarf-4", "-g1", "-w", "-ferror-limit=8"),
    # nothing but the emulator's own library and runtime
    *("-ffreestanding", "-nostdlib", "-nostdinc", "-nostdinc++", f"-I{HERE / 'metal_library'}"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fvisibility=hidden"),
    # neither aliasing rules nor loops that must end: the code runs as written
    *("-fno-strict-aliasing", "-fno-finite-loops"),
    # half rounds after every operation, as Metal's does
    *("-mf16c", "-mfma", "-Xclang", "-ffloat16-excess-precision=none"),
]
_CHECKS = [
    # the instrumentation alone; runtime/hooks.cpp is what it calls
    *("-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-compound-read-before-write=1", "-fno-vectorize", "-fno-slp-vectorize"),
    "-fsanitize=bounds,shift,signed-integer-overflow,integer-divide-by-zero,alignment,null",
    # variables that were never set are NaN
    "-ftrivial-auto-var-init=pattern",
]


@dataclass(frozen=True)
class Program:
    """A shared object and what to call in it."""

    path: Path
    library: ctypes.CDLL

    @property
    def entry(self) -> ctypes.c_void_p:
        return ctypes.cast(self.library.emulator_entry, ctypes.c_void_p)

    def line(self, offset: str) -> str:
        """Where in the kernel's source the code at ``offset`` (hexadecimal) stems from: ``name:line``."""
        command = ["addr2line", "-i", "-e", str(self.path), f"0x{offset}"]
        try:
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return f"0x{offset}"
        places = [line.split(" (")[0].rsplit("/", 1)[-1] for line in output.splitlines()]
        library = {path.name for path in (HERE / "metal_library").iterdir()}
        return next((place for place in places if place.split(":")[0] not in library), f"0x{offset}")


@functools.cache
def _program(
    metal: str,
    expression: str,
    constants: tuple[tuple[int | str, int | bool], ...],
    defines: tuple[str, ...],
    fuse_multiply_add: bool,
    check_address_spaces: bool,
) -> Program:
    key = (metal, expression, constants, defines)
    if check_address_spaces:
        errors = address_space_errors(metal, expression, defines)
        if errors:
            raise CompileError("\n".join(errors))

    def make(path: Path) -> None:
        translation = translate(preprocess(metal, defines), dict(constants))
        contraction = "-ffp-contract=fast" if fuse_multiply_add else "-ffp-contract=off"
        compile_or_raise(
            [*_COMMON, *_CHECKS, contraction, "-", "-o", path],
            translation.with_entry(expression),
        )

    path = cached((*key, fuse_multiply_add), ".so", make)
    return Program(path, ctypes.CDLL(str(path)))


def compile_kernel(
    metal: str,
    expression: str,
    *,
    function_constants: FunctionConstants | None = None,
    defines: Sequence[str] = (),
    fuse_multiply_add: bool = False,
    check_address_spaces: bool = True,
) -> Program:
    """Compiles a kernel, or takes it from the cache.

    Args:
        metal: the whole source as the driver would get it; ``#include`` finds MLX's own kernel headers.
        expression: the kernel, with template arguments if it has any: ``softmax<float>``.
        function_constants: values by index or name; those not given are 0.
        defines: macros, ``NAME=value``.
        fuse_multiply_add: whether ``a * b + c`` rounds once.
        check_address_spaces: whether to compile it a second time, for its address spaces alone.

    Raises:
        CompileError: with the compiler's words; lines count from the last ``#line`` in ``metal``.
    """
    runtime()
    constants: Mapping[int | str, int | bool] = function_constants or {}
    return _program(
        metal,
        expression,
        tuple(sorted(constants.items(), key=str)),
        tuple(defines),
        fuse_multiply_add,
        check_address_spaces,
    )


@functools.cache
def runtime() -> ctypes.CDLL:
    """The functions that compiled kernels call; loaded first, so that their names resolve to it."""

    def make(path: Path) -> None:
        sources = sorted((HERE / "runtime").glob("*.cpp"))
        flags = ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti"]
        compile_or_raise([*flags, *sources, "-o", path, "-lm"])

    return ctypes.CDLL(str(cached("runtime", ".so", make)), mode=ctypes.RTLD_GLOBAL)
