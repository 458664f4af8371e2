"""Packing: every token of a step is attended to in exactly one way, over its own context."""

import mlx.core as mx
import numpy as np
import pytest
from emulated_kernels import emulated_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.ops import packing as packing_module
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.packing import TILE, Packing

BLOCK_SIZE, HEADS, KV_HEADS, DIM, V_DIM = 8, 4, 2, 32, 16


def packed_batch(runs, rng):
    """Runs of ``(start, length)``, a token per row, each sequence on blocks of its own."""
    lengths = np.array([length for _, length in runs])
    ends = np.cumsum(lengths)
    starts = np.concatenate([np.arange(start, start + length) for start, length in runs])
    widths = [-(-(start + length) // BLOCK_SIZE) for start, length in runs]
    ids = rng.permutation(np.arange(1, 1 + sum(widths))).astype(np.int32)
    tables = np.zeros((len(runs), max(widths)), np.int32)
    for row, width in enumerate(widths):
        tables[row, :width], ids = ids[:width], ids[width:]
    tables = np.repeat(tables, lengths, axis=0)
    blocks = tables[np.arange(len(starts)), starts // BLOCK_SIZE].astype(np.int64)
    return AttentionBatch(
        starts.astype(np.int32),
        1,
        blocks * BLOCK_SIZE + starts % BLOCK_SIZE,
        tables,
        BLOCK_SIZE,
        runs=tuple((int(end - n), int(end)) for end, n in zip(ends, lengths, strict=True)),
    )


RUNS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 50)), min_size=1, max_size=6)


@given(RUNS, st.sampled_from([0, 60, 1 << 30]), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_each_token_is_in_one_part_with_its_context_and_its_blocks(runs, gather_beyond, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_module, "GATHER_BEYOND", {"metal": gather_beyond})
        check_parts(runs, gather_beyond, seed)


def check_parts(runs, gather_beyond, seed):
    batch = packed_batch(runs, np.random.default_rng(seed))
    packing = Packing.of(batch)
    assert Packing.of(batch) is packing
    found: list[tuple[int, int, list[int]]] = []  # token, context, table
    if len(packing.singles):
        part = packing.single_batch
        found += zip(
            packing.singles.tolist(), part.context_lens.tolist(), part.block_tables.tolist(), strict=True
        )
    if len(packing.tiles):
        part = packing.tile_batch
        assert part.rows == len(packing.tiles)
        lens = part.context_lens.reshape(-1, TILE)
        for tokens, contexts, table in zip(packing.tiles, lens, part.block_tables, strict=True):
            found += [(int(t), int(n), table.tolist()) for t, n in zip(tokens, contexts, strict=True)]
    for (begin, end), part in zip(packing.gathered, packing.gathered_batches, strict=True):
        assert end - begin > TILE
        assert batch.context_lens[end - 1] > gather_beyond
        for token, context in zip(range(begin, end), part.context_lens.tolist(), strict=True):
            found.append((token, context, part.block_tables[0].tolist()))
    assert {token for token, _, _ in found} == set(range(len(batch.slots)))
    for token, context, table in found:
        assert context == batch.context_lens[token]
        assert table == batch.block_tables[token].tolist()
    order = np.array(packing.device_order)
    assert [found[place][0] for place in order] == list(range(len(order)))


@pytest.fixture
def on_kernels():
    with emulated_kernels():
        yield


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("gather_beyond", [0, 40, 1 << 30])
def test_a_packed_step_on_kernels_gives_what_plain_operations_give(
    on_kernels, monkeypatch, gather_beyond, window
):
    monkeypatch.setattr(packing_module, "GATHER_BEYOND", {"metal": gather_beyond})
    rng = np.random.default_rng(3)
    spec = LayerKVSpec(
        (
            Plane("k", "float32", (KV_HEADS, BLOCK_SIZE, DIM)),
            Plane("v", "float32", (KV_HEADS, BLOCK_SIZE, V_DIM)),
        ),
        window,
    )
    batch = packed_batch([(30, 1), (0, 33), (3, 1), (20, 5), (17, 25)], rng)
    tokens = len(batch.slots)
    q, k = (mx.array(rng.standard_normal((tokens, n, 1, DIM)).astype(np.float32)) for n in (HEADS, KV_HEADS))
    v = mx.array(rng.standard_normal((tokens, KV_HEADS, 1, V_DIM)).astype(np.float32))
    num_blocks = 1 + int(batch.block_tables.max())
    before = rng.standard_normal((num_blocks, KV_HEADS, BLOCK_SIZE, DIM)).astype(np.float32)
    outs = []
    for kind in (KernelLayer, DeviceLayer):
        layer = kind(spec, num_blocks)
        layer.k, layer.v = mx.array(before), mx.array(before[..., :V_DIM].copy())
        mx.eval(layer.k, layer.v)
        outs.append(np.array(layer.attend(q, k, v, batch, scale=0.3)))
    assert outs[0].shape == (tokens, HEADS, 1, V_DIM)
    np.testing.assert_allclose(outs[0], outs[1], rtol=0, atol=2e-5 * np.abs(outs[1]).max())
