"""DecodeStep: steps in which every row computes one token, compiled once per bucket of shapes."""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.models.seam import PagedLayerCache
from mlx_paged_attention.ops.batch import AttentionBatch, Cut
from mlx_paged_attention.ops.decode_batch import DecodeShape
from mlx_paged_attention.runner.kv_pool import KernelPool
from mlx_paged_attention.runner.model_host import ModelHost
from mlx_paged_attention.scheduler.step_plan import UNKNOWN_TOKEN

_Compiled = Callable[..., tuple[mx.array, mx.array]]


class DecodeStep:
    """Decode steps of one model on one pool.

    A compiled function keeps the weights alive. This object alone holds the functions, and they do
    not hold it: they go when it goes.
    """

    def __init__(self, host: ModelHost, caches: Sequence[PagedLayerCache], pool: KernelPool) -> None:
        self._host = host
        self._caches = caches
        self._pool = pool
        self._cuts = self._find_cuts()
        self._compiled: dict[DecodeShape, _Compiled] = {}

    def __call__(
        self,
        tokens: NDArray[np.int32],
        sampled: mx.array | None,
        starts: NDArray[np.int32],
        slots: NDArray[np.int64],
        block_tables: NDArray[np.int32],
    ) -> mx.array:
        """Logits ``[rows, vocabulary]``; arguments as for :meth:`DecodeShape.pack`.

        Args:
            sampled: int32 ``[bucket(rows)]``, what stands in for :data:`UNKNOWN_TOKEN`; ``None``
                if there is none.
        """
        pool = self._pool
        rows, width = block_tables.shape
        shape = DecodeShape(bucket(rows), width_bucket(width), pool.block_size, self._cuts)
        function = self._compiled.get(shape)
        if function is None:
            step = partial(_step, self._host, self._caches, pool, shape)
            function = self._compiled[shape] = mx.compile(step)
        packed = mx.array(shape.pack(tokens, starts, slots, block_tables))
        if sampled is None:
            sampled = mx.zeros(shape.rows, mx.int32)
        logits, pool.order.token = function(packed, sampled, _tiny(pool.order.token), pool.planes)
        return logits[:rows]

    def _find_cuts(self) -> tuple[Cut, ...]:
        """What the layers' work lists are cut for, seen in a step that is stated but never evaluated."""
        nothing = np.zeros(1, np.int32)
        batch = AttentionBatch(nothing, 1, nothing.astype(np.int64), nothing[None], self._pool.block_size)
        token = self._pool.order.token
        self._host.forward(mx.zeros((1, 1), mx.int32), batch, self._caches)
        self._pool.order.token = token
        return batch.cuts


def _step(
    host: ModelHost,
    caches: Sequence[PagedLayerCache],
    pool: KernelPool,
    shape: DecodeShape,
    packed: mx.array,
    sampled: mx.array,
    token: mx.array,
    planes: list[mx.array],
) -> tuple[mx.array, mx.array]:
    """What is compiled. Runs once per shape, on arrays without values."""
    kept = pool.planes, pool.order.token
    pool.planes, pool.order.token = planes, token
    try:
        tokens, batch = shape.unpack(packed)
        tokens = mx.where(tokens == UNKNOWN_TOKEN, sampled[:, None], tokens)
        logits = host.forward(tokens, batch, caches)
        return logits, _tiny(pool.order.token)
    finally:
        pool.planes, pool.order.token = kept


def _tiny(token: mx.array) -> mx.array:
    """An ordering token of one element, whatever it was: a compiled function sees one shape."""
    return token if token.shape == (1,) else token.reshape(-1)[:1]


def bucket(rows: int) -> int:
    """1, 2, 4, and from there in steps of about a third: 6, 8, 12, 16, 24, ..."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 8 and rows <= power * 3 // 4 else power


def width_bucket(width: int) -> int:
    """Blocks of a table: a power of two, 64 at least."""
    return max(64, 1 << (width - 1).bit_length())
