"""Sampling of one row in plain float64 numpy, written straight from the definitions; short ways to sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.sampling.row import SamplingRow
from mlx_paged_attention.sampling.sampler import launch


def make_row(prompt: Sequence[int] = (), output: Sequence[int] = (), **sampling: Any) -> SamplingRow:
    return SamplingRow([*prompt, *output], len(prompt), RowSampling(**{"temperature": 1.0, **sampling}))


def sample(logits: np.ndarray | mx.array, rows: Sequence[SamplingRow]) -> list[int]:
    return [row.token_id for row in launch(mx.array(logits), rows).read()]


def sample_many(logits: np.ndarray, count: int, **sampling: Any) -> np.ndarray:
    """Tokens of ``count`` rows with the same logits ``[vocab]`` and seeds 0, 1, ..."""
    tokens: list[int] = []
    for start in range(0, count, 64):
        rows = [make_row(seed=seed, **sampling) for seed in range(start, min(start + 64, count))]
        tokens += sample(np.broadcast_to(logits, (len(rows), len(logits))), rows)
    return np.array(tokens)


def processed(logits: np.ndarray, prompt: list[int], output: list[int], sampling: RowSampling) -> np.ndarray:
    """Logits ``[vocab]`` after bias, penalties and masks."""
    x = logits.astype(np.float64).copy()
    for token, bias in sampling.logit_bias.items():
        x[token] += bias
    if sampling.repetition_penalty != 1.0:
        for token in set(prompt) | set(output):
            x[token] = (
                x[token] / sampling.repetition_penalty
                if x[token] > 0
                else (x[token] * sampling.repetition_penalty)
            )
    for token in set(output):
        x[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    banned = set(sampling.stop_ids) if len(output) < sampling.min_tokens else set()
    for word in sampling.bad_words:
        begun = word[:-1]
        if not begun or output[-len(begun) :] == begun:
            banned.add(word[-1])
    allowed = set(range(len(x))) if sampling.allowed_token_ids is None else set(sampling.allowed_token_ids)
    left = allowed - banned or allowed
    x[[token for token in range(len(x)) if token not in left]] = -np.inf
    return x


@dataclass
class Distribution:
    """Token ids in the order of their intervals, and whether rounding might move a filter's cut."""

    ids: np.ndarray
    probabilities: np.ndarray
    close: bool

    def draw(self, u: float) -> set[int]:
        """The tokens whose intervals hold ``u``, give or take the rounding of float32 sums."""
        ends = np.cumsum(self.probabilities)
        ends /= ends[-1]
        first, last = np.searchsorted(ends, [max(u - 3e-6, 0.0), min(u + 3e-6, 1 - 1e-9)], side="right")
        places = np.arange(first, last + 1)
        return set(self.ids[places[self.probabilities[places] > 0]].tolist())


def distribution(x: np.ndarray, sampling: RowSampling) -> Distribution:
    """What remains of processed logits ``[vocab]`` after temperature, min-p, top-k and top-p."""
    vocab = len(x)
    z = (x - x.max()) / sampling.temperature
    p = np.exp(z)
    close = bool(
        sampling.min_p and np.abs(p[p < 1] - sampling.min_p).min(initial=1.0) < 1e-5 * sampling.min_p
    )
    p = np.where(p >= sampling.min_p, p, 0.0)
    ranked = 0 < sampling.top_k < vocab or sampling.top_p < 1.0
    order = np.argsort(-x, kind="stable") if ranked else np.arange(vocab)
    p = p[order]
    if 0 < sampling.top_k < vocab:
        p[sampling.top_k :] = 0.0
    if sampling.top_p < 1.0:
        before = np.cumsum(p) - p
        limit = sampling.top_p * p.sum()
        close |= bool(np.abs(before - limit).min() < 1e-5 * limit)
        p = np.where(before < limit, p, 0.0)
    return Distribution(order, p / p.sum(), close)
