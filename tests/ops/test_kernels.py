"""The attention kernels, run by the Metal emulator, and on the GPU where there is one."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from emulated_kernels import emulated_kernels, skip_without_gpu

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.kernel_check.decode_case import LSE_FACTOR, TOLERANCE, DecodeCase
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels import decode
from mlx_paged_attention.ops.kernels import work_list as work_lists
from mlx_paged_attention.ops.kernels.join import join_rows
from mlx_paged_attention.ops.kernels.make import upload
from mlx_paged_attention.ops.kernels.order import no_token
from mlx_paged_attention.ops.kernels.pool import copy_blocks, gather_kv, write_kv
from mlx_paged_attention.ops.kernels.work_list import work_list

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).split(".")[-1])
EDGES = [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 300, 37]


@pytest.fixture(autouse=True, params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Where kernels run in a test."""
    if request.param == "gpu":
        skip_without_gpu()
        yield
        return
    with emulated_kernels():
        yield


def check(case, target=64):
    dtype = case.q.dtype
    error, lse_error = case.errors(target)
    assert error <= TOLERANCE[dtype]
    assert lse_error <= LSE_FACTOR * TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("target", [1, 64], ids=["whole", "split"])
def test_every_length_around_a_block_and_a_step_is_right(dtype, target):
    check(DecodeCase.random(0, dtype, (8, 2, 64, 64), EDGES), target)


@pytest.mark.parametrize(
    ("dtype", "dim", "v_dim"),
    [
        (mx.float16, 80, 80),
        (mx.bfloat16, 96, 96),
        (mx.float16, 112, 112),
        (mx.bfloat16, 128, 128),
        (mx.bfloat16, 192, 128),
        (mx.float16, 256, 256),
        (mx.float32, 80, 48),
    ],
)
def test_every_size_of_head_is_right(dtype, dim, v_dim):
    check(DecodeCase.random(1, dtype, (4, 2, dim, v_dim), [0, 1, 17, 100]))


@pytest.mark.parametrize("heads", [(4, 4), (5, 1), (32, 8), (64, 8), (16, 1), (40, 1)], ids=str)
def test_every_group_of_heads_is_right(heads):
    check(DecodeCase.random(2, mx.float16, (*heads, 64, 64), [1, 17, 100]))


@pytest.mark.parametrize("size", [8, 32, 64])
def test_every_size_of_block_is_right(size):
    check(DecodeCase.random(3, mx.float16, (8, 2, 64, 64), [*EDGES, 700], size=size))


@pytest.mark.parametrize("window", [1, 8, 64, 128, 700])
@pytest.mark.parametrize("size", [8, 16])
def test_a_window_begins_at_its_first_block_and_reads_nothing_before_it(window, size):
    # DecodeCase fills what lies before the window with NaN.
    check(DecodeCase.random(4, mx.float16, (8, 2, 64, 64), EDGES, window=window, size=size))


@pytest.mark.parametrize("sink", [-5.0, 0.0, 2.0])
@pytest.mark.parametrize("target", [1, 64], ids=["whole", "split"])
def test_sinks_take_their_share_once(sink, target):
    check(DecodeCase.random(5, mx.float16, (8, 2, 64, 64), EDGES, sink=sink), target)


def test_a_soft_cap_bends_the_scores():
    check(DecodeCase.random(6, mx.float32, (8, 2, 64, 64), EDGES, softcap=50.0))


@pytest.mark.parametrize(("queries", "window"), [(2, None), (5, 8), (16, None)])
def test_several_queries_of_a_row_see_what_lies_before_each(queries, window):
    check(
        DecodeCase.random(7, mx.float16, (8, 2, 64, 64), [1, 4, 16, 21, 100], queries=queries, window=window)
    )


@pytest.mark.parametrize("target", [1, 64], ids=["whole", "split"])
def test_a_row_without_context_gives_zero_and_a_log_sum_exp_of_minus_infinity(target):
    out, lse = DecodeCase.random(8, mx.float16, (8, 2, 64, 64), [0, 200]).attend(target)
    assert (out[0] == 0).all()
    assert np.isneginf(lse[0]).all()
    assert np.isfinite(lse[1]).all()


@pytest.mark.parametrize("shift", [-30.0, 30.0])
@pytest.mark.parametrize("window", [None, 20])
def test_moving_every_score_by_a_constant_changes_nothing(shift, window):
    case = DecodeCase.random(9, mx.float32, (4, 2, 64, 64), [1, 16, 33, 200], window=window)
    case.q[..., -1] = 1.0
    case.k[..., -1] = 0.0
    plain, plain_lse = case.attend(target=16)
    case.k[..., -1] = shift * 8  # scores are divided by 8
    moved, moved_lse = case.attend(target=16)
    np.testing.assert_allclose(moved, plain, atol=1e-4)
    np.testing.assert_allclose(moved_lse, plain_lse + shift, atol=1e-3)


def test_queries_may_lie_in_memory_as_they_like():
    case = DecodeCase.random(10, mx.float16, (8, 2, 64, 64), [20, 33], queries=3)
    expected, _ = case.attend()
    case.q = mx.contiguous(case.q.swapaxes(1, 2)).swapaxes(1, 2)
    np.testing.assert_array_equal(case.attend()[0], expected)


def test_stored_and_computed_types_may_differ():
    case = DecodeCase.random(11, mx.float32, (8, 2, 64, 64), [20, 100])
    case.k, case.v = case.k.astype(mx.bfloat16), case.v.astype(mx.bfloat16)
    check(case)


# ---- Work lists


@pytest.mark.parametrize("window", [None, 50])
def test_a_work_list_covers_every_position_that_is_read_once(window, device):
    lens = np.array([0, 1, 64, 65, 1000, 5000], np.int32)
    for target in (1, 8, 100, 1600, None):
        work = work_list(lens, 1, block_size=16, threadgroups_per_item=2, window=window, target=target)
        items, splits = np.array(work.items), np.array(work.splits)
        for row, context in enumerate(lens):
            first, count, *counters = splits[row]
            assert counters == [0, 0]
            mine = items[first : first + count]
            begin = 0 if window is None else max(0, context - window) // 16 * 16
            assert (mine[:, 0] == row).all()
            assert mine[0, 1] == begin
            assert mine[-1, 2] == context
            assert (mine[1:, 1] == mine[:-1, 2]).all()
        if target:
            assert len(items) <= max(target // 2, 1) + len(lens)


def test_a_work_list_of_fixed_capacity_is_padded_with_empty_items():
    case = DecodeCase.random(12, mx.float16, (4, 2, 64, 64), [100, 3])
    work = work_list(case.lens, 1, block_size=16, threadgroups_per_item=2, capacity=9)
    assert work.items.shape == (9, 4)
    assert work.split
    assert np.array(work.items[:, 3]).tolist() == [0] * 2 + [1] * 7


@pytest.mark.parametrize("gpu", ["cuda", "metal"])
def test_a_batch_that_fills_the_chip_is_not_cut_and_a_long_row_alone_is(gpu, monkeypatch):
    monkeypatch.setattr(work_lists, "backend", lambda: gpu)

    def items_of_first_row(lens, capacity=None):
        lens = np.array(lens, np.int32)
        _, splits = work_lists.cut_contexts(
            lens, 1, block_size=16, threadgroups_per_item=8, capacity=capacity
        )
        return splits[0, 1]

    assert items_of_first_row([1000] * 128) == 1
    assert items_of_first_row([16384]) >= 8
    assert items_of_first_row([16384] + [100] * 30) >= 4  # the others take up some of the chip
    assert items_of_first_row([16384], capacity=5) <= 5
    assert items_of_first_row([0]) == 1


@pytest.mark.parametrize(
    ("dtype", "dim", "tiles", "expected"),
    [
        (mx.bfloat16, 128, 1, (3, 96 << 10)),
        (mx.bfloat16, 128, 2, (2, 64 << 10)),  # what two tiles are merged in takes the place of a step
        (mx.bfloat16, 64, 1, (6, 96 << 10)),
        (mx.bfloat16, 256, 1, (2, 128 << 10)),  # one threadgroup on a multiprocessor
        (mx.float32, 256, 1, (0, 0)),  # through registers
    ],
)
def test_steps_are_fetched_ahead_as_far_as_shared_memory_has_room(dtype, dim, tiles, expected, monkeypatch):
    monkeypatch.setattr(decode, "copies_to_shared_memory", lambda: True)
    pool = mx.zeros((2, 2, 16, dim), dtype)
    assert decode.stages(pool, pool, tiles) == expected


def test_short_metadata_are_padded():
    assert np.array(upload(np.array([7, 5], np.int32))).tolist() == [7, 5, 0, 0, 0, 0, 0, 0]
    assert np.array(upload(np.arange(9, dtype=np.int32))).tolist() == list(range(9))


def test_results_are_right_in_a_list_that_is_filled_up():
    case = DecodeCase.random(13, mx.float16, (4, 2, 64, 64), [300, 0, 65])
    out, lse = case.attend(capacity=20)
    expected, expected_lse = case.expected()
    np.testing.assert_allclose(out, expected, atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-2)


# ---- The pool


@pytest.mark.parametrize(("dtype", "stored"), [(mx.bfloat16, mx.bfloat16), (mx.float32, mx.float16)])
def test_new_keys_go_to_their_slots_and_nowhere_else(dtype, stored):
    rng = np.random.default_rng(0)
    k, v = (mx.array(rng.standard_normal((2, 3, 4, d))).astype(dtype).swapaxes(1, 2) for d in (32, 16))
    pools = [mx.full((6, 4, 8, d), -1.0, stored) for d in (32, 16)]
    mx.eval(pools)
    slots = np.array([8, 15, 16, 47, 3, 30], np.int32)  # the fifth is in the null block
    mx.eval(write_kv(k, v, *pools, mx.array(slots), no_token()))
    for pool, new in zip(pools, (k, v), strict=True):
        expected = np.full(pool.shape, -1.0, np.float32)
        rows = np.array(new.astype(stored).astype(mx.float32)).swapaxes(1, 2).reshape(6, 4, -1)
        kept = slots >= 8
        expected[slots[kept] // 8, :, slots[kept] % 8] = rows[kept]
        np.testing.assert_array_equal(np.array(pool.astype(mx.float32)), expected)


def test_blocks_are_copied_inside_the_pool():
    rng = np.random.default_rng(1)
    pools = [mx.array(rng.standard_normal((6, 2, 8, d)).astype(np.float32)) for d in (32, 16)]
    before = [np.array(pool) for pool in pools]
    mx.eval(copy_blocks(*pools, mx.array([1, 2], mx.int32), mx.array([5, 3], mx.int32), no_token()))
    for pool, old in zip(pools, before, strict=True):
        old[[5, 3]] = old[[1, 2]]
        np.testing.assert_array_equal(np.array(pool), old)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (5, 24), (8, 16), (0, 40)])
def test_a_range_of_positions_is_gathered(first, last):
    rng = np.random.default_rng(2)
    pools = [mx.array(rng.standard_normal((9, 3, 8, d)).astype(np.float16)) for d in (64, 24)]
    table = np.array([4, 2, 8, 1, 6], np.int32)
    *planes, _ = gather_kv(*pools, mx.array(table), first, last, no_token())
    at = np.arange(first, last)
    for pool, plane in zip(pools, planes, strict=True):
        expected = np.array(pool)[table[at // 8], :, at % 8].swapaxes(0, 1)[None]
        np.testing.assert_array_equal(np.array(plane), expected)


@DTYPES
def test_rows_of_two_results_are_joined_in_any_order(dtype):
    rng = np.random.default_rng(4)
    first, last = (mx.array(rng.standard_normal((n, 3, 16)), mx.float32).astype(dtype) for n in (5, 9))
    order = mx.array([13, 0, 4, 5, 5, 12, 1, 2], mx.int32)
    joined = join_rows(first, last, order)
    assert mx.array_equal(joined, mx.concatenate([first, last])[order])
    assert joined.dtype == dtype


@pytest.mark.parametrize("queries", [1, 3, 16])
def test_queries_may_be_picked_from_anywhere(queries):
    case = DecodeCase.random(0, mx.float32, (8, 2, 64, 64), [40, 7, 133], queries=queries, size=8)
    out, lse = case.attend(target=16)
    picked_out, picked_lse = case.attend(target=16, picked=True)
    np.testing.assert_array_equal(out, picked_out)
    np.testing.assert_array_equal(lse, picked_lse)


@pytest.mark.parametrize("window", [None, 21])
def test_a_layer_on_kernels_remembers_what_it_was_given(window):
    rng = np.random.default_rng(3)
    planes = tuple(Plane(name, "float32", (2, 8, 32)) for name in "kv")
    layer = KernelLayer(LayerKVSpec(planes, window), 12)
    tables = np.array([[3, 1, 7, 5, 9], [2, 8, 4, 6, 10]], np.int32)
    keys = np.empty((2, 2, 0, 32), np.float32)
    values = keys.copy()
    start = 0
    for queries in (3, 1, 5, 1, 16, 1):
        q = rng.standard_normal((2, 4, queries, 32)).astype(np.float32)
        k, v = (rng.standard_normal((2, 2, queries, 32)).astype(np.float32) for _ in range(2))
        keys, values = np.concatenate([keys, k], axis=2), np.concatenate([values, v], axis=2)
        at = np.arange(start, start + queries)
        slots = (tables[:, at // 8] * 8 + at % 8).reshape(-1).astype(np.int64)
        starts = np.full(2, start, np.int32)
        batch = AttentionBatch(starts, queries, slots, tables, 8)
        out = layer.attend(mx.array(q), mx.array(k), mx.array(v), batch, scale=0.3)
        mask = batch.mask(window)
        expected = mx.fast.scaled_dot_product_attention(
            mx.array(q), mx.array(keys), mx.array(values), scale=0.3, mask=mask
        )
        np.testing.assert_allclose(np.array(out), np.array(expected), atol=1e-4)
        start += queries
    dense = layer.gather_rows(batch)
    for plane, held in zip(dense, (keys, values), strict=True):
        np.testing.assert_array_equal(np.array(plane), held)


# ---- The whole grid


HEADS = [(4, 4), (8, 2), (5, 1), (16, 4), (32, 8), (64, 8)]
LENGTHS = sorted(
    {n + d for n in (16, 64, 128, 512, 1024, 2048, 4096, 8192) for d in (-1, 0, 1)} - {8193} | {1}
)
RAGGED = [[523, 37, 2011], [*range(335, 464), 1328, *range(14, 19)]]


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_grid_of_head_and_block_sizes(dtype, dim, size):
    check(DecodeCase.random(20, dtype, (8, 2, dim, dim), [1, size - 1, size, size + 1, 500], size=size))


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("contexts", [[n] for n in LENGTHS] + RAGGED, ids=lambda c: str(c[:3]))
def test_grid_of_groups_and_contexts(dtype, heads, contexts):
    check(DecodeCase.random(21, dtype, (*heads, 64, 64), contexts))


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("window", [None, 8, 64, 128, 700])
@pytest.mark.parametrize(("sink", "softcap"), itertools.product([None, -5.0, 0.0, 2.0], [None, 50.0]))
@pytest.mark.parametrize("contexts", RAGGED, ids=["3 rows", "135 rows"])
def test_grid_of_windows_sinks_and_caps(dtype, window, sink, softcap, contexts):
    case = DecodeCase.random(22, dtype, (8, 2, 64, 64), contexts, window=window, sink=sink, softcap=softcap)
    check(case)
    check(case, target=1)
