"""Ordering tokens: how kernels that write through an input are kept in order.

MLX orders two kernels only if one takes an output of the other. A kernel that writes into the pool
therefore returns a tiny output, its token, and whatever must come later takes the token as an input.
"""

from collections.abc import Sequence

import mlx.core as mx

from mlx_paged_attention.ops.kernels.make import words


def joined(tokens: Sequence[mx.array]) -> mx.array:
    """One token for several: what takes it comes after all of them."""
    if not tokens:
        return words()
    if len(tokens) == 1:
        return tokens[0]
    return mx.concatenate([token.reshape(-1) for token in tokens])
