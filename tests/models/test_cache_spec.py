"""What a layer keeps is read off mlx-lm's cache, and how it attends off its masks."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask, create_causal_mask
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

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane, StateSpec
from mlx_paged_attention.errors import UnsupportedModelError
from mlx_paged_attention.models.cache_spec import CacheEntry, observe_cache
from mlx_paged_attention.models.seam import (
    rebind_attention,
    scaled_dot_product_attention,
    waiting_for_attention,
)


@pytest.fixture(autouse=True)
def _rebound():
    rebind_attention()
    yield
    assert not waiting_for_attention


def observed(model, block_size=16):
    return list(observe_cache(model, block_size=block_size).layers)


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
    specs = observed(model)
    assert specs == [LayerKVSpec(planes(NUM_KV_HEADS, 16, HEAD_DIM, HEAD_DIM))] * NUM_LAYERS


@pytest.mark.parametrize(
    ("name", "windows"), [("gemma3", [WINDOW, None, WINDOW, None]), ("sliding_only", [WINDOW, None])]
)
def test_windows_are_those_of_each_layer(tiny_model, name, windows):
    model, _ = load_model(tiny_model(name))
    specs = observed(model, block_size=4)
    assert [spec.window for spec in specs] == windows
    assert {spec.planes for spec in specs} == {planes(NUM_KV_HEADS, 4, HEAD_DIM, HEAD_DIM)}


def test_each_layer_has_heads_and_widths_of_its_own():
    caches = [KVCache(), RotatingKVCache(max_size=512), KVCache()]
    model = Model(caches, [(8, 64, 64), (1, 192, 128), (3, 24, 40)], mx.bfloat16)
    assert observed(model) == [
        LayerKVSpec(planes(8, 16, 64, 64, "bfloat16")),
        LayerKVSpec(planes(1, 16, 192, 128, "bfloat16"), 512),
        LayerKVSpec(planes(3, 16, 24, 40, "bfloat16")),
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (QuantizedKVCache(), "layer 1 keeps a QuantizedKVCache: only keys and values, states"),
        (CacheList(KVCache(), QuantizedKVCache()), "layer 1 keeps a QuantizedKVCache"),
        (RotatingKVCache(max_size=64, keep=4), "layer 1 .* keeps its first 4 tokens"),
    ],
)
def test_a_layer_that_keeps_something_else_is_refused_by_number_and_kind(entry, message):
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        observe_cache(Model([KVCache(), entry], [(2, 8, 8)] * 2), block_size=16)
    assert "use mlx_lm" in str(refused.value)


def test_a_cache_that_the_model_does_not_write_takes_no_memory():
    spec = observe_cache(
        Model([KVCache(), KVCache(), KVCache()], [(2, 8, 8), None, (1, 8, 8)]), block_size=16
    )
    assert spec.entries == (CacheEntry("attention", 0), CacheEntry("unused"), CacheEntry("attention", 1))
    assert [layer.planes[0].shape for layer in spec.layers] == [(2, 16, 8), (1, 16, 8)]
    assert spec.make_cache(["first", "second"], [], "unused") == ["first", "unused", "second"]


class Hybrid(nn.Module):
    """A state, then a list of a state and keys and values, as some models keep for a layer."""

    def make_cache(self):
        return [ArraysCache(2), CacheList(ArraysCache(1), KVCache())]

    def __call__(self, tokens, cache):
        cache[0][0] = mx.zeros((1, 3, 5))
        cache[0][1] = mx.zeros((1, 4, 2, 2), mx.bfloat16)
        cache[1][0][0] = mx.zeros((1, 7))
        kv = mx.zeros((1, 2, tokens.shape[1], 8))
        cache[1][1].update_and_fetch(kv, kv)
        return mx.zeros((*tokens.shape, 4))


def test_states_and_lists_are_seen_through():
    spec = observe_cache(Hybrid(), block_size=16)
    assert spec.entries == (
        CacheEntry("state", 0),
        CacheEntry("list", 0, (CacheEntry("state", 1), CacheEntry("attention", 0))),
    )
    assert spec.states == (
        StateSpec((Plane("0", "float32", (3, 5)), Plane("1", "bfloat16", (4, 2, 2))), 2),
        StateSpec((Plane("0", "float32", (7,)),), 1),
    )
    assert spec.bytes_per_state == 4 * 15 + 2 * 16 + 4 * 7
    assert spec.bytes_per_block == 2 * 4 * 2 * 16 * 8
    made = spec.make_cache(["kv"], ["one", "two"], None)
    assert made[0] == "one"
    assert made[1].caches == ("two", "kv")


class Masked(nn.Module):
    """One attention under whatever mask is made for it."""

    def __init__(self, entry, make_mask, times=1):
        super().__init__()
        self._entry, self._make_mask, self._times = entry, make_mask, times

    def make_cache(self):
        return [self._entry]

    def __call__(self, tokens, cache):
        x = mx.random.normal((1, 2, tokens.shape[1], 8))
        h = mx.zeros((1, tokens.shape[1], 8))
        masks = [self._make_mask(h, cache[0]) for _ in range(self._times)]
        keys, values = cache[0].update_and_fetch(x, x)
        for mask in masks:
            scaled_dot_product_attention(x, keys, values, cache[0], 1.0, mask)
        return mx.zeros((*tokens.shape, 4))


@pytest.mark.parametrize(
    ("entry", "window", "seen"),
    [
        (KVCache, None, None),
        (KVCache, 4096, 4096),
        (lambda: RotatingKVCache(max_size=512), None, 512),
        (lambda: RotatingKVCache(max_size=512), 512, 512),
    ],
)
def test_a_window_is_seen_in_the_mask_however_long_it_is(entry, window, seen):
    model = Masked(entry(), lambda h, cache: create_attention_mask(h, cache, window_size=window))
    spec = observe_cache(model, block_size=16)
    assert [layer.window for layer in spec.layers] == [seen]
    assert not spec.own_masks


def test_a_mask_that_the_cache_did_not_make_is_the_models_own():
    spec = observe_cache(Masked(KVCache(), lambda h, cache: create_causal_mask(h.shape[1])), block_size=16)
    assert spec.own_masks
    chunked = Masked(ChunkedKVCache(64), lambda h, cache: create_causal_mask(h.shape[1]))
    assert observe_cache(chunked, block_size=16).own_masks


def test_attention_twice_under_masks_of_two_windows_is_the_models_own():
    windows = iter((None, 8))
    model = Masked(KVCache(), lambda h, cache: create_attention_mask(h, cache, window_size=next(windows)), 2)
    assert observe_cache(model, block_size=16).own_masks


def test_a_model_whose_window_is_another_in_chunks_than_in_decoding_is_refused():
    entry = RotatingKVCache(max_size=512)
    model = Masked(entry, lambda h, cache: create_attention_mask(h, cache, window_size=513))
    with pytest.raises(UnsupportedModelError, match="to 513 tokens in a prompt and to 512 in decoding"):
        observe_cache(model, block_size=16)
