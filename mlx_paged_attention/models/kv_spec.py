"""What each layer of a model keeps in the cache, observed from the model itself."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.errors import UnsupportedModelError


def observe_kv_specs(model: nn.Module, *, block_size: int) -> list[LayerKVSpec]:
    """One spec per entry of the model's cache, in order.

    Heads and head dims are read off the arrays that a forward of one token puts into mlx-lm's
    own cache, so nothing is guessed from a config. Windows come from ``RotatingKVCache``.

    Raises:
        UnsupportedModelError: a layer keeps something other than keys and values per token.
    """
    cache = make_prompt_cache(model)
    for index, entry in enumerate(cache):
        if reason := _refusal(entry):
            raise UnsupportedModelError(
                f"layer {index} keeps a {type(entry).__name__}: {reason}; "
                "this model cannot run on the paged engine yet, use mlx_lm for it"
            )
    model(mx.zeros((1, 1), mx.int32), cache=cache)
    return [_spec(entry, index, block_size) for index, entry in enumerate(cache)]


def _refusal(entry: Any) -> str | None:
    if type(entry) is KVCache:
        return None
    if type(entry) is RotatingKVCache:
        if entry.keep:
            return f"a window that always keeps its first {entry.keep} tokens is not supported"
        return None
    return "only plain keys and values, with or without a sliding window, are supported"


def _spec(entry: Any, index: int, block_size: int) -> LayerKVSpec:
    if entry.keys is None:
        raise UnsupportedModelError(
            f"layer {index} has a cache that the model does not write; "
            "layers that share keys and values are not supported yet, use mlx_lm for this model"
        )
    planes = tuple(
        Plane(name, str(array.dtype).removeprefix("mlx.core."), _block(array, block_size))
        for name, array in (("k", entry.keys), ("v", entry.values))
    )
    window = entry.max_size if isinstance(entry, RotatingKVCache) else None
    return LayerKVSpec(planes, window)


def _block(array: mx.array, block_size: int) -> tuple[int, ...]:
    _, kv_heads, _, head_dim = array.shape
    return kv_heads, block_size, head_dim
