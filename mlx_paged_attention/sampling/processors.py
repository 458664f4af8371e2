"""process_logits: bias, penalties and masks, for the rows that ask and for no others.

Every kind is one sparse update: index arrays over ``(row, token)`` are gathered in numpy, and one
scatter applies them, so a step moves what the rows touch and not a ``[rows, vocab]`` mask.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged_attention.sampling.grammar import GrammarMasks
from mlx_paged_attention.sampling.row import IntArray, SamplingRow

Array = npt.NDArray[Any]
_Updates = list[tuple[Array, ...]]


def process_logits(
    logits: mx.array, rows: Sequence[SamplingRow], masks: GrammarMasks | None = None
) -> mx.array:
    """Apply, in this order: logit bias, repetition / frequency / presence penalties, masks.

    The repetition penalty divides positive logits and multiplies negative ones
    (https://arxiv.org/abs/1909.05858, section 4.1) of tokens in the prompt or the output; the other
    two subtract ``frequency * count + presence`` for tokens in the output.

    Masked tokens get exactly -inf. Masks never leave a row empty: if ``bad_words`` and ``min_tokens``
    together forbid every token that is allowed, the row's allowed tokens (without
    ``allowed_token_ids``, all of them) win. A forced token is the only one allowed, whatever is banned. A
    grammar's mask comes last, and has both in it.

    Args:
        logits: ``[rows, vocab]``, any floating-point type; not changed.
        rows: one per row of ``logits``.
        masks: of the rows that have a grammar.

    Returns:
        ``[rows, vocab]``: float32, or ``logits`` themselves when no row asks for anything.
    """
    vocab = logits.shape[1]
    bias, penalties, allowed, banned = _collect(rows, vocab)
    if bias or penalties or allowed or banned:
        logits = _updated(logits, bias, penalties, allowed, banned)
    return logits if masks is None else masks.apply(logits)


def _updated(
    logits: mx.array, bias: _Updates, penalties: _Updates, allowed: _Updates, banned: _Updates
) -> mx.array:
    flat = logits.astype(mx.float32).reshape(-1)
    if bias:
        where, values = _joined(bias)
        flat = flat.at[where].add(values)
    if penalties:
        where, repetition, subtracted = _joined(penalties)
        old = flat[where]
        flat[where] = mx.where(old > 0, old / repetition, old * repetition) - subtracted
    if allowed:
        where, in_rows = _joined(allowed)
        kept = flat[where]
        table = flat.reshape(logits.shape)
        table[in_rows] = -mx.inf
        flat = table.reshape(-1)
        flat[where] = kept
    if banned:
        (where,) = _joined(banned)
        flat[where] = -mx.inf
    return flat.reshape(logits.shape)


def _collect(rows: Sequence[SamplingRow], vocab: int) -> tuple[_Updates, _Updates, _Updates, _Updates]:
    """Flat positions and values of every update, one tuple of arrays per row and kind."""
    bias: _Updates = []
    penalties: _Updates = []
    allowed: _Updates = []
    banned: _Updates = []
    for index, row in enumerate(rows):
        start = index * vocab
        if len(row.bias_ids):
            bias.append((start + row.bias_ids, row.bias_values))
        if row.penalized is not None:
            ids, counts, sampling = row.penalized.ids, row.penalized.counts, row.sampling
            repetition = np.full(len(ids), sampling.repetition_penalty, np.float32)
            subtracted = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
            if len(ids):
                penalties.append((start + ids, repetition, subtracted.astype(np.float32)))
        if row.grammar is None and row.forced_id is not None:
            allowed.append((np.array([start + row.forced_id]), np.array([index], np.int32)))
            continue
        if row.allowed_ids is not None:
            allowed.append((start + row.allowed_ids, np.array([index], np.int32)))
        if row.grammar is None and (forbidden := row.banned_ids()):
            ids_banned = np.unique(np.array(forbidden, np.int32))
            if not _all_banned(row.allowed_ids, ids_banned, vocab):
                banned.append((start + ids_banned,))
    return bias, penalties, allowed, banned


def _all_banned(allowed: IntArray | None, banned: IntArray, vocab: int) -> bool:
    return len(banned) >= vocab if allowed is None else bool(np.isin(allowed, banned).all())


def _joined(updates: _Updates) -> list[mx.array]:
    return [mx.array(np.concatenate(parts)) for parts in zip(*updates, strict=True)]
