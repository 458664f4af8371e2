"""The CPU's paged attention: one compiled loop over rows and KV heads that reads blocks in place."""

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

# Reassociation lets the compiler vectorise sums. Infinities and NaN keep their meaning: the
# running maximum starts at -inf, and slots outside a context may hold anything.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


@numba.njit(parallel=True, fastmath=_FAST, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def attend_rows(
    q: F32,
    k_pool: F32,
    v_pool: F32,
    block_tables: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    queries_per_row: int,
    scale: Any,
    window: int,
    softcap: Any,
    sinks: F32,
    out: F32,
) -> None:
    """Attention of ``[n, heads, head_dim]`` query tokens, written to ``out``.

    Args:
        q: ``[n, heads, head_dim]``; query ``i`` belongs to table row ``i // queries_per_row``.
        k_pool, v_pool: ``[blocks, kv_heads, block_size, head_dim]``.
        block_tables: ``[rows, width]``.
        context_lens: ``[n]``, positions each query attends to.
        window: attend to the last ``window`` positions only; 0 is all.
        softcap: 0 is none.
        sinks: ``[heads]`` or empty.
        out: ``[n, heads, v_head_dim]``; a query without context gives 0.

    Softmax is computed online, block by block (Milakov & Gimelshein 2018,
    https://arxiv.org/abs/1805.02867).
    """
    n, heads, head_dim = q.shape
    kv_heads, block_size = k_pool.shape[1], k_pool.shape[2]
    v_dim = v_pool.shape[3]
    group = heads // kv_heads
    for task in numba.prange(n * kv_heads):
        row = task // kv_heads
        kv_head = task % kv_heads
        table = block_tables[row // queries_per_row]
        context = context_lens[row]
        first = max(0, context - window) if window > 0 else 0
        head = kv_head * group

        peak = np.full(group, -np.inf, np.float32)
        total = np.zeros(group, np.float32)
        acc = np.zeros((group, v_dim), np.float32)
        weights = np.empty((group, block_size), np.float32)
        if sinks.shape[0] > 0:
            for g in range(group):
                peak[g] = sinks[head + g]
                total[g] = np.float32(1)

        for index in range(first // block_size, (context + block_size - 1) // block_size):
            block = table[index]
            begin = max(0, first - index * block_size)
            end = min(block_size, context - index * block_size)
            keys = k_pool[block, kv_head]
            values = v_pool[block, kv_head]
            for g in range(group):
                query = q[row, head + g]
                best = peak[g]
                for j in range(begin, end):
                    score = np.float32(0)
                    for d in range(head_dim):
                        score += query[d] * keys[j, d]
                    score *= scale
                    if softcap > 0:
                        score = softcap * np.float32(math.tanh(score / softcap))
                    weights[g, j] = score
                    best = max(best, score)
                # exp(-inf - best) is 0: the first block has nothing to rescale.
                shrink = np.float32(math.exp(peak[g] - best)) if best > -np.inf else np.float32(1)
                peak[g] = best
                mass = np.float32(0)
                for j in range(begin, end):
                    weight = np.float32(math.exp(weights[g, j] - best))
                    weights[g, j] = weight
                    mass += weight
                total[g] = total[g] * shrink + mass
                for d in range(v_dim):
                    acc[g, d] *= shrink
            for j in range(begin, end):
                for g in range(group):
                    weight = weights[g, j]
                    for d in range(v_dim):
                        acc[g, d] += weight * values[j, d]

        for g in range(group):
            norm = np.float32(1) / total[g] if total[g] > 0 else np.float32(0)
            for d in range(v_dim):
                out[row, head + g, d] = acc[g, d] * norm
