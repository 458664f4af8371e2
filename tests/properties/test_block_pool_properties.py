"""Random use of the block pool: the books stay consistent whatever the order of moves."""

from hypothesis import given, settings
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
        self.pool = self.make_pool()
        self.refs = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.names: dict[int, bytes] = {}
        self.index: set[bytes] = set()

    def make_pool(self) -> BlockPool:
        return BlockPool(NUM_BLOCKS, on_evict=lambda *block: self.evicted.append(block), enable_events=True)

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


class ElasticPoolMachine(BlockPoolMachine):
    """As above, in a pool that grows as it is used, and is grown, shrunk and limited from outside."""

    def make_pool(self) -> BlockPool:
        return BlockPool(
            2,
            max_blocks=NUM_BLOCKS,
            on_evict=lambda *block: self.evicted.append(block),
            enable_events=True,
        )

    @rule(target=BlockPoolMachine.held, count=st.integers(0, 4))
    def take(self, count: int) -> list[Block]:
        pool = self.pool
        if count > pool.num_free:
            return []
        free, before = pool.free_queue.get_all(), pool.num_blocks
        fresh = next((i for i, block in enumerate(free) if block.block_hash is not None), len(free))
        blocks = pool.get_new_blocks(count)
        if fresh >= count:
            assert pool.num_blocks == before
        grown = [pool.blocks[i] for i in range(before, pool.num_blocks)]
        assert blocks == [*free[:fresh], *grown, *free[fresh:]][:count]
        for block_id, name in self.evicted:
            assert self.names.pop(block_id) == name
        self.evicted.clear()
        for block in blocks:
            self.refs[block.block_id] += 1
        return blocks

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def shrink(self, num_blocks: int) -> None:
        before = self.pool.num_blocks
        left = self.pool.shrink(num_blocks)
        held = [block_id for block_id, count in self.refs.items() if count]
        assert left == min(before, max(num_blocks, 1 + max(held, default=0)))
        assert {block_id for block_id, _ in self.evicted} == {i for i in self.names if i >= left}
        for block_id, name in self.evicted:
            assert self.names.pop(block_id) == name
        self.evicted.clear()

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def grow(self, num_blocks: int) -> None:
        if self.pool.num_blocks <= num_blocks <= self.pool.limit:
            self.pool.grow(num_blocks)
            assert self.pool.num_blocks == num_blocks

    @rule(limited=st.booleans())
    def limit(self, limited: bool) -> None:
        self.pool.limit = self.pool.num_blocks if limited else NUM_BLOCKS

    @rule(block_ids=st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=3))
    def unpublish(self, block_ids: list[int]) -> None:
        super().unpublish([block_id for block_id in block_ids if block_id < self.pool.num_blocks])


ElasticPoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestElasticPool = ElasticPoolMachine.TestCase

_MOVES = st.lists(
    st.tuples(st.sampled_from(["take", "take", "publish", "free", "hit"]), st.integers(0, 9)), max_size=60
)


@given(moves=_MOVES, start=st.integers(1, NUM_BLOCKS))
def test_an_elastic_pool_hands_out_the_ids_of_one_that_is_there_from_the_start(
    moves: list[tuple[str, int]], start: int
) -> None:
    def ids(pool: BlockPool) -> list[list[int]]:
        held: list[list[Block]] = []
        handed_out = []
        for number, (move, n) in enumerate(moves):
            if move == "take" and n % 4 <= pool.num_free:
                held.append(pool.get_new_blocks(n % 4))
                handed_out.append([block.block_id for block in held[-1]])
            elif move == "publish" and held:
                chosen = [block for block in held[n % len(held)] if block.block_hash is None][:1]
                if chosen:
                    pool.publish(chosen, [bytes([number])], parent_hash=None, token_ids=[0])
            elif move == "free" and held:
                pool.free_blocks(reversed(held.pop(n % len(held))))
            elif move == "hit" and (block := pool.get_cached_block(bytes([n]))) is not None:
                pool.touch([block])
                held.append([block])
        return handed_out

    assert ids(BlockPool(start, max_blocks=NUM_BLOCKS)) == ids(BlockPool(NUM_BLOCKS))
