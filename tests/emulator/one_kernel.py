"""A kernel of one input and one output, for tests that care about a line or two of its body."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .custom_kernel import metal_kernel

INDICES = """\
const uint i = thread_position_in_grid.x;
const uint l = thread_position_in_threadgroup.x;
const uint lane = thread_index_in_simdgroup;
const uint sg = simdgroup_index_in_threadgroup;
"""
FIRST_LINE = INDICES.count("\n") + 1


def run(
    body: str,
    x: mx.array | None = None,
    *,
    threads: int = 64,
    threadgroup: int = 64,
    output_shape: Sequence[int] | None = None,
    init_value: float | None = None,
    template: Any = None,
    **options: Any,
) -> np.ndarray[Any, Any]:
    """``out`` (float32) after ``body``, which sees ``x``, ``i``, ``l``, ``lane`` and ``sg``."""
    kernel = metal_kernel("probe", ["x"], ["out"], INDICES + body, **options)
    (out,) = kernel(
        inputs=[mx.arange(threads, dtype=mx.float32) if x is None else x],
        output_shapes=[output_shape or (threads,)],
        output_dtypes=[mx.float32],
        grid=(threads, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        init_value=init_value,
        template=template,
    )
    return np.array(out)
