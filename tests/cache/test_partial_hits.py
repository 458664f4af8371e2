"""Prompts that part from a published one within a block copy that block and go on from there."""

from fake_runner import FakeRunner, make_manager, make_request

from mlx_paged_attention.cache.block_contents import BlockContents
from mlx_paged_attention.cache.manager import PrefixHit
from mlx_paged_attention.scheduler.scheduler import Scheduler

SIZE = 4


class Engine:
    """Scheduler and fake runner, whole requests one after the other."""

    def __init__(self, num_blocks: int = 40, size: int = SIZE) -> None:
        self.manager = make_manager(num_blocks, size, partial_hits=True)
        self.scheduler = Scheduler(self.manager, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=60)
        self.runner = FakeRunner(size)
        self.count = 0

    def submit(self, tokens, **options):
        request = make_request(str(self.count), tokens, **{"max_tokens": 1, **options})
        self.count += 1
        self.scheduler.add_request(request)
        return request

    def run(self, tokens, **options):
        """Tokens found cached, and copies made."""
        request, copies = self.submit(tokens, **options), []
        while self.scheduler.has_unfinished_requests:
            copies += self.step().copies
        return request.num_cached_tokens, copies

    def step(self):
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, self.runner.run(plan))
        self.manager.check()
        return plan


def test_what_two_prompts_share_of_a_block_is_computed_once():
    engine = Engine()
    assert engine.run([1, 2, 3, 4, 5, 6, 7, 8, 9]) == (0, [])
    # Blocks 1 and 2 are published; the second is copied to the third request's own.
    cached, copies = engine.run([1, 2, 3, 4, 5, 6, 99, 98, 97])
    assert cached == 6
    assert [source for source, _ in copies] == [2]
    cached, copies = engine.run([1, 2, 77, 76, 75])
    assert cached == 2
    assert [source for source, _ in copies] == [1]


def test_a_prompt_that_ends_within_a_block_computes_its_last_token_alone():
    engine = Engine()
    engine.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert engine.run([1, 2, 3, 4, 5, 6, 7])[0] == 6
    assert engine.run([1, 2, 3])[0] == 2
    assert engine.run([1])[0] == 0


def test_the_longest_of_several_is_taken():
    engine = Engine()
    for tail in ([5, 0, 0, 0], [5, 6, 7, 0], [5, 6, 0, 0]):
        engine.run([1, 2, 3, 4, *tail, 9])
    cached, _ = engine.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cached == 7


def test_other_salts_share_nothing_of_a_first_block_either():
    engine = Engine()
    engine.run([1, 2, 3, 4, 5], cache_salt="one")
    assert engine.run([1, 2, 9, 9, 9], cache_salt="other")[0] == 0
    assert engine.run([1, 2, 9, 9, 9])[0] == 0
    assert engine.run([1, 2, 9, 9, 9], cache_salt="one")[0] == 2


def test_a_block_that_the_same_step_writes_is_not_copied():
    engine = Engine()
    first = engine.submit([1, 2, 3, 4, 5])
    second = engine.submit([1, 2, 9, 9, 9])
    plan = engine.step()
    assert len(plan.rows) == 2
    assert plan.copies == []
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)


def test_a_block_that_is_reused_for_its_own_copy_stays_right():
    engine = Engine(num_blocks=4)
    engine.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    for tail in (40, 50, 60):  # three usable blocks: the one that is copied is evicted for the copy
        assert engine.run([1, 2, 3, 4, 5, 6, tail, tail, tail])[0] >= 4


def test_a_few_tokens_are_not_worth_a_copy():
    engine = Engine(size=16)
    engine.run(list(range(1, 18)))
    assert engine.run([1, 2, 3, 90, 91]) == (0, [])
    assert engine.run([1, 2, 3, 4, 91])[0] == 4


def test_without_the_option_hits_end_at_blocks():
    manager = make_manager(10, SIZE)
    request = make_request("a", [1, 2, 3, 4, 5])
    request.start_hashing(manager.hasher)
    manager.allocate_slots(request, 5, PrefixHit())
    manager.take_published()
    other = make_request("b", [1, 2, 9, 9, 9])
    other.start_hashing(manager.hasher)
    assert manager.get_computed_blocks(other) == PrefixHit()


def test_a_step_that_fails_takes_what_copied_from_it_along():
    engine = Engine()
    scheduler, runner = engine.scheduler, engine.runner
    first = engine.submit([1, 2, 3, 4, 5], max_tokens=3)
    failing = scheduler.schedule()
    second = engine.submit([1, 2, 9, 9, 9], max_tokens=3)
    later = scheduler.schedule()
    assert later.copies == [(1, 3)]
    runner.fail(failing)
    assert set(scheduler.fail_step(failing)) == {first, second}
    runner.fail(later)
    assert scheduler.fail_step(later) == []
    assert engine.run([1, 2, 3, 4, 5])[0] == 0


def test_contents_are_forgotten_with_the_blocks_they_were_in():
    manager = make_manager(10, SIZE)
    blocks = manager.pool.get_new_blocks(2)
    contents = BlockContents()
    contents.add(b"start", blocks[0].block_id, b"x", [1, 2, 3, 4])
    assert contents.find(b"start", [1, 2, 9], manager.pool.blocks, ()) == (0, 0)  # not published
    blocks[0].block_hash = b"x"
    contents.add(b"start", blocks[0].block_id, b"x", [1, 2, 3, 4])
    assert contents.find(b"start", [1, 2, 9], manager.pool.blocks, ()) == (blocks[0].block_id, 2)
    assert contents.find(b"start", [1, 2, 9], manager.pool.blocks, {blocks[0].block_id}) == (0, 0)
    assert contents.find(b"other", [1, 2, 9], manager.pool.blocks, ()) == (0, 0)
    assert contents.find(b"start", [], manager.pool.blocks, ()) == (0, 0)
    blocks[0].block_hash = b"y"
    contents.add(b"elsewhere", blocks[0].block_id, b"y", [5, 6, 7, 8])
    assert contents.find(b"start", [1, 2, 9], manager.pool.blocks, ()) == (0, 0)
    assert contents.find(b"elsewhere", [5], manager.pool.blocks, ()) == (blocks[0].block_id, 1)
    blocks[0].block_hash = None
