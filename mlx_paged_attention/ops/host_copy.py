"""ContextCopy: a scattered context side by side, for the one sequence that is being computed (CPU)."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops.host_memory import release, reserve

F32 = NDArray[np.float32]


class ContextCopy:
    """Keys and values of one layer and sequence, beside the pool; committed as far as they are used.

    From one step to the next only what is new is copied. Whoever writes into the pool says so.

    Args:
        planes: the pool's, ``[kv_heads, blocks, block_size, head_dim]``.
        most: bytes that a copy may take.
    """

    def __init__(self, planes: Sequence[F32], most: int) -> None:
        self._planes = planes
        self._size = planes[0].shape[2]
        self._most_blocks = most // sum(plane[:, 0].nbytes for plane in planes)
        self._copies: list[tuple[mx.array, F32]] = []
        self._first = -1  # index in the sequence of the first block held; -1: nothing is
        self._blocks: NDArray[np.int32] = np.empty(0, np.int32)
        self._end = 0  # position after the last one held

    def hold(self, table: NDArray[np.int32], begin: int, end: int) -> list[list[mx.array]] | None:
        """Positions ``begin .. end - 1`` of a sequence, one piece per plane: ``[kv_heads, n, head_dim]``.

        ``None`` if they are too many, or if another sequence was asked for last: where sequences take
        turns, a copy would be made for every token.
        """
        first = begin // self._size
        blocks = table[first : -(-end // self._size)]
        if len(blocks) > self._most_blocks:
            return None
        same = first == self._first and self._end <= end
        if not same or not np.array_equal(blocks[: len(self._blocks)], self._blocks):
            self._first, self._blocks, self._end = first, blocks, first * self._size
            return None
        if not self._copies:
            for plane in self._planes:
                array, view = reserve((plane.shape[0], self._most_blocks * self._size, plane.shape[3]))
                self._copies.append((array, view.reshape(plane.shape[0], -1, *plane.shape[2:])))
        known = self._end // self._size - first  # blocks held whole
        if known == 0:
            mx.synchronize()  # MLX may still be reading the copy for another sequence
        for (_, copy), plane in zip(self._copies, self._planes, strict=True):
            for head in range(plane.shape[0]):
                plane[head].take(blocks[known:], axis=0, out=copy[head, known : len(blocks)], mode="clip")
        self._blocks, self._end = blocks, end
        low = begin - first * self._size
        return [[array[:, low : low + end - begin]] for array, _ in self._copies]

    def written(self, slots: NDArray[np.int64]) -> None:
        """Forget what is held if one of these slots of the pool is."""
        if len(slots) > 1:  # rarely a sequence's next step: not worth a closer look
            self.forget()
        for index in np.flatnonzero(self._blocks == slots[0] // self._size).tolist():
            if (self._first + index) * self._size + int(slots[0]) % self._size < self._end:
                self.forget()

    def forget(self) -> None:
        """What is held is no longer what the pool has."""
        self._first = -1

    def release(self) -> None:
        """Forget it, and give its memory back until it is written again."""
        self.forget()
        for _, copy in self._copies:
            release(copy)
