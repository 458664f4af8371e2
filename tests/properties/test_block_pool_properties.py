"""Random use of the block pool: the books stay consistent whatever the order of moves."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mlx_paged_attention.cache.block import Block
from mlx_paged_attention.cache.block_pool import BlockPool
from mlx_paged_attention.cache.events import AllBlocksCleared, BlockStored

NUM_BLOCKS = 9
NAMES = [bytes([i]) for i in range(4)]


class BlockPoolMachine(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[tuple[int, bytes]] = []
        self.pool = BlockPool(
            NUM_BLOCKS, on_evict=lambda *block: self.evicted.append(block), enable_events=True
        )
        self.refs = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.names: dict[int, bytes] = {}
        self.index: set[bytes] = set()

    @rule(target=held, count=st.integers(0, 4))
    def take(self, count: int) -> list[Block]:
        free = self.pool.free_queue.get_all()
        if count > len(free):
            return []
        blocks = self.pool.get_new_blocks(count)
        assert blocks == free[:count]
        lost = [(b.block_id, self.names.pop(b.block_id)) for b in blocks if b.block_id in self.names]
        assert self.evicted == lost
        self.evicted.clear()
        for block in blocks:
            self.refs[block.block_id] += 1
        return blocks

    @rule(blocks=held, name=st.sampled_from(NAMES))
    def publish(self, blocks: list[Block], name: bytes) -> None:
        chosen = [block for block in blocks if block.block_hash is None][:1]
        if chosen:
            self.pool.publish(chosen, [name], parent_hash=None, token_ids=[0])
            self.names[chosen[0].block_id] = name

    @rule(target=held, name=st.sampled_from(NAMES))
    def hit(self, name: bytes) -> list[Block]:
        block = self.pool.get_cached_block(name)
        assert (block is not None) == (name in self.names.values())
        if block is None:
            return []
        assert self.names[block.block_id] == name
        self.pool.touch([block])
        self.refs[block.block_id] += 1
        return [block]

    @rule(blocks=consumes(held))
    def free(self, blocks: list[Block]) -> None:
        self.pool.free_blocks(reversed(blocks))
        for block in blocks:
            self.refs[block.block_id] -= 1
        gone = [b for b in reversed(blocks) if self.refs[b.block_id] == 0]
        queue = self.pool.free_queue.get_all()
        fresh = [b for b in gone if b.block_hash is None]
        cached = [b for b in gone if b.block_hash is not None]
        assert queue[: len(fresh)] == fresh
        assert queue[len(queue) - len(cached) :] == cached

    @rule(block_ids=st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=3))
    def unpublish(self, block_ids: list[int]) -> None:
        self.pool.unpublish(block_ids)
        for block_id in block_ids:
            self.names.pop(block_id, None)

    @rule()
    def reset(self) -> None:
        done = self.pool.reset()
        assert done == (not any(self.refs.values()))
        if done:
            self.names.clear()

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        for block in self.pool.blocks:
            assert block.ref_count == self.refs[block.block_id]
            assert block.block_hash == self.names.get(block.block_id)

    @invariant()
    def events_describe_the_index(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
            elif isinstance(event, BlockStored):
                self.index.update(event.block_hashes)
            else:
                self.index.remove(event.block_hash)
        assert self.index == set(self.names.values())


BlockPoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase
