"""BlockPool: the one owner of block ids. Hands blocks out, takes them back, remembers what is published."""

from collections.abc import Callable, Iterable, Sequence

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from mlx_paged_attention.cache.free_queue import FreeBlockQueue


class PublishedBlocks:
    """The published blocks by digest. Several blocks may have equal contents: the oldest is found."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, dict[int, Block]] = {}

    def find(self, block_hash: bytes) -> Block | None:
        twins = self._blocks.get(block_hash)
        return next(iter(twins.values())) if twins else None

    def find_all(self, block_hash: bytes) -> list[Block]:
        return list(self._blocks.get(block_hash, {}).values())

    def add(self, block_hash: bytes, block: Block) -> None:
        self._blocks.setdefault(block_hash, {})[block.block_id] = block

    def remove(self, block_hash: bytes, block: Block) -> bool:
        """Whether it was the last block with this digest."""
        twins = self._blocks[block_hash]
        del twins[block.block_id]
        if twins:
            return False
        del self._blocks[block_hash]
        return True

    def items(self) -> Iterable[tuple[bytes, Block]]:
        for block_hash, twins in self._blocks.items():
            for block in twins.values():
                yield block_hash, block


# A pool grows by this share of its budget, or by more if more is needed at once: what it takes and does
# not need is less than that, and few steps wait for arrays to be copied.
GROWTH = 8


class BlockPool:
    """Blocks with ids from 0; block 0 is the null block and is never handed out.

    A free block that is published keeps its contents until it is reused. Blocks that never were
    published are reused first, then the least recently freed.

    The pool may begin small. Blocks that are not there yet count as free; they come when there is no fresh
    block left, before a published one is reused. So the ids are those that a pool of full size hands out.

    Args:
        num_blocks: blocks that are there from the start.
        max_blocks: the budget, as many blocks as there may ever be; ``None``: ``num_blocks``, a fixed pool.
        on_evict: called with block id and digest just before a published block is reused, or taken away.
        enable_events: record ``CacheEvent`` values for ``take_events``.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        max_blocks: int | None = None,
        on_evict: Callable[[int, bytes], None] | None = None,
        enable_events: bool = False,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.max_blocks = num_blocks if max_blocks is None else max_blocks
        if self.max_blocks < num_blocks:
            raise ValueError(f"max_blocks ({max_blocks}) must be at least num_blocks ({num_blocks})")
        self.limit = self.max_blocks
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.blocks[0].is_null = True
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        self.published = PublishedBlocks()
        self.num_cached = 0
        self._on_evict = on_evict
        self._enable_events = enable_events
        self._events: list[CacheEvent] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that are there now, the null block included."""
        return len(self.blocks)

    @property
    def num_usable(self) -> int:
        """Blocks that the budget allows, without the null block."""
        return self.max_blocks - 1

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return len(self.blocks) - 1 - self.free_queue.num_free

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those to come included; ``num_cached`` of them are published."""
        return self.free_queue.num_free + max(0, self.limit - len(self.blocks))

    @property
    def usage(self) -> float:
        """Held share of the usable blocks, 0 to 1."""
        return self.num_held / self.num_usable if self.num_usable else 0.0

    @property
    def growth(self) -> int:
        """Blocks by which the pool grows."""
        return -(-self.max_blocks // GROWTH)

    def grow(self, num_blocks: int) -> None:
        """Adds blocks, as fresh ones, until there are ``num_blocks``.

        Raises:
            ValueError: they are more than the limit, or fewer than there are.
        """
        if not len(self.blocks) <= num_blocks <= self.limit:
            raise ValueError(f"{len(self.blocks)} blocks cannot grow to {num_blocks}, limit {self.limit}")
        added = [Block(block_id) for block_id in range(len(self.blocks), num_blocks)]
        self.blocks += added
        self.free_queue.insert_fresh(added)

    def shrink(self, num_blocks: int) -> int:
        """Takes free blocks away from the highest id down, published ones too, to ``num_blocks`` at least.

        Ends before the first block that a request holds.

        Returns:
            How many blocks there are now.
        """
        while len(self.blocks) > max(num_blocks, 1) and self.blocks[-1].ref_count == 0:
            block = self.blocks[-1]
            self._evict(block)
            self.free_queue.remove(block)
            self.blocks.pop()
        return len(self.blocks)

    def get_new_blocks(self, count: int) -> list[Block]:
        """``count`` blocks to write into, each with one reference.

        Raises:
            ValueError: fewer are free; nothing is taken.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        missing = count - self.free_queue.count_fresh(count)
        if missing > 0 and len(self.blocks) < self.limit:
            self.grow(min(self.limit, len(self.blocks) + max(missing, self.growth)))
        blocks = self.free_queue.popleft_n(count)
        for block in blocks:
            self._evict(block)
            assert block.ref_count == 0
            block.ref_count = 1
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Adds a reference to each block; a free one leaves the free queue."""
        for block in blocks:
            if block.ref_count == 0 and not block.is_null:
                self.free_queue.remove(block)
                self.num_cached -= block.block_hash is not None
            block.ref_count += 1

    def free_blocks(self, ordered: Iterable[Block]) -> None:
        """Drops a reference to each block; those without any become free, in the order given.

        A request passes its blocks last first, so that of one sequence the tail is reused before
        the beginning, which more prompts share.
        """
        fresh: list[Block] = []
        cached: list[Block] = []
        for block in ordered:
            if block.is_null:
                continue
            assert block.ref_count > 0, f"{block} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                (fresh if block.block_hash is None else cached).append(block)
        self.free_queue.prepend_n(fresh)
        self.free_queue.append_n(cached)
        self.num_cached += len(cached)

    def get_cached_block(self, block_hash: bytes) -> Block | None:
        """The block published under this digest, or ``None``."""
        return self.published.find(block_hash)

    def publish(
        self,
        blocks: Sequence[Block],
        block_hashes: Sequence[bytes],
        *,
        parent_hash: bytes | None,
        token_ids: list[int],
    ) -> None:
        """Makes consecutive full blocks of one sequence findable. They must not be written again."""
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            assert block.ref_count > 0, f"{block} is published by nobody"
            assert block.block_hash is None, f"{block} is published twice"
            block.block_hash = block_hash
            self.published.add(block_hash, block)
        if self._enable_events:
            size = len(token_ids) // len(blocks)
            self._events.append(BlockStored(list(block_hashes), parent_hash, token_ids, size))

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Makes blocks unfindable; whoever holds them keeps them."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.block_hash is not None:
                self.num_cached -= block.ref_count == 0
                self._forget(block)

    def retire(self, block: Block) -> None:
        """Unpublishes a free block and lets it be reused before all others."""
        assert block.ref_count == 0, f"{block} is in use"
        self.unpublish([block.block_id])
        self.free_queue.remove(block)
        self.free_queue.prepend_n([block])

    def reset(self) -> bool:
        """Unpublishes everything. Does nothing and returns ``False`` while a request holds a block."""
        if self.num_held:
            return False
        for block in self.blocks:
            block.block_hash = None
        self.published = PublishedBlocks()
        self.num_cached = 0
        if self._enable_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[CacheEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Asserts that the books are consistent; O(blocks), for tests."""
        free = self.free_queue.get_all()
        free_ids = {block.block_id for block in free}
        assert len(free_ids) == len(free) == self.free_queue.num_free
        assert 0 not in free_ids
        assert [block.block_id for block in self.blocks] == list(range(len(self.blocks)))
        assert len(self.blocks) <= self.max_blocks
        for block in self.blocks[1:]:
            assert (block.ref_count == 0) == (block.block_id in free_ids), block
        assert self.num_cached == sum(block.block_hash is not None for block in free)
        published = {block.block_id: block_hash for block_hash, block in self.published.items()}
        assert published == {b.block_id: b.block_hash for b in self.blocks if b.block_hash is not None}

    def _evict(self, block: Block) -> None:
        """Ends the publication of a free block, if it is published."""
        if block.block_hash is None:
            return
        if self._on_evict is not None:
            self._on_evict(block.block_id, block.block_hash)
        self.num_cached -= 1
        self._forget(block)

    def _forget(self, block: Block) -> None:
        assert block.block_hash is not None
        gone = self.published.remove(block.block_hash, block)
        if gone and self._enable_events:
            self._events.append(BlockRemoved(block.block_hash))
        block.block_hash = None
