"""Attention of a long run of queries over contiguous keys: MLX's own kernel, memory bounded."""

import mlx.core as mx

from mlx_paged_attention.ops.kernels.make import backend

# Where MLX's attention is not fused it holds [heads, queries, keys] scores: keep them below this.
MAX_SCORES_BYTES = 256 << 20

# On CUDA MLX makes a plan for every new pair of lengths, which takes a tenth of a second, and keeps
# few of them. There queries and keys are padded to begin and end at multiples of this.
ALIGNED = 128


def chunk_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Causal attention of one sequence's chunk.

    Args:
        queries: ``[1, heads, L, head_dim]``, the tokens at key indices ``start .. start + L - 1``.
        keys, values: ``[1, kv_heads, start + L, head_dim]``.
        window: attend to this many positions, the query's own included.

    Returns:
        ``[1, heads, L, v_head_dim]``.
    """
    if backend() == "cuda":
        return _aligned(queries, keys, values, start, scale, window, sinks)
    return _sliced(queries, keys, values, start, scale, window, sinks)


def _aligned(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    start: int,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """As ``_sliced``, with rows before and after the chunk's: what is after no query of it sees."""
    length = queries.shape[2]
    before, after = start % ALIGNED, -(start + length) % ALIGNED
    behind = [(0, 0), (0, 0), (0, after), (0, 0)]
    out = _sliced(
        mx.pad(queries, [(0, 0), (0, 0), (before, after), (0, 0)]),
        mx.pad(keys, behind),
        mx.pad(values, behind),
        start - before,
        scale,
        window,
        sinks,
    )
    return out[:, :, before : before + length]


def _is_fused(queries: mx.array, values: mx.array) -> bool:
    """Whether MLX's attention keeps no scores: on CUDA, by cuDNN, of these types and up to this size."""
    short = max(queries.shape[3], values.shape[3]) <= 128
    return backend() == "cuda" and short and queries.dtype in (mx.float16, mx.bfloat16)


def _sliced(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    start: int,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """In slices of as many queries as the memory for scores allows."""
    heads, length = queries.shape[1], queries.shape[2]
    most = max(1, MAX_SCORES_BYTES // (4 * heads * (start + length)))
    if sinks is None and _is_fused(queries, values):
        most = length
    pieces = []
    for begin in range(0, length, most):
        end = min(begin + most, length)
        first = 0 if window is None else max(0, start + begin - window + 1)
        last = start + end
        mask: str | mx.array = "causal"
        if window is not None and last - first > window:
            rows = mx.arange(start + begin, last)[:, None]
            columns = mx.arange(first, last)[None]
            mask = (columns <= rows) & (columns > rows - window)
        pieces.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, begin:end],
                keys[:, :, first:last],
                values[:, :, first:last],
                scale=scale,
                mask=mask,
                sinks=sinks,
            )
        )
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)
