"""Reported faults of sampling, each as a test that names its report."""

import math

import pytest
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention import SamplingParams
from mlx_paged_attention.errors import InvalidRequestError


def warm(**options):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 24, **options})


def tokens_of(outputs):
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_without_a_seed_answers_differ_one_after_the_other_and_at_once(engine):
    """Blaizzy/mlx-vlm#1818"""
    llm = engine("llama")
    prompt = varied_prompt(6, 1)
    one_by_one = [tokens_of(llm.generate([prompt], warm()))[0] for _ in range(5)]
    at_once = tokens_of(llm.generate([prompt] * 5, warm()))
    assert len(set(one_by_one)) >= 2
    assert len(set(at_once)) >= 2
    assert not set(one_by_one) & set(at_once)


def test_randomness_goes_on_from_request_to_request(engine):
    """yanun0323/Whallm#8"""
    llm = engine("llama")
    a, b = varied_prompt(6, 1), varied_prompt(6, 2)
    outputs = [tokens_of(llm.generate([prompt], warm()))[0] for prompt in (a, b, a, a)]
    assert len({outputs[0], outputs[2], outputs[3]}) >= 2


def test_a_seeded_answer_is_the_same_beside_anything(engine):
    """vllm-project/vllm#51226"""
    llm = engine("llama")
    prompt = varied_prompt(6, 1)
    seeded = warm(seed=42, temperature=0.8, max_tokens=16)
    alone = tokens_of(llm.generate([prompt], seeded))[0]
    for others in range(1, 5):
        neighbours = [varied_prompt(5 + s, s) for s in range(others)]
        outputs = llm.generate([*neighbours, prompt], [warm()] * others + [seeded])
        assert tokens_of(outputs)[-1] == alone
    (other_seed,) = llm.generate([prompt], warm(seed=43, temperature=0.8, max_tokens=16))
    assert tuple(other_seed.outputs[0].token_ids) != alone


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", 999999),
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", -1),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("min_p", 2),
        ("top_k", -5),
    ],
)
def test_extreme_values_are_refused_by_name(engine, oracle, param, value):
    """ggml-org/llama.cpp#19367"""
    with pytest.raises(InvalidRequestError, match=param) as refused:
        SamplingParams(**{param: value})
    assert refused.value.param == param
    prompt = varied_prompt(5, 2)
    (output,) = engine("llama").generate([prompt], greedy(2))
    assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 2))


def test_two_requests_for_several_answers_keep_them_apart(engine):
    """vllm-project/vllm#16863"""
    llm = engine("llama")
    prompts = [varied_prompt(5, 1), varied_prompt(6, 2)]
    params = [warm(n=2, seed=1, max_tokens=10), warm(n=2, seed=2, max_tokens=10)]
    together = llm.generate(prompts, params)
    alone = [llm.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    for both, single in zip(together, alone, strict=True):
        assert [answer.index for answer in both.outputs] == [0, 1]
        assert [a.token_ids for a in both.outputs] == [a.token_ids for a in single.outputs]
        assert both.outputs[0].token_ids != both.outputs[1].token_ids
