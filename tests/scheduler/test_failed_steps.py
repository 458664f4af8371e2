"""A step that raises takes with it what was built on it, and nothing else."""

from typing import Any

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
