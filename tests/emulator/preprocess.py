"""The driver's preprocessor: its macros, MLX's headers, and library headers that are empty here."""

import functools
from pathlib import Path

from .toolchain import HERE, cache_folder, compile_or_raise, mlx_include

_LIBRARY_HEADERS = (
    "metal_array",
    "metal_atomic",
    "metal_common",
    "metal_compute",
    "metal_geometric",
    "metal_integer",
    "metal_limits",
    "metal_logging",
    "metal_math",
    "metal_matrix",
    "metal_numeric",
    "metal_pack",
    "metal_quadgroup",
    "metal_relational",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_stdlib",
    "metal_type_traits",
    "metal_uniform",
)


@functools.lru_cache(maxsize=8)  # a kernel's two compilations begin alike
def preprocess(metal: str, defines: tuple[str, ...] = ()) -> str:
    arguments = ["-E", "-x", "c++", "-std=c++17", "-w", "-undef", "-nostdinc", "-nostdinc++"]
    arguments += ["-D__cplusplus=201703L", "-D__UINT32_MAX__=4294967295u", "-Wno-builtin-macro-redefined"]
    arguments += ["-include", str(HERE / "metal_library/driver_macros.h")]
    arguments += [f"-I{_empty_headers()}", f"-I{mlx_include()}", *(f"-D{define}" for define in defines), "-"]
    return compile_or_raise(arguments, metal)


@functools.cache
def _empty_headers() -> Path:
    folder = cache_folder() / "library headers"
    folder.mkdir(exist_ok=True)
    for name in _LIBRARY_HEADERS:
        (folder / name).touch()
    return folder
