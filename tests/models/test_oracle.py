"""The reference itself: it is mlx-lm's, its outputs vary, and faults would show in it."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache
from oracle import varied_prompt
from tiny_models import TINY_MODELS

NAMES = list(TINY_MODELS)


class ChunkPositions:
    """A broken cache: all keys are kept, but positions are counted from the chunk's start."""

    def __init__(self):
        self.offset = 0
        self.keys = self.values = None

    def update_and_fetch(self, keys, values):
        if self.keys is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, queries, return_array=False, window_size=None):
        known = 0 if self.keys is None else self.keys.shape[2]
        return create_causal_mask(queries, known, window_size=window_size)


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_equals_generate_step(oracle, name):
    prompt = varied_prompt(20, 1)
    reference = oracle(name).greedy(prompt, 8)
    steps = generate_step(
        mx.array(prompt), oracle(name).model, max_tokens=8, stream=mx.default_stream(mx.default_device())
    )
    for i, (token, logprobs) in enumerate(steps):
        assert token == reference.token_ids[i]
        np.testing.assert_allclose(np.array(logprobs), reference.logprobs[i], atol=5e-4)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_outputs_vary(oracle, name):
    outputs = [oracle(name).greedy(varied_prompt(10 + s, s), 24).token_ids for s in range(4)]
    assert min(len(set(tokens)) for tokens in outputs) >= 8
    assert len({tuple(tokens) for tokens in outputs}) == 4


@pytest.mark.parametrize("name", NAMES)
def test_positions_counted_from_the_chunk_would_show(oracle, name):
    prompt = varied_prompt(30, 2)
    model = oracle(name).model
    cache = [ChunkPositions() for _ in make_prompt_cache(model)]
    model(mx.array([prompt[:23]]), cache=cache)
    wrong = np.array(model(mx.array([prompt[23:]]), cache=cache)[0, -1])
    right = oracle(name).prompt_logprobs(prompt)[-1]
    wrong -= np.logaddexp.reduce(wrong)
    assert np.abs(wrong - right).max() > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_every_key_in_reach_matters(oracle, name):
    """A fault in one old position would show: here the token at it is another one."""
    prompt = varied_prompt(30, 2)
    right = oracle(name).prompt_logprobs(prompt)[-1]
    reach = 6 if name == "sliding_only" else 20
    for distance in (1, reach // 2, reach):
        other = list(prompt)
        other[-1 - distance] ^= 1
        assert np.abs(oracle(name).prompt_logprobs(other)[-1] - right).max() > 1e-2, distance


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_chunking_the_reference_moves_it_by_less_than_half_the_tolerance(oracle, name):
    """Rounding alone stays clear of the tolerance of 1e-4 on the likely tokens."""
    model = oracle(name).model
    for seed in range(3):
        prompt = varied_prompt(65, seed)
        whole = oracle(name).prompt_logprobs(prompt)
        cache = make_prompt_cache(model)
        pieces = [np.array(model(mx.array([prompt[i : i + 7]]), cache=cache)[0]) for i in range(0, 65, 7)]
        chunked = np.concatenate(pieces)
        chunked -= np.logaddexp.reduce(chunked, axis=-1, keepdims=True)
        likely = np.argsort(-whole, axis=-1)[:, :5]
        moved = np.take_along_axis(chunked, likely, 1) - np.take_along_axis(whole, likely, 1)
        assert np.abs(moved).max() < 5e-5
