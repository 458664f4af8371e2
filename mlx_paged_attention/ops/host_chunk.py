"""Attention of a run of consecutive queries on the CPU: two matrix products around one softmax."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops.chunk import MAX_SCORES_BYTES
from mlx_paged_attention.ops.host_kernel import F32, causal_softmax, gather_positions


def attend_run(
    q: F32,
    k_pool: F32,
    v_pool: F32,
    table: NDArray[np.int32],
    start: int,
    *,
    scale: float,
    window: int | None,
    sinks: F32,
    out: F32,
) -> None:
    """Attention of one sequence's tokens at positions ``start``, ``start + 1``, ..., written to ``out``.

    The context is gathered once for all queries, and a group's query heads share one product with
    it, so that a long context costs what its multiplications cost. They are MLX's: numpy brings a
    BLAS of its own, whose threads would fight with those that MLX's last product left spinning.
    Scores stay below ``MAX_SCORES_BYTES`` by slicing queries.

    Args:
        q: ``[n, heads, head_dim]``.
        k_pool, v_pool: ``[kv_heads, blocks, block_size, head_dim]``, the new tokens already written.
        table: the sequence's block ids.
        window: attend to the last ``window`` positions only.
        sinks: ``[heads]`` or empty.
        out: ``[n, heads, v_head_dim]``.
    """
    n, heads, head_dim = q.shape
    kv_heads, v_dim = k_pool.shape[0], v_pool.shape[3]
    group = heads // kv_heads
    most = max(1, MAX_SCORES_BYTES // (4 * heads * (start + n)))
    for low in range(0, n, most):
        high = min(low + most, n)
        first = 0 if window is None else max(0, start + low - window + 1)
        count = start + high - first
        keys = np.empty((kv_heads, count, head_dim), np.float32)
        values = np.empty((kv_heads, count, v_dim), np.float32)
        gather_positions(k_pool, table, first, keys)
        gather_positions(v_pool, table, first, values)
        part = q[low:high].reshape(high - low, kv_heads, group, head_dim)
        grouped = part.transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
        scores = mx.array(grouped) @ mx.array(keys).swapaxes(1, 2)
        mx.eval(scores)
        weights = np.array(scores, copy=False)  # the same memory: softmax happens in it
        end = start + low + 1 - first
        causal_softmax(weights, group, end, np.float32(scale), window or 0, np.float32(0), sinks)
        product = scores @ mx.array(values)
        mx.eval(product)
        mixed = np.array(product, copy=False).reshape(kv_heads, high - low, group, v_dim)
        out[low:high] = mixed.transpose(1, 0, 2, 3).reshape(high - low, heads, v_dim)
        del scores, weights  # before the next slice's are made
