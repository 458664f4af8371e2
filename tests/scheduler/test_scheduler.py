"""The published scheduler vectors, and what a plan promises to the runner."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from fake_runner import make_manager, make_request, reply, varied_prompt

from mlx_paged_attention.errors import InvalidRequestError, RequestTooLongError
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.scheduler.request import Request, RequestStatus
from mlx_paged_attention.scheduler.scheduler import Scheduler
from mlx_paged_attention.scheduler.step_plan import RowOutput, StepOutput, StepPlan


def make_scheduler(num_blocks: int = 10000, block_size: int = 16, **options: Any) -> Scheduler:
    cache = {key: options.pop(key) for key in ("enable_caching", "full_hit") if key in options}
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 8192, "max_model_len": 8192, **options}
    return Scheduler(make_manager(num_blocks, block_size, **cache), **options)


def add(scheduler: Scheduler, lengths: Sequence[int], **options: Any) -> list[Request]:
    """Requests "0", "1", ... with prompts that share nothing."""
    requests = [make_request(str(i), [i + 1] * length, **options) for i, length in enumerate(lengths)]
    for request in requests:
        scheduler.add_request(request)
    return requests


def sizes(plan: StepPlan) -> dict[str, int]:
    return {row.request_id: len(row.token_ids) for row in plan.rows}


def step(scheduler: Scheduler, tokens: dict[str, list[int]] | None = None) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, reply(plan, tokens))
    scheduler.manager.check()
    return plan


# Published vectors


def test_requests_are_admitted_in_order_of_arrival() -> None:
    """Vector S1."""
    scheduler = make_scheduler()
    requests = add(scheduler, [10] * 10)
    plan = scheduler.schedule()
    assert sizes(plan) == {str(i): 10 for i in range(10)}
    assert [new.request_id for new in plan.new] == [str(i) for i in range(10)]
    assert scheduler.running == requests
    assert scheduler.num_waiting == 0


def test_long_prompts_are_computed_in_chunks_below_the_threshold() -> None:
    """Vector S2."""
    scheduler = make_scheduler(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    add(scheduler, [800] * 3)
    assert sizes(step(scheduler)) == {"0": 400, "1": 400, "2": 224}
    assert sizes(step(scheduler)) == {"0": 400, "1": 400, "2": 224}
    assert sizes(step(scheduler)) == {"0": 1, "1": 1, "2": 352}


@pytest.mark.parametrize(("chunked", "count"), [(True, 2), (False, 1)])
def test_without_chunks_a_prompt_that_exceeds_the_budget_waits(chunked: bool, count: int) -> None:
    """Vector S3."""
    scheduler = make_scheduler(
        max_num_batched_tokens=1024, max_num_seqs=3, max_model_len=1024, enable_chunked_prefill=chunked
    )
    add(scheduler, [800, 800, 10, 10])
    assert len(scheduler.schedule().rows) == count


def test_a_token_in_flight_survives_the_preemption_of_its_request() -> None:
    """Vector S4."""
    scheduler = make_scheduler(11, max_num_batched_tokens=100, enable_caching=False)
    first, second = (make_request(str(i), [i] * 80) for i in range(2))
    scheduler.add_request(first)
    one = scheduler.schedule()
    assert sizes(one) == {"0": 80}
    scheduler.add_request(second)
    two = scheduler.schedule()
    assert sizes(two) == {"1": 80}
    scheduler.update(one, reply(one))
    three = scheduler.schedule()
    assert sizes(three) == {"0": 1}
    assert three.released == ["1"]
    assert second.status is RequestStatus.PREEMPTED
    assert scheduler.update(two, reply(two, {"1": [42]})) == [(second, [42])]
    assert second.output_token_ids == [42]
    scheduler.manager.check()


@pytest.mark.parametrize(
    ("options", "output", "reason", "stop_reason"),
    [
        ({"eos_token_ids": [12]}, [10, 12], "stop", None),
        ({"stop_token_ids": [42, 43]}, [10, 42], "stop", 42),
        ({"max_tokens": 2}, [10, 42], "length", None),
        ({"eos_token_ids": [42], "ignore_eos": True}, [10, 42, 12, 42], None, None),
        ({"eos_token_ids": [42], "min_tokens": 3}, [10, 42, 12, 42], "stop", None),
    ],
)
def test_tokens_after_the_stopping_one_are_dropped(
    options: dict[str, Any], output: list[int], reason: str | None, stop_reason: int | None
) -> None:
    """Vector S5."""
    scheduler = make_scheduler()
    (request,) = add(scheduler, [10], **options)
    plan = scheduler.schedule()
    sampled = [10, 12, 42] if options == {"eos_token_ids": [12]} else [10, 42, 12, 42]
    assert scheduler.update(plan, reply(plan, {"0": sampled})) == [(request, output)]
    assert request.output_token_ids == output
    assert request.finish_reason == reason
    assert request.stop_reason == stop_reason
    assert scheduler.has_unfinished_requests == (reason is None)
    assert (scheduler.manager.num_free_blocks == 9999) == (reason is not None)


@pytest.mark.parametrize(
    "options", [{"max_tokens": 9}, {"max_tokens": 1}, {"max_tokens": 9, "min_tokens": 5}]
)
def test_a_complete_form_stops_whatever_else_would_hold(options: dict[str, int]) -> None:
    scheduler = make_scheduler()
    (request,) = add(scheduler, [16], **options)
    plan = scheduler.schedule()
    scheduler.update(plan, StepOutput(plan.step, [RowOutput(request.request_id, [10], complete=True)]))
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == ([10], "stop", None)


def test_end_of_sequence_before_min_tokens_does_not_stop() -> None:
    """Vector S6."""
    scheduler = make_scheduler()
    (request,) = add(scheduler, [10], min_tokens=5, eos_token_ids=[2])
    for token in (10, 11, 2):
        step(scheduler, {"0": [token]})
        assert not request.is_finished
    step(scheduler, {"0": [10]})
    step(scheduler, {"0": [2]})
    assert request.finish_reason == "stop"
    assert request.output_token_ids == [10, 11, 2, 10, 2]


def test_lower_priority_values_are_served_first_and_ties_by_arrival() -> None:
    """Vector S8."""
    scheduler = make_scheduler(policy="priority")
    for i, (priority, arrival) in enumerate(zip([2, 1, 1, 0], [1, 3, 2, 4], strict=True)):
        scheduler.add_request(make_request(str(i), [i] * 10, priority=priority, arrival_time=arrival))
    assert list(sizes(scheduler.schedule())) == ["3", "2", "1", "0"]


def low_and_high() -> tuple[Scheduler, Request, Request]:
    scheduler = make_scheduler(5, policy="priority")
    low = make_request("low", varied_prompt(30, 1), priority=1)
    high = make_request("high", varied_prompt(32, 2), priority=0, arrival_time=1.0, max_tokens=2)
    scheduler.add_request(low)
    step(scheduler)
    scheduler.add_request(high)
    assert sizes(step(scheduler)) == {"low": 1, "high": 32}
    assert scheduler.manager.num_free_blocks == 0
    return scheduler, low, high


def test_the_request_of_lowest_priority_gives_its_blocks_up() -> None:
    """Vector S9."""
    scheduler, low, high = low_and_high()
    plan = step(scheduler)
    assert sizes(plan) == {"high": 1}
    assert plan.released == ["low"]
    assert low.status is RequestStatus.PREEMPTED
    assert high.finish_reason == "length"
    plan = scheduler.schedule()
    assert plan.new[0].token_ids == low.token_ids
    assert low.num_computed_tokens == 32
    assert len(low.token_ids) == 32


def test_blocks_that_a_struck_row_was_to_fill_are_not_published() -> None:
    scheduler = make_scheduler(
        9, 4, policy="priority", max_num_batched_tokens=12, max_num_seqs=2, long_prefill_token_threshold=9
    )
    low = make_request("low", varied_prompt(26, 1), priority=1, max_tokens=1)
    scheduler.add_request(low)
    step(scheduler)
    scheduler.add_request(make_request("high", [1], priority=0))
    step(scheduler, {"high": [7, 7, 7, 7]})
    assert low.num_computed_tokens == 18
    # low's row, first in the list, would fill its fifth and sixth block; then high needs a block.
    plan = scheduler.schedule()
    assert sizes(plan) == {"high": 4}
    assert plan.released == ["low"]
    assert scheduler.manager.get_computed_blocks(low).num_tokens == 16
    scheduler.manager.check()


def test_a_step_that_preempts_admits_nothing() -> None:
    """Vector S10."""
    scheduler = make_scheduler(11, policy="priority", enable_caching=False)
    add(scheduler, [80, 80], priority=1)
    step(scheduler)
    urgent = make_request("urgent", [9], priority=0)
    scheduler.add_request(urgent)
    plan = step(scheduler)
    assert sizes(plan) == {"0": 1}
    assert plan.released == ["1"]
    assert scheduler.num_preemptions == 1
    assert scheduler.manager.num_free_blocks == 4  # it would have fitted
    assert sizes(step(scheduler)) == {"0": 1, "urgent": 1}


def test_a_struck_row_gives_its_tokens_back_to_the_budget() -> None:
    scheduler = make_scheduler(
        9, 4, policy="priority", max_num_batched_tokens=8, max_num_seqs=3, enable_caching=False
    )
    scheduler.add_request(make_request("low", [1] * 22, priority=1, max_tokens=4))
    assert sizes(step(scheduler)) == {"low": 8}
    assert sizes(step(scheduler)) == {"low": 8}
    for name in ("b", "c"):
        scheduler.add_request(make_request(name, [2], priority=0))
    assert sizes(step(scheduler, {"low": [7], "b": [7] * 4, "c": [7] * 8})) == {"low": 6, "b": 1, "c": 1}
    assert scheduler.manager.num_free_blocks == 0
    # low, first in the list, takes one of 8 tokens; then b finds no block, and low is struck.
    plan = scheduler.schedule()
    assert plan.released == ["low"]
    assert sizes(plan) == {"b": 4, "c": 4}


def test_blocks_that_a_running_prompt_still_needs_are_not_given_to_a_waiting_one() -> None:
    scheduler = make_scheduler(10, 4, max_num_batched_tokens=16, long_prefill_token_threshold=4)
    add(scheduler, [24, 16], max_tokens=4)
    assert sizes(step(scheduler)) == {"0": 4}
    assert scheduler.manager.num_free_blocks == 8  # of which the first still takes 5
    for _ in range(5):
        assert sizes(step(scheduler)) == {"0": 4}
    assert scheduler.num_preemptions == 0


def test_lookups_are_counted_once_per_admission() -> None:
    """Vector S11."""
    scheduler = make_scheduler(11, max_num_batched_tokens=200)
    stats = scheduler.manager.stats
    (first,) = add(scheduler, [96], max_tokens=40)
    step(scheduler)
    waiting = make_request("waiting", [9] * 80)
    scheduler.add_request(waiting)
    for _ in range(3):
        step(scheduler)
    assert scheduler.num_waiting == 1
    scheduler.abort(["0"])
    step(scheduler)
    assert waiting.status is RequestStatus.RUNNING
    assert (stats.requests, stats.queries, stats.hits) == (2, 176, 0)

    resumed = waiting.num_tokens
    scheduler._queues.preempt(waiting)
    step(scheduler)
    assert (stats.requests, stats.queries, stats.hits) == (2, 176, 0)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, resumed, 80)
    assert first.num_cached_tokens == 0


def test_without_caching_no_lookup_is_counted() -> None:
    """Vector S11."""
    scheduler = make_scheduler(enable_caching=False)
    add(scheduler, [96])
    step(scheduler)
    assert scheduler.manager.stats.queries == 0


def test_steps_can_be_planned_before_outputs_return() -> None:
    """Vector S12."""
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=1024)
    first, second = (make_request(str(i), [i] * 512) for i in range(2))
    scheduler.add_request(first)
    one = scheduler.schedule()
    assert sizes(one) == {"0": 512}
    scheduler.add_request(second)
    two = scheduler.schedule()
    assert sizes(two) == {"1": 512}
    scheduler.update(one, reply(one))
    three = scheduler.schedule()
    assert sizes(three) == {"0": 1}
    scheduler.update(two, reply(two))
    assert sizes(scheduler.schedule()) == {"1": 1}


def test_resetting_running_requests_empties_the_cache_and_keeps_their_order() -> None:
    """Vector S13."""
    scheduler = make_scheduler()
    requests = add(scheduler, [40] * 3)
    step(scheduler)
    assert scheduler.reset_prefix_cache() is False
    assert scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert scheduler.num_running == 0
    assert scheduler.manager.num_cached_blocks == 0
    plan = step(scheduler)
    assert list(sizes(plan)) == ["0", "1", "2"]
    assert plan.released == ["2", "1", "0"]
    assert all(len(row.token_ids) == 41 for row in plan.rows)
    assert [request.num_preemptions for request in requests] == [1, 1, 1]


# The plan


def test_block_tables_travel_as_differences() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20)
    add(scheduler, [34])
    rows = [step(scheduler).rows[0] for _ in range(3)]
    assert [row.new_block_ids for row in rows] == [[1, 2], [3], []]
    assert [row.start for row in rows] == [0, 20, 34]
    assert [row.sample for row in rows] == [False, True, True]
    assert [row.write_from for row in rows] == [0, 20, 34]
    assert rows[2].token_ids == [7]


def test_a_new_rows_first_table_includes_its_hits() -> None:
    scheduler = make_scheduler()
    prompt = varied_prompt(40, 1)
    scheduler.add_request(make_request("a", prompt))
    step(scheduler)
    scheduler.add_request(make_request("b", prompt))
    plan = step(scheduler)
    row = plan.rows[-1]
    assert (row.start, row.write_from, row.token_ids) == (32, 32, prompt[32:])
    assert row.new_block_ids == [1, 2, 4]
    assert plan.new[0].token_ids == prompt
    assert plan.new[0].num_prompt_tokens == 40


def test_a_wholly_cached_prompt_computes_its_last_token_without_writing_it() -> None:
    scheduler = make_scheduler()
    prompt = varied_prompt(32, 1)
    scheduler.add_request(make_request("a", prompt))
    step(scheduler)
    cached = make_request("b", prompt)
    scheduler.add_request(cached)
    row = step(scheduler).rows[-1]
    assert (row.start, row.write_from, row.token_ids) == (31, 32, prompt[31:])
    assert row.new_block_ids == [1, 2]
    assert row.sample
    assert cached.num_cached_tokens == 31
    row = step(scheduler).rows[-1]
    assert (row.start, row.write_from, row.new_block_ids) == (32, 32, [4])


def test_requests_of_one_step_share_blocks_and_the_writer_comes_first() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add_request(make_request(name, varied_prompt(33, 1)))
    plan = step(scheduler)
    assert [row.request_id for row in plan.rows] == ["a", "b", "c"]
    assert [row.new_block_ids for row in plan.rows] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert sizes(plan) == {"a": 33, "b": 1, "c": 1}


def test_a_plan_survives_a_round_trip_through_msgpack() -> None:
    scheduler = make_scheduler()
    add(scheduler, [40, 10], prompt_logprobs=2)
    plan = scheduler.schedule()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


def test_a_preempted_request_reenters_with_all_its_tokens() -> None:
    scheduler = make_scheduler(11, max_num_batched_tokens=200, enable_caching=False)
    first, second = add(scheduler, [80, 80], max_tokens=3)
    step(scheduler)
    step(scheduler)
    assert second.status is RequestStatus.PREEMPTED
    step(scheduler)
    assert first.is_finished
    plan = step(scheduler)
    assert plan.released == ["0"]
    (new,) = plan.new
    assert new.token_ids == [2] * 80 + [7]
    assert new.num_prompt_tokens == 80
    assert plan.rows[0].start == 0
    assert second.num_output_tokens == 2


def test_an_output_overtaken_by_a_recomputation_is_dropped() -> None:
    scheduler = make_scheduler(11, max_num_batched_tokens=100)
    (request,) = add(scheduler, [40])
    early = scheduler.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    again = scheduler.schedule()
    assert sizes(again) == {"0": 40}
    assert scheduler.update(early, reply(early, {"0": [5]})) == [(request, [5])]
    assert scheduler.update(again, reply(again, {"0": [5]})) == [(request, [])]
    plan = scheduler.schedule()
    assert (plan.rows[0].start, plan.rows[0].token_ids) == (40, [5])


def test_the_released_wait_for_a_plan_that_is_run() -> None:
    scheduler = make_scheduler()
    add(scheduler, [10], max_tokens=1)
    step(scheduler)
    idle = scheduler.schedule()
    assert (idle.rows, idle.released) == ([], [])
    add(scheduler, [10])
    plan = scheduler.schedule()
    assert plan.released == ["0"]
    assert plan.step == 1
    assert scheduler.num_steps == 2


def test_a_request_that_never_ran_is_not_released() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, [10, 10])
    step(scheduler)
    scheduler.abort(["1"])
    assert step(scheduler).released == []


# Endings and refusals


def test_aborting_returns_blocks_wherever_the_request_is() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    requests = add(scheduler, [40] * 3)
    plan = scheduler.schedule()
    assert scheduler.abort(["0", "2", "0", "unknown"]) == [requests[0], requests[2]]
    assert [request.finish_reason for request in requests] == ["abort", None, "abort"]
    assert scheduler.update(plan, reply(plan)) == [(requests[1], [7])]
    scheduler.abort(["1"])
    assert scheduler.manager.num_free_blocks == 9999
    assert not scheduler.has_unfinished_requests
    assert scheduler.abort(["1"]) == []


def test_a_stop_string_found_outside_ends_the_request() -> None:
    scheduler = make_scheduler()
    (request,) = add(scheduler, [10])
    step(scheduler)
    scheduler.finish_request("0", "###")
    assert (request.finish_reason, request.stop_reason) == ("stop", "###")
    assert scheduler.manager.usage == 0.0
    scheduler.finish_request("0", "later")
    assert request.stop_reason == "###"


def test_an_answer_ends_at_the_models_length() -> None:
    scheduler = make_scheduler(max_model_len=12, max_num_batched_tokens=16)
    (request,) = add(scheduler, [10], max_tokens=100, min_tokens=50)
    step(scheduler)
    assert not request.is_finished
    step(scheduler)
    assert request.finish_reason == "length"
    assert request.num_tokens == 12


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_both_numbers() -> None:
    scheduler = make_scheduler(max_model_len=100, max_num_batched_tokens=128)
    with pytest.raises(RequestTooLongError, match=r"100 tokens.* max_model_len 100") as caught:
        add(scheduler, [100])
    assert caught.value.param == "prompt"
    add(scheduler, [99])


def test_a_request_larger_than_the_pool_is_refused_and_blocks_nobody() -> None:
    """vllm-project/vllm#39734."""
    scheduler = make_scheduler(8, max_model_len=1024)
    with pytest.raises(RequestTooLongError, match=r"13 KV blocks of 16; the pool has 7 "):
        scheduler.add_request(make_request("large", varied_prompt(200, 1), max_tokens=8))
    small = make_request("small", varied_prompt(10, 2), max_tokens=4)
    scheduler.add_request(small)
    for _ in range(4):
        step(scheduler)
    assert small.finish_reason == "length"


def test_a_living_requests_id_cannot_be_used_again() -> None:
    scheduler = make_scheduler()
    add(scheduler, [10])
    with pytest.raises(InvalidRequestError, match="already in use"):
        add(scheduler, [10])
    scheduler.abort(["0"])
    add(scheduler, [10])


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 8, "max_num_batched_tokens": 7},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 100, "max_model_len": 101},
        {"enable_chunked_prefill": False, "long_prefill_token_threshold": 10},
    ],
)
def test_settings_under_which_requests_would_starve_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        make_scheduler(**options)


def test_an_output_that_is_not_the_plans_is_refused() -> None:
    scheduler = make_scheduler()
    add(scheduler, [10, 10])
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match="output of step 3"):
        scheduler.update(plan, StepOutput(3, []))
    with pytest.raises(ValueError, match=r"no token for \['1'\]"):
        scheduler.update(plan, StepOutput(plan.step, [RowOutput("0", [7])]))


# A step that raised


def test_a_failed_step_leaves_nothing_of_its_own_published() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    prompt = varied_prompt(64, 1)
    request = make_request("a", prompt)
    scheduler.add_request(request)
    step(scheduler)
    assert scheduler.fail_step(scheduler.schedule()) == [request]
    assert request.finish_reason == "error"
    scheduler.manager.check()
    scheduler.add_request(make_request("b", prompt))
    row = scheduler.schedule().rows[0]
    assert row.start == 32  # what the step before wrote is good


def test_a_failed_step_ends_those_who_found_its_blocks_since() -> None:
    scheduler = make_scheduler()
    shared = varied_prompt(32, 1)
    writer = make_request("writer", shared)
    reader = make_request("reader", shared + varied_prompt(20, 2))
    other = make_request("other", varied_prompt(20, 3))
    late = make_request("late", shared + varied_prompt(20, 2) + [1])
    scheduler.add_request(writer)
    failing = scheduler.schedule()
    scheduler.add_request(reader)
    scheduler.add_request(other)
    following = scheduler.schedule()
    assert following.rows[0].start == 32
    assert scheduler.fail_step(failing) == [writer, reader]
    assert scheduler.update(following, reply(following)) == [(other, [7])]
    scheduler.add_request(late)
    assert next(row for row in step(scheduler).rows if row.request_id == "late").start == 0


def test_a_failed_step_spoils_the_blocks_of_requests_aborted_since() -> None:
    scheduler = make_scheduler()
    add(scheduler, [40])
    failing = scheduler.schedule()
    scheduler.abort(["0"])
    assert scheduler.fail_step(failing) == []
    assert scheduler.manager.num_cached_blocks == 0


def test_a_failed_requests_row_in_a_later_plan_needs_no_output() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    (request,) = add(scheduler, [40])
    failing, following = scheduler.schedule(), scheduler.schedule()
    assert following.rows[0].sample
    assert scheduler.fail_step(failing) == [request]
    assert scheduler.update(following, StepOutput(following.step, [])) == []
    assert scheduler.manager.num_cached_blocks == 0


# Fairness and progress


def test_running_requests_decode_while_a_long_prompt_is_computed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    add(scheduler, [10, 300])
    step(scheduler)
    for _ in range(8):
        assert sizes(step(scheduler)) == {"0": 1, "1": 31}


def test_an_idle_request_preempted_ahead_of_the_list_skips_nobody() -> None:
    """A victim that stands before the current request, and had nothing to compute, moves the list up."""
    scheduler = make_scheduler(7, 4, policy="priority", enable_caching=False)
    idle = make_request("idle", [1] * 8, priority=9)
    scheduler.add_request(idle)
    in_flight = scheduler.schedule()
    for name in ("b", "c"):
        scheduler.add_request(make_request(name, [2] * 8))
    plan = scheduler.schedule()
    scheduler.update(plan, reply(plan))
    assert scheduler.manager.num_free_blocks == 0
    plan = scheduler.schedule()
    assert sizes(plan) == {"b": 1, "c": 1}
    assert idle.status is RequestStatus.PREEMPTED
    scheduler.update(in_flight, reply(in_flight))
    assert idle.output_token_ids == [7]


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_in_bounded_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_paged_attention.scheduler.chunked_prefill.MAX_SCORED_TOKENS", 20)
    scheduler = make_scheduler(max_num_batched_tokens=100)
    scored = RowSampling(temperature=0.0, prompt_logprobs=0)
    scheduler.add_request(Request("scored", list(range(50)), scored, max_tokens=2))
    scheduler.add_request(Request("plain", list(range(50, 100)), RowSampling(temperature=0.0), max_tokens=2))
    first = scheduler.schedule()
    assert [len(row.token_ids) for row in first.rows] == [20, 50]
    assert [len(row.token_ids) for row in scheduler.schedule().rows] == [20]
    assert [len(row.token_ids) for row in scheduler.schedule().rows] == [10]
