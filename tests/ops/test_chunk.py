"""A long chunk's attention equals dense attention, whole or in slices."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged_attention.ops import chunk
from mlx_paged_attention.ops.chunk import chunk_attention

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 16, 8


def dense(q, k, v, start, window, sinks, scale):
    """float64 attention of ``[heads, L, dim]`` over ``[kv_heads, start + L, dim]``."""
    q, k, v = (x[0].astype(np.float64) for x in (q, k, v))
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    for head in range(q.shape[0]):
        kv = head // (q.shape[0] // k.shape[0])
        for i in range(q.shape[1]):
            end = start + i + 1
            first = max(0, end - window) if window else 0
            scores = k[kv, first:end] @ q[head, i] * scale
            extra = [] if sinks is None else [float(sinks[head])]
            peak = max(scores.max(), *extra) if extra else scores.max()
            weights = np.exp(scores - peak)
            total = weights.sum() + sum(np.exp(s - peak) for s in extra)
            out[head, i] = weights @ v[kv, first:end] / total
    return out[None]


def case(length, start, *, v_dim=DIM, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (
        (1, HEADS, length, DIM),
        (1, KV_HEADS, start + length, DIM),
        (1, KV_HEADS, start + length, v_dim),
    )
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def run(q, k, v, **options):
    return np.array(chunk_attention(mx.array(q), mx.array(k), mx.array(v), **options))


@pytest.mark.parametrize("v_dim", [DIM, V_DIM])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 40, 64, 1000])
@pytest.mark.parametrize(("length", "start"), [(1, 0), (40, 0), (17, 1), (40, 23), (5, 64)])
def test_each_query_sees_the_positions_up_to_its_own(length, start, window, v_dim):
    q, k, v = case(length, start, v_dim=v_dim)
    out = run(q, k, v, start=start, scale=0.3, window=window)
    np.testing.assert_allclose(out, dense(q, k, v, start, window, None, 0.3), atol=1e-5)


@pytest.mark.parametrize("window", [None, 7, 16, 64])
@pytest.mark.parametrize(("length", "start"), [(16, 0), (1, 0), (40, 0), (17, 1), (40, 23), (5, 64), (8, 8)])
def test_padding_to_few_lengths_changes_nothing(monkeypatch, length, start, window):
    monkeypatch.setattr(chunk, "ALIGNED", 16)
    lengths = set()
    sliced = chunk._sliced

    def recorded(queries, keys, *rest):
        lengths.update((queries.shape[2] % 16, keys.shape[2] % 16))
        return sliced(queries, keys, *rest)

    monkeypatch.setattr(chunk, "_sliced", recorded)
    q, k, v = case(length, start)
    out = chunk._aligned(*(mx.array(x) for x in (q, k, v)), start, 0.3, window, None)
    np.testing.assert_allclose(np.array(out), dense(q, k, v, start, window, None, 0.3), atol=1e-5)
    assert lengths == {0}


@pytest.mark.parametrize("window", [None, 9])
def test_sinks_take_their_share(window):
    q, k, v = case(20, 11)
    sinks = np.array([-1.0, 0.0, 2.0, 5.0], np.float32)
    out = run(q, k, v, start=11, scale=0.25, window=window, sinks=mx.array(sinks))
    np.testing.assert_allclose(out, dense(q, k, v, 11, window, sinks, 0.25), atol=1e-5)


class Scores:
    """Passes calls on to MLX's attention and remembers the largest matrix of scores."""

    def __init__(self, monkeypatch):
        self.largest = self.calls = 0
        plain = mx.fast.scaled_dot_product_attention

        def counting(q, k, v, **options):
            self.calls += 1
            self.largest = max(self.largest, 4 * q.shape[1] * q.shape[2] * k.shape[2])
            return plain(q, k, v, **options)

        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counting)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5, 24, 50])
@pytest.mark.parametrize("start", [0, 13])
@pytest.mark.parametrize("queries_at_a_time", [1, 3, 8, 39])
def test_slices_of_bounded_scores_give_the_same(monkeypatch, queries_at_a_time, start, window, with_sinks):
    q, k, v = case(40, start)
    options = {"start": start, "scale": 0.3, "window": window}
    if with_sinks:
        options["sinks"] = mx.array([0.5, -1.0, 1.0, 0.0])
    whole = run(q, k, v, **options)
    limit = queries_at_a_time * 4 * HEADS * (start + 40)
    monkeypatch.setattr(chunk, "MAX_SCORES_BYTES", limit)
    scores = Scores(monkeypatch)
    np.testing.assert_allclose(run(q, k, v, **options), whole, atol=1e-6)
    assert scores.largest <= limit
    assert scores.calls == -(-40 // queries_at_a_time)


def test_a_row_larger_than_the_limit_is_still_computed(monkeypatch):
    q, k, v = case(3, 5)
    whole = run(q, k, v, start=5, scale=0.3)
    monkeypatch.setattr(chunk, "MAX_SCORES_BYTES", 1)
    np.testing.assert_allclose(run(q, k, v, start=5, scale=0.3), whole, atol=1e-6)


def test_a_window_reads_no_keys_that_no_query_of_the_slice_can_see(monkeypatch):
    q, k, v = case(40, 100)
    monkeypatch.setattr(chunk, "MAX_SCORES_BYTES", 10 * 4 * HEADS * 140)
    scores = Scores(monkeypatch)
    run(q, k, v, start=100, scale=0.3, window=8)
    assert scores.calls == 4
    assert scores.largest == 4 * HEADS * 10 * (10 + 7)


def test_keys_outside_every_window_may_hold_anything():
    q, k, v = case(4, 20)
    expected = run(q, k, v, start=20, scale=0.3, window=6)
    k[:, :, :15] = np.nan
    v[:, :, :15] = np.nan
    np.testing.assert_array_equal(run(q, k, v, start=20, scale=0.3, window=6), expected)


def test_half_precision_stays_half():
    q, k, v = (mx.array(x).astype(mx.bfloat16) for x in case(20, 3))
    assert chunk_attention(q, k, v, start=3, scale=0.3, window=5).dtype == mx.bfloat16
