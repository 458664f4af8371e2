"""HostLayer: a layer whose pool MLX and numpy share and compiled loops read in place (CPU)."""

import sys
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.host_chunk import attend_run
from mlx_paged_attention.ops.host_copy import ContextCopy
from mlx_paged_attention.ops.host_kernel import ONE_LOOP, attend_rows, write_tokens
from mlx_paged_attention.ops.host_memory import release, reserve
from mlx_paged_attention.ops.layer import AttentionLayer

F32 = NDArray[np.float32]
# Longer runs of one sequence's tokens gather their context once and multiply matrices; up to here,
# reading the blocks in place for every token costs less.
SHORT_RUN = 4
# A single token attends within MLX's graph: over its context's pieces, up to so many of them, or over a copy
# of a context whose keys and values take no more bytes in a layer.
MOST_PIECES = 4
MOST_COPIED = 4 << 20
_NO_SINKS: NDArray[np.float32] = np.empty(0, np.float32)


class HostLayer(AttentionLayer):
    """Planes in float32, ``[kv_heads, blocks, block_size, head_dim]``, as arrays of MLX and views of numpy.

    MLX's CPU back end runs no custom kernels, so each layer evaluates its queries, keys and
    values and works on numpy's zero-copy views of them. The operating system commits the pool's pages as
    blocks are first written, so all that it may ever grow to is reserved at once, and growing costs nothing;
    shrinking gives pages back and moves nothing.

    Stopping the graph in every layer costs a step of one token a tenth of its time. If that
    token's context lies in few pieces, MLX multiplies by slices of the pool, which copies
    nothing, and the new keys and values are written once the step has run. A short context in more
    pieces is copied first, into memory beside the pool that is committed as far as it is used.
    """

    pack_limit = sys.maxsize  # a run costs the same whether its tokens are rows or one chunk
    most_copied = MOST_COPIED

    def __init__(self, spec: LayerKVSpec, num_blocks: int, max_blocks: int | None = None) -> None:
        super().__init__(spec)
        self._num_blocks = num_blocks
        self._max_blocks = num_blocks if max_blocks is None else max_blocks
        # The same memory twice: numpy's views write, MLX's arrays only read.
        self._pool_k, self.k = _reserve(spec.planes[0], self._max_blocks)
        self._pool_v, self.v = _reserve(spec.planes[1], self._max_blocks)
        self._unwritten: tuple[mx.array, mx.array, AttentionBatch] | None = None
        self._copy = ContextCopy((self.k, self.v), MOST_COPIED)

    def twin(self, spec: LayerKVSpec) -> "HostLayer":
        twin = super().twin(spec)
        twin._unwritten = None
        twin._copy = ContextCopy((self.k, self.v), MOST_COPIED)
        return twin

    @property
    def nbytes(self) -> int:
        return self.k[:, : self._num_blocks].nbytes + self.v[:, : self._num_blocks].nbytes

    def resize(self, num_blocks: int) -> None:
        assert num_blocks <= self._max_blocks
        if num_blocks < self._num_blocks:
            for plane in (self.k, self.v):
                for head in plane:
                    release(head[num_blocks : self._num_blocks])
            self._copy.release()
        self._num_blocks = num_blocks

    def follow(self, other: "HostLayer") -> None:
        self._num_blocks = other._num_blocks
        self._copy.release()

    @property
    def state(self) -> tuple[mx.array, ...]:
        return () if self._unwritten is None else self._unwritten[:2]

    def flush(self) -> None:
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            self.write(*unwritten)

    def forget(self) -> None:
        self._copy.forget()

    def discard(self) -> None:
        self._unwritten = None

    def write(self, keys: mx.array, values: mx.array, batch: AttentionBatch) -> None:
        self.flush()
        mx.eval(keys, values)
        self._copy.written(batch.slots)
        write_tokens(_token_rows(keys), _token_rows(values), batch.slots, self.k, self.v)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.flush()
        mx.synchronize()  # MLX may still be reading what lay in the targets before
        for plane in (self.k, self.v):
            plane[:, list(target)] = plane[:, list(source)]
        self.forget()

    def gather(self, batch: AttentionBatch, row: int, first: int, last: int) -> tuple[mx.array, mx.array]:
        self.flush()
        size = batch.block_size
        begin, end = first // size, -(-last // size)
        table = batch.table_of(row)[None, begin:end]
        span = slice(first - begin * size, last - begin * size)
        return mx.array(_gather(self.k, table)[:, :, span]), mx.array(_gather(self.v, table)[:, :, span])

    def gather_rows(self, batch: AttentionBatch) -> tuple[mx.array, mx.array]:
        self.flush()
        table = batch.all_tables[:, : -(-batch.longest // batch.block_size)]
        empty = ~batch.written
        dense = []
        for plane in (self.k, self.v):
            rows = _gather(plane, table)[:, :, : batch.longest]
            rows.transpose(0, 2, 1, 3)[empty] = 0
            dense.append(mx.array(rows))
        return dense[0], dense[1]

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        batch: AttentionBatch,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if len(batch.slots) == 1 and sinks is None:
            past = self._past(batch)
            if past is not None:
                return self._attend_one(queries, keys, values, batch, past, scale)
        mx.eval(queries, keys, values)  # one evaluation per layer
        self.write(keys, values, batch)
        return self.attend_in_place(queries, batch, scale, sinks)

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
        return self.attend_in_place(queries, batch, scale, sinks)

    def _past(self, batch: AttentionBatch) -> tuple[list[mx.array], list[mx.array]] | None:
        """Keys and values before the batch's one token, in pieces ``[kv_heads, n, head_dim]``."""
        self.flush()
        pieces = batch.past_pieces(self.spec.window)
        if len(pieces) <= MOST_PIECES:
            pool_k, pool_v = self._pool_k, self._pool_v
            return [pool_k[:, b:e] for b, e in pieces], [pool_v[:, b:e] for b, e in pieces]
        length, start = sum(end - begin for begin, end in pieces), int(batch.starts[0])
        held = self._copy.hold(batch.table_of(0), start - length, start)
        return None if held is None else (held[0], held[1])

    def _attend_one(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        batch: AttentionBatch,
        past: tuple[list[mx.array], list[mx.array]],
        scale: float,
    ) -> mx.array:
        self._unwritten = keys, values, batch
        k, v = [*past[0], keys[0]], [*past[1], values[0]]
        q = (queries * scale).reshape(k[0].shape[0], -1, k[0].shape[2])
        weights = mx.softmax(mx.concatenate([q @ part.swapaxes(1, 2) for part in k], axis=-1), axis=-1)
        ends = np.cumsum([part.shape[1] for part in v])[:-1].tolist()
        mixed = [w @ part for w, part in zip(mx.split(weights, ends, axis=-1), v, strict=True)]
        out = sum(mixed[1:], mixed[0]).reshape(1, queries.shape[1], 1, v[0].shape[2])
        mx.async_eval(out)  # MLX computes this layer while Python states the next
        return out

    def attend_in_place(
        self, queries: mx.array, batch: AttentionBatch, scale: float, sinks: mx.array | None
    ) -> mx.array:
        self.flush()
        rows, heads, length, _ = queries.shape
        q = _token_rows(queries)
        out = np.empty((rows * length, heads, self.v.shape[3]), np.float32)
        sink_logits = _NO_SINKS if sinks is None else np.array(sinks.astype(mx.float32))
        long_runs, short = batch.split(SHORT_RUN)
        with ONE_LOOP:
            for begin, end in long_runs:
                attend_run(
                    q[begin:end],
                    self.k,
                    self.v,
                    batch.table_of(begin // length),
                    int(batch.context_lens[begin]) - 1,
                    scale=scale,
                    window=self.spec.window,
                    sinks=sink_logits,
                    out=out[begin:end],
                )
            if not long_runs:
                self._attend_tokens(q, batch.all_tables, batch.context_lens, length, scale, sink_logits, out)
            elif len(short):
                part = np.empty((len(short), *out.shape[1:]), np.float32)
                tables, lens = batch.tables_of(short // length), batch.context_lens[short]
                self._attend_tokens(q[short], tables, lens, 1, scale, sink_logits, part)
                out[short] = part
        return mx.array(out).reshape(rows, length, heads, -1).swapaxes(1, 2)

    def _attend_tokens(
        self,
        q: F32,
        tables: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        queries_per_row: int,
        scale: float,
        sinks: F32,
        out: F32,
    ) -> None:
        window, no_cap = self.spec.window or 0, np.float32(0)
        attend_rows(
            q,
            self.k,
            self.v,
            tables,
            context_lens,
            queries_per_row,
            np.float32(scale),
            window,
            no_cap,
            sinks,
            out,
        )


def _reserve(plane: Plane, num_blocks: int) -> tuple[mx.array, F32]:
    kv_heads, block_size, head_dim = plane.shape
    array, view = reserve((kv_heads, num_blocks * block_size, head_dim))
    return array, view.reshape(kv_heads, num_blocks, block_size, head_dim)


def _token_rows(x: mx.array) -> F32:
    """``[rows, heads, queries, head_dim]`` as a contiguous numpy ``[rows * queries, heads, head_dim]``."""
    view = np.array(x, copy=False)
    rows, heads, queries, head_dim = view.shape
    return np.ascontiguousarray(view.transpose(0, 2, 1, 3).reshape(rows * queries, heads, head_dim))


def _gather(plane: F32, table: NDArray[np.int32]) -> F32:
    """Blocks by table: ``[rows, kv_heads, width * block_size, head_dim]``."""
    rows, width = table.shape
    kv_heads, _, block_size, head_dim = plane.shape
    return plane[:, table].swapaxes(0, 1).reshape(rows, kv_heads, width * block_size, head_dim)
