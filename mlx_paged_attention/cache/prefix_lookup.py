"""Finding a published prefix that every layer group can go on from."""

from collections.abc import Callable, Sequence

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.block_need import BlockNeed
from mlx_paged_attention.cache.block_pool import BlockPool


def group_hash(block_hash: bytes, group: int) -> bytes:
    """The name of what a layer group keeps of a block's tokens; groups lose their blocks independently."""
    return block_hash + group.to_bytes(4, "little") if group else block_hash


def longest_window_hit(
    is_cached: Callable[[int], bool], num_blocks: int, first_needed: Callable[[int], int]
) -> int:
    """The most blocks, at most ``num_blocks``, after which a windowed layer can go on.

    Args:
        is_cached: whether a block is there.
        first_needed: of a number of blocks, the index of the first that whoever goes on after them sees.
    """
    end = index = num_blocks
    while index > first_needed(end):
        index -= 1
        if not is_cached(index):
            end = index
    return end


def find_prefix(
    pool: BlockPool, hashes: Sequence[bytes], need: BlockNeed, num_tokens: int
) -> list[list[Block]]:
    """Each group's blocks of the longest prefix that all of them can go on from, equally many.

    Blocks that lie wholly behind a group's window are not needed: the null block stands in their place.

    Args:
        hashes: of the sequence's full blocks.
        need: has the groups' windows.
        num_tokens: of the sequence; its last one is computed in any case.
    """

    def find(group: int, index: int) -> Block | None:
        return pool.get_cached_block(group_hash(hashes[index], group))

    def first_needed(window: int | None, count: int) -> int:
        return need.first_useful(window, min(count * need.block_size, num_tokens - 1))

    # Whole contexts from the left, then windows from the right, until all agree.
    count = len(hashes)
    for group, window in enumerate(need.windows):
        if window is None:
            count = next((i for i in range(count) if find(group, i) is None), count)
    agreed = False
    while not agreed:
        agreed = True
        for group, window in enumerate(need.windows):
            if window is not None:
                found = longest_window_hit(
                    lambda i, group=group: find(group, i) is not None,  # type: ignore[misc]
                    count,
                    lambda end, window=window: first_needed(window, end),  # type: ignore[misc]
                )
                agreed &= found == count
                count = found
    tables = []
    for group, window in enumerate(need.windows):
        first = min(count, first_needed(window, count))
        blocks = [find(group, i) for i in range(first, count)]
        tables.append([pool.blocks[0]] * first + [block for block in blocks if block is not None])
        assert len(tables[-1]) == count
    return tables
