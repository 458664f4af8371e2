"""The seam: what a model sees as its cache, and how attention finds the pool through the keys."""

import sys
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.models import seam
from mlx_paged_attention.models.forward import ForwardContext
from mlx_paged_attention.models.seam import (
    PagedLayerCache,
    UnusedCache,
    rebind_attention,
    scaled_dot_product_attention,
)
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.host import HostLayer

HEADS, DIM, BLOCK_SIZE = 2, 8, 4


def spec(window=None):
    return LayerKVSpec(tuple(Plane(name, "float32", (HEADS, BLOCK_SIZE, DIM)) for name in "kv"), window)


def batch(starts, queries=1):
    """Row ``i`` has the blocks ``3 i + 1 .. 3 i + 3``."""
    tables = np.arange(1, 1 + 3 * len(starts), dtype=np.int32).reshape(len(starts), 3)
    positions = np.array(starts)[:, None] + np.arange(queries)
    blocks = np.take_along_axis(tables, positions // BLOCK_SIZE, 1)
    slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).reshape(-1)
    return AttentionBatch(np.array(starts, np.int32), queries, slots, tables, BLOCK_SIZE)


@pytest.fixture
def context():
    yield ForwardContext()
    assert not seam.waiting_for_attention, "keys were left behind"


def make_cache(context, *, dense=False, window=None, num_blocks=10):
    return PagedLayerCache(HostLayer(spec(window), num_blocks), context, dense=dense)


def tokens(rows, queries=1, seed=0):
    rng = np.random.default_rng(seed)
    return [mx.array(rng.standard_normal((rows, HEADS, queries, DIM)).astype(np.float32)) for _ in range(3)]


def plain(q, k, v):
    """One query over contiguous keys."""
    return np.array(mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0))


def test_the_offset_is_a_position_per_row_and_constant_during_a_forward(context):
    cache = make_cache(context)
    context.batch = batch([3, 0, 5])
    offset = cache.offset
    assert (offset.dtype, offset.tolist()) == (mx.int32, [3, 0, 5])
    q, k, v = tokens(3)
    scaled_dot_product_attention(q, *cache.update_and_fetch(k, v), cache, 1.0, None)
    assert cache.offset.tolist() == [3, 0, 5]
    assert cache.settle()


def test_outside_a_forward_a_cache_has_no_answer(context):
    cache = make_cache(context)
    with pytest.raises(AssertionError, match="outside a forward"):
        cache.offset  # noqa: B018
    with pytest.raises(AssertionError, match="outside a forward"):
        cache.size()


def test_attention_finds_the_pool_through_the_keys_even_without_a_cache(context):
    cache = make_cache(context)
    history = []
    for step in range(6):
        context.batch = batch([step])
        q, k, v = tokens(1, seed=step)
        history.append((k, v))
        keys, values = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, keys, values, cache=None, scale=1.0, mask="causal")
        assert cache.settle()
        expected = plain(q, *(mx.concatenate(list(part), axis=2) for part in zip(*history, strict=True)))
        np.testing.assert_allclose(np.array(out), expected, atol=1e-5)


def test_layers_whose_calls_interleave_attend_each_over_their_own(context):
    one, other = make_cache(context), make_cache(context)
    context.batch = batch([0])
    q, k, v = tokens(1)
    _, k2, v2 = tokens(1, seed=1)
    first, second = one.update_and_fetch(k, v), other.update_and_fetch(k2, v2)
    out2 = scaled_dot_product_attention(q, *second, one, 1.0, None)
    out1 = scaled_dot_product_attention(q, *first, other, 1.0, None)
    # A single position: attention is its value.
    np.testing.assert_allclose(np.array(out1), np.array(v), atol=1e-6)
    np.testing.assert_allclose(np.array(out2), np.array(v2), atol=1e-6)
    assert one.settle()
    assert other.settle()


def test_a_layer_without_keys_of_its_own_attends_to_anothers(context):
    cache, history = make_cache(context), []
    for step in range(5):
        context.batch = batch([step])
        q, k, v = tokens(1, seed=step)
        history.append((k, v))
        cache.update_and_fetch(k, v)
        cache.keys = mx.depends(cache.keys, q)  # as models do for the sake of evaluation
        outs = [
            scaled_dot_product_attention(part, *cache.keys_and_values(), cache, 1.0, None)
            for part in (q, q * 0.5)
        ]
        assert cache.settle()
        whole = [mx.concatenate(list(part), axis=2) for part in zip(*history, strict=True)]
        for out, part in zip(outs, (q, q * 0.5), strict=True):
            np.testing.assert_allclose(np.array(out), plain(part, *whole), atol=1e-5)


def test_a_layer_that_keeps_nothing_still_knows_positions_and_masks(context):
    cache = UnusedCache(context, dense=False)
    context.batch = batch([3, 5])
    assert cache.offset.tolist() == [3, 5]
    assert cache.size() == 6
    assert cache.make_mask(1) is None
    assert UnusedCache(context, dense=True).make_mask(1).shape == (2, 1, 1, 6)
    context.batch = batch([3])
    assert UnusedCache(context, dense=True, one_row=True).offset == 3
    context.batch = None


def test_keys_from_elsewhere_go_to_mlx_lm(context):
    q, k, v = tokens(1, 5)
    cache = KVCache()
    keys, values = cache.update_and_fetch(k, v)
    out = scaled_dot_product_attention(q, keys, values, cache, scale=0.5, mask="causal")
    expected = seam.mlx_lm_attention(q, k, v, None, 0.5, "causal")
    np.testing.assert_array_equal(np.array(out), np.array(expected))


def test_keys_that_were_never_attended_to_are_reported_and_forgotten(context):
    cache = make_cache(context)
    context.batch = batch([0])
    cache.update_and_fetch(*tokens(1)[1:])
    assert len(seam.waiting_for_attention) == 1
    assert not cache.settle()
    assert not seam.waiting_for_attention
    assert cache.settle()


def test_a_cache_is_updated_once_in_a_forward(context):
    cache = make_cache(context)
    context.batch = batch([0])
    cache.update_and_fetch(*tokens(1)[1:])
    with pytest.raises(AssertionError, match="twice"):
        cache.update_and_fetch(*tokens(1, seed=1)[1:])
    cache.settle()


def test_a_paged_cache_gives_no_mask(context):
    cache = make_cache(context, window=3)
    context.batch = batch([3, 0])
    assert cache.make_mask(1, return_array=True, window_size=5) is None
    assert base.create_attention_mask(mx.zeros((2, 1, 4)), cache) is None


@pytest.mark.parametrize(
    ("own", "asked", "effective"), [(None, None, None), (None, 2, 2), (3, None, 3), (3, 2, 2)]
)
def test_a_dense_cache_masks_by_position_and_window(context, own, asked, effective):
    cache = make_cache(context, dense=True, window=own)
    context.batch = batch([4, 1], queries=2)
    mask = np.array(cache.make_mask(2, window_size=asked))
    assert mask.shape == (2, 1, 2, 6)
    for row, start in enumerate((4, 1)):
        for query in range(2):
            end = start + query + 1
            first = max(0, end - effective) if effective else 0
            assert np.flatnonzero(mask[row, 0, query]).tolist() == list(range(first, end))


def test_a_dense_cache_returns_the_whole_context_of_its_rows(context):
    cache = make_cache(context, dense=True)
    context.batch = batch([0], queries=5)
    _, k, v = tokens(1, 5)
    keys, values = cache.update_and_fetch(k, v)
    np.testing.assert_array_equal(np.array(keys), np.array(k))
    context.batch = batch([5, 0])
    _, k2, v2 = tokens(2, seed=1)
    keys, values = cache.update_and_fetch(k2, v2)
    assert keys.shape == values.shape == (2, HEADS, 6, DIM)
    np.testing.assert_array_equal(np.array(keys)[0, :, :5], np.array(k)[0])
    np.testing.assert_array_equal(np.array(values)[0, :, :5], np.array(v)[0])
    np.testing.assert_array_equal(np.array(keys)[:, :, [5, 0]][[0, 1], :, [0, 1]], np.array(k2)[:, :, 0])
    assert cache.settle()


def test_what_models_ask_of_a_cache_beside_that(context):
    cache = make_cache(context)
    context.batch = batch([3, 7])
    assert bool(cache)  # "if cache and ..." must not ask for a length
    assert not hasattr(cache, "__len__")
    assert not hasattr(cache, "bits")  # what mlx-lm tells a quantised cache by
    assert cache.size() == 8
    assert not cache.empty()
    assert not cache.is_trimmable()
    assert cache.nbytes == 10 * 2 * HEADS * BLOCK_SIZE * DIM * 4


def test_rebinding_reaches_every_loaded_model_module_and_those_loaded_later():
    from mlx_lm.models import llama

    rebind_attention()
    assert llama.scaled_dot_product_attention is scaled_dot_product_attention
    assert base.scaled_dot_product_attention is seam.mlx_lm_attention
    late = ModuleType("mlx_lm.models.late")
    late.sdpa = base.scaled_dot_product_attention
    late.other = len
    sys.modules[late.__name__] = late
    try:
        rebind_attention()
        rebind_attention()
    finally:
        del sys.modules[late.__name__]
    assert late.sdpa is scaled_dot_product_attention
    assert late.other is len
