import mlx.core as mx
import numpy as np
import pytest
from sampling_reference import make_row, processed, sample

from mlx_paged_attention.sampling.processors import process_logits


def process(logits, rows):
    return np.array(process_logits(mx.array(logits), rows))


def test_rows_that_ask_for_nothing_leave_the_logits_as_they_are():
    logits = mx.zeros((2, 5), mx.bfloat16)
    assert process_logits(logits, [make_row([1], [2]), make_row([1], temperature=0.0)]) is logits


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("vocab", [7, 111, 1000])
def test_every_mix_of_processors_equals_the_definition(vocab, dtype):
    rng = np.random.default_rng(vocab)
    for _ in range(10):
        count = int(rng.integers(1, 9))
        raw = mx.array(rng.normal(size=(count, vocab)) * 5).astype(dtype)
        rows, prompts = [], []
        for _ in range(count):
            prompts.append(rng.integers(0, vocab, rng.integers(1, 30)).tolist())
            output = rng.integers(0, vocab, rng.integers(0, 30)).tolist()
            asked = {
                "repetition_penalty": float(rng.uniform(0.5, 2)),
                "presence_penalty": float(rng.uniform(-2, 2)),
                "frequency_penalty": float(rng.uniform(-2, 2)),
                "logit_bias": {
                    int(token): float(rng.uniform(-100, 100)) for token in rng.integers(0, vocab, 3)
                },
                "allowed_token_ids": rng.integers(0, vocab, 5).tolist(),
                "bad_words": [[int(rng.integers(vocab))], [*output[-1:], int(rng.integers(vocab))]],
                "stop_ids": rng.integers(0, vocab, 3).tolist(),
            }
            asked = {name: value for name, value in asked.items() if rng.random() < 0.4}
            rows.append(make_row(prompts[-1], output, min_tokens=int(rng.integers(0, 30)), **asked))
        got = process_logits(raw, rows)
        before = np.array(raw.astype(mx.float32))
        for index, row in enumerate(rows):
            want = processed(before[index], prompts[index], row.output_token_ids, row.sampling)
            np.testing.assert_allclose(np.array(got[index].astype(mx.float32)), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.array(raw.astype(mx.float32)), before)  # the input is not written


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = np.array([[4.0, -4.0, 4.0, -4.0, 0.0, -np.inf]], np.float32)
    got = process(logits, [make_row([0, 1, 4], [5], repetition_penalty=2.0)])
    assert got.tolist() == [[2.0, -8.0, 4.0, -4.0, 0.0, -np.inf]]


def test_presence_is_subtracted_once_and_frequency_per_occurrence():
    logits = np.zeros((2, 4), np.float32)
    rows = [make_row([3], [0, 0, 1], presence_penalty=0.5), make_row([3], [0, 0, 1], frequency_penalty=0.25)]
    assert process(logits, rows).tolist() == [[-0.5, -0.5, 0, 0], [-0.5, -0.25, 0, 0]]


def test_bias_is_added_before_the_repetition_penalty_looks_at_the_sign():
    logits = np.array([[-1.0, 1.0]], np.float32)
    got = process(logits, [make_row([0], repetition_penalty=2.0, logit_bias={0: 5.0})])
    assert got.tolist() == [[2.0, 1.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_a_row_masked_down_to_one_token_gets_it(temperature):
    logits = np.random.default_rng(0).normal(size=(64, 1000)).astype(np.float32) * 10
    rows = [make_row([1], temperature=temperature, seed=seed, allowed_token_ids=[seed]) for seed in range(64)]
    assert sample(logits, rows) == list(range(64))


def test_masks_leave_what_is_allowed_and_not_banned():
    rows = [
        make_row([1], seed=seed, allowed_token_ids=[3, 4], min_tokens=1, stop_ids=[4]) for seed in range(32)
    ]
    assert sample(np.zeros((32, 8), np.float32), rows) == [3] * 32


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_tokens_win_over_bans_that_would_leave_none(temperature):
    options = {"temperature": temperature, "min_tokens": 9}
    rows = [
        *[make_row([1], seed=s, allowed_token_ids=[4], stop_ids=[4, 5], **options) for s in range(32)],
        *[make_row([1], seed=s, stop_ids=[*range(8)], **options) for s in range(32)],
    ]
    tokens = sample(np.tile(np.arange(8, dtype=np.float32), (64, 1)), rows)
    assert tokens[:32] == [4] * 32
    assert 7 in tokens[32:]
    assert temperature > 0 or set(tokens[32:]) == {7}


def test_a_stop_token_is_never_sampled_before_min_tokens():
    logits = np.zeros((64, 16), np.float32)
    logits[:, [2, 5]] = 50.0
    rows = [make_row([1], [0] * 3, seed=seed, min_tokens=4, stop_ids=[2, 5]) for seed in range(64)]
    assert not {2, 5} & set(sample(logits, rows))
    for row in rows:
        row.append(0)
    assert set(sample(logits, rows)) == {2, 5}
