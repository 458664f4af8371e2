"""AttentionLayer: one layer's keys and values in the pool, and what can be done with them."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import mlx.core as mx

from mlx_paged_attention.cache.spec import LayerKVSpec
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.chunk import chunk_attention
from mlx_paged_attention.ops.latent_attention import plain_latent_attention

# Up to this many queries of one sequence, attention reads the blocks in place; beyond, gathering
# them once and running MLX's dense attention is cheaper than re-reading them for every query.
SHORT_QUERIES = 16


class AttentionLayer(ABC):
    """The physical planes of one layer and the operations on them.

    Keys and values come as models make them, ``[rows, kv_heads, queries, head_dim]``; queries
    as ``[rows, heads, queries, head_dim]``.
    """

    # The longest chunk that may join the single tokens of a step as rows of one token each.
    pack_limit = 32
    # Bytes that it may take beside its planes, for copies of them.
    most_copied = 0

    def __init__(self, spec: LayerKVSpec) -> None:
        self.spec = spec

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of this layer's arrays, read off the arrays."""

    @property
    @abstractmethod
    def state(self) -> tuple[mx.array, ...]:
        """Arrays to evaluate so that everything written has been written; may be empty."""

    def twin(self, spec: LayerKVSpec) -> Self:
        """Another layer on the same arrays, which keeps its keys and values in other blocks of them."""
        assert spec.planes == self.spec.planes, "layers that differ share memory"
        twin = copy.copy(self)
        twin.spec = spec
        return twin

    def follow(self, other: Self) -> None:
        """Take the arrays of the layer whose twin this is, which has changed their size."""
        vars(self).update(vars(other.twin(self.spec)))

    @abstractmethod
    def resize(self, num_blocks: int) -> None:
        """Have so many blocks; those that stay keep their contents.

        All that was stated has run, and nobody else holds the arrays. Takes at most as much memory beside
        them as the layer has afterwards.
        """

    def flush(self) -> None:  # noqa: B027  # most layers put nothing off
        """Write what has been put off; whoever reads the pool by other ways than this class flushes first."""

    def forget(self) -> None:  # noqa: B027
        """Let go of copies of what is in the pool: a twin has changed blocks."""

    def discard(self) -> None:  # noqa: B027
        """Forget what was stated and has not run: a step has failed, and whatever had started has ended."""

    @abstractmethod
    def write(self, keys: mx.array, values: mx.array, batch: AttentionBatch) -> None:
        """Put keys and values into the batch's slots, in place."""

    @abstractmethod
    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy block ``source[i]`` to ``target[i]``, in place; none is in both, nor twice in ``target``."""

    @abstractmethod
    def gather(self, batch: AttentionBatch, row: int, first: int, last: int) -> tuple[mx.array, mx.array]:
        """Positions ``first .. last - 1`` of a row as ``[1, kv_heads, last - first, head_dim]``."""

    @abstractmethod
    def gather_rows(self, batch: AttentionBatch) -> tuple[mx.array, mx.array]:
        """All rows, ``[rows, kv_heads, longest, head_dim]``; positions not yet written are 0."""

    @abstractmethod
    def attend_in_place(
        self, queries: mx.array, batch: AttentionBatch, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attention of every query over its blocks, read where they lie."""

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
        """Write the new keys and values, then attend.

        Args:
            queries: ``[rows, heads, queries, head_dim]``.
            keys, values: the new tokens', ``[rows, kv_heads, queries, head_dim]``.
            scale: factor of the scores before the softmax.
            sinks: ``[heads]``, a logit per head that takes part in the softmax without a value.

        Returns:
            ``[rows, heads, queries, v_head_dim]`` in the queries' type.
        """
        self.write(keys, values, batch)
        return self.attend_written(queries, keys, values, batch, scale=scale, sinks=sinks)

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
        """As :meth:`attend`, of keys and values that have been written already."""
        if batch.rows > 1 or batch.queries <= SHORT_QUERIES:
            return self.attend_in_place(queries, batch, scale, sinks)
        return self.attend_gathered(queries, keys, values, batch, scale, sinks)

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
        """Write the new latents, then attend to all, which are keys and values at once (MLA).

        Args:
            queries: ``[rows, heads, 1, latent_dim]``.
            rope_queries: ``[rows, heads, 1, rope_dim]``, scaled.
            latents, ropes: the new tokens', ``[rows, 1, 1, dim]``, stored as keys and values.
            scale: factor of ``queries @ latents``.

        Returns:
            ``[rows, heads, 1, latent_dim]`` in the queries' type.
        """
        self.write(latents, ropes, batch)
        keys, rope_keys = self.gather_rows(batch)
        mask = batch.mask(None)
        return plain_latent_attention(queries, rope_queries, keys, rope_keys, mask, scale=scale)

    def attend_gathered(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        batch: AttentionBatch,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of one row over a copy of its blocks, by MLX's own kernel."""
        start, window = int(batch.starts[0]), self.spec.window
        first = 0 if window is None else max(0, start - window + 1)
        if start > 0:
            keys, values = self.gather(batch, 0, first, start + batch.queries)
        return chunk_attention(
            queries, keys, values, start=start - first, scale=scale, window=window, sinks=sinks
        )


def resized(plane: mx.array, num_blocks: int) -> mx.array:
    """An array ``[num_blocks, ...]`` of its own that begins as ``plane`` does; what is new is 0."""
    kept = plane.shape[0]
    if num_blocks < kept:
        new = mx.contiguous(plane[:num_blocks])  # copies what is in a larger buffer
    else:
        new = mx.zeros((num_blocks, *plane.shape[1:]), plane.dtype)
        new[:kept] = plane
    mx.eval(new)
    return new
