"""The layer of each back end does what dense attention over every sequence's own tokens does."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.ops import host
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.host import HostLayer
from mlx_paged_attention.ops.layer import SHORT_QUERIES

BLOCK_SIZE, HEADS, KV_HEADS, DIM, V_DIM = 8, 6, 2, 16, 12
NUM_BLOCKS = 40
SCALE = 0.27

LAYERS = pytest.mark.parametrize("kind", [HostLayer, DeviceLayer])


def make_layer(kind, window=None, *, filled_with=np.nan, num_blocks=NUM_BLOCKS):
    planes = (
        Plane("k", "float32", (KV_HEADS, BLOCK_SIZE, DIM)),
        Plane("v", "float32", (KV_HEADS, BLOCK_SIZE, V_DIM)),
    )
    layer = kind(LayerKVSpec(planes, window), num_blocks)
    if kind is HostLayer:
        layer.k[:], layer.v[:] = filled_with, filled_with
    else:
        layer.k, layer.v = (mx.full(x.shape, filled_with, x.dtype) for x in (layer.k, layer.v))
    return layer


def blocks_of(layer):
    """Keys and values as ``[blocks, kv_heads, block_size, dim]``."""
    layer.flush()
    if isinstance(layer, HostLayer):
        return layer.k.swapaxes(0, 1), layer.v.swapaxes(0, 1)
    return np.array(layer.k), np.array(layer.v)


class Sequences:
    """What has been written of each sequence, and the batches that write more."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.free = list(self.rng.permutation(np.arange(1, NUM_BLOCKS)))
        self.blocks: list[list[int]] = []
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def new(self):
        self.blocks.append([])
        self.keys.append(np.empty((0, KV_HEADS, DIM), np.float32))
        self.values.append(np.empty((0, KV_HEADS, V_DIM), np.float32))
        return len(self.blocks) - 1

    def extend(self, rows, queries):
        """A batch of ``queries`` new tokens for each of the sequences ``rows``: (batch, q, k, v)."""
        starts, tables, slots = [], [], []
        q = self.rng.standard_normal((len(rows), HEADS, queries, DIM)).astype(np.float32)
        k = self.rng.standard_normal((len(rows), KV_HEADS, queries, DIM)).astype(np.float32)
        v = self.rng.standard_normal((len(rows), KV_HEADS, queries, V_DIM)).astype(np.float32)
        for i, row in enumerate(rows):
            start = len(self.keys[row])
            while len(self.blocks[row]) * BLOCK_SIZE < start + queries:
                self.blocks[row].append(int(self.free.pop()))
            starts.append(start)
            tables.append(self.blocks[row])
            for position in range(start, start + queries):
                slots.append(self.blocks[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            self.keys[row] = np.concatenate([self.keys[row], k[i].transpose(1, 0, 2)])
            self.values[row] = np.concatenate([self.values[row], v[i].transpose(1, 0, 2)])
        width = max(map(len, tables))
        padded = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
        batch = AttentionBatch(np.array(starts, np.int32), queries, np.array(slots), padded, BLOCK_SIZE)
        return batch, q, k, v

    def attention(self, rows, q, window=None, sinks=None):
        """float64, ``[rows, heads, queries, v_dim]``."""
        out = np.zeros((*q.shape[:3], V_DIM))
        queries, group = q.shape[2], HEADS // KV_HEADS
        for i, row in enumerate(rows):
            for head in range(HEADS):
                for query in range(queries):
                    end = len(self.keys[row]) - queries + query + 1
                    first = max(0, end - window) if window else 0
                    keys = self.keys[row][first:end, head // group].astype(np.float64)
                    scores = keys @ q[i, head, query] * SCALE
                    extra = [] if sinks is None else [float(sinks[head])]
                    peak = max([scores.max(), *extra])
                    weights = np.exp(scores - peak)
                    total = weights.sum() + sum(np.exp(s - peak) for s in extra)
                    values = self.values[row][first:end, head // group]
                    out[i, head, query] = weights @ values / total
        return out


def attend(layer, batch, q, k, v, sinks=None):
    sinks = None if sinks is None else mx.array(sinks)
    out = layer.attend(mx.array(q), mx.array(k), mx.array(v), batch, scale=SCALE, sinks=sinks)
    return np.array(out)


@LAYERS
@pytest.mark.parametrize("sinks", [None, np.linspace(-1, 2, HEADS, dtype=np.float32)], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 21])
def test_chunks_and_decode_rows_equal_dense_attention_among_nan(kind, window, sinks):
    sequences = Sequences()
    layer = make_layer(kind, window)
    a, b, c = (sequences.new() for _ in range(3))
    steps = [
        ([a], 20),  # a long chunk without history
        ([b], 3),
        ([c], 1),
        ([a, b, c], 1),  # decode rows of different lengths
        ([b], SHORT_QUERIES),
        ([b], SHORT_QUERIES + 1),  # a long chunk with history
        ([a, c], 4),  # several queries per row
        ([c], 40),
        ([c, a, b], 1),
    ]
    for rows, queries in steps:
        batch, q, k, v = sequences.extend(rows, queries)
        out = attend(layer, batch, q, k, v, sinks)
        expected = sequences.attention(rows, q, window, sinks)
        np.testing.assert_allclose(out, expected, atol=2e-5, err_msg=f"{rows} x {queries}")


def one_token(table, start, *, window=None, seed=0):
    """A token behind ``start`` others whose blocks are ``table``, on a host layer among NaN."""
    layer, rng = make_layer(HostLayer, window), np.random.default_rng(seed)
    keys = rng.standard_normal((start + 1, KV_HEADS, DIM)).astype(np.float32)
    values = rng.standard_normal((start + 1, KV_HEADS, V_DIM)).astype(np.float32)
    slots = np.array([table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start + 1)])
    for plane, new in ((layer.k, keys), (layer.v, values)):
        plane[:, slots[:-1] // BLOCK_SIZE, slots[:-1] % BLOCK_SIZE] = new[:-1].swapaxes(0, 1)
    batch = AttentionBatch(
        np.array([start], np.int32), 1, slots[-1:], np.array([table], np.int32), BLOCK_SIZE
    )
    q = rng.standard_normal((1, HEADS, 1, DIM)).astype(np.float32)
    sequences = Sequences()
    sequences.keys, sequences.values = [keys], [values]
    expected = sequences.attention([0], q, window, None)
    k, v = keys[-1].reshape(1, KV_HEADS, 1, DIM), values[-1].reshape(1, KV_HEADS, 1, V_DIM)
    return layer, batch, [mx.array(x) for x in (q, k, v)], expected


PIECES = {
    "ascending": ([3, 4, 5, 6, 7, 8, 9], 1),
    "descending": ([9, 8, 7, 6, 5, 4, 3], 6),
    "in two pieces": ([20, 21, 22, 5, 6, 7, 8], 2),
    "in four pieces": ([20, 21, 30, 31, 2, 9, 10], 4),
}


@pytest.mark.parametrize("window", [None, 1, 2, 9, 17, 100])
@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 41, 47, 48])
@pytest.mark.parametrize("table", [table for table, _ in PIECES.values()], ids=list(PIECES))
@pytest.mark.parametrize("most_copied", [4 << 20, 0], ids=["copied", "in place"])
def test_a_single_token_equals_dense_attention_wherever_its_blocks_lie(
    monkeypatch, table, start, window, most_copied
):
    monkeypatch.setattr(host, "MOST_COPIED", most_copied)
    layer, batch, arrays, expected = one_token(table, start, window=window)
    for _ in range(2):  # copied from the second time on
        out = np.array(layer.attend(*arrays, batch, scale=SCALE))
        np.testing.assert_allclose(out, expected, atol=2e-5)
    block, offset = batch.slots[0] // BLOCK_SIZE, batch.slots[0] % BLOCK_SIZE
    keys, values = blocks_of(layer)
    np.testing.assert_array_equal(keys[block, :, offset], np.array(arrays[1])[0, :, 0])
    np.testing.assert_array_equal(values[block, :, offset], np.array(arrays[2])[0, :, 0])


@pytest.mark.parametrize(("table", "pieces"), PIECES.values(), ids=list(PIECES))
def test_the_past_of_a_token_comes_in_as_few_pieces_as_its_blocks_lie_in(table, pieces):
    _, batch, _, _ = one_token(table, 45)
    found = batch.past_pieces(None)
    assert len(found) == pieces
    slots = [slot for begin, end in found for slot in range(begin, end)]
    assert slots == [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(45)]
    assert [s for begin, end in batch.past_pieces(11) for s in range(begin, end)] == slots[-10:]
    assert batch.past_pieces(1) == ()


def test_what_a_single_token_has_still_to_write_is_there_for_every_reader():
    for read in (
        lambda layer, batch, q: layer.gather(batch, 0, 41, 42)[0],
        lambda layer, batch, q: layer.gather_rows(batch)[0][:, :, 41:42],
    ):
        layer, batch, (q, k, v), _ = one_token(PIECES["ascending"][0], 41)
        layer.attend(q, k, v, batch, scale=SCALE)
        np.testing.assert_array_equal(np.array(read(layer, batch, q)), np.array(k))
    layer, batch, (q, k, v), expected = one_token(PIECES["ascending"][0], 41)
    layer.attend(q, k, v, batch, scale=SCALE)
    np.testing.assert_allclose(np.array(layer.attend_in_place(q, batch, SCALE, None)), expected, atol=2e-5)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    window=st.sampled_from([None, None, 1, 3, 8, 9, 30]),
    with_sinks=st.booleans(),
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
            st.sampled_from([1, 1, 2, 7, 8, 9, 17, 25]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_both_layers_equal_dense_attention_for_random_batches(seed, window, with_sinks, steps):
    sequences = Sequences(seed)
    layers = [make_layer(HostLayer, window), make_layer(DeviceLayer, window)]
    sinks = sequences.rng.standard_normal(HEADS).astype(np.float32) if with_sinks else None
    for _ in range(4):
        sequences.new()
    for rows, queries in steps:
        needed = sum(-(-(len(sequences.keys[row]) + queries) // BLOCK_SIZE) for row in rows)
        if needed > len(sequences.free):
            break
        batch, q, k, v = sequences.extend(rows, queries)
        expected = sequences.attention(rows, q, window, sinks)
        for layer in layers:
            np.testing.assert_allclose(attend(layer, batch, q, k, v, sinks), expected, atol=2e-5)
    host, device = (blocks_of(layer) for layer in layers)
    for host_plane, device_plane in zip(host, device, strict=True):
        np.testing.assert_array_equal(host_plane, device_plane)


@LAYERS
def test_a_write_touches_its_slots_and_no_other(kind):
    sequences = Sequences()
    layer = make_layer(kind, filled_with=-7.0)
    a, b = sequences.new(), sequences.new()
    batch, _, k, v = sequences.extend([a, b], 5)
    layer.write(mx.array(k), mx.array(v), batch)
    for plane, new in zip(blocks_of(layer), (k, v), strict=True):
        expected = np.full_like(plane, -7.0)
        for i, row in enumerate([a, b]):
            expected[sequences.blocks[row][0], :, :5] = new[i]
        np.testing.assert_array_equal(plane, expected)


@LAYERS
def test_many_tokens_may_go_into_the_null_block_at_once(kind):
    layer = make_layer(kind, filled_with=0.0)
    batch = AttentionBatch(
        np.array([3, 3, 3], np.int32), 1, np.array([3, 3, 3]), np.ones((3, 1), np.int32), BLOCK_SIZE
    )
    k = mx.ones((3, KV_HEADS, 1, DIM))
    layer.write(k, mx.ones((3, KV_HEADS, 1, V_DIM)), batch)
    plane, _ = blocks_of(layer)
    assert (plane[0, :, 3] == 1).all()
    assert plane.sum() == KV_HEADS * DIM


@LAYERS
def test_gather_gives_any_run_of_positions(kind):
    sequences = Sequences()
    layer = make_layer(kind)
    a, b = sequences.new(), sequences.new()
    for row, length in ((a, 20), (b, 27)):
        batch, _, k, v = sequences.extend([row], length)
        layer.write(mx.array(k), mx.array(v), batch)
    batch, _, k, v = sequences.extend([a, b], 2)
    layer.write(mx.array(k), mx.array(v), batch)
    for index, row in enumerate([a, b]):
        for first, last in ((0, 1), (0, 8), (3, 17), (8, 16), (15, 22), (21, 22)):
            keys, values = layer.gather(batch, index, first, last)
            assert keys.shape == (1, KV_HEADS, last - first, DIM)
            np.testing.assert_array_equal(
                np.array(keys)[0].transpose(1, 0, 2), sequences.keys[row][first:last]
            )
            np.testing.assert_array_equal(
                np.array(values)[0].transpose(1, 0, 2), sequences.values[row][first:last]
            )


@LAYERS
def test_gathered_rows_hold_zeros_where_nothing_has_been_written(kind):
    sequences = Sequences()
    layer = make_layer(kind)
    a, b = sequences.new(), sequences.new()
    batch, _, k, v = sequences.extend([b], 18)
    layer.write(mx.array(k), mx.array(v), batch)
    batch, _, k, v = sequences.extend([a, b], 1)
    layer.write(mx.array(k), mx.array(v), batch)
    keys, values = (np.array(x) for x in layer.gather_rows(batch))
    assert keys.shape == (2, KV_HEADS, 19, DIM)
    assert values.shape == (2, KV_HEADS, 19, V_DIM)
    for i, row in enumerate([a, b]):
        length = len(sequences.keys[row])
        np.testing.assert_array_equal(keys[i, :, :length].transpose(1, 0, 2), sequences.keys[row])
        np.testing.assert_array_equal(values[i, :, :length].transpose(1, 0, 2), sequences.values[row])
        assert not keys[i, :, length:].any()
        assert not values[i, :, length:].any()


def test_a_mask_shows_each_query_its_window():
    batch = AttentionBatch(
        np.array([0, 4], np.int32), 2, np.arange(4), np.zeros((2, 1), np.int32), BLOCK_SIZE
    )
    assert batch.longest == 6
    assert np.array(batch.mask(None)).astype(int).tolist() == [
        [[[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]],
        [[[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]],
    ]
    assert np.array(batch.mask(2)).astype(int).tolist() == [
        [[[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]],
        [[[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]],
    ]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_device_layer_of_half_precision_answers_in_the_queries_type(dtype):
    planes = tuple(
        Plane(name, str(dtype).removeprefix("mlx.core."), (KV_HEADS, BLOCK_SIZE, DIM)) for name in "kv"
    )
    layer = DeviceLayer(LayerKVSpec(planes), 8)
    for queries in (1, 20):
        batch = AttentionBatch(
            np.array([0], np.int32),
            queries,
            BLOCK_SIZE + np.arange(queries),
            np.array([[1, 2, 3]], np.int32),
            8,
        )
        k = mx.ones((1, KV_HEADS, queries, DIM), dtype)
        out = layer.attend(mx.ones((1, HEADS, queries, DIM), dtype), k, k * 2, batch, scale=1.0)
        assert out.dtype == dtype
        np.testing.assert_allclose(np.array(out.astype(mx.float32)), np.full(out.shape, 2.0), rtol=2e-3)


def address(layer):
    plane = layer.k if isinstance(layer, HostLayer) else np.array(layer.k, copy=False)
    return plane.__array_interface__["data"][0]


@LAYERS
def test_a_pool_is_never_copied_while_it_is_written(kind):
    layer = make_layer(kind, filled_with=0.0)
    mx.eval(layer.state)
    start = address(layer)
    for step in range(200):
        if step % 25 == 0:
            sequences = Sequences(step)
            rows = [sequences.new() for _ in range(8)]
        batch, q, k, v = sequences.extend(rows, 1)
        out = layer.attend(mx.array(q), mx.array(k), mx.array(v), batch, scale=SCALE)
        mx.eval(out, layer.state)
        assert address(layer) == start, f"the pool moved in step {step}"


def test_a_pool_that_somebody_holds_is_copied():
    """Why nobody may hold one; and the control of the test above."""
    layer = make_layer(DeviceLayer, filled_with=0.0)
    start, held = address(layer), layer.k.reshape(-1)
    mx.eval(held)
    sequences = Sequences()
    batch, _, k, v = sequences.extend([sequences.new()], 3)
    layer.write(mx.array(k), mx.array(v), batch)
    mx.eval(layer.state)
    assert address(layer) != start
    assert not np.array(held).any()


def test_two_threads_may_attend_at_once_whatever_threading_numba_found():
    """Without OpenMP numba falls back to a pool that aborts the process when two threads enter it."""
    code = (
        "import sys, threading\n"
        "import mlx_paged_attention, numba, numpy as np, mlx.core as mx\n"
        "from test_layers import HostLayer, Sequences, attend, make_layer\n"
        "def work(seed):\n"
        "    layer, sequences = make_layer(HostLayer), Sequences(seed)\n"
        "    rows = [sequences.new(), sequences.new()]\n"
        "    for _ in range(100):\n"
        "        out = attend(layer, *sequences.extend(rows, 1))\n"
        "    np.testing.assert_array_less(np.abs(out), 10)\n"
        "threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "print(numba.threading_layer())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
        env={**os.environ, "NUMBA_THREADING_LAYER": "workqueue"},
    )
    assert result.stdout.strip() == "workqueue", result.stderr
