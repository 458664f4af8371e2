"""KernelLayer: a layer whose pool is MLX arrays that the project's kernels write in place (GPU back ends)."""

import mlx.core as mx

from mlx_paged_attention.cache.spec import LayerKVSpec
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.kernels.decode import paged_decode, supports, threadgroups_per_item
from mlx_paged_attention.ops.kernels.make import backend
from mlx_paged_attention.ops.kernels.order import Order
from mlx_paged_attention.ops.kernels.pool import copy_blocks, gather_kv, write_kv
from mlx_paged_attention.ops.layer import AttentionLayer


class KernelLayer(AttentionLayer):
    """Planes as MLX arrays, ``[blocks, kv_heads, block_size, head_dim]``, that never change identity.

    Args:
        order: that of all layers whose operations are to run in the order stated; every
            operation here takes its token and leaves its own.
    """

    def __init__(self, spec: LayerKVSpec, num_blocks: int, order: Order | None = None) -> None:
        super().__init__(spec)
        self.order = Order() if order is None else order
        self.k, self.v = (
            mx.zeros((num_blocks, *plane.shape), getattr(mx, plane.dtype)) for plane in spec.planes
        )
        mx.eval(self.k, self.v)

    @staticmethod
    def supports(spec: LayerKVSpec) -> bool:
        """Whether kernels run here, and there are some for such planes."""
        (_, block_size, head_dim), (_, _, v_dim) = (plane.shape for plane in spec.planes)
        stored = getattr(mx, spec.planes[0].dtype)
        return backend() is not None and supports(stored, block_size, head_dim, v_dim)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The planes, evaluated only once everything stated so far has run."""
        return tuple(mx.depends([self.k, self.v], [self.order.token]))

    def write(self, keys: mx.array, values: mx.array, batch: AttentionBatch) -> None:
        self.order.token = write_kv(keys, values, self.k, self.v, batch.device_slot_ids, self.order.token)

    def copy(self, source: mx.array, target: mx.array) -> None:
        """Copy blocks ``source[i]`` to ``target[i]``, int32 ``[n]`` each, none in both."""
        self.order.token = copy_blocks(self.k, self.v, source, target, self.order.token)

    def gather(self, batch: AttentionBatch, row: int, first: int, last: int) -> tuple[mx.array, mx.array]:
        table = mx.contiguous(batch.device_tables[row])
        keys, values, self.order.token = gather_kv(self.k, self.v, table, first, last, self.order.token)
        return keys, values

    def gather_rows(self, batch: AttentionBatch) -> tuple[mx.array, mx.array]:
        keys, values = [], []
        for row, start in enumerate(batch.starts):
            length = int(start) + batch.queries
            padding = [(0, 0), (0, 0), (0, batch.longest - length), (0, 0)]
            new_keys, new_values = self.gather(batch, row, 0, length)
            keys.append(mx.pad(new_keys, padding))
            values.append(mx.pad(new_values, padding))
        return mx.concatenate(keys), mx.concatenate(values)

    def attend_in_place(
        self, queries: mx.array, batch: AttentionBatch, scale: float, sinks: mx.array | None
    ) -> mx.array:
        window = self.spec.window
        out, _, self.order.token = paged_decode(
            queries,
            self.k,
            self.v,
            batch.device_tables,
            batch.device_context_lens,
            batch.work(threadgroups_per_item(queries, self.k, self.v), window),
            scale=scale,
            window=window,
            sinks=sinks,
            after=self.order.token,
        )
        return out
