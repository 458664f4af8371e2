"""Bad values are refused by name before they reach a sampler."""

import math

import pytest

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import SamplingParams

NOT_NUMBERS = [math.nan, math.inf, -math.inf, 1e999, 10**400, -(10**400), "1", None, True, [1.0]]
BOUNDS = {  # the values nearest outside and at the bounds
    "temperature": ([-1, -1e-9, 100.1, 999999], [0, 0.0, 1, 100.0]),
    "top_p": ([-1, 0, 0.0, 1.5, 1.0001], [1e-9, 0.5, 1]),
    "min_p": ([-0.1, 2, 1.0001], [0, 0.5, 1]),
    "repetition_penalty": ([0, -1, 1e-4, 1e-300, 100.1], [1e-3, 1, 100]),
    "presence_penalty": ([-2.1, 2.1], [-2, 0, 2]),
    "frequency_penalty": ([-2.1, 2.1], [-2, 0, 2]),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, (bad, _) in BOUNDS.items() for value in [*bad, *NOT_NUMBERS]],
)
def test_a_number_out_of_range_is_refused_by_name(name, value):
    """ggml-org/llama.cpp#19367"""
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, good) in BOUNDS.items() for value in good]
)
def test_a_number_within_range_is_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -5),
        ("top_k", 2.5),
        ("top_k", 10**400),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("seed", 2**63),
        ("seed", "1"),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", ["a"] * 257),
        ("stop", "a" * 65_537),
        ("bad_words", ["a"] * 1025),
        ("bad_words", ["a" * 40_000, "b" * 40_000]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [5] * 1025),
        ("shown_special_ids", [-1]),
        ("shown_special_ids", 5),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.0]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", [1]),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("ignore_eos", "yes"),
        ("priority", 2**31),
        ("cache_salt", ""),
        ("structured_outputs", {}),
        ("structured_outputs", {"json": [], "regex": "a"}),
        ("structured_outputs", {"json": "["}),
        ("structured_outputs", {"json": "[]"}),
        ("structured_outputs", {"json": 5}),
        ("structured_outputs", {"json_object": False}),
        ("structured_outputs", {"regex": 5}),
        ("structured_outputs", {"choice": "yes"}),
        ("structured_outputs", {"choice": ["yes", ""]}),
        ("structured_outputs", {"xml": "a"}),
        ("structured_outputs", "json"),
    ],
)
def test_any_other_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_best_of_is_at_least_n():
    assert SamplingParams(n=2, best_of=3).num_sequences == 3
    assert SamplingParams(n=2).num_sequences == 2
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(n=3, best_of=2)
    assert caught.value.param == "best_of"


def test_stop_strings_need_text():
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)
