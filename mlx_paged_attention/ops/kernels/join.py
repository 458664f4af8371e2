"""join_rows: the results of two kernels as one array."""

import math

import mlx.core as mx

from mlx_paged_attention.ops.kernels.make import Kernel

_JOIN = Kernel("join_rows", ("first", "last", "order"), ("out",))


def join_rows(first: mx.array, last: mx.array, order: mx.array) -> mx.array:
    """Rows of ``first`` and ``last``, in this order: what concatenating and sorting do, in one launch.

    Args:
        first, last: ``[any number, ...]``, contiguous, of one type, 16 bytes or a multiple per row.
        order: int32 ``[rows]``; rows of ``last`` are counted on from those of ``first``.
    """
    row = first.shape[1:]
    row_bytes = math.prod(row) * first.dtype.size
    (out,) = _JOIN(
        [first, last, order],
        [("ROW_BYTES", row_bytes)],
        grid=(row_bytes // 16, order.shape[0], 1),
        threadgroup=(min(128, row_bytes // 16), 1, 1),
        output_shapes=[(order.shape[0], *row)],
        output_dtypes=[first.dtype],
    )
    return out
