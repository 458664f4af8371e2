"""FreeBlockQueue: the free blocks in the order in which they are reused."""

from collections.abc import Iterable, Sequence

from mlx_paged_attention.cache.block import Block


class FreeBlockQueue:
    """A doubly linked list threaded through the blocks, so that any block leaves it in O(1).

    A sentinel stands at either end; no operation has to look for an empty list.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.num_free = 0
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.append_n(blocks)

    def popleft(self) -> Block:
        """The next block to reuse.

        Raises:
            ValueError: the queue is empty.
        """
        first = self._head.next_free
        if first is None or first is self._tail:
            raise ValueError("No free blocks available")
        self.remove(first)
        return first

    def popleft_n(self, count: int) -> list[Block]:
        return [self.popleft() for _ in range(count)]

    def remove(self, block: Block) -> None:
        """Takes ``block`` out, wherever it stands.

        Raises:
            ValueError: it is not in the queue.
        """
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"{block} is not in the free queue")
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.num_free -= 1

    def append(self, block: Block) -> None:
        self.append_n((block,))

    def append_n(self, blocks: Iterable[Block]) -> None:
        """Puts ``blocks`` at the end, in their order."""
        last = self._tail.prev_free
        assert last is not None
        self._insert_after(last, blocks)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Puts ``blocks`` at the front; the first of them becomes the next to be reused."""
        self._insert_after(self._head, blocks)

    def count_fresh(self, most: int) -> int:
        """How many blocks at the front carry no published prefix; counts up to ``most``."""
        block, count = self._head.next_free, 0
        while count < most and block is not self._tail and block is not None and block.block_hash is None:
            block, count = block.next_free, count + 1
        return count

    def insert_fresh(self, blocks: Iterable[Block]) -> None:
        """Puts ``blocks`` behind the fresh ones at the front: to be reused before any published one."""
        place = self._head
        while (after := place.next_free) is not None and after is not self._tail and after.block_hash is None:
            place = after
        self._insert_after(place, blocks)

    def get_all(self) -> list[Block]:
        """Every free block in order; O(free blocks), for tests and checks."""
        blocks = []
        block = self._head.next_free
        while block is not None and block is not self._tail:
            blocks.append(block)
            block = block.next_free
        return blocks

    def _insert_after(self, place: Block, blocks: Iterable[Block]) -> None:
        after = place.next_free
        assert after is not None
        for block in blocks:
            assert block.next_free is None, f"{block} is already in the free queue"
            place.next_free = block
            block.prev_free = place
            # Linked onwards at once: a block listed twice then fails the assertion above.
            block.next_free = after
            place = block
            self.num_free += 1
        after.prev_free = place
