"""Reported faults of preemption, each as a test that names its report."""

import itertools

import pytest
from engine_hooks import check_books, preempt_everything, settled_stats, start_together, wrapped_launch
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention import SamplingParams


def preempt_before_step(llm, number):
    """A hook for ``wrapped_launch``: everything is preempted between steps ``number - 1`` and ``number``."""
    counter = itertools.count(1)

    def hook(plan):
        if next(counter) == number:
            preempt_everything(llm)

    return hook


def test_a_victim_waits_until_it_fits(engine, oracle):
    """vllm-project/vllm#25538: 11 blocks of 4; one request grows to 9, the other to 6."""
    llm = engine("llama", block_size=4, num_blocks=12, max_num_batched_tokens=4, max_num_seqs=4)
    prompts, lengths = [varied_prompt(20, 1), varied_prompt(20, 2)], [16, 4]
    before = settled_stats(llm)
    start_together(llm, 2)
    params = [greedy(n, cache_salt="vllm#25538") for n in lengths]
    for output, prompt, length in zip(llm.generate(prompts, params), prompts, lengths, strict=True):
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, length))
    after = settled_stats(llm)
    assert 1 <= after.preemptions - before.preemptions <= 3
    assert after.steps - before.steps <= 60


@pytest.mark.parametrize("step", [2, 4, 8])
def test_prompt_logprobs_survive_preemption_between_chunks(engine, oracle, step):
    """vllm-project/vllm#29071"""
    llm = engine("llama", block_size=4, max_num_batched_tokens=4, max_num_seqs=4)
    prompt = varied_prompt(30, 2)
    with wrapped_launch(llm, preempt_before_step(llm, step)):
        (output,) = llm.generate([prompt], greedy(4, prompt_logprobs=1))
    assert output.metrics.num_preemptions == 1
    assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 4))
    reference = oracle("llama").prompt_logprobs(prompt)
    assert len(output.prompt_logprobs) == 30
    assert output.prompt_logprobs[0] is None
    for position, entries in enumerate(output.prompt_logprobs[1:], start=1):
        assert prompt[position] in entries
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(reference[position - 1][token_id], abs=1e-4)


@pytest.mark.parametrize("step", [1, 10, 20])
def test_outputs_stay_outputs_when_they_are_computed_again(engine, step):
    """vllm-project/vllm#5349: penalties, random numbers and counts go on where they stopped."""
    llm = engine("llama")
    prompt = varied_prompt(9, 3)
    params = SamplingParams(
        temperature=0.8,
        seed=5,
        presence_penalty=1.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        min_tokens=12,
        max_tokens=24,
        logprobs=1,
    )
    (undisturbed,) = llm.generate([prompt], params)
    with wrapped_launch(llm, preempt_before_step(llm, step)):
        (preempted,) = llm.generate([prompt], params)
    assert preempted.metrics.num_preemptions == 1
    assert undisturbed.metrics.num_preemptions == 0
    assert preempted.outputs[0].token_ids == undisturbed.outputs[0].token_ids
    assert preempted.prompt_token_ids == prompt
    assert preempted.outputs[0].cumulative_logprob == pytest.approx(
        undisturbed.outputs[0].cumulative_logprob, abs=24e-4
    )


def test_counters_add_up_under_preemption(engine, oracle):
    """vllm-project/vllm#10430"""
    llm = engine("llama", block_size=4, num_blocks=20)
    prompts = [varied_prompt(10, s) for s in range(4)]
    before = settled_stats(llm)
    for _ in range(2):
        for output, prompt in zip(llm.generate(prompts, greedy(30)), prompts, strict=True):
            assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 30))
        after = settled_stats(llm)
        check_books(llm)
        assert after.preemptions > before.preemptions
        assert 0 <= after.prefix_hits - before.prefix_hits <= after.prefix_queries - before.prefix_queries
        assert (after.used_blocks, after.free_blocks, after.running, after.waiting) == (0, 19, 0, 0)
        before = after
