"""largest: the k greatest entries of each row, exactly, without sorting the vocabulary."""

import mlx.core as mx

CHUNK = 32


def largest(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The ``k`` greatest entries of every row, greatest first, equal ones by ascending position.

    The k greatest lie in the k chunks with the greatest maxima (each of those chunks holds an entry
    that goes before anything elsewhere), so only these chunks are sorted.

    Args:
        x: ``[rows, entries]`` without NaN.
        k: at least 1; more than ``entries`` means all.

    Returns:
        values ``[rows, k]`` and their positions ``[rows, k]``.
    """
    rows, entries = x.shape
    k = min(k, entries)
    if k * CHUNK >= entries:
        order = mx.argsort(-x, axis=-1)[:, :k]
        return mx.take_along_axis(x, order, -1), order
    chunks = in_chunks(x, -mx.inf)
    best = mx.argsort(-mx.max(chunks, axis=-1), axis=-1)[:, :k]
    # Back in ascending order, so that a stable sort keeps equal entries in theirs.
    best = mx.sort(best, axis=-1)[:, :, None]
    values = mx.take_along_axis(chunks, best, 1).reshape(rows, -1)
    positions = (best * CHUNK + mx.arange(CHUNK, dtype=best.dtype)).reshape(rows, -1)
    order = mx.argsort(-values, axis=-1)[:, :k]
    return mx.take_along_axis(values, order, -1), mx.take_along_axis(positions, order, -1)


def in_chunks(x: mx.array, filler: float) -> mx.array:
    """``[rows, entries]`` as ``[rows, chunks, CHUNK]``, the last chunk filled up with ``filler``."""
    rows, entries = x.shape
    missing = -entries % CHUNK
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)], constant_values=filler)
    return x.reshape(rows, -1, CHUNK)
