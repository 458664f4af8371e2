"""Reported faults of sliding-window layers, each as a test that names its report."""

import pytest
from oracle import assert_matches, greedy, varied_prompt
from tiny_models import WINDOW


@pytest.mark.parametrize("max_num_batched_tokens", [1024, 64])
def test_a_prompt_much_longer_than_the_window(engine, oracle, max_num_batched_tokens):
    """Blaizzy/mlx-vlm#669"""
    llm = engine("gemma3", max_num_batched_tokens=max_num_batched_tokens)
    prompt = varied_prompt(300, 3)
    cached = []
    for _ in range(2):
        (output,) = llm.generate([prompt], greedy(16, cache_salt=f"mlx-vlm#669-{max_num_batched_tokens}"))
        assert_matches(output.outputs[0], oracle("gemma3").greedy(prompt, 16))
        cached.append(output.num_cached_tokens)
    assert cached == [0, 288]  # whole blocks: parts of one are copied only where no layer has a window


@pytest.mark.parametrize("chunk", [4, 16, 1024])
def test_chunked_and_whole_prefill_beyond_the_window(engine, oracle, chunk):
    """lablup/mlxcel#405"""
    llm = engine("gemma3", max_num_batched_tokens=chunk, max_num_seqs=4, enable_prefix_caching=False)
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 40, 300):
        prompt = varied_prompt(length, 1)
        (output,) = llm.generate([prompt], greedy(12))
        assert_matches(output.outputs[0], oracle("gemma3").greedy(prompt, 12))


@pytest.mark.parametrize("last_is", ["prefilled", "decoded"])
def test_the_window_holds_exactly_its_length_of_keys(engine, last_is):
    """ml-explore/mlx-lm#390: 8 keys are seen, the query's own included; the 9th is not."""
    llm = engine("sliding_only", enable_prefix_caching=False)

    def last_logprobs(prompt):
        if last_is == "prefilled":
            (output,) = llm.generate([prompt], greedy(1, logprobs=20))
            return output.outputs[0].logprobs[0]
        # The bias forces the last token to be the first output; reported values are without it.
        params = greedy(2, logprobs=20, logit_bias={prompt[-1]: 100})
        (output,) = llm.generate([prompt[:-1]], params)
        assert output.outputs[0].token_ids[0] == prompt[-1]
        return output.outputs[0].logprobs[1]

    def difference(prompt):
        """The largest change of a log-probability; rounding depends on where the blocks lie."""
        found = last_logprobs(prompt)
        return max(
            abs(found[token].logprob - of.logprob) if token in found else 1 for token, of in right.items()
        )

    prompt = varied_prompt(20, 5)
    right = last_logprobs(prompt)
    outside, inside = list(prompt), list(prompt)
    outside[-1 - WINDOW] ^= 1
    inside[-WINDOW] ^= 1
    assert difference(outside) < 2e-5
    assert difference(inside) > 1e-2


def test_short_and_long_rows_in_one_batch(engine, oracle):
    """ml-explore/mlx-lm#439"""
    prompts = [varied_prompt(3, 1), varied_prompt(21, 2)]
    for output, prompt in zip(engine("gemma3").generate(prompts, greedy(24)), prompts, strict=True):
        assert_matches(output.outputs[0], oracle("gemma3").greedy(prompt, 24))
