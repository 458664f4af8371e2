"""One token per row: right in distribution, exact against the reference, alone or in any company."""

import mlx.core as mx
import numpy as np
import pytest
from sampling_reference import distribution, make_row, processed, sample, sample_many

from mlx_paged_attention.sampling import draw, sampler
from mlx_paged_attention.sampling.draw import CANDIDATES
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.sampling.random import uniform
from mlx_paged_attention.sampling.row import SamplingRow
from mlx_paged_attention.sampling.sampler import launch


def random_options(rng, vocab):
    options = {
        "temperature": float(rng.choice([0.0, 1e-3, 0.3, 0.7, 1.0, 1.5, 100.0])),
        "top_k": int(rng.choice([0, 0, 1, 2, 40, CANDIDATES, CANDIDATES + 1, 10**6])),
        "top_p": float(rng.choice([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.99])),
        "min_p": float(rng.choice([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0])),
        "seed": int(rng.integers(-(2**63), 2**63)),
    }
    if rng.random() < 0.3:
        options |= {"repetition_penalty": 1.2, "frequency_penalty": -0.3, "presence_penalty": 0.4}
    if rng.random() < 0.2:
        options |= {"allowed_token_ids": rng.integers(0, vocab, 20).tolist()}
    if rng.random() < 0.2:
        options |= {"logprobs": int(rng.integers(0, 21))}
    return options


def random_batch(rng, count, vocab, scale=4.0):
    logits = (rng.normal(size=(count, vocab)) * scale).astype(np.float32)
    logits[rng.random((count, vocab)) < 0.05] = -np.inf
    prompts = [rng.integers(0, vocab, rng.integers(1, 9)).tolist() for _ in range(count)]
    rows = [
        make_row(prompt, rng.integers(0, vocab, rng.integers(0, 9)).tolist(), **random_options(rng, vocab))
        for prompt in prompts
    ]
    return logits, prompts, rows


@pytest.mark.parametrize(("vocab", "batches"), [(3, 40), (111, 40), (5003, 10), (32000, 2)])
def test_mixed_batches_agree_with_the_reference(vocab, batches):
    rng = np.random.default_rng(vocab)
    drawn = loose = 0
    for _ in range(batches):
        count = int(rng.integers(1, 33))
        logits, prompts, rows = random_batch(rng, count, vocab)
        for index, token in enumerate(sample(logits, rows)):
            row = rows[index]
            x = processed(logits[index], prompts[index], row.output_token_ids, row.sampling)
            assert np.isfinite(x[token])
            if row.sampling.temperature == 0:
                assert token == int(np.argmax(x.astype(np.float32)))
                continue
            u = float(uniform([row.sampling.seed], [len(row.output_token_ids)])[0])
            want = distribution(x, row.sampling)
            possible = want.draw(u)
            drawn += 1
            loose += want.close or len(possible) > 1
            assert want.close or token in possible, row.sampling
    assert loose < 0.1 * drawn  # elsewhere just one token was right


@pytest.mark.parametrize("vocab", [111, 5003])
def test_a_row_gets_the_token_it_gets_alone_in_any_company_and_order(vocab):
    """vllm-project/vllm#51226"""
    rng = np.random.default_rng(vocab)
    for _ in range(4):
        logits, _, rows = random_batch(rng, 24, vocab)
        alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        for size in (24, 24, 7):
            order = rng.permutation(24)[:size]
            assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


FILTERS = [
    {},
    {"temperature": 0.6},
    {"top_k": 10},
    {"top_k": 300},
    {"top_p": 0.8},
    {"min_p": 0.02},
    {"temperature": 1.3, "min_p": 0.01, "top_k": 50, "top_p": 0.9},
]


@pytest.mark.parametrize("options", FILTERS)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_frequencies_follow_the_distribution(options, scale):
    count, vocab = 8192, 111
    logits = np.random.default_rng(7).normal(size=vocab).astype(np.float32) * scale
    want = distribution(logits.astype(np.float64), make_row(**options).sampling)
    expected = np.zeros(vocab)
    expected[want.ids] = want.probabilities * count
    observed = np.bincount(sample_many(logits, count, **options), minlength=vocab)
    cosine = observed @ expected / np.linalg.norm(observed) / np.linalg.norm(expected)
    assert cosine > 0.99
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    degrees = common.sum() - 1
    chi_square = ((observed - expected)[common] ** 2 / expected[common]).sum()
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_the_numbers_of_one_seed_follow_the_distribution_too():
    logits = np.random.default_rng(8).normal(size=20).astype(np.float32)
    tokens = sample(np.tile(logits, (4096, 1)), [make_row([], [0] * i, seed=1) for i in range(4096)])
    p = np.exp(logits) / np.exp(logits).sum()
    observed = np.bincount(tokens, minlength=20)
    assert ((observed - 4096 * p) ** 2 / (4096 * p)).sum() < 60


@pytest.mark.parametrize(("vocab", "count"), [(111, 64), (32000, 16)])
@pytest.mark.parametrize("options", [o for o in FILTERS if set(o) - {"temperature"}])
def test_nothing_outside_the_filters_is_ever_sampled(vocab, count, options):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(count, vocab)) * 2).astype(np.float32)
    for attempt in range(3):
        rows = [make_row(seed=attempt * count + i, **options) for i in range(count)]
        for x, row, token in zip(logits, rows, sample(logits, rows), strict=True):
            want = distribution(x.astype(np.float64), row.sampling)
            assert want.close or token in set(want.ids[want.probabilities > 0].tolist())


def test_a_top_p_set_larger_than_the_candidates_is_drawn_from_whole():
    vocab = 5000
    tokens = sample_many(np.zeros(vocab, np.float32), 512, top_p=0.5)
    assert tokens.max() < vocab / 2  # of equals, the lower ids are kept
    assert tokens.max() > vocab / 2 * 0.95
    assert len(set(tokens.tolist())) > CANDIDATES


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 0.7])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 20, CANDIDATES, CANDIDATES + 1])
def test_what_runs_ahead_has_its_token_before_it_is_read(temperature, top_p, top_k):
    sampling = RowSampling(temperature=temperature, top_p=top_p, top_k=top_k)
    row = SamplingRow([1], 1, sampling)
    redrawn = any(sampler._method(row, vocab) == "top_p" for vocab in (4 * CANDIDATES, 2**18))
    assert not (sampling.runs_ahead and redrawn)


def test_a_repeated_run_repeats_and_another_seed_differs():
    logits = np.random.default_rng(3).normal(size=(1, 1000)).astype(np.float32)

    def run(seed):
        row, tokens = make_row([5], seed=seed), []
        for _ in range(16):
            tokens += sample(logits, [row])
            row.append(tokens[-1])
        return tokens

    assert run(42) == run(42)
    assert len({tuple(run(seed)) for seed in (42, 43, -42, 42 + 2**32)}) == 4
    assert len(set(run(42))) > 8  # the stream moves on


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6, 1e-3])
def test_a_tiny_temperature_takes_the_likeliest(temperature):
    logits = np.random.default_rng(4).permuted(np.tile(np.arange(500, dtype=np.float32), (64, 1)), axis=1)
    for options in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        rows = [make_row(seed=i, temperature=temperature, **options) for i in range(64)]
        assert sample(logits, rows) == logits.argmax(-1).tolist()


def test_temperature_100_is_nearly_uniform():
    logits = np.random.default_rng(5).normal(size=16).astype(np.float32)
    observed = np.bincount(sample_many(logits, 4096, temperature=100.0), minlength=16)
    assert observed.min() > 180
    assert observed.max() < 340


@pytest.mark.parametrize("options", FILTERS)
@pytest.mark.parametrize("temperature", [1e-3, 1.0, 100.0])
def test_huge_and_infinite_logits_never_yield_an_impossible_token(options, temperature):
    logits = np.full((64, 1003), -np.inf, np.float32)
    logits[:, [3, 500, 1002]] = 1e4
    logits[:, 7] = -1e4
    rows = [make_row(seed=i, **(options | {"temperature": temperature})) for i in range(64)]
    assert set(sample(logits, rows)) == {3, 500, 1002}


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.zeros((2, 300), np.float32)
    logits[:, [40, 41, 299]] = 1.0
    assert sample(logits, [make_row(temperature=0.0), make_row(temperature=0.0, logit_bias={0: 0.5})]) == [
        40,
        40,
    ]


def test_top_k_keeps_the_lowest_ids_of_equals():
    tokens = sample_many(np.zeros(2000, np.float32), 256, top_k=3)
    assert set(tokens.tolist()) == {0, 1, 2}
    assert set(sample_many(np.zeros(2000, np.float32), 64, top_k=1).tolist()) == {0}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits_sample_like_their_float32_values(dtype):
    rng = np.random.default_rng(6)
    logits, _, rows = random_batch(rng, 32, 1000)
    half = mx.array(logits).astype(dtype)
    assert sample(half, rows) == sample(half.astype(mx.float32), rows)


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24])
@pytest.mark.parametrize("options", FILTERS)
def test_the_extreme_random_numbers_draw_possible_tokens(monkeypatch, u, options):
    monkeypatch.setattr(
        "mlx_paged_attention.sampling.sampler.uniform", lambda seeds, _: np.full(len(seeds), u, np.float32)
    )
    rng = np.random.default_rng(9)
    logits = (rng.normal(size=(16, 5003)) * 4).astype(np.float32)
    logits[:, :50] = logits[:, -50:] = -np.inf
    for x, token in zip(logits, sample(logits, [make_row(**options)] * 16), strict=True):
        want = distribution(x.astype(np.float64), make_row(**options).sampling)
        possible = want.ids[want.probabilities > 0]
        assert token in possible[:2] if u == 0 else token in possible[-200:]


def test_a_target_that_rounding_moved_past_the_sum_finds_the_last_possible_entry():
    weights = mx.array([[0.0, 0.5, 0.25, 0.0], [0.0, 0.0, 1e-45, 0.0]])
    index, _ = draw._find(weights, mx.array([[0.75], [1.0]]))
    assert index.tolist() == [[2], [2]]
    assert draw._find(weights, mx.zeros((2, 1)))[0].tolist() == [[1], [2]]


def test_launch_does_not_write_its_logits_or_rows():
    logits = mx.array(np.random.default_rng(2).normal(size=(2, 50)).astype(np.float32))
    before = np.array(logits)
    rows = [
        make_row([1], [2], allowed_token_ids=[3]),
        make_row([1], [2], temperature=0.0, logit_bias={4: 9.0}),
    ]
    pending = launch(logits, rows)
    pending.read()
    np.testing.assert_array_equal(np.array(logits), before)
    assert [row.output_token_ids for row in rows] == [[2], [2]]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("vocab", [7, 1000, 49152])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"top_k": 3}]
)
def test_rows_whose_logits_are_no_numbers_are_told_from_the_others(options, vocab, dtype):
    logits = np.random.default_rng(1).normal(size=(8, vocab)).astype(np.float32)
    logits[3] = np.nan
    logits[1, 0] = np.nan
    if options.get("temperature") != 0:  # of a greedy row, only the likeliest token matters
        logits[2, -1] = np.nan
    else:
        logits[2, -1] = np.inf
    logits[4, vocab // 2] = np.inf
    logits[5] = -np.inf
    logits[6, 1:] = -np.inf  # a mask of the model's own
    rows = [make_row([1], [], **options) for _ in logits]
    sampled = launch(mx.array(logits).astype(dtype), rows).read()
    assert [row.finite for row in sampled] == [True, False, False, False, False, False, True, True]
    assert all(0 <= row.token_id < vocab for row in sampled)
