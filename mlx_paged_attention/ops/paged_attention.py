"""The public operation: attention of single tokens over paged keys and values."""

import mlx.core as mx
import numpy as np

from mlx_paged_attention.ops.kernels.decode import TYPES, paged_decode, supports, threadgroups_per_item
from mlx_paged_attention.ops.kernels.make import backend, upload
from mlx_paged_attention.ops.kernels.work_list import work_list


def paged_attention(
    q: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attention of one query token per row over that row's blocks.

    Every row is a token with a context of its own, so decode, short extends and the
    verification of drafts are the same call. Scores and sums are float32. Slots at or beyond
    a row's context may hold anything, NaN included. On a GPU this runs the project's kernel
    where it knows the shapes (head sizes up to 256 in steps of 16, blocks in steps of 8), which
    reads ``context_lens`` on the host to share out the work; anywhere else ``plain_attention``.

    Args:
        q: ``[rows, heads, head_dim]``, any floating type.
        k_pool: ``[blocks, kv_heads, block_size, head_dim]``.
        v_pool: ``[blocks, kv_heads, block_size, v_head_dim]``.
        block_tables: int32 ``[rows, width]``, block ids by position; entries beyond a row's
            context are ignored but must be valid block ids.
        context_lens: int32 ``[rows]``, positions each row attends to, 0 included, at most
            ``width * block_size``.
        scale: factor of the scores, ``head_dim ** -0.5`` by default.
        window: attend to the last ``window`` positions of the context only.
        sinks: ``[heads]``, a logit per head that takes part in the softmax without a value
            (https://arxiv.org/abs/2309.17453).
        softcap: scores become ``softcap * tanh(scores / softcap)``
            (https://arxiv.org/abs/2408.00118).

    Returns:
        ``[rows, heads, v_head_dim]`` in ``q``'s type; a row without context gives 0.

    Raises:
        ValueError: shapes do not fit together.

    Source: Kwon et al. 2023, https://arxiv.org/abs/2309.06180.
    """
    rows, heads, head_dim = q.shape
    kv_heads, block_size = k_pool.shape[1], k_pool.shape[2]
    if k_pool.shape[3] != head_dim or v_pool.shape[:3] != k_pool.shape[:3]:
        raise ValueError(
            f"[paged_attention] q {q.shape}, k_pool {k_pool.shape} and v_pool {v_pool.shape} do not fit"
        )
    if heads % kv_heads:
        raise ValueError(f"[paged_attention] {heads} heads are no multiple of {kv_heads} kv heads")
    if block_tables.shape[0] != rows or context_lens.shape != (rows,):
        raise ValueError(
            f"[paged_attention] {rows} rows need block_tables [{rows}, width] and context_lens [{rows}], "
            f"not {block_tables.shape} and {context_lens.shape}"
        )
    scale = head_dim**-0.5 if scale is None else scale
    known = (
        q.dtype in TYPES
        and k_pool.dtype == v_pool.dtype
        and supports(k_pool.dtype, block_size, head_dim, v_pool.shape[3])
    )
    if backend() is None or not known:
        return plain_attention(
            q, k_pool, v_pool, block_tables, context_lens,
            scale=scale, window=window, sinks=sinks, softcap=softcap,
        )  # fmt: skip
    # Kernels take arrays as they lie in memory. This copies nothing unless one is a strided view.
    k_pool, v_pool = mx.contiguous(k_pool), mx.contiguous(v_pool)
    block_tables = mx.contiguous(block_tables.astype(mx.int32))
    lens = np.array(context_lens.astype(mx.int32))
    q = q[:, :, None]
    work = work_list(
        lens,
        1,
        block_size=block_size,
        threadgroups_per_item=threadgroups_per_item(q, k_pool, v_pool),
        window=window,
    )
    out, _, _ = paged_decode(
        q, k_pool, v_pool, block_tables, upload(lens), work,
        scale=scale, window=window, sinks=sinks, softcap=softcap,
    )  # fmt: skip
    return out.squeeze(2)


def plain_attention(
    q: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """``paged_attention`` in plain MLX: it gathers the rows' blocks. The reference for every faster path."""
    rows, heads, head_dim = q.shape
    kv_heads, block_size = k_pool.shape[1], k_pool.shape[2]
    positions = mx.arange(block_tables.shape[1] * block_size)
    lens = context_lens[:, None]
    allowed = positions < lens
    if window is not None:
        allowed = allowed & (positions >= lens - window)
    allowed = allowed[:, None, None]  # [rows, 1, 1, positions]

    # NaN in a slot outside the context would survive a product with 0: take it out first.
    live = allowed.transpose(0, 1, 3, 2)
    keys = mx.where(live, gather_blocks(k_pool, block_tables).astype(mx.float32), 0.0)
    values = mx.where(live, gather_blocks(v_pool, block_tables).astype(mx.float32), 0.0)

    group = heads // kv_heads
    grouped = q.astype(mx.float32).reshape(rows, kv_heads, group, head_dim)
    scores = (grouped * scale) @ keys.swapaxes(-1, -2)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    scores = mx.where(allowed, scores, -mx.inf)
    peak = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        logits = sinks.astype(mx.float32).reshape(kv_heads, group, 1)
        peak = mx.maximum(peak, logits)
    # A row without context has a peak of -inf; any finite stand-in gives weights of exp(-inf) = 0.
    peak = mx.where(peak == -mx.inf, 0.0, peak)
    weights = mx.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(logits - peak)
    out = (weights @ values) / mx.where(total == 0, 1.0, total)
    return out.reshape(rows, heads, -1).astype(q.dtype)


def gather_blocks(pool: mx.array, block_tables: mx.array) -> mx.array:
    """A plane's blocks by table: ``[rows, kv_heads, width * block_size, head_dim]``."""
    rows, width = block_tables.shape
    blocks, kv_heads, block_size, head_dim = pool.shape
    # Gathering whole head runs is several times faster than gathering blocks and transposing.
    runs = pool.reshape(blocks * kv_heads, block_size, head_dim)
    index = block_tables[:, None] * kv_heads + mx.arange(kv_heads)[None, :, None]
    return runs[index].reshape(rows, kv_heads, width * block_size, head_dim)
