"""A step that raises takes with it what was built on it, and nothing else."""

from typing import Any

import pytest
from fake_runner import FakeRunner, expected_output, make_manager, make_request, varied_prompt

from mlx_paged_attention.cache.state_slots import StateSlots
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.scheduler import Scheduler


def make_scheduler(**cache: Any) -> Scheduler:
    manager = make_manager(100, 4, **cache)
    return Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)


def run_alone(scheduler: Scheduler, runner: FakeRunner, request: Request) -> None:
    scheduler.add_request(request)
    while not request.is_finished:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan))
    assert request.output_token_ids == expected_output(request.prompt_token_ids, request.num_output_tokens)


def test_a_state_that_a_later_step_computes_anew_is_no_snapshot_if_that_step_fails() -> None:
    scheduler, runner = make_scheduler(states=StateSlots(9, 4)), FakeRunner(4)
    prompt = varied_prompt(9, 1)
    request = make_request("a", prompt)
    scheduler.add_request(request)
    first = scheduler.schedule()  # up to the end of a block
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    again = scheduler.schedule()
    assert first.rows[0].state_to == again.rows[0].state_to
    scheduler.update(first, runner.run(first))
    runner.fail(again)
    assert scheduler.fail_step(again) == [request]
    for name in ("b", "c"):  # the second goes on from what the first has left behind
        run_alone(scheduler, runner, make_request(name, prompt, max_tokens=3))


def fork(scheduler: Scheduler, parent: Request, name: str, num_tokens: int) -> Request:
    tokens = [*parent.token_ids[:num_tokens], 9]
    child = make_request(name, tokens, max_tokens=6)
    scheduler.fork(parent, child, num_tokens)
    return child


@pytest.mark.parametrize("parent_ends", [False, True])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("first", "second", "lost"), [(6, 5, ""), (6, 6, ""), (7, 5, "b"), (7, 7, "bc")])
def test_forks_fail_with_what_they_read_and_not_with_what_their_parent_wrote_behind_it(
    parent_ends: bool, planned: bool, first: int, second: int, lost: str
) -> None:
    scheduler, runner = make_scheduler(), FakeRunner(4)
    parent = make_request("a", varied_prompt(6, 1))
    scheduler.add_request(parent)
    plan = scheduler.schedule()
    scheduler.update(plan, runner.run(plan))
    failing = scheduler.schedule()  # writes at position 6, within a block
    child = fork(scheduler, parent, "b", first)
    grandchild = fork(scheduler, child, "c", second)
    assert scheduler.num_running == 3
    later = [scheduler.schedule()] if planned else []
    if parent_ends:
        scheduler.abort(["a"])
    runner.fail(failing)
    ended = scheduler.fail_step(failing)
    assert [request.request_id for request in ended] == ["a"] * (not parent_ends) + list(lost)
    runner.forget([request.request_id for request in ended], later)
    for plan in later:
        scheduler.update(plan, runner.run(plan))
    while scheduler.has_unfinished_requests:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan))
        scheduler.manager.check()
    for request in (child, grandchild):
        if request.request_id in lost:
            continue
        assert request.finish_reason == "length"
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 6)


def test_a_fork_fails_with_the_copy_of_the_block_that_it_begins_with() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(4)
    parent = make_request("a", varied_prompt(6, 1))
    scheduler.add_request(parent)
    plan = scheduler.schedule()
    scheduler.update(plan, runner.run(plan))
    before = fork(scheduler, parent, "before", 6)
    failing = scheduler.schedule()
    assert len(failing.copies) == 1  # of the parent, or of the child: the last owner writes in place
    copied = parent if failing.rows[0].request_id == "a" else before
    child = fork(scheduler, copied, "b", 6)
    runner.fail(failing)
    assert child in scheduler.fail_step(failing)
