import pytest

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.block_pool import BlockPool, PublishedBlocks


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
