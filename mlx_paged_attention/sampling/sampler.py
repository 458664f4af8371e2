"""launch: one token per row of logits, each row on its own.

Nothing that happens to a row depends on its neighbours: how it is sampled follows from its parameters
and its logits, and its random number from its seed and the number of its output tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

from mlx_paged_attention.sampling import draw
from mlx_paged_attention.sampling.grammar import GrammarMasks
from mlx_paged_attention.sampling.logprobs import TokenScores
from mlx_paged_attention.sampling.processors import process_logits
from mlx_paged_attention.sampling.random import uniform
from mlx_paged_attention.sampling.row import SamplingRow
from mlx_paged_attention.scheduler.step_plan import TokenLogprobs

# How a row's token is found: the likeliest; drawn from all; drawn by rank among a few candidates whose
# number top-k bounds, or that top-p may turn out to exceed; drawn by rank among all.
Method = Literal["greedy", "unranked", "top_k", "top_p", "ranked"]


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What one row yielded.

    Attributes:
        logprobs: ``None`` unless the row asked.
        finite: its likeliest logit is a number; if not, the token means nothing.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    finite: bool


def launch(
    logits: mx.array, rows: Sequence[SamplingRow], masks: GrammarMasks | None = None
) -> "PendingSample":
    """Build the graph that samples one token per row, without waiting for it.

    Logits pass bias, penalties and masks (see :func:`process_logits`), then temperature, min-p, top-k
    and top-p, in this order and each over what the one before it left. Min-p is relative to the
    likeliest token; among equal logits the lowest ids are kept. Greedy rows take the likeliest token,
    the lowest id among equals. A drawn row maps its random number through the inverse CDF over token
    ids, or over ranks (likeliest first) if it has top-k or top-p. Log-probabilities are those of
    ``logits`` as they are.

    The rows are only read: append the token to its row, or have the row expect it, before launching
    the next.

    Args:
        logits: ``[rows, vocab]``, any floating-point type; not changed.
        rows: at least one, one per row of ``logits``.
        masks: of the rows that have a grammar.
    """
    assert rows, "nothing to sample"
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    return PendingSample(logits, rows, masks)


class PendingSample:
    """Tokens on their way, made by :func:`launch`.

    Attributes:
        token_ids: ``[rows]`` int32, unevaluated. A row with top-p and no top-k gets its final token
            only in :meth:`read` if its set turns out to be larger than the candidates.
    """

    def __init__(
        self, logits: mx.array, rows: Sequence[SamplingRow], masks: GrammarMasks | None = None
    ) -> None:
        self._sampling = [row.sampling for row in rows]
        self._logits = process_logits(logits, rows, masks)
        self._numbers = uniform([row.sampling.seed for row in rows], [row.num_outputs for row in rows])
        by_method: dict[Method, list[int]] = {}
        for index, row in enumerate(rows):
            by_method.setdefault(_method(row, logits.shape[1]), []).append(index)
        self._maybe_uncovered = by_method.get("top_p", [])
        self._covered: mx.array | None = None
        parts = [self._draw(method, indices) for method, indices in by_method.items()]
        finite = [self._is_finite(*part) for part in zip(by_method.items(), parts, strict=True)]
        # Each part holds some of the rows; bring them back into the rows' order.
        order = np.argsort(np.concatenate(list(by_method.values())))
        self.token_ids = parts[0] if len(parts) == 1 else mx.concatenate(parts)[mx.array(order)]
        self._finite = finite[0] if len(parts) == 1 else mx.concatenate(finite)[mx.array(order)]

        self._raw = logits
        self._scored = [i for i, row in enumerate(self._sampling) if row.logprobs is not None]
        self._scores = self._score() if self._scored else None

    @property
    def arrays(self) -> list[mx.array]:
        """What :meth:`read` waits for."""
        covered = [] if self._covered is None else [self._covered]
        scores = [] if self._scores is None else self._scores.arrays
        return [self.token_ids, self._finite, *covered, *scores]

    def read(self) -> list[SampledRow]:
        """Wait for the tokens and their log-probabilities."""
        mx.eval(self.arrays)
        if self._covered is not None:
            self._draw_uncovered(self._covered)
        logprobs: dict[int, TokenLogprobs] = {}
        if self._scores is not None:
            counts = [self._sampling[i].logprobs or 0 for i in self._scored]
            logprobs = dict(zip(self._scored, self._scores.read(counts), strict=True))
        return [
            SampledRow(token_id, logprobs.get(index), finite)
            for index, (token_id, finite) in enumerate(
                zip(np.array(self.token_ids).tolist(), np.array(self._finite).tolist(), strict=True)
            )
        ]

    def _draw(self, method: Method, indices: list[int]) -> mx.array:
        """Token ids of the rows ``indices``, ``[indices]``."""
        logits = _rows_of(self._logits, indices)
        if method == "greedy":
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        filters = draw.Filters.of([self._sampling[i] for i in indices])
        numbers = mx.array(self._numbers[indices, None])
        scaled = draw.scale(logits, filters)
        if method == "unranked":
            return draw.by_id(scaled, filters, numbers)
        if method == "top_p":
            token_ids, self._covered = draw.by_rank_if_covered(scaled, filters, numbers)
            return token_ids
        candidates = draw.CANDIDATES if method == "top_k" else logits.shape[1]
        return draw.by_rank(scaled, filters, numbers, candidates)

    def _is_finite(self, part: tuple[Method, list[int]], token_ids: mx.array) -> mx.array:
        """Whether the greatest logit of each row is a number, ``[indices]`` bool.

        Where the hidden state is none, no logit is, and greedy rows have found the greatest already. What is
        drawn depends on every entry: a maximum is NaN if any entry is.
        """
        method, indices = part
        logits = _rows_of(self._logits, indices)
        if method == "greedy":
            return mx.isfinite(mx.take_along_axis(logits, token_ids[:, None], -1).squeeze(1))
        return mx.isfinite(mx.max(logits, axis=-1))

    def _draw_uncovered(self, covered: mx.array) -> None:
        uncovered = np.array(self._maybe_uncovered)[~np.array(covered)].tolist()
        if uncovered:
            self.token_ids[mx.array(uncovered)] = self._draw("ranked", uncovered)
            if self._scores is not None:
                self._scores = self._score()

    def _score(self) -> TokenScores:
        most = max(self._sampling[i].logprobs or 0 for i in self._scored)
        return TokenScores(_rows_of(self._raw, self._scored), _rows_of(self.token_ids, self._scored), most)


def _method(row: SamplingRow, vocab: int) -> Method:
    top_k = row.sampling.top_k if 0 < row.sampling.top_k < vocab else None
    if row.greedy:
        return "greedy"
    if top_k is None and row.sampling.top_p >= 1.0:
        return "unranked"
    if vocab <= draw.CANDIDATES or (top_k is not None and top_k > draw.CANDIDATES):
        return "ranked"
    return "top_p" if top_k is None else "top_k"


def _rows_of(array: mx.array, indices: list[int]) -> mx.array:
    """``array[indices]``, without a copy when these are all its rows (indices ascend)."""
    return array if len(indices) == array.shape[0] else array[mx.array(indices)]
