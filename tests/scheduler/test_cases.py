"""Faults reported of other engines, replayed against the scheduler with a runner that checks every step."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from fake_runner import FakeRunner, expected_output, make_manager, make_request, reply, varied_prompt

from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.scheduler import Scheduler
from mlx_paged_attention.scheduler.step_plan import StepPlan


class Loop:
    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True, **options: Any) -> None:
        self.manager = make_manager(num_blocks, block_size, enable_caching=caching)
        options = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 1024, **options}
        self.scheduler = Scheduler(self.manager, **options)
        self.runner = FakeRunner(block_size)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        if plan.rows:
            self.scheduler.update(plan, self.runner.run(plan))
        self.manager.check()
        return plan

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> Request:
        request = make_request(request_id, prompt, max_tokens=max_tokens)
        self.scheduler.add_request(request)
        return request

    def drain(self) -> None:
        while self.scheduler.has_unfinished_requests:
            self.step()


def assert_expected(request: Request) -> None:
    assert request.output_token_ids == expected_output(request.prompt_token_ids, request.max_tokens)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("aborting", [False, True])
def test_no_block_is_lost_over_hundreds_of_requests(caching: bool, at_once: int, aborting: bool) -> None:
    """kekzl/imp#1115."""
    loop = Loop(64, 16, caching=caching)
    for first in range(0, 200, at_once):
        requests = [loop.add(str(i), varied_prompt(20, i), 8) for i in range(first, first + at_once)]
        if aborting and (first // at_once) % 10 == 9:
            loop.step()
            loop.scheduler.abort([requests[0].request_id])
        loop.drain()
        for request in requests:
            if request.finish_reason == "length":
                assert_expected(request)
    assert loop.manager.num_free_blocks == 63
    assert all(block.ref_count == 0 for block in loop.manager.pool.blocks)
    assert (loop.manager.num_cached_blocks > 0) == caching


@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_request_waits_until_it_fits(caching: bool) -> None:
    """vllm-project/vllm#25538."""
    loop = Loop(12, 4, caching=caching, max_num_seqs=4, max_num_batched_tokens=4)
    growing = loop.add("a", varied_prompt(8, 1), 28)
    other = loop.add("b", varied_prompt(12, 2), 12)
    loop.drain()
    assert 1 <= loop.scheduler.num_preemptions <= 3
    assert loop.scheduler.num_steps <= 60
    assert_expected(growing)
    assert_expected(other)


def test_first_tokens_come_as_each_prompt_is_done() -> None:
    """ddalcu/mlx-serve#205. Decoding rows share the budget, so later prompts end a step later."""
    loop = Loop(100, 16, max_num_batched_tokens=64)
    requests = [loop.add(str(i), varied_prompt(64, i), 8) for i in range(4)]
    first_token: dict[str, int] = {}
    for step in range(1, 7):
        loop.step()
        for request in requests:
            if request.num_output_tokens:
                first_token.setdefault(request.request_id, step)
    assert list(first_token.values()) == [1, 3, 4, 5]
    loop.drain()
    for request in requests:
        assert_expected(request)


def test_history_that_was_changed_is_not_found() -> None:
    """vllm-project/vllm#49449."""
    loop = Loop(64, 16)
    prompt = varied_prompt(15, 1)
    first = loop.add("a", prompt, 1)
    loop.drain()
    (answer,) = first.output_token_ids
    changed = loop.add("a2", [*prompt, answer + 1, *varied_prompt(5, 2)], 1)
    loop.drain()
    asked_again = loop.add("b", [*prompt, answer], 1)
    loop.drain()
    for request in (first, changed, asked_again):
        assert_expected(request)
    assert changed.num_cached_tokens == 0
    assert asked_again.num_cached_tokens == 0


def test_a_growing_conversation_shares_its_history() -> None:
    """ml-explore/mlx-lm#1117."""
    loop = Loop(512, 16)
    tokens, cached = varied_prompt(20, 0), 0
    for turn in range(30):
        request = loop.add(str(turn), tokens, 8)
        loop.drain()
        assert_expected(request)
        assert loop.manager.num_cached_blocks - cached <= 3
        cached = loop.manager.num_cached_blocks
        if turn:
            assert request.num_cached_tokens >= len(tokens) - 20 - 8 - 16
        tokens = [*request.token_ids, *varied_prompt(12, turn + 1)]


def test_planning_256_decoding_rows_takes_little_time() -> None:
    """Best of many steps, against a limit far above the usual half a millisecond."""
    loop = Loop(20000, 16, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=2048)
    for i in range(256):
        loop.add(str(i), [i] * 1000 + [7], 40)
    best = 1.0
    for _ in range(60):
        began = time.perf_counter()
        plan = loop.scheduler.schedule()
        elapsed = time.perf_counter() - began
        if plan.num_tokens == len(plan.rows) == 256:
            best = min(best, elapsed)
        loop.scheduler.update(plan, reply(plan))
    assert best < 0.01
