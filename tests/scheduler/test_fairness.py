"""Nobody stands still: decodes beside long prompts, prompts beside decodes, short ones behind long ones."""

from collections.abc import Sequence
from typing import Any

import pytest
from fake_runner import FakeRunner, expected_output, make_manager, make_request, varied_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged_attention.cache.state_slots import StateSlots
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.scheduler import Scheduler
from mlx_paged_attention.scheduler.step_plan import StepPlan

BUDGET = 256


class Loop:
    """A scheduler on the checking fake runner.

    Attributes:
        first_token: by request id, the step that sampled its first token, counted from 1.
        end: by request id, the step after which it had ended.
    """

    def __init__(self, num_blocks: int = 3000, **options: Any) -> None:
        self.manager = make_manager(
            num_blocks,
            16,
            max_blocks=options.pop("max_blocks", None),
            enable_caching=options.pop("caching", True),
            states=options.pop("states", None),
        )
        options = {
            "max_num_seqs": 16,
            "max_num_batched_tokens": BUDGET,
            "max_model_len": 40_000,
            **options,
        }
        self.scheduler = Scheduler(self.manager, **options)
        self.runner = FakeRunner(16)
        self.requests: dict[str, Request] = {}
        self.steps = 0
        self.first_token: dict[str, int] = {}
        self.end: dict[str, int] = {}

    def add(self, name: str, length: int, max_tokens: int = 4) -> Request:
        request = make_request(name, varied_prompt(length, len(self.requests)), max_tokens=max_tokens)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> StepPlan:
        """A step, in which every running request must get at least a token."""
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert {row.request_id for row in plan.rows} == {r.request_id for r in self.scheduler.running}
        if plan.rows:
            self.scheduler.update(plan, self.runner.run(plan))
        self.steps += 1
        for name, request in self.requests.items():
            if request.num_output_tokens:
                self.first_token.setdefault(name, self.steps)
            if request.is_finished:
                self.end.setdefault(name, self.steps)
        return plan

    def run(self, limit: int) -> None:
        while self.scheduler.has_unfinished_requests:
            assert self.steps < limit, "it takes longer than it may"
            self.step()
        for request in self.requests.values():
            length = request.num_output_tokens
            assert request.output_token_ids == expected_output(request.prompt_token_ids, length)


def sizes(plan: StepPlan) -> dict[str, int]:
    return {row.request_id: len(row.token_ids) for row in plan.rows}


def test_every_running_request_emits_a_token_per_step_beside_a_long_prompt() -> None:
    loop = Loop()
    for number in range(8):
        loop.add(f"decode {number}", 10, max_tokens=200)
    loop.step()
    loop.add("long", 30_000)
    before = {name: request.num_output_tokens for name, request in loop.requests.items()}
    for count in range(1, 101):
        plan = loop.step()
        assert plan.num_tokens == BUDGET
        assert sizes(plan)["long"] == BUDGET - 8
        for name, request in loop.requests.items():
            assert name == "long" or request.num_output_tokens == before[name] + count
    loop.run(300)


def test_a_request_that_was_admitted_after_several_long_prompts_decodes_in_every_step() -> None:
    """Their chunks grow once the decoding before them ends; what is behind them keeps its token."""
    loop = Loop()
    loop.add("first", 100, max_tokens=2)
    loop.step()
    for name in ("long 1", "long 2", "long 3"):
        loop.add(name, 20_000, max_tokens=2)
        loop.step()
    loop.add("late", 10, max_tokens=150)
    loop.run(400)
    assert loop.end["late"] - loop.first_token["late"] == 149


def test_prompts_advance_however_many_requests_decode() -> None:
    """As many requests as the budget has tokens: each still gets one."""
    loop = Loop(max_num_seqs=32, max_num_batched_tokens=32)
    for number in range(31):
        loop.add(f"decode {number}", 1, max_tokens=200)
    long = loop.add("long", 150, max_tokens=2)
    loop.step()
    assert long.num_computed_tokens == 1
    for count in range(2, 151):
        loop.step()
        assert long.num_computed_tokens >= count
    assert loop.first_token["long"] <= 151


def test_a_short_prompt_behind_a_long_one_gets_its_first_token_at_once() -> None:
    loop = Loop()
    loop.add("long", 30_000)
    assert sizes(loop.step()) == {"long": BUDGET}  # alone, it gets all
    loop.add("short", 20, max_tokens=5)
    assert sizes(loop.step()) == {"long": BUDGET - 20, "short": 20}
    assert loop.first_token["short"] == 2
    assert sizes(loop.step()) == {"long": BUDGET - 1, "short": 1}
    loop.run(200)
    assert loop.end["short"] == 6
    # What others took is all that the long prompt has lost.
    assert loop.first_token["long"] == -(-(30_000 + 20 + 4) // BUDGET)


def test_short_prompts_behind_several_long_ones_wait_a_step_for_each() -> None:
    loop = Loop()
    for number in range(4):
        loop.add(f"long {number}", 8000)
    for number in range(6):
        loop.add(f"short {number}", 20, max_tokens=3)
    for _ in range(12):
        loop.step()
    assert [loop.first_token[f"short {n}"] for n in range(6)] == [5, 5, 5, 6, 6, 6]
    assert loop.requests["long 0"].num_computed_tokens > 0.7 * 12 * BUDGET  # and is not held up by the others
    loop.run(600)


def test_nothing_is_kept_for_a_request_that_could_not_be_admitted() -> None:
    loop = Loop(num_blocks=1900)
    loop.add("long", 29_000)
    loop.step()
    loop.add("no blocks", 2000)
    for _ in range(50):
        assert sizes(loop.step()) == {"long": BUDGET}
    refused = Loop(num_blocks=1900, max_blocks=4000)
    refused.manager.pool.limit = 1900  # there is no memory to grow
    refused.add("long", 29_000)
    refused.step()
    refused.add("no memory", 2000)
    for _ in range(50):
        assert sizes(refused.step()) == {"long": BUDGET}
    seats = Loop(max_num_seqs=1)
    seats.add("long", 5000)
    seats.add("no seat", 10)
    for _ in range(15):
        assert sizes(seats.step()) == {"long": BUDGET}


def test_a_prompt_that_ends_with_the_step_is_not_cut_for_a_waiting_one() -> None:
    loop = Loop(max_num_batched_tokens=67)
    for number in range(3):
        loop.add(str(number), 64)
    assert [sizes(loop.step()) for _ in range(3)] == [
        {"0": 64, "1": 3},
        {"0": 1, "1": 61, "2": 5},
        {"0": 1, "1": 1, "2": 59},
    ]


def test_the_longest_cached_prefix_is_admitted_first_and_the_age_bound_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    loop = Loop(policy="longest_prefix", max_num_seqs=1, max_overtaken_seconds=10.0)
    monkeypatch.setattr(loop.scheduler.waiting, "_clock", lambda: now)
    warm = varied_prompt(100, 77)

    def add(name: str, prompt: Sequence[int]) -> None:
        request = make_request(name, prompt, max_tokens=2)
        loop.requests[name] = request
        loop.scheduler.add_request(request)

    add("warming", warm)
    loop.run(10)
    add("cold", varied_prompt(100, 5))
    for number in range(5):
        add(f"warm {number}", [*warm, number])
        loop.step()
        loop.step()
        now += 3.0
    loop.run(60)
    order = sorted(loop.end, key=lambda name: loop.end[name])
    assert order == ["warming", "warm 0", "warm 1", "warm 2", "warm 3", "cold", "warm 4"]
    assert loop.requests["warm 0"].num_cached_tokens == 96


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_request_ends_within_a_number_of_steps_that_can_be_told(data: st.DataObject) -> None:
    """Whoever runs and is served before all others is never preempted, and computes a token per step.

    So he ends within as many steps as he has tokens, and all end within the sum of these, plus a step
    each for being admitted after a step that preempted.
    """
    policy = data.draw(st.sampled_from(["fcfs", "priority", "longest_prefix"]))
    max_num_seqs = data.draw(st.integers(1, 6))
    snapshots = data.draw(st.sampled_from([None, None, 0, 3]))
    states = None if snapshots is None else StateSlots(1 + 2 * max_num_seqs + snapshots, 16)
    loop = Loop(
        num_blocks=data.draw(st.integers(9, 14)),
        policy=policy,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=data.draw(st.sampled_from([6, 20, 100])),
        caching=data.draw(st.booleans()),
        states=states,
        max_model_len=128,
    )
    total = 0
    for number in range(data.draw(st.integers(1, 8))):
        length, max_tokens = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 40))
        request = make_request(
            str(number),
            [number % 2] * length,
            max_tokens=max_tokens,
            priority=data.draw(st.integers(0, 2)),
        )
        loop.requests[str(number)] = request
        loop.scheduler.add_request(request)
        total += length + max_tokens
    loop.run(total + 2 * len(loop.requests) + loop.scheduler.max_num_seqs)
    assert loop.manager.usage == 0.0
