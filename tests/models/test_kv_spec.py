"""What a layer keeps is read off what the model puts into mlx-lm's cache."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.utils import load_model
from tiny_models import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, TINY_MODELS, WINDOW

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.errors import UnsupportedModelError
from mlx_paged_attention.models.kv_spec import observe_kv_specs


class Model(nn.Module):
    """Puts keys and values of the given ``(kv_heads, k_dim, v_dim)`` into each cache it makes."""

    def __init__(self, caches, shapes, dtype=mx.float32):
        super().__init__()
        self._caches, self._shapes, self._dtype = caches, shapes, dtype

    def make_cache(self):
        return self._caches

    def __call__(self, tokens, cache):
        for entry, shape in zip(cache, self._shapes, strict=True):
            if shape is not None:
                heads, k_dim, v_dim = shape
                length = tokens.shape[1]
                entry.update_and_fetch(
                    mx.zeros((1, heads, length, k_dim), self._dtype),
                    mx.zeros((1, heads, length, v_dim), self._dtype),
                )
        return mx.zeros((*tokens.shape, 4))


def planes(heads, size, k_dim, v_dim, dtype="float32"):
    return Plane("k", dtype, (heads, size, k_dim)), Plane("v", dtype, (heads, size, v_dim))


@pytest.mark.parametrize("name", sorted(set(TINY_MODELS) - {"gemma3", "sliding_only"}))
def test_a_plain_models_layers_are_alike(tiny_model, name):
    model, _ = load_model(tiny_model(name))
    specs = observe_kv_specs(model, block_size=16)
    assert specs == [LayerKVSpec(planes(NUM_KV_HEADS, 16, HEAD_DIM, HEAD_DIM))] * NUM_LAYERS


@pytest.mark.parametrize(
    ("name", "windows"), [("gemma3", [WINDOW, None, WINDOW, None]), ("sliding_only", [WINDOW, None])]
)
def test_windows_are_those_of_each_layer(tiny_model, name, windows):
    model, _ = load_model(tiny_model(name))
    specs = observe_kv_specs(model, block_size=4)
    assert [spec.window for spec in specs] == windows
    assert {spec.planes for spec in specs} == {planes(NUM_KV_HEADS, 4, HEAD_DIM, HEAD_DIM)}


def test_each_layer_has_heads_and_widths_of_its_own():
    caches = [KVCache(), RotatingKVCache(max_size=512), KVCache()]
    model = Model(caches, [(8, 64, 64), (1, 192, 128), (3, 24, 40)], mx.bfloat16)
    assert observe_kv_specs(model, block_size=16) == [
        LayerKVSpec(planes(8, 16, 64, 64, "bfloat16")),
        LayerKVSpec(planes(1, 16, 192, 128, "bfloat16"), 512),
        LayerKVSpec(planes(3, 16, 24, 40, "bfloat16")),
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ArraysCache(2), "layer 1 keeps a ArraysCache: only plain keys and values"),
        (CacheList(KVCache(), KVCache()), "layer 1 keeps a CacheList"),
        (ChunkedKVCache(64), "layer 1 keeps a ChunkedKVCache"),
        (QuantizedKVCache(), "layer 1 keeps a QuantizedKVCache"),
        (RotatingKVCache(max_size=64, keep=4), "layer 1 .* keeps its first 4 tokens"),
    ],
)
def test_a_layer_that_keeps_something_else_is_refused_by_number_and_kind(entry, message):
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        observe_kv_specs(Model([KVCache(), entry], [(2, 8, 8)] * 2), block_size=16)
    assert "use mlx_lm" in str(refused.value)


def test_a_cache_that_the_model_does_not_write_is_refused():
    with pytest.raises(UnsupportedModelError, match="layer 1 has a cache that the model does not write"):
        observe_kv_specs(Model([KVCache(), KVCache()], [(2, 8, 8), None]), block_size=16)
