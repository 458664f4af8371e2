import pytest

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.block_pool import BlockPool, PublishedBlocks
from mlx_paged_attention.cache.events import BlockRemoved


def publish(pool: BlockPool, blocks: list[Block], *names: bytes) -> None:
    pool.publish(blocks, names, parent_hash=None, token_ids=[0] * len(blocks))


def free_ids(pool: BlockPool) -> list[int]:
    pool.check()
    return [block.block_id for block in pool.free_queue.get_all()]


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert [block.block_id for block in pool.get_new_blocks(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="1 blocks asked for, 0 free"):
        pool.get_new_blocks(1)


def test_asking_for_too_many_blocks_takes_none() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks asked for"):
        pool.get_new_blocks(4)
    assert free_ids(pool) == [1, 2, 3]


def test_never_published_blocks_are_reused_first() -> None:
    pool = BlockPool(6)
    first, second, third = pool.get_new_blocks(3)
    publish(pool, [first, second], b"a", b"b")
    pool.free_blocks([third, second, first])
    assert free_ids(pool) == [3, 4, 5, 2, 1]
    assert pool.num_cached == 2


def test_blocks_freed_earlier_are_evicted_earlier() -> None:
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    publish(pool, [first], b"a")
    publish(pool, [second], b"b")
    pool.free_blocks([second])
    pool.free_blocks([first])
    pool.touch([second])  # used again: now the most recent
    pool.free_blocks([second])
    assert [block.block_id for block in pool.get_new_blocks(2)] == [1, 2]


def test_a_freed_block_keeps_its_hash_until_reused() -> None:
    evicted = []
    pool = BlockPool(2, on_evict=lambda block_id, key: evicted.append((block_id, key)))
    (block,) = pool.get_new_blocks(1)
    publish(pool, [block], b"a")
    pool.free_blocks([block])
    assert pool.get_cached_block(b"a") is block
    assert evicted == []
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"a") is None
    assert evicted == [(1, b"a")]
    pool.check()


def test_the_eviction_hook_still_finds_the_block_published() -> None:
    found = []
    pool = BlockPool(2, on_evict=lambda _, key: found.append(pool.get_cached_block(key)))
    (block,) = pool.get_new_blocks(1)
    publish(pool, [block], b"a")
    pool.free_blocks([block])
    pool.get_new_blocks(1)
    assert found == [block]


def test_touching_a_free_block_takes_it_out_of_the_free_queue() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    publish(pool, [block], b"a")
    pool.free_blocks([block])
    pool.touch([block])
    pool.touch([block])
    assert block.ref_count == 2
    assert free_ids(pool) == [2]
    pool.free_blocks([block])
    assert free_ids(pool) == [2]
    pool.free_blocks([block])
    assert free_ids(pool) == [2, 1]


def test_of_two_blocks_with_one_hash_the_older_is_found_and_the_other_survives_it() -> None:
    published = PublishedBlocks()
    zero, three = Block(0), Block(3)
    published.add(b"h", zero)
    published.add(b"h", three)
    assert published.find(b"h") is zero
    assert published.remove(b"h", zero) is False
    assert published.find_all(b"h") == [three]
    assert published.find(b"h") is three
    assert published.remove(b"h", three) is True
    assert published.find(b"h") is None
    assert published.find_all(b"h") == []


def test_unpublishing_drops_the_hash_and_frees_nothing() -> None:
    pool = BlockPool(4)
    held, freed = pool.get_new_blocks(2)
    publish(pool, [held, freed], b"a", b"b")
    pool.free_blocks([freed])
    pool.unpublish([1, 2, 3])
    assert pool.get_cached_block(b"a") is None
    assert pool.get_cached_block(b"b") is None
    assert held.ref_count == 1
    assert free_ids(pool) == [3, 2]
    assert pool.num_cached == 0


def test_reset_waits_until_nothing_is_held() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    publish(pool, [block], b"a")
    assert pool.reset() is False
    assert pool.get_cached_block(b"a") is block
    pool.free_blocks([block])
    assert pool.reset() is True
    assert all(block.block_hash is None for block in pool.blocks)
    pool.check()


def test_usage_is_the_held_share() -> None:
    pool = BlockPool(5)
    assert pool.usage == 0.0
    pool.get_new_blocks(1)
    assert pool.usage == 0.25
    assert BlockPool(1).usage == 0.0


def test_freeing_a_block_twice_is_an_error() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks([block])


def test_a_published_block_cannot_be_published_again() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    publish(pool, [block], b"a")
    with pytest.raises(AssertionError, match="published twice"):
        publish(pool, [block], b"b")


# ---- elastic pools


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_blocks_to_come_count_as_free_and_come_when_no_fresh_one_is_left() -> None:
    pool = BlockPool(3, max_blocks=17)  # grows by 3
    assert (pool.num_blocks, pool.num_free, pool.num_usable, pool.growth) == (3, 16, 16, 3)
    assert ids(pool.get_new_blocks(2)) == [1, 2]
    assert pool.num_blocks == 3
    assert ids(pool.get_new_blocks(1)) == [3]
    assert (pool.num_blocks, pool.num_free, pool.num_held) == (6, 13, 3)
    assert pool.usage == 3 / 16
    assert ids(pool.get_new_blocks(11)) == list(range(4, 15))  # more than a step at once
    assert pool.num_blocks == 15
    assert ids(pool.get_new_blocks(2)) == [15, 16]
    assert pool.num_blocks == 17
    with pytest.raises(ValueError, match="1 blocks asked for, 0 free"):
        pool.get_new_blocks(1)
    pool.check()


def test_a_pool_grows_before_it_forgets_a_prefix() -> None:
    pool = BlockPool(3, max_blocks=4)
    first, second = pool.get_new_blocks(2)
    publish(pool, [first], b"a")
    pool.free_blocks([second, first])
    assert ids(pool.get_new_blocks(2)) == [2, 3]
    assert pool.get_cached_block(b"a") is first
    assert ids(pool.get_new_blocks(1)) == [1]
    assert pool.get_cached_block(b"a") is None


def test_blocks_that_come_are_used_before_published_ones_and_after_fresh_ones() -> None:
    pool = BlockPool(4, max_blocks=6)
    first, second, third = pool.get_new_blocks(3)
    publish(pool, [first, second], b"a", b"b")
    pool.free_blocks([third, second, first])
    pool.grow(6)
    assert free_ids(pool) == [3, 4, 5, 2, 1]
    with pytest.raises(ValueError, match="6 blocks cannot grow to 7, limit 6"):
        pool.grow(7)


def test_shrinking_takes_free_blocks_from_the_top_and_forgets_what_they_held() -> None:
    evicted = []
    pool = BlockPool(6, on_evict=lambda *block: evicted.append(block), enable_events=True)
    blocks = pool.get_new_blocks(4)
    publish(pool, [blocks[3]], b"d")
    pool.take_events()
    pool.free_blocks([blocks[3], blocks[2]])
    assert pool.shrink(1) == 3  # block 2 is held
    assert (evicted, pool.take_events()) == ([(4, b"d")], [BlockRemoved(b"d")])
    assert (free_ids(pool), pool.num_cached, pool.num_free) == ([], 0, 3)
    assert pool.shrink(2) == 3
    pool.free_blocks([blocks[1], blocks[0]])
    assert pool.shrink(2) == 2
    assert ids(pool.get_new_blocks(5)) == [1, 2, 3, 4, 5]


def test_the_null_block_stays() -> None:
    pool = BlockPool(3)
    assert pool.shrink(0) == 1
    assert pool.num_free == 2
    assert ids(pool.get_new_blocks(2)) == [1, 2]


def test_a_limit_below_the_budget_ends_growth() -> None:
    pool = BlockPool(2, max_blocks=9)
    pool.limit = 2
    assert (pool.num_free, pool.num_usable) == (1, 8)
    pool.get_new_blocks(1)
    assert pool.num_free == 0
    assert not pool.reset()
    pool.limit = 9
    assert ids(pool.get_new_blocks(1)) == [2]


def test_a_pool_cannot_begin_larger_than_its_budget() -> None:
    with pytest.raises(ValueError, match=r"max_blocks \(2\) must be at least num_blocks \(3\)"):
        BlockPool(3, max_blocks=2)
