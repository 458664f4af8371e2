"""BlockContents: which tokens published blocks hold, for prompts that part from others within a block."""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from mlx_paged_attention.cache.block import Block

# Blocks that a lookup compares with, the latest first: many prompts may part at one place.
_MOST_COMPARED = 64


class BlockContents:
    """Published blocks by what comes before them and their first token.

    Blocks that are published no more are found out when they are met, or when their id is used again.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[bytes, int], dict[int, tuple[bytes, tuple[int, ...]]]] = {}
        self._places: dict[int, tuple[bytes, int]] = {}

    def add(self, before: bytes, block_id: int, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """A block is published.

        Args:
            before: names everything before it: the digest of the block before, or of a sequence's start.
        """
        self._remove(block_id)
        place = self._places[block_id] = (before, token_ids[0])
        self._blocks.setdefault(place, {})[block_id] = (block_hash, tuple(token_ids))

    def find(
        self, before: bytes, token_ids: Sequence[int], blocks: Sequence[Block], apart: Collection[int]
    ) -> tuple[int, int]:
        """The block that begins with most of these tokens: its id, and how many; 0 and 0 if there is none.

        Args:
            blocks: of the pool.
            apart: ids of blocks that are not to be taken.
        """
        best, length = 0, 0
        if not token_ids:
            return best, length
        candidates = self._blocks.get((before, token_ids[0]), {})
        for block_id, (block_hash, held) in list(islice(reversed(candidates.items()), _MOST_COMPARED)):
            if blocks[block_id].block_hash != block_hash:
                self._remove(block_id)
            elif block_id not in apart:
                same = next(
                    (i for i, (a, b) in enumerate(zip(held, token_ids, strict=False)) if a != b), None
                )
                same = min(len(held), len(token_ids)) if same is None else same
                if same > length:
                    best, length = block_id, same
        return best, length

    def remove(self, block_ids: Iterable[int]) -> None:
        """These blocks are no more."""
        for block_id in block_ids:
            self._remove(block_id)

    def clear(self) -> None:
        self._blocks.clear()
        self._places.clear()

    def _remove(self, block_id: int) -> None:
        place = self._places.pop(block_id, None)
        if place is not None:
            del self._blocks[place][block_id]
            if not self._blocks[place]:
                del self._blocks[place]
