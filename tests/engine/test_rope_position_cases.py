"""Reported faults of positions and rotary embeddings, each as a test that names its report."""

import numpy as np
import pytest
from engine_hooks import recorded_plans, start_together, submit, wrapped_launch
from oracle import assert_matches, greedy, varied_prompt


def test_declared_rope_scaling_is_applied(engine, oracle):
    """Blaizzy/mlx-vlm#1710: no difference at position 0, more with every token."""
    prompt = varied_prompt(60, 1)
    (output,) = engine("llama_llama3_rope").generate([prompt], greedy(8))
    assert_matches(output.outputs[0], oracle("llama_llama3_rope").greedy(prompt, 8))
    # The weights are those of "llama": only the scaling differs, and it shows.
    scaled, plain = (oracle(n).prompt_logprobs(prompt)[-1] for n in ("llama_llama3_rope", "llama"))
    assert np.abs(scaled - plain).max() > 1e-2


def test_a_decoded_token_stands_where_a_prefilled_one_would(engine, oracle):
    """Blaizzy/mlx-vlm#1983"""
    llm = engine("llama", enable_prefix_caching=False)
    lengths = range(2, 41)
    prompts = [varied_prompt(n, 1) for n in lengths]
    whole = llm.generate(prompts, greedy(1, logprobs=20))
    # One token less, the last one forced by a bias; reported log-probabilities are without it.
    decoded = llm.generate(
        [prompt[:-1] for prompt in prompts],
        [greedy(2, logprobs=20, logit_bias={prompt[-1]: 100}) for prompt in prompts],
    )
    for prompt, one, two in zip(prompts, whole, decoded, strict=True):
        assert two.outputs[0].token_ids[0] == prompt[-1]
        reference = oracle("llama").prompt_logprobs(prompt)[-1]
        for entries in (one.outputs[0].logprobs[0], two.outputs[0].logprobs[1]):
            assert len(entries) >= 20
            for token_id, entry in entries.items():
                assert entry.logprob == pytest.approx(reference[token_id], abs=1e-4), len(prompt)


@pytest.mark.parametrize("length", [10, 31, 33, 60])
def test_longrope_below_across_and_above_its_original_length(engine, oracle, length):
    """ml-explore/mlx-lm#660: 40 outputs take the short prompts across 32 with the cache on."""
    prompt = varied_prompt(length, 1)
    reference = oracle("llama_longrope").greedy(prompt, 40)
    llm = engine("llama_longrope")
    for _ in range(2):
        (output,) = llm.generate([prompt], greedy(40))
        assert_matches(output.outputs[0], reference)
    # The continuation hits blocks that were written while decoding.
    longer = prompt + reference.token_ids + varied_prompt(5, 2)
    (output,) = llm.generate([longer], greedy(8))
    assert output.num_cached_tokens >= (length + 39) // 16 * 16
    assert_matches(output.outputs[0], oracle("llama_longrope").greedy(longer, 8))


def test_decode_rows_of_all_lengths_beside_a_chunk_in_one_step(engine, oracle):
    """vllm-project/vllm-metal#496: contexts of 5, 17 and 40 decode while 7 tokens enter at position 16."""
    llm = engine("llama")
    salt = "vllm-metal#496"
    joining = varied_prompt(23, 9)
    llm.generate([joining[:16]], greedy(1, cache_salt=salt))
    running = [varied_prompt(n, n) for n in (4, 16, 39)]
    late = []

    def join(plan):
        if not late:
            late.append(submit(llm, joining, greedy(6, cache_salt=salt)))

    with recorded_plans(llm) as plans, wrapped_launch(llm, join):
        start_together(llm, 3)
        outputs = llm.generate(running, greedy(6, cache_salt=salt))
        outputs.append(late[0]())
    rows = [(row.start, len(row.token_ids)) for row in plans[1].rows]
    assert rows == [(4, 1), (16, 1), (39, 1), (16, 7)]
    for output, prompt in zip(outputs, [*running, joining], strict=True):
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 6))
