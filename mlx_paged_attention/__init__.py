"""mlx-paged-attention: high-throughput LLM inference for MLX on a paged KV cache."""

from typing import TYPE_CHECKING, Any

from mlx_paged_attention.blas import load_blas

if TYPE_CHECKING:
    from mlx_paged_attention.api.async_llm import AsyncLLM
    from mlx_paged_attention.api.llm import LLM
    from mlx_paged_attention.config import EngineConfig
    from mlx_paged_attention.ops.paged_attention import paged_attention
    from mlx_paged_attention.runner.paged_cache import make_paged_cache
    from mlx_paged_attention.sampling.params import SamplingParams
    from mlx_paged_attention.sampling.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "SamplingParams",
    "StructuredOutputsParams",
    "make_paged_cache",
    "paged_attention",
]

# A library loaded before MLX takes the place of the slow one its Linux CPU build brings.
load_blas()

_HOMES = {
    "AsyncLLM": "api.async_llm",
    "EngineConfig": "config",
    "LLM": "api.llm",
    "SamplingParams": "sampling.params",
    "StructuredOutputsParams": "sampling.structured_outputs",
    "make_paged_cache": "runner.paged_cache",
    "paged_attention": "ops.paged_attention",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use: the command line and the server need no MLX to start."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names too that nobody has used yet."""
    return sorted({*globals(), *__all__})
