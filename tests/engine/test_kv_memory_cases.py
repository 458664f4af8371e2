"""Reported leaks and broken budgets, each as a test that names its report."""

import gc
import itertools

import mlx.core as mx
import pytest
from engine_hooks import check_books, engine_of, settled_stats, submit, wrapped_launch
from oracle import assert_matches, greedy, varied_prompt
from tiny_models import LLAMA_BYTES_PER_TOKEN

from mlx_paged_attention import LLM


def test_the_memory_budget_reaches_the_pool(tiny_model):
    """jundot/omlx#28"""
    budget = 1 << 20
    with LLM(model=str(tiny_model("llama")), skip_tokenizer_init=True, kv_memory=budget) as llm:
        assert llm.info.bytes_per_token == LLAMA_BYTES_PER_TOKEN
        assert llm.info.num_blocks == llm.stats().num_blocks == budget // (16 * LLAMA_BYTES_PER_TOKEN)
        assert llm.stats().pool_bytes < llm.info.pool_bytes <= budget
        prompts = [varied_prompt(100, s) for s in range(40)]
        llm.generate(prompts, greedy(8))
        assert settled_stats(llm).pool_bytes == llm.info.pool_bytes


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize(("at_once", "requests"), [(1, 50), (8, 200)])
def test_no_block_is_lost_over_many_requests(engine, at_once, requests, enable_prefix_caching):
    """kekzl/imp#1115: every tenth request is aborted midway."""
    llm = engine("llama", num_blocks=64, enable_prefix_caching=enable_prefix_caching)
    free = settled_stats(llm).free_blocks
    assert free == 63

    def abort_every_tenth_at_its_third_output(plan):
        for row in plan.rows:
            if row.request_id.endswith("9") and row.start == 22:
                llm._engine.abort(row.request_id)

    with wrapped_launch(llm, abort_every_tenth_at_its_third_output):
        for first in range(0, requests, at_once):
            numbers = range(first, min(first + at_once, requests))
            waits = [submit(llm, varied_prompt(20, n), greedy(8), f"request-{n}") for n in numbers]
            for number, wait in zip(numbers, waits, strict=True):
                answer = wait().outputs[0]
                assert answer.finish_reason == ("abort" if number % 10 == 9 else "length")
                assert len(answer.token_ids) == (4 if number % 10 == 9 else 8)
    after = settled_stats(llm)
    assert after.free_blocks == free
    assert after.used_blocks == 0
    assert (after.cached_blocks > 0) == enable_prefix_caching
    check_books(llm)


def test_a_growing_chat_keeps_one_chain_of_blocks(tiny_model, oracle):
    """ml-explore/mlx-lm#1117: 30 turns of a model with sliding layers, 20 new tokens each."""
    with LLM(model=str(tiny_model("gemma3")), skip_tokenizer_init=True, num_blocks=128) as llm:
        prompt: list[int] = []
        before = 0
        for turn in range(30):
            prompt = prompt + varied_prompt(20, turn)
            (output,) = llm.generate([prompt], greedy(4))
            assert_matches(output.outputs[0], oracle("gemma3").greedy(prompt, 4))
            stats = settled_stats(llm)
            assert stats.used_blocks == 0
            assert stats.cached_blocks - before <= 3 * len(llm.info.windows)
            before = stats.cached_blocks
        # Of 604 tokens the last was sampled, not computed; two blocks at most end otherwise than the chat.
        assert before <= ((600 + 3) // 16 + 30) * len(llm.info.windows)


@pytest.mark.parametrize(
    "steps", [600, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_nothing_piles_up_while_decoding(engine, steps):
    """ml-explore/mlx-lm#960: sampled every tenth of the run."""
    llm = engine("gemma3", num_blocks=700)
    active = []
    runner = engine_of(llm)._runner
    launch = runner.launch
    counter = itertools.count()

    def sampled(plan):
        if next(counter) % (steps // 10) == 0:
            active.append(mx.get_active_memory())
        return launch(plan)

    gc.collect()  # engines of earlier tests
    runner.launch = sampled
    try:
        outputs = llm.generate([varied_prompt(5, 1), varied_prompt(9, 2)], greedy(steps, ignore_eos=True))
    finally:
        runner.launch = launch
    assert [len(output.outputs[0].token_ids) for output in outputs] == [steps, steps]
    assert len(active) >= 10
    assert max(active[1:]) <= 1.01 * active[1]


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("requests", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_settles_under_mixed_traffic(engine, requests, enable_prefix_caching):
    """waybarrios/vllm-mlx#442"""
    llm = engine("llama", num_blocks=64, enable_prefix_caching=enable_prefix_caching)
    active, cached = [], []
    share = requests // 10
    for tenth in range(10):
        numbers = range(tenth * share, (tenth + 1) * share)
        prompts = [varied_prompt(1 + 37 * n % 90, n) for n in numbers]
        llm.generate(prompts, [greedy(1 + 11 * n % 30, logprobs=None) for n in numbers])
        active.append(mx.get_active_memory())
        cached.append(mx.get_cache_memory())
    assert max(active[-5:]) <= 1.01 * min(active[-5:])
    assert max(cached[-5:]) <= 64 << 20
    after = settled_stats(llm)
    assert after.used_blocks == 0
    if not enable_prefix_caching:
        assert after.cached_blocks == after.prefix_queries == 0
