"""KernelLayer: a layer whose pool is MLX arrays that the project's kernels write in place (GPU back ends)."""

import sys
from collections.abc import Sequence

import mlx.core as mx

from mlx_paged_attention.cache.spec import LayerKVSpec
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.kernels.decode import paged_decode, supports, threadgroups_per_item
from mlx_paged_attention.ops.kernels.join import join_rows
from mlx_paged_attention.ops.kernels.latent import (
    latent_decode,
    latent_threadgroups_per_item,
    supports_latents,
)
from mlx_paged_attention.ops.kernels.make import backend
from mlx_paged_attention.ops.kernels.order import Order, no_token
from mlx_paged_attention.ops.kernels.pool import copy_blocks, gather_kv, write_kv
from mlx_paged_attention.ops.layer import AttentionLayer, resized
from mlx_paged_attention.ops.packing import Packing


class KernelLayer(AttentionLayer):
    """Planes as MLX arrays, ``[blocks, kv_heads, block_size, head_dim]``; only ``resize`` replaces them.

    Args:
        order: that of all layers whose operations are to run in the order stated; every
            operation here takes its token and leaves its own.
    """

    pack_limit = sys.maxsize  # the runs of a packed step are found, and attended to as such

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
        known = supports_latents if spec.is_latent else supports
        return backend() is not None and known(stored, block_size, head_dim, v_dim)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The planes, evaluated only once everything stated so far has run."""
        return tuple(mx.depends([self.k, self.v], [self.order.token]))

    def discard(self) -> None:
        # The token is made by what cannot be computed; whoever took it could not be either.
        self.order.token = no_token()

    def resize(self, num_blocks: int) -> None:
        self.k = resized(self.k, num_blocks)  # one plane after the other: each leaves room for the next
        self.v = resized(self.v, num_blocks)

    def write(self, keys: mx.array, values: mx.array, batch: AttentionBatch) -> None:
        self.order.token = write_kv(keys, values, self.k, self.v, batch.device_slot_ids, self.order.token)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        read, written = mx.array(list(source), mx.int32), mx.array(list(target), mx.int32)
        self.order.token = copy_blocks(self.k, self.v, read, written, self.order.token)

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

    def attend_written(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        batch: AttentionBatch,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if batch.singles_only:
            return self.attend_in_place(queries, batch, scale, sinks)
        return self._attend_packed(queries, keys, values, Packing.of(batch), scale, sinks)

    def attend_latents(
        self,
        queries: mx.array,
        rope_queries: mx.array,
        latents: mx.array,
        ropes: mx.array,
        batch: AttentionBatch,
        *,
        scale: float,
    ) -> mx.array:
        self.write(latents, ropes, batch)
        out, _, self.order.token = latent_decode(
            queries,
            rope_queries,
            self.k,
            self.v,
            batch.device_tables,
            batch.device_context_lens,
            batch.work(latent_threadgroups_per_item(queries, self.k), None),
            scale=scale,
            after=self.order.token,
        )
        return out

    def _attend_packed(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        packing: Packing,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        rows, heads, length, _ = queries.shape
        q = _flat(queries)[:, :, None]
        parts = []
        if packing.has_singles:
            batch, picked = packing.single_batch, packing.device_singles
            parts.append(_flat(self.attend_in_place(q, batch, scale, sinks, picked)))
        if packing.has_tiles:
            batch, picked = packing.tile_batch, packing.device_tiles
            parts.append(_flat(self.attend_in_place(q, batch, scale, sinks, picked)))
        for (begin, end), run in zip(packing.gathered, packing.gathered_batches, strict=True):
            q_row, k_row, v_row = (_flat(x)[begin:end].swapaxes(0, 1)[None] for x in (queries, keys, values))
            parts.append(_flat(self.attend_gathered(q_row, k_row, v_row, run, scale, sinks)))
        if len(parts) == 2 and not packing.gathered:
            out = join_rows(parts[0], parts[1], packing.device_order)
        else:
            out = mx.concatenate(parts)[packing.device_order]
        return out.reshape(rows, length, heads, -1).swapaxes(1, 2)

    def attend_in_place(
        self,
        queries: mx.array,
        batch: AttentionBatch,
        scale: float,
        sinks: mx.array | None,
        picked: mx.array | None = None,
    ) -> mx.array:
        window = self.spec.window
        out, _, self.order.token = paged_decode(
            queries,
            self.k,
            self.v,
            batch.device_tables,
            batch.device_context_lens,
            batch.work(threadgroups_per_item(queries, self.k, self.v, batch.queries), window),
            scale=scale,
            window=window,
            sinks=sinks,
            picked=picked,
            after=self.order.token,
        )
        return out


def _flat(x: mx.array) -> mx.array:
    """``[rows, heads, queries, head_dim]`` as ``[rows * queries, heads, head_dim]``."""
    rows, heads, queries, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(rows * queries, heads, head_dim)
