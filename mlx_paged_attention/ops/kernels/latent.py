"""latent_decode: attention of single tokens over blocks of latents (MLA), read where they lie."""

from dataclasses import replace

import mlx.core as mx

from mlx_paged_attention.ops.kernels.decode import TYPES, float_bits, matrix_type, merge_splits
from mlx_paged_attention.ops.kernels.make import Kernel, TemplateArgument, backend, unread
from mlx_paged_attention.ops.kernels.order import no_token
from mlx_paged_attention.ops.kernels.work_list import WorkList

_INPUTS = ("q", "q_rope", "latents", "ropes", "block_tables", "context_lens", "items", "after")
_DECODE = Kernel("latent_decode", _INPUTS, ("out", "lse"))
_DECODE_AND_MERGE = replace(
    _DECODE,
    inputs=(*_INPUTS, "sinks", "splits"),
    outputs=("out", "lse", "merged", "merged_lse"),
    mutable=("splits",),
    tail="merge_last.cu",
)
# Of the dimensions that a simdgroup holds in registers: of a latent, and 16 at a time of the rope's part.
LARGEST_SLICE = 64
MOST_PARTS = 2


def supports_latents(stored: mx.Dtype, block_size: int, latent_dim: int, rope_dim: int) -> bool:
    """Whether there is a kernel for such a pool: latents in steps of 16 that simdgroups can share in slices
    of at most 64, parts for the rope and blocks in steps of 8."""
    sizes = latent_dim % 16 == 0 and latent_dim // simdgroups(latent_dim) <= LARGEST_SLICE
    ropes = 8 <= rope_dim <= 16 * simdgroups(latent_dim) * MOST_PARTS and rope_dim % 8 == 0
    return stored in TYPES and block_size % 8 == 0 and sizes and ropes


def simdgroups(latent_dim: int) -> int:
    """Of a threadgroup: each takes as many of the latent's dimensions, in steps of 16."""
    return next((count for count in (8, 4, 2) if latent_dim % (16 * count) == 0), 1)


def tiles(q_dtype: mx.Dtype, stored: mx.Dtype, heads: int) -> int:
    """Tiles of 16 heads that a threadgroup works on, which then share what it loads."""
    # Two need more registers, and more threadgroup memory, than Metal has.
    wide = matrix_type(q_dtype, stored) == mx.float32
    return 1 if heads <= 16 or wide or backend() == "metal" else 2


def keys_per_step(q_dtype: mx.Dtype, stored: mx.Dtype) -> int:
    """Tokens that a threadgroup works on at a time; it holds those after them, too."""
    return 16 if matrix_type(q_dtype, stored) == mx.float32 else 32


def latent_threadgroups_per_item(q: mx.array, latents: mx.array) -> int:
    """How many threadgroups share one item of a work list for ``q [rows, heads, 1, latent_dim]``."""
    return -(-q.shape[1] // (16 * tiles(q.dtype, latents.dtype, q.shape[1])))


def latent_decode(
    q: mx.array,
    q_rope: mx.array,
    latents: mx.array,
    ropes: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    work: WorkList,
    *,
    scale: float,
    after: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Attention of one query per row over the row's blocks, whose latents are keys and values at once.

    A token's score is ``scale * q · latent + q_rope · rope``, in float32.

    Args:
        q: ``[rows, heads, 1, latent_dim]``, strided as it likes.
        q_rope: ``[rows, heads, 1, rope_dim]``, likewise, in ``q``'s type; scaled already.
        latents: ``[blocks, 1, block_size, latent_dim]``, a whole array.
        ropes: ``[blocks, 1, block_size, rope_dim]``, likewise.
        block_tables: int32 ``[rows, width]``.
        context_lens: int32 ``[rows]``.
        work: the pieces of these contexts.
        scale: factor of the latents' part of the scores.
        after: the ordering token of what must have happened before.

    Returns:
        ``[rows, heads, 1, latent_dim]`` in ``q``'s type, 0 for a row without context; the log-sum-exp of
        each query's scores, float32 ``[rows, 1, heads]``, −inf there; the ordering token.

    Calls that share ``work`` must run one after another, as those of a model's layers do.

    Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.
    """
    rows, heads, _, latent_dim = q.shape
    after = no_token() if after is None else after
    items, sg = work.items.shape[0], simdgroups(latent_dim)
    out_rows, out_type = (items, mx.float32) if work.split else (rows, q.dtype)
    template: list[tuple[str, TemplateArgument]] = [
        ("O", out_type),
        ("S", latents.dtype),
        ("M", matrix_type(q.dtype, latents.dtype)),
        ("H", heads),
        ("DV", latent_dim),
        ("DR", ropes.shape[3]),
        ("BS", latents.shape[2]),
        ("TILES", tiles(q.dtype, latents.dtype, heads)),
        ("SG", sg),
        ("KEYS", keys_per_step(q.dtype, latents.dtype)),
        ("SCALE_BITS", float_bits(scale)),
        ("SPLIT", work.split),
    ]
    inputs = [q, q_rope, latents, ropes, block_tables, context_lens, work.items, after]
    grid = (32 * sg * latent_threadgroups_per_item(q, latents), items, 1)
    threadgroup = (32 * sg, 1, 1)
    shapes = [(out_rows, heads, 1, latent_dim), (out_rows, 1, heads)]
    types = [out_type, mx.float32]
    if work.split and backend() == "cuda":
        _, token, out, lse = _DECODE_AND_MERGE(
            [*inputs, unread(), work.splits],
            [*template, ("R", q.dtype), ("SINKS", False)],
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[*shapes, (rows, heads, 1, latent_dim), (rows, 1, heads)],
            output_dtypes=[*types, q.dtype, mx.float32],
        )
        return out, lse, token
    out, lse = _DECODE(
        inputs, template, grid=grid, threadgroup=threadgroup, output_shapes=shapes, output_dtypes=types
    )
    token = lse
    if work.split:
        out, lse = merge_splits(out, lse, work.splits, q.dtype)
    return out, lse, token
