"""Drawing tokens by inverse CDF: one uniform number per row, never a token of probability zero.

All arrays are float32. ``scaled`` logits have a maximum of 0 in every row, so weights ``exp(scaled)``
lie in [0, 1] and a row's total is at least 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged_attention.sampling.largest import CHUNK, in_chunks, largest
from mlx_paged_attention.sampling.params import RowSampling

# Of a row with top-p or top-k, so many of the likeliest tokens are looked at first.
CANDIDATES = 256


class Filters(NamedTuple):
    """The parameters of several rows as columns ``[rows, 1]``; what is off, lets everything pass."""

    temperature: mx.array
    log_min_p: mx.array
    top_k: mx.array
    top_p: mx.array

    @classmethod
    def of(cls, rows: Sequence[RowSampling]) -> "Filters":
        """The columns of ``rows``."""
        with np.errstate(divide="ignore"):
            log_min_p = np.log(np.array([row.min_p for row in rows]))
        return cls(
            temperature=column([row.temperature for row in rows]),
            log_min_p=column(log_min_p.tolist()),
            top_k=column([row.top_k if row.top_k > 0 else np.inf for row in rows]),
            top_p=column([row.top_p if row.top_p < 1 else np.inf for row in rows]),
        )


def column(values: Sequence[float]) -> mx.array:
    """``[rows, 1]`` float32."""
    return mx.array(np.array(values, dtype=np.float32)[:, None])


def scale(logits: mx.array, filters: Filters) -> mx.array:
    """Divide by the temperature, after moving the maximum to 0 so that nothing overflows."""
    logits = logits.astype(mx.float32)
    return (logits - mx.max(logits, axis=-1, keepdims=True)) / filters.temperature


def by_id(scaled: mx.array, filters: Filters, u: mx.array) -> mx.array:
    """Draw from all tokens that pass min-p, their intervals in the order of their ids.

    Args:
        scaled: ``[rows, vocab]``.
        u: ``[rows, 1]`` in [0, 1).

    Returns:
        token ids ``[rows]``.
    """
    weights = in_chunks(_min_p_weights(scaled, filters), 0.0)
    # First the chunk, then the token in it: short sums keep the tail that a long one would round away.
    sums = mx.sum(weights, axis=-1)
    chunk, rest = _find(sums, u * mx.sum(sums, axis=-1, keepdims=True))
    inside = mx.take_along_axis(weights, chunk[:, :, None], 1).squeeze(1)
    place, _ = _find(inside, rest)
    return (chunk * CHUNK + place).squeeze(1).astype(mx.int32)


def by_rank(scaled: mx.array, filters: Filters, u: mx.array, candidates: int) -> mx.array:
    """Draw from the tokens that pass min-p, top-k and top-p, their intervals likeliest first.

    Args:
        scaled: ``[rows, vocab]``.
        u: ``[rows, 1]`` in [0, 1).
        candidates: how many of the likeliest tokens to look at, at least every row's top_k.

    Returns:
        token ids ``[rows]``.
    """
    ids, weights = _candidates(scaled, filters, candidates)
    return _draw_top_p(ids, weights, mx.sum(weights, axis=-1, keepdims=True), filters, u)


def by_rank_if_covered(scaled: mx.array, filters: Filters, u: mx.array) -> tuple[mx.array, mx.array]:
    """:func:`by_rank` without top-k, from the ``CANDIDATES`` likeliest tokens.

    Returns:
        token ids ``[rows]``, and whether the candidates hold all that pass, ``[rows]`` bool; where
        they do not, the token must be drawn again from the whole vocabulary.
    """
    ids, weights = _candidates(scaled, filters, CANDIDATES)
    mass = mx.sum(_min_p_weights(scaled, filters), axis=-1, keepdims=True)
    covered = mx.sum(weights, axis=-1, keepdims=True) >= filters.top_p * mass
    return _draw_top_p(ids, weights, mass, filters, u), covered.squeeze(1)


def _min_p_weights(scaled: mx.array, filters: Filters) -> mx.array:
    return mx.where(scaled >= filters.log_min_p, mx.exp(scaled), 0.0)


def _candidates(scaled: mx.array, filters: Filters, count: int) -> tuple[mx.array, mx.array]:
    """Ids of the likeliest tokens and their weights, 0 beyond top-k and min-p."""
    values, ids = largest(scaled, count)
    in_top_k = mx.arange(ids.shape[1]) < filters.top_k
    return ids, mx.where(in_top_k, _min_p_weights(values, filters), 0.0)


def _draw_top_p(ids: mx.array, weights: mx.array, mass: mx.array, filters: Filters, u: mx.array) -> mx.array:
    """A token goes if those before it already hold ``top_p`` of ``mass``, so the first always stays."""
    before = mx.cumsum(weights, axis=-1, inclusive=False)
    weights = mx.where(before < filters.top_p * mass, weights, 0.0)
    place, _ = _find(weights, u * mx.sum(weights, axis=-1, keepdims=True))
    return mx.take_along_axis(ids, place, -1).squeeze(1).astype(mx.int32)


def _find(weights: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """The first entry at which the running sum exceeds ``target``, and what is left of it there.

    Only entries of positive weight are found. The last of them is taken if rounding has made the
    target no less than the whole sum.

    Args:
        weights: ``[rows, entries]``, at least one positive in each row.
        target: ``[rows, 1]``.

    Returns:
        index ``[rows, 1]`` and ``target`` minus the sum before it ``[rows, 1]``.
    """
    sums = mx.cumsum(weights, axis=-1)
    positive = weights > 0
    whole = mx.max(mx.where(positive, sums, 0.0), axis=-1, keepdims=True)
    found = positive & ((sums > target) | (sums >= whole))
    index = mx.argmax(found.astype(mx.uint8), axis=-1, keepdims=True)
    return index, target - (mx.take_along_axis(sums, index, -1) - mx.take_along_axis(weights, index, -1))
