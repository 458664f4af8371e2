"""BlockTable: the blocks of one sequence, which its forks share until one of them writes."""

from collections.abc import Iterable

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.block_pool import BlockPool


class BlockTable:
    """The blocks of one sequence, in a pool that belongs to it and its forks.

    Args:
        pool: nothing in it is published.
        block_size: tokens per block.
        blocks: those it begins with, a reference to each included.
    """

    def __init__(self, pool: BlockPool, block_size: int, blocks: Iterable[Block] = ()) -> None:
        self._pool = pool
        self._block_size = block_size
        self._blocks = list(blocks)

    @classmethod
    def in_new_pool(cls, num_blocks: int, block_size: int) -> "BlockTable":
        """An empty table in a pool of its own, the null block included."""
        return cls(BlockPool(num_blocks), block_size)

    def block_ids(self, first: int = 0) -> list[int]:
        """The table from index ``first`` on."""
        return [block.block_id for block in self._blocks[first:]]

    def fork(self) -> "BlockTable":
        """The table of another sequence with the same tokens: all blocks are shared, none is copied."""
        self._pool.touch(self._blocks)
        return BlockTable(self._pool, self._block_size, self._blocks)

    def make_writable(self, start: int, end: int) -> list[tuple[int, int]] | None:
        """Make room to write tokens ``start .. end - 1``, and forget what there was from ``start`` on.

        Entries before index ``start // block_size`` stay as they are.

        Returns:
            (source, target) of the blocks to copy before anything is written: at most one, the block
            that ``start`` lies within if others hold it too. ``None`` if there is no room, in which
            case nothing has changed.
        """
        pool, size = self._pool, self._block_size
        kept = -(-start // size)
        assert kept <= len(self._blocks), "tokens would be missing before the first new one"
        cut = self._blocks[kept:]
        partial = self._blocks[kept - 1] if start % size else None
        copied = partial is not None and partial.ref_count > 1
        num_new = -(-end // size) - kept
        if num_new + copied > pool.num_free + sum(block.ref_count == 1 for block in cut):
            return None
        del self._blocks[kept:]
        pool.free_blocks(cut)  # first ones first: they come back in this order, side by side
        copies = []
        if partial is not None and copied:
            (own,) = pool.get_new_blocks(1)
            pool.free_blocks([partial])
            self._blocks[-1] = own
            copies = [(partial.block_id, own.block_id)]
        self._blocks += pool.get_new_blocks(num_new)
        return copies

    def free(self) -> None:
        """Give all blocks back: those that no fork holds can be had again."""
        self._pool.free_blocks(self._blocks)
        self._blocks = []
