"""The reference against a dense computation in float64, and every faster path against the reference."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged_attention.ops.host_kernel import attend_rows
from mlx_paged_attention.ops.paged_attention import paged_attention


def paged_case(rng, contexts, heads, kv_heads, head_dim, block_size=16, v_dim=None):
    """Random queries and pools with shuffled tables; every slot outside a context is NaN."""
    v_dim = v_dim or head_dim
    width = max(1, -(-max(contexts) // block_size))
    used = [-(-c // block_size) for c in contexts]
    blocks = 1 + sum(used)
    order = list(rng.permutation(np.arange(1, blocks)))
    k = np.full((blocks, kv_heads, block_size, head_dim), np.nan, np.float32)
    v = np.full((blocks, kv_heads, block_size, v_dim), np.nan, np.float32)
    tables = np.zeros((len(contexts), width), np.int32)
    dense = []
    for row, (context, count) in enumerate(zip(contexts, used, strict=True)):
        keys = rng.standard_normal((context, kv_heads, head_dim)).astype(np.float32)
        values = rng.standard_normal((context, kv_heads, v_dim)).astype(np.float32)
        for index in range(count):
            block = tables[row, index] = order.pop()
            part = slice(index * block_size, min((index + 1) * block_size, context))
            k[block, :, : part.stop - part.start] = keys[part].transpose(1, 0, 2)
            v[block, :, : part.stop - part.start] = values[part].transpose(1, 0, 2)
        dense.append((keys, values))
    q = rng.standard_normal((len(contexts), heads, head_dim)).astype(np.float32)
    return q, k, v, tables, np.array(contexts, np.int32), dense


def dense_attention(q, dense, *, window=None, sinks=None, softcap=None):
    """Float64 attention of each query over its own contiguous keys and values."""
    out = []
    for row, (keys, values) in enumerate(dense):
        heads, head_dim = q[row].shape
        group = heads // keys.shape[1]
        result = np.zeros((heads, values.shape[2]))
        first = max(0, len(keys) - window) if window else 0
        for head in range(heads):
            k = keys[first:, head // group].astype(np.float64)
            v = values[first:, head // group].astype(np.float64)
            scores = k @ q[row, head].astype(np.float64) * head_dim**-0.5
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            extra = [] if sinks is None else [float(sinks[head])]
            if not len(scores):
                continue
            peak = max([scores.max(), *extra])
            weights = np.exp(scores - peak)
            total = weights.sum() + sum(np.exp(s - peak) for s in extra)
            result[head] = weights @ v / total
        out.append(result)
    return np.array(out)


def host(q, k, v, tables, lens, *, window=None, sinks=None, softcap=None):
    out = np.empty((q.shape[0], q.shape[1], v.shape[3]), np.float32)
    no_sinks = np.empty(0, np.float32)
    k, v = (np.ascontiguousarray(pool.swapaxes(0, 1)) for pool in (k, v))
    attend_rows(
        q, k, v, tables, lens, 1, np.float32(q.shape[2] ** -0.5), window or 0,
        np.float32(softcap or 0), no_sinks if sinks is None else sinks, out,
    )  # fmt: skip
    return out


def reference(q, k, v, tables, lens, *, window=None, sinks=None, softcap=None):
    sinks = None if sinks is None else mx.array(sinks)
    arrays = [mx.array(x) for x in (q, k, v, tables, lens)]
    return np.array(paged_attention(*arrays, window=window, sinks=sinks, softcap=softcap))


PATHS = pytest.mark.parametrize("attend", [reference, host], ids=["reference", "host"])
CONTEXTS = [0, 1, 15, 16, 17, 31, 32, 33, 100]


@PATHS
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 2), (5, 1), (32, 8)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_attention_equals_dense_attention_whatever_lies_in_unused_slots(attend, heads, kv_heads, head_dim):
    case = paged_case(np.random.default_rng(head_dim + heads), CONTEXTS, heads, kv_heads, head_dim)
    np.testing.assert_allclose(attend(*case[:5]), dense_attention(case[0], case[5]), atol=1e-5)


@PATHS
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (8, 2, 128)])
def test_long_contexts_around_a_blocks_edge(attend, heads, kv_heads, head_dim):
    case = paged_case(np.random.default_rng(7), [2047, 2048, 2049, 1], heads, kv_heads, head_dim)
    np.testing.assert_allclose(attend(*case[:5]), dense_attention(case[0], case[5]), atol=1e-5)
    windowed = attend(*case[:5], window=1000)
    np.testing.assert_allclose(windowed, dense_attention(case[0], case[5], window=1000), atol=1e-5)


@PATHS
@pytest.mark.parametrize("window", [1, 7, 8, 16, 17, 64, 700])
def test_a_window_holds_exactly_its_last_positions(attend, window):
    case = paged_case(np.random.default_rng(window), CONTEXTS, 8, 2, 64)
    expected = dense_attention(case[0], case[5], window=window)
    np.testing.assert_allclose(attend(*case[:5], window=window), expected, atol=1e-5)


@PATHS
@pytest.mark.parametrize("sink", [-5.0, 0.0, 2.0])
def test_sinks_take_their_share_and_give_no_value(attend, sink):
    rng = np.random.default_rng(1)
    case = paged_case(rng, CONTEXTS, 8, 2, 64)
    sinks = (rng.standard_normal(8) + sink).astype(np.float32)
    expected = dense_attention(case[0], case[5], sinks=sinks)
    np.testing.assert_allclose(attend(*case[:5], sinks=sinks), expected, atol=1e-5)


@PATHS
@pytest.mark.parametrize("softcap", [1.0, 50.0])
def test_a_soft_cap_bends_the_scores(attend, softcap):
    case = paged_case(np.random.default_rng(2), CONTEXTS, 8, 2, 64)
    expected = dense_attention(case[0], case[5], softcap=softcap)
    np.testing.assert_allclose(attend(*case[:5], softcap=softcap), expected, atol=1e-5)


@PATHS
@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_block_size_and_value_width_are_free(attend, block_size):
    case = paged_case(np.random.default_rng(3), [0, 1, 40], 6, 3, 24, block_size=block_size, v_dim=8)
    np.testing.assert_allclose(attend(*case[:5]), dense_attention(case[0], case[5]), atol=1e-5)


@PATHS
@pytest.mark.parametrize("shift", [-30.0, 30.0])
def test_moving_every_score_by_a_constant_changes_nothing(attend, shift):
    rng = np.random.default_rng(4)
    q, k, v, tables, lens, _ = paged_case(rng, [1, 16, 33, 90], 4, 2, 63)
    wide_q = np.concatenate([q, np.full((*q.shape[:2], 1), 1.0, np.float32)], axis=2)
    scale = 64**0.5  # both calls scale by 1/sqrt(64)

    def with_last(value):
        last = np.full((*k.shape[:3], 1), value, np.float32)
        return np.concatenate([k, last], axis=3)

    plain = attend(wide_q, with_last(0.0), v, tables, lens, window=20)
    moved = attend(wide_q, with_last(shift * scale), v, tables, lens, window=20)
    np.testing.assert_allclose(moved, plain, atol=2e-4)


def test_a_row_without_context_gives_zero_and_not_nan():
    case = paged_case(np.random.default_rng(5), [0, 3], 4, 2, 16)
    for attend in (reference, host):
        assert (attend(*case[:5])[0] == 0).all()


def test_half_precision_is_accumulated_in_float32():
    q, k, v, tables, lens, dense = paged_case(np.random.default_rng(6), [200], 4, 2, 64)
    half = [mx.array(x).astype(mx.float16) for x in (q, k, v)]
    out = paged_attention(*half, mx.array(tables), mx.array(lens))
    assert out.dtype == mx.float16
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), dense_attention(q, dense), atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 4, 8)}, "do not fit"),
        ({"q": (2, 3, 16)}, "no multiple"),
        ({"lens": (3,)}, "2 rows need"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    shapes = {"q": (2, 4, 16), "k": (3, 2, 4, 16), "v": (3, 2, 4, 16), "tables": (2, 1), "lens": (2,)}
    shapes |= change
    arrays = [mx.zeros(s, mx.int32 if n in ("tables", "lens") else mx.float32) for n, s in shapes.items()]
    with pytest.raises(ValueError, match=message):
        paged_attention(*arrays)
