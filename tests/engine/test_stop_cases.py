"""Reported faults of ending an answer, each as a test that names its report."""

import json
import shutil

import pytest
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention import LLM

PROMPT = varied_prompt(8, 1)


@pytest.fixture(scope="module")
def with_two_eos(tiny_model, oracle, tmp_path_factory):
    """The tiny Llama with ``eos_token_id: [2, X]``, X being its fourth greedy token of PROMPT."""
    directory = tmp_path_factory.mktemp("two-eos") / "llama"
    shutil.copytree(tiny_model("llama"), directory)
    fourth = oracle("llama").greedy(PROMPT, 4).token_ids[3]
    assert fourth not in oracle("llama").greedy(PROMPT, 3).token_ids
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, fourth]}))
    with LLM(model=str(directory), skip_tokenizer_init=True, num_blocks=64, max_model_len=256) as llm:
        yield llm


def test_every_end_of_sequence_token_ends_alone_and_in_a_batch(with_two_eos, oracle):
    """lmstudio-ai/mlx-engine#374"""
    alone = with_two_eos.generate([PROMPT], greedy(32))
    batched = with_two_eos.generate([varied_prompt(5, 3), PROMPT, varied_prompt(20, 4)], greedy(32))
    for output in (alone[0], batched[1]):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop"
        assert answer.stop_reason is None
        assert answer.token_ids[:3] == oracle("llama").greedy(PROMPT, 3).token_ids
        assert len(answer.token_ids) <= 4


def test_ignore_eos_holds_for_every_end_of_sequence_token(with_two_eos, oracle):
    """vllm-project/vllm#4589"""
    (output,) = with_two_eos.generate([PROMPT], greedy(32, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"
    assert_matches(output.outputs[0], oracle("llama").greedy(PROMPT, 32))
