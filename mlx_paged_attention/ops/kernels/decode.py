"""paged_decode: attention of single tokens and short runs of queries over blocks, read where they lie."""

from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_paged_attention.ops.kernels.make import (
    Kernel,
    TemplateArgument,
    backend,
    copies_to_shared_memory,
    unread,
)
from mlx_paged_attention.ops.kernels.order import no_token
from mlx_paged_attention.ops.kernels.work_list import SIMDGROUPS, WorkList

_INPUTS = ("q", "k_pool", "v_pool", "block_tables", "context_lens", "items", "sinks", "picked", "after")
_DECODE = Kernel("paged_decode", _INPUTS, ("out", "lse"))
_DECODE_AND_MERGE = replace(
    _DECODE,
    inputs=(*_INPUTS, "splits"),
    outputs=("out", "lse", "merged", "merged_lse"),
    mutable=("splits",),
    tail="merge_last.cu",
)
# The same where keys and values come by way of shared memory.
_STAGED, _STAGED_AND_MERGE = (replace(kernel, head="staged.cu") for kernel in (_DECODE, _DECODE_AND_MERGE))
_MERGE = Kernel("merge_splits", ("parts", "lses", "splits", "sinks"), ("out", "lse"))

# With so few there are fewer loads under way than the memory could serve, so that blocks are asked for
# ahead of their loads (where the back end can); with more, that would only throw others out of the cache.
FEW_THREADGROUPS = 32

# Where keys and values come by way of shared memory, a multiprocessor has that of two threadgroups, less what
# they merge their simdgroups' results in (for each tile); or of one, where two steps of that many bytes, one
# under way while another is worked on, need more. More than a few steps would gain nothing.
SHARED_MEMORY = 112 << 10
MERGED_IN = 9 << 10
LARGEST_STEP = 96 << 10
MOST_STAGES = 6

TYPES = (mx.float16, mx.bfloat16, mx.float32)


def supports(stored: mx.Dtype, block_size: int, *head_dims: int) -> bool:
    """Whether there are kernels for such a pool: head sizes in steps of 16, blocks in steps of 8."""
    sizes = all(16 <= dim <= 256 and dim % 16 == 0 for dim in head_dims)
    return stored in TYPES and block_size % 8 == 0 and sizes


def matrix_type(q_dtype: mx.Dtype, stored: mx.Dtype) -> mx.Dtype:
    """The type of the factors of matrix products, whose sums are float32 always."""
    return q_dtype if q_dtype == stored else mx.float32


def tiles(q_dtype: mx.Dtype, k_pool: mx.array, v_pool: mx.array, columns: int) -> int:
    """Tiles of 8 columns, a column being a query and a head, that a threadgroup works on."""
    wide = max(k_pool.shape[3], v_pool.shape[3]) > 128 or matrix_type(q_dtype, k_pool.dtype) == mx.float32
    return 1 if columns <= 8 or wide or backend() == "metal" else 2


def threadgroups_per_item(q: mx.array, k_pool: mx.array, v_pool: mx.array, queries: int = 0) -> int:
    """How many threadgroups share one item of a work list.

    Args:
        q: ``[rows, heads, queries, head_dim]``, or with ``queries`` per row picked from its tokens.
    """
    kv_heads = k_pool.shape[1]
    columns = q.shape[1] // kv_heads * (queries or q.shape[2])
    return int(kv_heads * -(-columns // (8 * tiles(q.dtype, k_pool, v_pool, columns))))


def stages(k_pool: mx.array, v_pool: mx.array, tiles: int) -> tuple[int, int]:
    """Steps that are fetched ahead through shared memory, and its bytes; 0 where registers do instead."""
    step = 16 * SIMDGROUPS * (k_pool.shape[3] + v_pool.shape[3]) * k_pool.dtype.size
    if not copies_to_shared_memory() or step > LARGEST_STEP:
        return 0, 0
    count = min(max(2, (SHARED_MEMORY - tiles * MERGED_IN) // step), MOST_STAGES)
    return count, count * step


def paged_decode(
    q: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    work: WorkList,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    picked: mx.array | None = None,
    after: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Attention of several queries per row over the row's blocks.

    The contexts are split across threadgroups ("flash decoding",
    https://pytorch.org/blog/flash-decoding/) and merged by their log-sum-exp.

    Args:
        q: ``[rows, heads, queries, head_dim]``, strided as it likes.
        k_pool, v_pool: ``[blocks, kv_heads, block_size, head_dim]``, whole arrays.
        block_tables: int32 ``[rows, width]``.
        context_lens: int32 ``[rows * queries]``.
        work: the pieces of these contexts, cut for this window.
        scale, window, sinks, softcap: as for ``paged_attention``.
        picked: int32 ``[rows, queries]``: each query's place among ``q``'s tokens, which then is
            ``[tokens, heads, 1, head_dim]``; ``None`` where queries lie row by row.
        after: the ordering token of what must have happened before, such as the writes of these keys.

    Returns:
        ``[rows, heads, queries, v_head_dim]`` in ``q``'s type; the log-sum-exp of each
        query's scores (sinks included), float32 ``[rows, queries, heads]``, −inf where
        there is nothing to attend to; the ordering token for what may happen only once the
        pool has been read.

    Calls that share ``work`` must run one after another, as those of a model's layers do.
    """
    rows, heads, queries, head_dim = q.shape
    if picked is not None:
        rows, queries = picked.shape
    kv_heads, block_size, v_dim = k_pool.shape[1], k_pool.shape[2], v_pool.shape[3]
    after = no_token() if after is None else after
    sink_values = unread() if sinks is None else sinks
    items = work.items.shape[0]
    threadgroups = threadgroups_per_item(q, k_pool, v_pool, queries)
    tiles_each = tiles(q.dtype, k_pool, v_pool, heads // kv_heads * queries)
    ahead, shared_memory = stages(k_pool, v_pool, tiles_each)
    out_rows, out_type = (items, mx.float32) if work.split else (rows, q.dtype)
    template: list[tuple[str, TemplateArgument]] = [
        ("O", out_type),
        ("S", k_pool.dtype),
        ("M", matrix_type(q.dtype, k_pool.dtype)),
        ("H", heads),
        ("KH", kv_heads),
        ("DK", head_dim),
        ("DV", v_dim),
        ("BS", block_size),
        ("TILES", tiles_each),
        ("SG", SIMDGROUPS),
        ("WINDOW", window or 0),
        ("SOFTCAP", softcap is not None),
        ("SCALE_BITS", float_bits(scale)),
        ("CAP_BITS", float_bits(softcap or 0.0)),
        ("SINKS", sinks is not None),
        ("PICKED", 0 if picked is None else queries),
        ("SPLIT", work.split),
        ("STAGES", ahead) if ahead else ("PREFETCH", rows * threadgroups <= FEW_THREADGROUPS),
    ]
    places = unread() if picked is None else picked
    inputs = [q, k_pool, v_pool, block_tables, context_lens, work.items, sink_values, places, after]
    grid = (32 * SIMDGROUPS * threadgroups, items, 1)
    threadgroup = (32 * SIMDGROUPS, 1, 1)
    shapes = [_result_shape(out_rows, queries, heads, v_dim), (out_rows, queries, heads)]
    types = [out_type, mx.float32]
    if work.split and backend() == "cuda":
        kernel = _STAGED_AND_MERGE if ahead else _DECODE_AND_MERGE
        _, token, out, lse = kernel(
            [*inputs, work.splits],
            [*template, ("R", q.dtype)],
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[*shapes, _result_shape(rows, queries, heads, v_dim), (rows, queries, heads)],
            output_dtypes=[*types, q.dtype, mx.float32],
            shared_memory=shared_memory,
        )
    else:
        kernel = _STAGED if ahead else _DECODE
        out, lse = kernel(
            inputs,
            template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=shapes,
            output_dtypes=types,
            shared_memory=shared_memory,
        )
        token = lse
        if work.split:
            out, lse = merge_splits(out, lse, work.splits, q.dtype, sinks)
    return out if queries == 1 else out.swapaxes(1, 2), lse, token


def float_bits(x: float) -> int:
    """A float32's bits as an int32."""
    return int(np.float32(x).view(np.int32))


def _result_shape(rows: int, queries: int, heads: int, v_dim: int) -> tuple[int, int, int, int]:
    """Kernels write ``[rows, queries, heads, v_dim]``: with one query that is what callers want, too."""
    return (rows, heads, 1, v_dim) if queries == 1 else (rows, queries, heads, v_dim)


def merge_splits(
    parts: mx.array, lses: mx.array, splits: mx.array, dtype: mx.Dtype, sinks: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Merge the results over pieces of a context.

    Args:
        parts: float32 ``[items, queries, heads, v_head_dim]``, or ``[items, heads, 1, v_head_dim]`` for
            one query, each piece normalised by itself.
        lses: float32 ``[items, queries, heads]``.
        splits: int32 ``[rows, 2 or more]``, each row's first item and number of items.
        dtype: of the result.
        sinks: ``[heads]``.

    Returns:
        The same for each row: ``[rows, ...]`` and its log-sum-exp ``[rows, queries, heads]``.
    """
    _, queries, heads = lses.shape
    v_dim = parts.shape[3]
    rows = splits.shape[0]
    out, lse = _MERGE(
        [parts, lses, splits, unread() if sinks is None else sinks],
        [("T", dtype), ("H", heads), ("DV", v_dim), ("SG", SIMDGROUPS), ("SINKS", sinks is not None)],
        grid=(32 * SIMDGROUPS * heads, rows * queries, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[_result_shape(rows, queries, heads, v_dim), (rows, queries, heads)],
        output_dtypes=[dtype, mx.float32],
    )
    return out, lse
