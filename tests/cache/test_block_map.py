"""The map of a pool: states, owners, sharing and empty slots, in a bounded size."""

import pytest

from mlx_paged_attention.cache import block_map
from mlx_paged_attention.cache.block_map import BlockRun, HeldTable, map_blocks
from mlx_paged_attention.cache.block_pool import BlockPool

SIZE = 4


def publish(pool, blocks, name):
    pool.publish(
        blocks,
        [f"{name} {i}".encode() for i in range(len(blocks))],
        parent_hash=None,
        token_ids=list(range(SIZE * len(blocks))),
    )


def test_each_block_is_told_with_its_state_and_its_owners():
    pool = BlockPool(12)
    shared = pool.get_new_blocks(2)
    one, two, gone = pool.get_new_blocks(1), pool.get_new_blocks(2), pool.get_new_blocks(1)
    publish(pool, [*shared, *gone], "prefix")
    pool.touch(shared)
    pool.free_blocks(gone)
    tables = [HeldTable("one", [*shared, *one], 3), HeldTable("two", [*shared, *two], 0)]
    told = map_blocks(pool.blocks, tables)
    assert told.runs == (
        BlockRun(0, 1, "null"),
        BlockRun(1, 2, "shared", ("one", "two"), 2),
        BlockRun(3, 1, "used", ("one",), 1),
        BlockRun(4, 2, "used", ("two",), 1),
        BlockRun(6, 1, "cached"),
        BlockRun(7, 5, "free"),
    )
    assert (told.shared_blocks, told.saved_blocks, told.empty_slots) == (2, 2, 3)
    assert told.blocks_left_out == 0


def test_forks_that_share_a_half_filled_block_share_its_empty_slots():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.touch(blocks)
    tables = [HeldTable(name, blocks, 3) for name in ("parent", "child")]
    assert map_blocks(pool.blocks, tables).empty_slots == 3


def test_many_owners_are_counted_and_the_first_named():
    pool = BlockPool(2)
    (block,) = pool.get_new_blocks(1)
    for _ in range(99):
        pool.touch([block])
    told = map_blocks(pool.blocks, [HeldTable(str(i), [block], 0) for i in range(100)])
    assert told.runs[1] == BlockRun(1, 1, "shared", tuple("01234567"), 100)
    assert told.saved_blocks == 99


@pytest.mark.parametrize("most", [1, 2, 7, 8, 100])
def test_a_scattered_pool_is_cut_and_says_so(monkeypatch, most):
    monkeypatch.setattr(block_map, "MAX_RUNS", most)
    pool = BlockPool(8)
    blocks = pool.get_new_blocks(7)
    told = map_blocks(pool.blocks, [HeldTable(str(i), [b], 0) for i, b in enumerate(blocks)])
    assert len(told.runs) == min(most, 8)
    assert sum(run.count for run in told.runs) + told.blocks_left_out == 8
    assert told.runs == tuple(
        BlockRun(i, 1, "used", (str(i - 1),), 1) if i else BlockRun(0, 1, "null") for i in range(min(most, 8))
    )


def test_a_pool_of_the_null_block_alone_can_be_told():
    assert map_blocks(BlockPool(1).blocks, []).runs == (BlockRun(0, 1, "null"),)
