"""Folding: of two published blocks with equal contents, one is enough."""

from collections.abc import Collection
from dataclasses import dataclass

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.block_pool import BlockPool
from mlx_paged_attention.cache.group_table import GroupTable


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A block that was published though another one of the same contents was, too."""

    group: GroupTable
    index: int
    block: Block
    block_hash: bytes


def fold(pool: BlockPool, duplicates: Collection[Duplicate], unwritten: Collection[int]) -> list[int]:
    """Put the older blocks in the places of their duplicates, which are given back.

    Both have been planned to be written by then: steps that still read a duplicate run before those that
    may be given its block.

    Args:
        unwritten: ids of blocks that only the step under construction writes.

    Returns:
        The indices in the tables at which something has changed.
    """
    changed = []
    for duplicate in duplicates:
        group, index, own = duplicate.group, duplicate.index, duplicate.block
        older = pool.get_cached_block(duplicate.block_hash)
        if older is None or older is own or older.block_id in unwritten:
            continue
        if older.ref_count == 0:
            continue  # it is free already: to take it would give back one block for another
        if own.block_hash != duplicate.block_hash or group.blocks[index] is not own:
            continue  # unpublished, behind the window, or copied since
        pool.touch([older])
        group.blocks[index] = older
        pool.unpublish([own.block_id])
        pool.free_blocks([own])
        changed.append(index)
    return changed
