"""Slots of four; sequences named by letters; a snapshot's hash is the tokens that it stands for."""

import pytest
from fake_runner import FakeRunner, make_manager, make_request

from mlx_paged_attention.cache.state_slots import StateSlots
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.scheduler import Scheduler

SIZE = 4


def key(num_tokens: int, of: str = "prompt") -> bytes:
    return f"{of} {num_tokens}".encode()


def keys(num_blocks: int, of: str = "prompt") -> list[bytes]:
    return [key(SIZE * (i + 1), of) for i in range(num_blocks)]


@pytest.fixture
def slots() -> StateSlots:
    return StateSlots(8, SIZE)


def enter(slots: StateSlots, name: str, slot: int = 0, branch: int = 0) -> None:
    slots.admit(name, slot, branch)


def compute(slots: StateSlots, name: str, num_tokens: int, *, generated: bool = False) -> tuple[int, int]:
    """A step of a sequence whose state becomes a snapshot if it can."""
    places = slots.plan(name, num_tokens)
    slots.check()
    if num_tokens % SIZE == 0:
        slots.publish(name, places[1], num_tokens, key(num_tokens), generated=generated)
    slots.check()
    return places


def test_a_sequence_starts_from_nothing_and_stays_in_its_slot(slots):
    enter(slots, "a")
    assert compute(slots, "a", 3) == (0, 1)
    assert compute(slots, "a", 5) == (1, 1)
    slots.free("a")
    slots.check()
    assert slots.pool.num_free == 7


def test_a_snapshot_is_left_as_it_is_and_read_once(slots):
    enter(slots, "a")
    assert compute(slots, "a", 4) == (0, 1)
    assert compute(slots, "a", 5) == (1, 2)
    assert slots.pool.blocks[1].ref_count == 1  # the step may still be reading it
    assert compute(slots, "a", 6) == (2, 2)
    assert slots.pool.blocks[1].ref_count == 0
    assert slots.find(keys(3)) == (1, 1)


def test_others_go_on_from_the_longest_prefix_that_has_a_snapshot(slots):
    enter(slots, "a")
    compute(slots, "a", 4)
    compute(slots, "a", 12)  # none after 8
    assert slots.find(keys(4)) == (3, 2)
    assert slots.find(keys(2)) == (1, 1)
    assert slots.find(keys(2, of="other")) == (0, 0)
    enter(slots, "b", 2)
    enter(slots, "c", 2)
    assert compute(slots, "b", 13) == (2, 3)
    assert compute(slots, "c", 14) == (2, 4)
    slots.free("a")
    slots.free("b")
    slots.free("c")
    slots.check()
    assert slots.find(keys(3)) == (3, 2)


def test_a_state_that_a_later_step_has_changed_meanwhile_is_no_snapshot(slots):
    enter(slots, "a")
    _, slot = slots.plan("a", 4)
    slots.plan("a", 5)
    slots.publish("a", slot, 4, key(4), generated=False)
    assert slots.find(keys(1)) == (0, 0)
    slots.free("a")
    slots.publish("a", slot, 5, key(4), generated=False)  # it has left
    assert slots.find(keys(1)) == (0, 0)


def test_an_equal_snapshot_is_not_kept_twice(slots):
    for name in "ab":
        enter(slots, name)
        compute(slots, name, 4)
    assert compute(slots, "a", 5) == (1, 3)
    assert compute(slots, "b", 5) == (2, 2)


def test_of_an_answer_only_the_last_snapshot_is_kept_and_all_of_a_prompts(slots):
    enter(slots, "a")
    for num_tokens in (4, 8, 9, 12, 13, 16, 17, 20, 21, 22):
        compute(slots, "a", num_tokens, generated=num_tokens > 9)
    found = [slots.pool.get_cached_block(key(n)) is not None for n in (4, 8, 12, 16, 20)]
    assert found == [True, True, False, False, True]


def test_the_least_recently_used_snapshot_goes_first_and_there_is_always_a_slot(slots):
    enter(slots, "a")
    for num_tokens in range(4, 80, 4):
        compute(slots, "a", num_tokens)
    slots.free("a")
    assert slots.find(keys(19)) == (19, slots.pool.get_cached_block(key(76)).block_id)
    assert slots.pool.num_cached == 7
    assert slots.find(keys(12)) == (0, 0)


@pytest.mark.parametrize(
    ("start", "end", "num_tokens", "cut"),
    [
        (0, 20, 20, 16),  # the last block that something follows
        (0, 21, 21, 20),
        (16, 20, 20, 20),
        (0, 10, 30, 8),  # what the budget leaves, down to a block
        (8, 11, 30, 11),  # less than a block
        (28, 30, 30, 30),
        (7, 8, 8, 8),
    ],
)
def test_chunks_end_where_a_snapshot_can_be_made(slots, start, end, num_tokens, cut):
    enter(slots, "a")
    assert slots.cut("a", start, end, num_tokens, None) == cut


def test_a_chunk_ends_where_another_sequence_has_parted(slots):
    enter(slots, "a", branch=12)
    assert slots.cut("a", 0, 20, 30, None) == 12
    assert slots.cut("a", 12, 20, 30, None) == 20
    assert slots.cut("unknown yet", 0, 20, 30, 8) == 8


def test_forgetting_all_snapshots_takes_no_sequences_state(slots):
    enter(slots, "a")
    compute(slots, "a", 4)
    with pytest.raises(AssertionError, match="a sequence holds a state"):
        slots.reset()
    slots.free("a")
    slots.reset()
    assert slots.find(keys(1)) == (0, 0)


# ---- in the manager


def request_of(manager, name: str, tokens: list[int]) -> Request:
    request = make_request(name, tokens)
    request.start_hashing(manager.hasher)
    return request


def run_prompt(manager, request: Request, hit) -> list[int]:
    """Its chunks' ends."""
    ends, start, total = [], hit.num_tokens, len(request.token_ids)
    first = True
    while start < total:
        end = manager.states.chunk_end(request, start, total, hit if first else None)
        assert manager.allocate_slots(request, end - start, hit if first else None) is not None
        _, slot = manager.states.plan(request.request_id, end)
        request.num_computed_tokens = end
        manager.states.publish(request, end, slot)
        manager.check()
        ends.append(end)
        start, first = end, False
    return ends


def test_a_shared_beginning_is_skipped_from_the_third_prompt_on_wherever_it_ends():
    manager = make_manager(40, SIZE, states=StateSlots(20, SIZE))
    common, answers = list(range(10)), []
    for i in range(3):
        request = request_of(manager, str(i), common + [50 + i] * 9)
        hit = manager.get_computed_blocks(request)
        answers.append((hit.num_found, hit.num_tokens, run_prompt(manager, request, hit)))
    # The second finds blocks but no state, and leaves one where the two parted.
    assert answers == [(0, 0, [16, 19]), (8, 0, [8, 16, 19]), (8, 8, [16, 19])]


def test_a_whole_prompt_again_computes_what_follows_its_last_full_block():
    manager = make_manager(40, SIZE, states=StateSlots(20, SIZE))
    for i, skipped in enumerate((0, 12)):
        request = request_of(manager, str(i), list(range(16)))
        hit = manager.get_computed_blocks(request)
        assert hit.num_tokens == skipped
        run_prompt(manager, request, hit)


def test_without_prefix_caching_prompts_are_not_cut():
    manager = make_manager(40, SIZE, enable_caching=False, states=StateSlots(20, SIZE))
    request = make_request("a", list(range(19)))
    assert manager.states.chunk_end(request, 0, 19) == 19


def test_a_prompt_waits_for_the_snapshot_that_an_equal_one_is_about_to_make():
    manager = make_manager(40, SIZE, states=StateSlots(20, SIZE))
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=60)
    for i in range(3):
        scheduler.add_request(make_request(str(i), list(range(19)), max_tokens=2))
    runner, computed = FakeRunner(SIZE), []
    while scheduler.has_unfinished_requests:
        plan = scheduler.schedule()
        computed += [(row.request_id, len(row.token_ids)) for row in plan.rows if row.start < 19]
        scheduler.update(plan, runner.run(plan))
        manager.check()
    assert computed == [("0", 16), ("0", 3), ("1", 3), ("2", 3)]


def test_snapshots_that_are_forgotten_are_not_found_and_whoever_holds_one_alone_goes_on_in_it(slots):
    enter(slots, "a")
    compute(slots, "a", 4)
    compute(slots, "a", 8)
    assert slots.find(keys(2)) == (2, 2)
    slots.forget(keys(2))
    slots.check()
    assert slots.find(keys(2)) == (0, 0)
    assert slots.plan("a", 9) == (2, 2)
    slots.check()


def test_a_snapshot_of_two_sequences_is_forgotten_when_the_last_one_asks(slots):
    enter(slots, "a")
    _, slot = compute(slots, "a", 4)
    enter(slots, "b", slot)
    slots.forget(keys(1))
    slots.check()
    assert slots.find(keys(1)) == (1, slot)
    slots.free("b")
    slots.forget(keys(1))
    slots.check()
    assert slots.find(keys(1)) == (0, 0)
