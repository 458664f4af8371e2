"""DecodeShape and DecodeBatch: the metadata of a decode step as one array of a fixed shape.

A compiled function is compiled anew for every shape of its arguments, and whatever it does not get as
an argument is a constant of it. So rows, block tables and work lists are padded, and all of it
travels in one array: one upload per step.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops.batch import AttentionBatch, Cut
from mlx_paged_attention.ops.kernels.work_list import WorkList, capacity_for, cut_contexts


@dataclass(frozen=True)
class DecodeShape:
    """What is fixed in a compiled decode step.

    Attributes:
        rows: padding included; a row of padding has no context and writes nothing.
        width: of the block tables.
        block_size: tokens per block.
        cuts: what the layers' work lists are cut for.
    """

    rows: int
    width: int
    block_size: int
    cuts: tuple[Cut, ...]

    def pack(
        self,
        tokens: NDArray[np.int32],
        starts: NDArray[np.int32],
        slots: NDArray[np.int64],
        block_tables: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """All metadata of a step of up to ``rows`` rows, one token each.

        Args:
            tokens, starts: int32 ``[n]``; slots: ``[n]``; block_tables: int32 ``[n, up to width]``,
                as in :class:`AttentionBatch`.
        """
        columns = np.zeros((4, self.rows), np.int32)
        columns[:, : len(tokens)] = tokens, starts, slots, starts + 1
        tables = np.zeros((self.rows, self.width), np.int32)
        tables[: block_tables.shape[0], : block_tables.shape[1]] = block_tables
        parts = [columns, tables, *self._work_lists(columns[3])]
        return np.concatenate([part.reshape(-1) for part in parts])

    def unpack(self, packed: mx.array) -> tuple[mx.array, "DecodeBatch"]:
        """The tokens, int32 ``[rows, 1]``, and the batch, as slices of what :meth:`pack` made."""
        lists = self._work_lists(np.zeros(self.rows, np.int32))
        shapes = [*[(self.rows,)] * 4, (self.rows, self.width), *[part.shape for part in lists]]
        ends = np.cumsum([0, *[math.prod(shape) for shape in shapes]]).tolist()
        tokens, starts, slots, lens, tables, *cut = (
            packed[begin:end].reshape(shape)
            for (begin, end), shape in zip(pairwise(ends), shapes, strict=True)
        )
        work = {
            key: WorkList(items, splits, split=True)
            for key, items, splits in zip(self.cuts, cut[::2], cut[1::2], strict=True)
        }
        return tokens[:, None], DecodeBatch(self.block_size, starts, slots, tables, lens, work)

    def _work_lists(self, context_lens: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """Items and splits for each of ``cuts``, of the same shapes whatever the contexts."""
        lists: list[NDArray[np.int32]] = []
        for threadgroups_per_item, window in self.cuts:
            lists += cut_contexts(
                context_lens,
                1,
                block_size=self.block_size,
                threadgroups_per_item=threadgroups_per_item,
                window=window,
                capacity=capacity_for(self.rows, threadgroups_per_item),
            )
        return lists


class DecodeBatch(AttentionBatch):
    """One token per row, its metadata on the device only.

    While a step is compiled there are no values to look at: whatever asks for metadata on the host
    fails, instead of making a constant of what it finds.
    """

    def __init__(
        self,
        block_size: int,
        starts: mx.array,
        slots: mx.array,
        block_tables: mx.array,
        context_lens: mx.array,
        work: dict[Cut, WorkList],
    ) -> None:
        self.__dict__.update(
            queries=1,
            block_size=block_size,
            offsets=starts,
            device_slot_ids=slots,
            device_tables=block_tables,
            device_context_lens=context_lens,
            _work=work,
        )

    @property
    def rows(self) -> int:
        return int(self.offsets.shape[0])
