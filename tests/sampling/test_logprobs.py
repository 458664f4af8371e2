import mlx.core as mx
import numpy as np
import pytest
from sampling_reference import make_row

from mlx_paged_attention.sampling.logprobs import token_logprobs
from mlx_paged_attention.sampling.sampler import launch


def reference(logits, token, k):
    x = logits.astype(np.float64)
    logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
    order = np.argsort(-x, kind="stable")[:k]
    return logprobs[token], 1 + int((x > x[token]).sum()), order.tolist(), logprobs[order]


def assert_scores(got, logits, token, k):
    logprob, rank, ids, values = reference(logits, token, k)
    assert got.token_id == token
    assert got.rank == rank
    assert got.logprob == pytest.approx(logprob, abs=1e-4)
    assert [token_id for token_id, _ in got.top] == ids
    np.testing.assert_allclose([value for _, value in got.top], values, atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("rows", "vocab", "k"), [(1, 7, 20), (3, 111, 5), (130, 5003, 20), (2, 49152, 0)])
def test_prompt_logprobs_equal_the_definition(rows, vocab, k, dtype):
    rng = np.random.default_rng(vocab)
    # In 16 bits this makes many ties, which go to the lower id.
    logits = mx.array(rng.normal(size=(rows, vocab)) * 4).astype(dtype)
    tokens = rng.integers(0, vocab, rows).tolist()
    got = token_logprobs(logits, tokens, k)
    for index, entry in enumerate(got):
        assert_scores(entry, np.array(logits[index].astype(mx.float32)), tokens[index], k)
    assert len(got) == rows


def test_no_positions_have_no_logprobs():
    assert token_logprobs(mx.zeros((0, 10)), [], 3) == []


def test_sampled_logprobs_are_raw_whatever_the_row_asks():
    """vllm-project/vllm#10234"""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(5, 2000)).astype(np.float32) * 3
    options = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 5.0, "top_k": 1, "logprobs": 0, "logit_bias": {7: 100.0}},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_p": 0.999, "logprobs": 20, "seed": 3},  # needs more than the candidates
        {"temperature": 1.0, "repetition_penalty": 2.0, "logprobs": 1, "allowed_token_ids": [11]},
    ]
    got = launch(mx.array(logits), [make_row([1, 2], [3], **option) for option in options]).read()
    assert got[2].logprobs is None
    for index in (0, 1, 3, 4):
        assert_scores(got[index].logprobs, logits[index], got[index].token_id, options[index]["logprobs"])
    assert got[1].token_id == 7
    assert got[4].token_id == 11


def test_large_logits_and_forbidden_ones_score_without_overflow():
    logits = mx.array([[1e4, -1e4, 1e4, -np.inf, 0.0]])
    (entry,) = token_logprobs(logits, [3], 4)
    assert entry.logprob == -np.inf
    assert entry.rank == 5
    assert [token for token, _ in entry.top] == [0, 2, 4, 1]
    assert entry.top[0][1] == pytest.approx(np.log(0.5))
