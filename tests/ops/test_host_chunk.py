"""A run of consecutive queries on the CPU equals dense attention, query by query."""

import numpy as np
import pytest
from test_paged_attention import dense_attention

from mlx_paged_attention.ops import host_chunk
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.host_chunk import attend_run
from mlx_paged_attention.ops.host_kernel import causal_softmax, gather_positions

HEADS, KV_HEADS, DIM, V_DIM, BLOCK_SIZE = 6, 2, 24, 16, 8


def run_case(start, count, seed=0):
    """Queries at ``start ..``, pools in which everything beyond the last of them is NaN."""
    rng = np.random.default_rng(seed)
    total = start + count
    width = -(-total // BLOCK_SIZE)
    table = rng.permutation(np.arange(1, width + 3)).astype(np.int32)[:width]
    k = np.full((width + 3, KV_HEADS, BLOCK_SIZE, DIM), np.nan, np.float32)
    v = np.full((width + 3, KV_HEADS, BLOCK_SIZE, V_DIM), np.nan, np.float32)
    keys = rng.standard_normal((total, KV_HEADS, DIM)).astype(np.float32)
    values = rng.standard_normal((total, KV_HEADS, V_DIM)).astype(np.float32)
    for position in range(total):
        slot = table[position // BLOCK_SIZE], slice(None), position % BLOCK_SIZE
        k[slot], v[slot] = keys[position], values[position]
    q = rng.standard_normal((count, HEADS, DIM)).astype(np.float32)
    dense = [(keys[: start + i + 1], values[: start + i + 1]) for i in range(count)]
    return q, k, v, table, dense


def run(q, k, v, table, start, window=None, sinks=None):
    out = np.full((len(q), HEADS, V_DIM), np.nan, np.float32)
    sinks = np.empty(0, np.float32) if sinks is None else sinks
    k, v = (np.ascontiguousarray(pool.swapaxes(0, 1)) for pool in (k, v))
    attend_run(q, k, v, table, start, scale=DIM**-0.5, window=window, sinks=sinks, out=out)
    return out


@pytest.mark.parametrize("sinks", [None, np.linspace(-3, 2, HEADS, dtype=np.float32)], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 7, 8, 9, 40])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 20), (5, 3), (8, 8), (31, 33), (100, 17)])
def test_a_run_equals_dense_attention_with_nan_beyond_it(start, count, window, sinks):
    q, k, v, table, dense = run_case(start, count)
    expected = dense_attention(q, dense, window=window, sinks=sinks)
    np.testing.assert_allclose(run(q, k, v, table, start, window, sinks), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("most_bytes", [1, 4 * HEADS * 50 * 4])
def test_slicing_queries_to_bound_memory_changes_nothing(monkeypatch, most_bytes, window):
    q, k, v, table, _ = run_case(20, 30)
    whole = run(q, k, v, table, 20, window)
    monkeypatch.setattr(host_chunk, "MAX_SCORES_BYTES", most_bytes)
    np.testing.assert_allclose(run(q, k, v, table, 20, window), whole, atol=1e-6)


def test_a_soft_cap_bends_the_scores_before_the_softmax():
    rng = np.random.default_rng(1)
    scores = (rng.standard_normal((1, 4, 9)) * 30).astype(np.float32)
    weights = scores.copy()
    causal_softmax(weights, 2, 8, np.float32(0.5), 0, np.float32(5), np.empty(0, np.float32))
    for row, end in enumerate((8, 8, 9, 9)):
        bent = np.exp(5 * np.tanh(scores[0, row, :end].astype(np.float64) * 0.5 / 5))
        np.testing.assert_allclose(weights[0, row, :end], bent / bent.sum(), rtol=2e-5)
        assert (weights[0, row, end:] == 0).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 200.0])
def test_weights_keep_their_precision_over_the_whole_range_of_scores(scale):
    scores = (np.random.default_rng(2).standard_normal((1, 3, 500)) * scale).astype(np.float32)
    weights = scores.copy()
    causal_softmax(weights, 3, 500, np.float32(1), 0, np.float32(0), np.empty(0, np.float32))
    exact = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    exact /= exact.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(weights, exact, rtol=3e-5, atol=1e-30)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 24), (3, 10), (7, 1), (8, 9)])
def test_gathered_positions_are_the_sequences_own_in_order(first, count):
    pool = np.arange(5 * 2 * 8 * 3, dtype=np.float32).reshape(5, 2, 8, 3)
    table = np.array([4, 1, 3], np.int32)
    out = np.empty((2, count, 3), np.float32)
    gather_positions(np.ascontiguousarray(pool.swapaxes(0, 1)), table, first, out)
    whole = pool[table].transpose(1, 0, 2, 3).reshape(2, 24, 3)
    assert (out == whole[:, first : first + count]).all()


def test_a_batch_knows_its_long_runs_and_the_tokens_of_short_ones():
    starts = np.array([9, 0, 1, 2, 3, 4, 7, 8], np.int32)
    runs = ((0, 1), (1, 6), (6, 8))
    zeros = np.zeros(8, np.int64)
    batch = AttentionBatch(starts, 1, zeros, np.zeros((8, 1), np.int32), BLOCK_SIZE, runs)
    long, short = batch.split(4)
    assert long == ((1, 6),)
    assert short.tolist() == [0, 6, 7]


def test_each_row_of_several_queries_is_a_run_by_default():
    batch = AttentionBatch(
        np.array([4, 0], np.int32), 3, np.zeros(6, np.int64), np.zeros((2, 1), np.int32), 8
    )
    assert batch.runs == ((0, 3), (3, 6))
