"""DeviceLayer: a layer whose pool is MLX arrays, with plain MLX operations (GPU back ends)."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_paged_attention.cache.spec import LayerKVSpec
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.layer import AttentionLayer, resized
from mlx_paged_attention.ops.paged_attention import gather_blocks, paged_attention


class DeviceLayer(AttentionLayer):
    """Planes as MLX arrays, ``[blocks, kv_heads, block_size, head_dim]``.

    A write is a scatter that replaces the array; MLX re-uses the buffer as long as nothing
    else holds it, which is why no method hands the array itself out before a write.
    """

    def __init__(self, spec: LayerKVSpec, num_blocks: int) -> None:
        super().__init__(spec)
        self.k, self.v = (
            mx.zeros((num_blocks, *plane.shape), getattr(mx, plane.dtype)) for plane in spec.planes
        )
        mx.eval(self.k, self.v)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def state(self) -> tuple[mx.array, ...]:
        return self.k, self.v

    def resize(self, num_blocks: int) -> None:
        self.k = resized(self.k, num_blocks)  # one plane after the other: each leaves room for the next
        self.v = resized(self.v, num_blocks)

    def write(self, keys: mx.array, values: mx.array, batch: AttentionBatch) -> None:
        blocks, offsets = batch.device_slots
        self.k[blocks, :, offsets] = _token_rows(keys, self.k.dtype)
        self.v[blocks, :, offsets] = _token_rows(values, self.v.dtype)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        read, written = mx.array(list(source), mx.int32), mx.array(list(target), mx.int32)
        self.k[written] = self.k[read]
        self.v[written] = self.v[read]

    def gather(self, batch: AttentionBatch, row: int, first: int, last: int) -> tuple[mx.array, mx.array]:
        size = batch.block_size
        begin, end = first // size, -(-last // size)
        tables = batch.device_tables[row : row + 1, begin:end]
        span = slice(first - begin * size, last - begin * size)
        return gather_blocks(self.k, tables)[:, :, span], gather_blocks(self.v, tables)[:, :, span]

    def gather_rows(self, batch: AttentionBatch) -> tuple[mx.array, mx.array]:
        width = -(-batch.longest // batch.block_size)
        tables = batch.device_tables[:, :width]
        written = mx.array(batch.written)[:, None, :, None]
        keys = gather_blocks(self.k, tables)[:, :, : batch.longest]
        values = gather_blocks(self.v, tables)[:, :, : batch.longest]
        zero = mx.array(0, keys.dtype)
        return mx.where(written, keys, zero), mx.where(written, values, zero)

    def attend_in_place(
        self, queries: mx.array, batch: AttentionBatch, scale: float, sinks: mx.array | None
    ) -> mx.array:
        rows, heads, length, head_dim = queries.shape
        tables = batch.device_tables
        if length > 1:
            tables = mx.repeat(tables, length, axis=0)
        out = paged_attention(
            queries.swapaxes(1, 2).reshape(rows * length, heads, head_dim),
            self.k,
            self.v,
            tables,
            batch.device_context_lens,
            scale=scale,
            window=self.spec.window,
            sinks=sinks,
        )
        return out.reshape(rows, length, heads, -1).swapaxes(1, 2)


def _token_rows(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """``[rows, kv_heads, queries, head_dim]`` as ``[rows * queries, kv_heads, head_dim]``."""
    rows, kv_heads, queries, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(rows * queries, kv_heads, head_dim).astype(dtype)
