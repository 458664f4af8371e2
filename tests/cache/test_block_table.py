"""Forks of a block table share what they can and write only into what is theirs alone."""

import random

import pytest

from mlx_paged_attention.cache.block_pool import BlockPool
from mlx_paged_attention.cache.block_table import BlockTable


def make_table(num_blocks: int, block_size: int, length: int) -> tuple[BlockPool, BlockTable]:
    pool = BlockPool(num_blocks + 1)
    table = BlockTable(pool, block_size)
    assert table.make_writable(0, length) == []
    return pool, table


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("length", [1, 9, 129])
def test_a_fork_takes_no_block_and_blocks_are_free_once_nobody_holds_them(size: int, length: int) -> None:
    """Vector C1."""
    pool, table = make_table(200, size, length)
    used = pool.num_usable - pool.num_free
    assert used == -(-length // size)
    fork = table.fork()
    assert fork.block_ids() == table.block_ids()
    assert pool.num_usable - pool.num_free == used
    table.free()
    assert pool.num_usable - pool.num_free == used
    fork.free()
    assert pool.num_free == pool.num_usable
    pool.check()


@pytest.mark.parametrize("fork_appends", [False, True])
@pytest.mark.parametrize("appended", [1, 16, 129])
@pytest.mark.parametrize("length", [1, 16, 129])
def test_the_first_write_into_a_shared_block_copies_that_block_only(
    length: int, appended: int, fork_appends: bool
) -> None:
    """Vector C2."""
    size = 8
    pool, table = make_table(200, size, length)
    fork = table.fork()
    writer, other = (fork, table) if fork_appends else (table, fork)
    before = other.block_ids()
    copies = writer.make_writable(length, length + appended)
    index = length // size
    assert copies == ([(before[index], writer.block_ids()[index])] if length % size else [])
    assert other.block_ids() == before
    assert writer.block_ids()[:index] == before[:index]
    used = -(-length // size) + -(-(length + appended) // size) - index
    assert pool.num_usable - pool.num_free == used
    writer.free()
    other.free()
    assert pool.num_free == pool.num_usable
    pool.check()


def test_a_block_just_taken_is_its_takers_and_free_once_when_given_back() -> None:
    """Wenyueh/MinivLLM#70"""
    pool, parent = make_table(8, 4, 6)
    full, partial = (pool.blocks[block_id] for block_id in parent.block_ids())
    assert (full.ref_count, partial.ref_count) == (1, 1)
    child = parent.fork()
    assert (full.ref_count, partial.ref_count) == (2, 2)
    ((source, target),) = child.make_writable(6, 7) or ()
    own = pool.blocks[target]
    assert source == partial.block_id
    assert (full.ref_count, partial.ref_count, own.ref_count) == (2, 1, 1)
    assert parent.block_ids() == [full.block_id, partial.block_id]
    parent.free()
    assert (full.ref_count, partial.ref_count, own.ref_count) == (1, 0, 1)
    child.free()
    free = [block.block_id for block in pool.free_queue.get_all()]
    assert sorted(free) == list(range(1, 9))
    pool.check()


def test_the_last_one_to_hold_a_block_writes_where_it_lies() -> None:
    """Vector C3."""
    pool, table = make_table(10, 4, 3)
    fork = table.fork()
    assert fork.make_writable(3, 4) == [(1, 2)]
    assert pool.num_free == 8
    assert table.make_writable(3, 4) == []
    assert table.block_ids() == [1]


def test_without_room_nothing_changes_and_what_is_given_back_can_be_had() -> None:
    """Vector C4."""
    pool, table = make_table(3, 4, 10)
    fork = table.fork()
    for _ in range(100):
        assert fork.make_writable(10, 11) is None
        assert table.make_writable(12, 13) is None
        assert fork.block_ids() == table.block_ids() == [1, 2, 3]
        pool.check()
    fork.free()
    assert table.make_writable(10, 12) == []


def test_what_is_forgotten_and_written_again_lies_where_it_lay() -> None:
    _, table = make_table(8, 4, 30)
    assert table.make_writable(5, 9) == []
    assert table.make_writable(9, 30) == []
    assert table.block_ids() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_writing_further_back_leaves_the_others_what_they_have() -> None:
    _, table = make_table(9, 4, 14)
    fork = table.fork()
    assert fork.make_writable(5, 11) == [(2, 5)]
    assert fork.block_ids() == [1, 5, 6]
    assert fork.block_ids(1) == [5, 6]
    assert table.block_ids() == [1, 2, 3, 4]


def test_any_sequence_of_writes_and_forks_keeps_every_sequences_tokens() -> None:
    """Slots hold the token that was written last; each table must lead to its own sequence's tokens."""
    rng, size = random.Random(0), 4
    pool = BlockPool(30)
    slots: dict[tuple[int, int], int] = {}
    living: list[tuple[BlockTable, list[int]]] = [(BlockTable(pool, size), [])]
    refused = 0
    for step in range(3000):
        table, tokens = rng.choice(living)
        action = rng.random()
        if action < 0.15 and len(living) < 6:
            living.append((table.fork(), list(tokens)))
        elif action < 0.25 and len(living) > 1:
            living = [entry for entry in living if entry[0] is not table]
            table.free()
        else:
            start = rng.randrange(len(tokens) + 1) if action < 0.5 else len(tokens)
            end = start + rng.randrange(1, 9)
            copies = table.make_writable(start, end)
            if copies is None:
                refused += 1
            else:
                for source, target in copies:
                    slots.update({(target, i): slots[source, i] for i in range(size) if (source, i) in slots})
                tokens[start:] = range(1000 * step, 1000 * step + end - start)
                ids = table.block_ids()
                slots.update({(ids[at // size], at % size): tokens[at] for at in range(start, end)})
        pool.check()
        for table, tokens in living:
            ids = table.block_ids()
            assert [slots[ids[at // size], at % size] for at in range(len(tokens))] == tokens
    assert refused > 50
