"""Log-probabilities of tokens under the raw logits: natural log, computed in float32."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged_attention.sampling.largest import largest
from mlx_paged_attention.scheduler.step_plan import TokenLogprobs

# Bounds the float32 copy of the logits that is alive at a time (64 rows of 150k entries: 38 MB).
_ROWS_AT_A_TIME = 64


class TokenScores:
    """The unevaluated log-probabilities of one token per row.

    Args:
        logits: ``[rows, vocab]``, any floating-point type, before temperature, penalties and masks.
        token_ids: ``[rows]``, the token to score in each row.
        k: how many of the likeliest tokens to report.
    """

    def __init__(self, logits: mx.array, token_ids: mx.array, k: int) -> None:
        x = logits.astype(mx.float32)
        # Relative to the maximum, so that logits of any magnitude keep their precision.
        maximum = mx.max(x, axis=-1, keepdims=True)
        total = mx.log(mx.sum(mx.exp(x - maximum), axis=-1, keepdims=True))
        chosen = mx.take_along_axis(x, token_ids[:, None], -1)
        logprob = (chosen - maximum - total).squeeze(1)
        self.arrays = [token_ids, logprob, mx.sum(x > chosen, axis=-1) + 1]
        if k:
            values, ids = largest(x, k)
            self.arrays += [ids, values - maximum - total]

    def read(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Wait for the numbers; row ``i`` reports its ``counts[i] <= k`` likeliest tokens."""
        mx.eval(self.arrays)
        token_ids, logprobs, ranks, *top = (np.array(array).tolist() for array in self.arrays)
        ids, values = top or ([[]] * len(token_ids), [[]] * len(token_ids))
        return [
            TokenLogprobs(
                token_id=token_ids[row],
                logprob=logprobs[row],
                rank=ranks[row],
                top=list(zip(ids[row][:count], values[row][:count], strict=True)),
            )
            for row, count in enumerate(counts)
        ]


def token_logprobs(logits: mx.array, token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Score one given token per row, a bounded number of rows at a time.

    Args:
        logits: ``[n, vocab]``, any floating-point type.
        token_ids: the token that stands at each of the ``n`` positions.
        k: how many of the likeliest tokens to report, ties to the lower id.
    """
    assert logits.shape[0] == len(token_ids), (logits.shape, len(token_ids))
    scored: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS_AT_A_TIME):
        ids = token_ids[start : start + _ROWS_AT_A_TIME]
        part = logits[start : start + len(ids)]
        scored += TokenScores(part, mx.array(list(ids), mx.int32), k).read([k] * len(ids))
    return scored
