"""Reported faults of scheduling, replayed on the whole engine; each test names its report."""

import time

import pytest
from engine_hooks import recorded_plans, settled_stats, start_together
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention.errors import RequestTooLongError


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "expected"),
    # 64 is spent on decoding first, so prompts of 64 fall behind by a token per running request.
    [(64, [0, 2, 3, 4]), (67, [0, 1, 2, 3])],
)
def test_first_tokens_do_not_wait_for_the_last_prompt(engine, oracle, max_num_batched_tokens, expected):
    """ddalcu/mlx-serve#205"""
    llm = engine("llama", max_num_batched_tokens=max_num_batched_tokens)
    prompts = [varied_prompt(64, s) for s in range(4)]
    with recorded_plans(llm) as plans:
        start_together(llm, 4)
        outputs = llm.generate(prompts, greedy(8, cache_salt=f"mlx-serve#205-{max_num_batched_tokens}"))
    first_steps: dict[str, int] = {}
    for step, plan in enumerate(plans):
        assert plan.num_tokens <= max_num_batched_tokens
        for row in plan.rows:
            if row.sample:
                first_steps.setdefault(row.request_id, step)
    assert list(first_steps.values()) == expected
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 8))


def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody(engine, oracle):
    """vllm-project/vllm#39734: within max_model_len, but larger than the pool of 128 slots."""
    llm = engine("llama", num_blocks=9, max_model_len=1024)
    with pytest.raises(RequestTooLongError, match=r"208 tokens.*128 tokens"):
        llm.generate([varied_prompt(200, 1)], greedy(8))
    prompt = varied_prompt(10, 2)
    begun = time.monotonic()
    (output,) = llm.generate([prompt], greedy(4))
    assert time.monotonic() - begun < 5
    assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 4))
    assert settled_stats(llm).used_blocks == 0


def test_a_request_that_fills_the_whole_pool_runs(engine, oracle):
    """vllm-project/vllm#39734: the other side of the limit."""
    llm = engine("llama", num_blocks=9, max_model_len=1024)
    prompt = varied_prompt(120, 3)
    (output,) = llm.generate([prompt], greedy(8))
    assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 8))
