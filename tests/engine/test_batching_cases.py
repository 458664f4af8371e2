"""Reported faults of batching, each as a test that names its report."""

import pytest
from oracle import assert_matches, greedy, varied_prompt


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_outputs_do_not_depend_on_the_batch_size(engine, oracle, name, max_num_seqs):
    """Blaizzy/mlx-vlm#1083"""
    prompts = [varied_prompt(5 + 3 * s, s) for s in range(16)]
    llm = engine(name, max_num_seqs=max_num_seqs)
    for output, prompt in zip(llm.generate(prompts, greedy(8)), prompts, strict=True):
        assert_matches(output.outputs[0], oracle(name).greedy(prompt, 8))


@pytest.mark.parametrize("neighbour", [1, 50, 400])
def test_an_answer_does_not_depend_on_its_neighbours_length(engine, oracle, neighbour):
    """Blaizzy/mlx-vlm#1946"""
    prompt = varied_prompt(9, 1)
    outputs = engine("llama").generate([prompt, varied_prompt(neighbour, 2)], greedy(16))
    reference = oracle("llama").greedy(prompt, 16)
    assert outputs[0].outputs[0].token_ids == reference.token_ids
    assert_matches(outputs[0].outputs[0], reference)


def test_the_shorter_of_two_rows_sees_no_padding(engine):
    """ml-explore/mlx-lm#1906"""
    short = varied_prompt(3, 2)
    llm = engine("llama", enable_prefix_caching=False)
    (alone,) = llm.generate([short], greedy(1, logprobs=20))
    _, batched = llm.generate([varied_prompt(12, 1), short], greedy(1, logprobs=20))
    alone, batched = alone.outputs[0].logprobs[0], batched.outputs[0].logprobs[0]
    assert alone.keys() == batched.keys()
    for token_id, entry in alone.items():
        assert batched[token_id].logprob == pytest.approx(entry.logprob, abs=1e-5)
