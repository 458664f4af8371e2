"""CompiledStep: steps on kernels, compiled once per shape."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops.batch import AttentionBatch, Cut
from mlx_paged_attention.ops.packing import TILE, Packing
from mlx_paged_attention.ops.step_shape import StepShape, shape_of
from mlx_paged_attention.runner.kv_pool import KernelPool
from mlx_paged_attention.runner.model_host import ModelCache, ModelHost
from mlx_paged_attention.scheduler.step_plan import UNKNOWN_TOKEN

_Compiled = Callable[..., tuple[mx.array, mx.array]]


class CompiledStep:
    """Steps of one model on one pool.

    A compiled function keeps the weights alive. This object alone holds the functions, and they do
    not hold it: they go when it goes.
    """

    def __init__(self, host: ModelHost, cache: ModelCache, pool: KernelPool) -> None:
        self._host = host
        self._cache = cache
        self._pool = pool
        self._cuts = self._find_cuts(1)
        self._tile_cuts = self._find_cuts(TILE)
        self._compiled: dict[StepShape, _Compiled] = {}

    def forget(self) -> None:
        """Drop what was compiled: the pool's arrays change."""
        self._compiled.clear()

    def shape_of(self, batch: AttentionBatch, num_wanted: int) -> StepShape | None:
        """The shape in which a batch of one token per row is compiled; ``None`` if it cannot be."""
        if not batch.singles_only:
            Packing.of(batch)
        return shape_of(batch, num_wanted, self._cuts, self._tile_cuts)

    def __call__(
        self,
        shape: StepShape,
        tokens: NDArray[np.int32],
        sampled: mx.array | None,
        batch: AttentionBatch,
        wanted: NDArray[np.int32],
    ) -> mx.array:
        """Logits ``[wanted, vocabulary]``.

        Args:
            shape: of :meth:`shape_of`.
            tokens: int32 ``[n]``.
            sampled: int32 ``[shape.tokens]``, what stands in for :data:`UNKNOWN_TOKEN`; ``None``
                if there is none.
            wanted: int32, indices of the tokens whose logits are wanted, ascending.
        """
        pool = self._pool
        function = self._compiled.get(shape)
        if function is None:
            step = partial(_step, self._host, self._cache, pool, shape)
            function = self._compiled[shape] = mx.compile(step)
        packed = mx.array(shape.pack(tokens, batch, wanted))
        if sampled is None:
            sampled = mx.zeros(shape.tokens, mx.int32)
        logits, pool.order.token = function(packed, sampled, _tiny(pool.order.token), pool.planes)
        if batch.singles_only and len(wanted) < len(tokens):
            return logits[mx.array(wanted)]
        return logits[: len(wanted)]

    def _find_cuts(self, queries: int) -> tuple[Cut, ...]:
        """What the layers' work lists are cut for, seen in a step that is stated but never evaluated."""
        size = self._pool.block_size
        positions = np.arange(queries)
        table = np.zeros((queries, -(-queries // size)), np.int32)
        batch = AttentionBatch(
            positions.astype(np.int32), 1, positions % size, table, size, runs=((0, queries),)
        ).with_groups([(positions % size, table)] * (len(self._pool.groups) - 1))
        token = self._pool.order.token
        self._host.forward(mx.zeros((queries, 1), mx.int32), batch, self._cache)
        self._pool.order.token = token
        return batch.cuts if queries == 1 else Packing.of(batch).tile_batch.cuts


def _step(
    host: ModelHost,
    cache: ModelCache,
    pool: KernelPool,
    shape: StepShape,
    packed: mx.array,
    sampled: mx.array,
    token: mx.array,
    planes: list[mx.array],
) -> tuple[mx.array, mx.array]:
    """What is compiled. Runs once per shape, on arrays without values."""
    kept = pool.planes, pool.order.token
    pool.planes, pool.order.token = planes, token
    try:
        tokens, batch, wanted = shape.unpack(packed)
        tokens = mx.where(tokens == UNKNOWN_TOKEN, sampled[:, None], tokens)
        logits = host.forward(tokens, batch, cache, wanted)
        return logits, _tiny(pool.order.token)
    finally:
        pool.planes, pool.order.token = kept


def _tiny(token: mx.array) -> mx.array:
    """An ordering token of one element, whatever it was: a compiled function sees one shape."""
    return token if token.shape == (1,) else token.reshape(-1)[:1]
