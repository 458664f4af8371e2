"""Reported faults of loading and of limits that did not arrive, each as a test that names its report."""

import json
import shutil

import mlx.core as mx
import pytest
from engine_hooks import recorded_plans
from oracle import Oracle, assert_matches, greedy, varied_prompt
from tiny_models import LLAMA_BYTES_PER_TOKEN, TINY_MODELS, TinyModel, write_model

from mlx_paged_attention import LLM
from mlx_paged_attention.errors import RequestTooLongError

PROMPTS = [varied_prompt(length, seed) for seed, length in enumerate((9, 1, 33))]


def tied(name, directory):
    """A tiny model whose head is its embedding."""
    tiny = TINY_MODELS[name]
    config = {**tiny.config, "tie_word_embeddings": True}
    return write_model(TinyModel(config, {**tiny.gains, "embed_tokens.weight": 0.1}), directory)


def answers(directory):
    with LLM(str(directory), skip_tokenizer_init=True, num_blocks=64) as llm:
        return llm.generate(PROMPTS, greedy(8))


def weights_of(directory):
    weights = mx.load(str(directory / "model.safetensors"))
    mx.eval(weights)
    return weights


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_tied_model_without_a_head_loads(name, tmp_path):
    """ml-explore/mlx-lm#648"""
    directory = tied(name, tmp_path / "tied")
    assert "lm_head.weight" not in weights_of(directory)
    oracle = Oracle.load(directory)
    for output, prompt in zip(answers(directory), PROMPTS, strict=True):
        assert_matches(output.outputs[0], oracle.greedy(prompt, 8))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_head_that_a_tied_model_brings_is_not_used(name, tmp_path):
    """ml-explore/mlx-lm#1298"""
    directory = tied(name, tmp_path / "tied")
    oracle = Oracle.load(directory)
    redundant = shutil.copytree(directory, tmp_path / "redundant")
    weights = weights_of(directory)
    head = mx.random.normal(weights["model.embed_tokens.weight"].shape, key=mx.random.key(9))
    mx.save_safetensors(str(redundant / "model.safetensors"), weights | {"lm_head.weight": head})
    for output, prompt in zip(answers(redundant), PROMPTS, strict=True):
        assert_matches(output.outputs[0], oracle.greedy(prompt, 8))


def test_a_flag_that_says_untied_wants_the_head(tmp_path):
    """ml-explore/mlx-lm#648, the other way round: the embedding does not stand in silently."""
    directory = tied("llama", tmp_path / "tied")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(Exception, match=r"lm_head\.weight"):
        LLM(str(directory), skip_tokenizer_init=True, num_blocks=64)


def test_every_limit_takes_effect(tiny_model):
    """jundot/omlx#1372"""
    model = str(tiny_model("llama"))
    options = {"skip_tokenizer_init": True, "block_size": 4}

    with LLM(model, max_model_len=12, num_blocks=64, **options) as llm:
        assert llm.info.max_model_len == 12
        with pytest.raises(RequestTooLongError, match="12"):
            llm.generate([varied_prompt(13, 1)], greedy(1))
        (output,) = llm.generate([varied_prompt(8, 1)], greedy(50))
        assert len(output.outputs[0].token_ids) == 4, "an answer ends with the context"

    budget = 10 * 4 * LLAMA_BYTES_PER_TOKEN
    with LLM(model, kv_memory=budget, max_model_len=32, **options) as llm:
        assert llm.info.num_blocks == 10
        assert llm.info.pool_bytes <= budget
        with pytest.raises(RequestTooLongError, match="37"):
            llm.generate([varied_prompt(37, 1)], greedy(1))

    with LLM(model, max_num_seqs=2, num_blocks=64, **options) as llm, recorded_plans(llm) as plans:
        llm.generate([varied_prompt(5, seed) for seed in range(6)], greedy(4))
        assert max(len(plan.rows) for plan in plans) == 2

    with (
        LLM(model, max_num_batched_tokens=3, max_num_seqs=3, num_blocks=64, **options) as llm,
        recorded_plans(llm) as plans,
    ):
        llm.generate([varied_prompt(20, seed) for seed in range(4)], greedy(4))
        assert max(sum(len(row.token_ids) for row in plan.rows) for plan in plans) == 3
