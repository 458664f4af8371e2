"""The CPU's compiled loops: attention that reads blocks in place, and the parts of chunk attention."""

import math
import os
import threading
from typing import Any

# OpenMP's threads would spin between two of our loops, on the cores that MLX's matmuls need.
# Read when the OpenMP library is loaded, which numba does for the first loop.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numba
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

# One parallel loop at a time, whatever engine it belongs to: it takes all cores, and the threads numba falls
# back to where it finds no OpenMP abort the process when two callers enter them.
ONE_LOOP = threading.Lock()

# Reassociation lets the compiler vectorise sums. Infinities and NaN keep their meaning: the
# running maximum starts at -inf, and slots outside a context may hold anything.
_FAST = {"reassoc", "contract", "arcp", "nsz"}
# Multiplications below which waking other threads, some 50 microseconds, costs more than it saves.
SERIAL_WORK = 1_000_000
_LOG2_E = np.float32(1.4426950408889634)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def exp_below_zero(x: Any) -> Any:
    """e^x for x <= 0 in float32, to two units in the last place; vectorises, which libm's does not.

    2^k times a minimax polynomial of 2^f on [-1/2, 1/2]. Anything below 2^-126 gives about 1e-38.
    """
    y = max(x * _LOG2_E, np.float32(-126))
    k = np.floor(y + np.float32(0.5))
    f = y - k
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1)
    return p * (np.int32((np.int32(k) + 127) << 23)).view(np.float32)


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
        k_pool, v_pool: ``[kv_heads, blocks, block_size, head_dim]``.
        block_tables: ``[rows, width]``.
        context_lens: ``[n]``, positions each query attends to.
        window: attend to the last ``window`` positions only; 0 is all.
        softcap: 0 is none.
        sinks: ``[heads]`` or empty.
        out: ``[n, heads, v_head_dim]``; a query without context gives 0.

    Softmax is computed online, block by block (Milakov & Gimelshein 2018,
    https://arxiv.org/abs/1805.02867).
    """
    work = int(context_lens.sum()) * q.shape[1] * q.shape[2]
    # The first call compiles the parallel loop however small it is: no request should wait for that.
    serial = work < SERIAL_WORK and _parallel.signatures
    loop = _serial if serial else _parallel
    loop(q, k_pool, v_pool, block_tables, context_lens, queries_per_row, scale, window, softcap, sinks, out)


def _attend_rows(
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
    n, heads, head_dim = q.shape
    kv_heads, _, block_size, _ = k_pool.shape
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
        scores = np.empty((group, block_size), np.float32)
        if sinks.shape[0] > 0:
            for g in range(group):
                peak[g] = sinks[head + g]
                total[g] = np.float32(1)

        for index in range(first // block_size, (context + block_size - 1) // block_size):
            block = table[index]
            begin = max(0, first - index * block_size)
            end = min(block_size, context - index * block_size)
            # Loops over slices from 0 vectorise: no index can be negative.
            keys = k_pool[kv_head, block, begin:end]
            values = v_pool[kv_head, block, begin:end]
            for g in range(group):
                query = q[row, head + g]
                weights = scores[g, : keys.shape[0]]
                best = peak[g]
                for j in range(keys.shape[0]):
                    score = np.float32(0)
                    for d in range(head_dim):
                        score += query[d] * keys[j, d]
                    score *= scale
                    if softcap > 0:
                        score = softcap * np.float32(math.tanh(score / softcap))
                    weights[j] = score
                    best = max(best, score)
                # exp(-inf - best) is 0: the first block has nothing to rescale.
                shrink = np.float32(math.exp(peak[g] - best)) if best > -np.inf else np.float32(1)
                peak[g] = best
                mass = np.float32(0)
                for j in range(keys.shape[0]):
                    weight = exp_below_zero(weights[j] - best)
                    weights[j] = weight
                    mass += weight
                total[g] = total[g] * shrink + mass
                for d in range(v_dim):
                    acc[g, d] *= shrink
            for j in range(values.shape[0]):
                for g in range(group):
                    weight = scores[g, j]
                    for d in range(v_dim):
                        acc[g, d] += weight * values[j, d]

        for g in range(group):
            norm = np.float32(1) / total[g] if total[g] > 0 else np.float32(0)
            for d in range(v_dim):
                out[row, head + g, d] = acc[g, d] * norm


_serial = numba.njit(fastmath=_FAST, cache=True, error_model="numpy")(_attend_rows)
_parallel = numba.njit(parallel=True, fastmath=_FAST, cache=True, error_model="numpy")(_attend_rows)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def write_tokens(keys: F32, values: F32, slots: NDArray[np.int64], k_pool: F32, v_pool: F32) -> None:
    """Copy ``[n, kv_heads, head_dim]`` keys and values to slots int64 ``[n]`` of a layer's pool."""
    block_size = k_pool.shape[2]
    for token in range(slots.shape[0]):
        block = slots[token] // block_size
        offset = slots[token] % block_size
        for head in range(keys.shape[1]):
            for d in range(keys.shape[2]):
                k_pool[head, block, offset, d] = keys[token, head, d]
            for d in range(values.shape[2]):
                v_pool[head, block, offset, d] = values[token, head, d]


@numba.njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def gather_positions(pool: F32, table: NDArray[np.int32], first: int, out: F32) -> None:
    """Copy positions ``first``, ``first + 1``, ... of a sequence to ``out``, ``[kv_heads, n, head_dim]``."""
    block_size = pool.shape[2]
    kv_heads, count, _ = out.shape
    begin = first // block_size
    for index in numba.prange(begin, (first + count + block_size - 1) // block_size):
        low = max(first, index * block_size)
        high = min(first + count, (index + 1) * block_size)
        for head in range(kv_heads):
            source = pool[head, table[index]]
            out[head, low - first : high - first] = source[
                low - index * block_size : high - index * block_size
            ]


@numba.njit(parallel=True, fastmath=_FAST, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def causal_softmax(
    scores: F32, group: int, first_end: int, scale: Any, window: int, softcap: Any, sinks: F32
) -> None:
    """Turn raw scores into attention weights, in place.

    Args:
        scores: ``[kv_heads, queries * group, keys]``; row ``i * group + g`` is query ``i`` of the
            group's head ``g``, and may look at keys below ``first_end + i``.
        scale: positive; window, softcap: as in :func:`attend_rows`.
        sinks: ``[kv_heads * group]`` or empty.
    """
    kv_heads, rows, _ = scores.shape
    for task in numba.prange(kv_heads * rows):
        kv_head = task // rows
        index = task % rows
        end = first_end + index // group
        begin = max(0, end - window) if window > 0 else 0
        row = scores[kv_head, index]
        live = row[begin:end]  # loops over a slice from 0 vectorise: no index can be negative
        if softcap > 0:
            for j in range(live.shape[0]):
                live[j] = softcap * np.float32(math.tanh(live[j] * scale / softcap)) / scale
        # Scaling after the subtraction keeps this a plain maximum.
        best = np.float32(-np.inf)
        for j in range(live.shape[0]):
            best = max(best, live[j])
        total = np.float32(0)
        if sinks.shape[0] > 0:
            sink = sinks[kv_head * group + index % group]
            best = max(best, np.float32(sink / scale))
            total = np.float32(math.exp(sink - best * scale))
        for j in range(live.shape[0]):
            weight = exp_below_zero((live[j] - best) * scale)
            live[j] = weight
            total += weight
        norm = np.float32(1) / total
        for j in range(live.shape[0]):
            live[j] *= norm
        row[:begin] = 0
        row[end:] = 0
