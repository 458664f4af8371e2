"""What a request's parameters become for the sampler, beyond what passes through as it is."""

import random

import pytest
from scripted_engine import EOS, VOCAB_SIZE, letters, make_info

from mlx_paged_attention.engine.prompt import row_sampling
from mlx_paged_attention.sampling.params import SamplingParams


def resolved(params, *, index=0, tokenizer=None, **info):
    return row_sampling(params, make_info(**info), tokenizer, index, random.Random(0))


def test_end_of_sequence_ids_without_a_logit_are_not_masked():
    """Masking them would write into the next row's logits."""
    sampling = resolved(SamplingParams(min_tokens=2), eos_token_ids=[EOS, VOCAB_SIZE, 70_000])
    assert sampling.stop_ids == [EOS]


def test_a_bad_word_that_the_model_cannot_write_is_not_masked():
    params = SamplingParams(bad_words=["ab", "az"])
    assert [97, 122] in resolved(params, tokenizer=letters()).bad_words
    sampling = resolved(params, tokenizer=letters(), vocab_size=ord("z"), eos_token_ids=[])
    assert [97, 98] in sampling.bad_words
    assert max(max(word) for word in sampling.bad_words) < ord("z")


@pytest.mark.parametrize(
    ("top_k", "expected"), [(-1, 0), (0, 0), (VOCAB_SIZE - 1, VOCAB_SIZE - 1), (VOCAB_SIZE, 0), (10**6, 0)]
)
def test_a_top_k_of_all_tokens_is_none(top_k, expected):
    assert resolved(SamplingParams(top_k=top_k)).top_k == expected


def test_an_answer_differs_from_the_first_only_in_its_seed_and_in_not_scoring_the_prompt():
    params = SamplingParams(n=2, prompt_logprobs=3, bad_words=["ab"], seed=5)
    first = resolved(params, tokenizer=letters())
    again = row_sampling(params, make_info(), letters(), 1, random.Random(0), first=first)
    assert (first.prompt_logprobs, again.prompt_logprobs) == (3, None)
    assert (first.seed, again.seed) == (5, 6)
    assert again.bad_words is first.bad_words  # encoding a thousand words takes a while
