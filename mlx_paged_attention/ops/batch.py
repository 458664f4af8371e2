"""AttentionBatch: where the rows of one forward pass read and write in the pool."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops.kernels.work_list import WorkList, work_list

if TYPE_CHECKING:
    from mlx_paged_attention.ops.packing import Packing

Split = tuple[tuple[tuple[int, int], ...], NDArray[np.int64]]
Pieces = tuple[tuple[int, int], ...]
# Threadgroups per item and window: what a work list is cut for.
Cut = tuple[int, int | None]


@dataclass(frozen=True)
class AttentionBatch:
    """Metadata of a forward pass over tokens ``[rows, queries]``.

    Row ``b`` holds the tokens at positions ``starts[b] .. starts[b] + queries - 1`` of one
    sequence; query ``i`` of it attends to positions ``0 .. starts[b] + i``.

    Attributes:
        starts: int32 ``[rows]``.
        queries: tokens per row.
        slots: int64 ``[rows * queries]``, where each token's keys and values go:
            ``block_id * block_size + offset``. Slots of block 0, the null block, are
            rubbish bins: nothing reads them.
        block_tables: int32 ``[lines, width]``, block ids by position, padded with 0: a line for each row, or
            fewer, where rows are tokens of one sequence.
        block_size: tokens per block.
        lines: of each row, int64 ``[rows]``; ``None``: each has its own.
        packing: once :meth:`Packing.of` has made it.
        runs: half-open ranges of the flattened ``[rows * queries]`` tokens, each a run of one
            sequence's consecutive positions; together they are all tokens. Each row is a run
            of its own by default.
        other_groups: the same rows for the layers of other groups, whose keys and values are in other
            blocks: the second group's batch, the third's, ...
    """

    starts: NDArray[np.int32]
    queries: int
    slots: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    block_size: int
    runs: tuple[tuple[int, int], ...] = ()
    lines: NDArray[np.int64] | None = field(default=None, repr=False)
    _splits: dict[int, Split] = field(default_factory=dict, repr=False)
    _masks: dict[int | None, mx.array] = field(default_factory=dict, repr=False)
    _work: dict[Cut, WorkList] = field(default_factory=dict, repr=False)
    _pieces: dict[int | None, Pieces] = field(default_factory=dict, repr=False)
    _packings: "list[Packing]" = field(default_factory=list, repr=False)
    packing: "Packing | None" = field(default=None, repr=False)
    other_groups: "tuple[AttentionBatch, ...]" = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.runs:
            ends = range(self.queries, len(self.starts) * self.queries + 1, self.queries)
            object.__setattr__(self, "runs", tuple((end - self.queries, end) for end in ends))

    def with_groups(self, others: Sequence[tuple[NDArray[np.int64], NDArray[np.int32]]]) -> "AttentionBatch":
        """This batch with other layer groups, given their slots and block tables."""
        if not others:
            return self
        # Splits, masks, work lists and packings depend on lengths alone: they are made once for all groups.
        batches = [replace(self, slots=slots, block_tables=table, _pieces={}) for slots, table in others]
        return replace(self, other_groups=tuple(batches))

    def of_group(self, group: int) -> "AttentionBatch":
        """The batch for a layer group's layers."""
        return self.other_groups[group - 1] if group else self

    @property
    def groups(self) -> "tuple[AttentionBatch, ...]":
        """The batch for each layer group."""
        return (self, *self.other_groups)

    @property
    def rows(self) -> int:
        return len(self.starts)

    def tables_of(self, rows: NDArray[np.integer]) -> NDArray[np.int32]:
        """The block tables of these rows, ``[len(rows), width]``."""
        tables: NDArray[np.int32] = self.block_tables[rows if self.lines is None else self.lines[rows]]
        return tables

    def table_of(self, row: int) -> NDArray[np.int32]:
        """The block table of a row, ``[width]``."""
        table: NDArray[np.int32] = self.block_tables[row if self.lines is None else self.lines[row]]
        return table

    @cached_property
    def all_tables(self) -> NDArray[np.int32]:
        """The block table of every row, ``[rows, width]``."""
        return self.block_tables if self.lines is None else self.block_tables[self.lines]

    @cached_property
    def singles_only(self) -> bool:
        """Whether every run is a single token."""
        return len(self.runs) == len(self.slots)

    @property
    def longest(self) -> int:
        """Positions the longest row holds once this forward has written."""
        return int(self.starts.max()) + self.queries

    @cached_property
    def offsets(self) -> mx.array:
        """int32 ``[rows]``: what ``cache.offset`` is for a model's RoPE."""
        return mx.array(self.starts)

    @cached_property
    def context_lens(self) -> NDArray[np.int32]:
        """int32 ``[rows * queries]``: how many positions each query attends to."""
        steps = np.arange(1, self.queries + 1, dtype=np.int32)
        return (self.starts[:, None] + steps).reshape(-1)

    @cached_property
    def written(self) -> NDArray[np.bool_]:
        """``[rows, longest]``: positions that hold keys and values after this forward."""
        positions = np.arange(self.longest, dtype=np.int32)
        return positions < (self.starts + self.queries)[:, None]

    def split(self, limit: int) -> Split:
        """Runs of more than ``limit`` tokens, and the indices of all tokens in shorter ones."""
        if limit not in self._splits:
            long = tuple(run for run in self.runs if run[1] - run[0] > limit)
            short = [np.arange(*run) for run in self.runs if run[1] - run[0] <= limit]
            self._splits[limit] = long, np.concatenate(short) if short else np.empty(0, np.int64)
        return self._splits[limit]

    def past_pieces(self, window: int | None) -> Pieces:
        """What the first row's first token looks back on, as half-open ranges of slots."""
        if window not in self._pieces:
            start, size = int(self.starts[0]), self.block_size
            first = 0 if window is None else max(0, start - window + 1)
            pieces = []
            if first < start:
                table = self.table_of(0)[first // size : -(-start // size)]
                for blocks in np.split(table, np.flatnonzero(np.diff(table) != 1) + 1):
                    pieces.append([int(blocks[0]) * size, (int(blocks[-1]) + 1) * size])
                pieces[0][0] += first % size
                pieces[-1][1] -= -start % size
            self._pieces[window] = tuple((begin, end) for begin, end in pieces)
        return self._pieces[window]

    def mask(self, window: int | None) -> mx.array:
        """Boolean ``[rows, 1, queries, longest]``: which positions each query may read."""
        if window not in self._masks:
            lens = self.context_lens.reshape(self.rows, self.queries, 1)
            positions = np.arange(self.longest, dtype=np.int32)
            allowed = positions < lens
            if window is not None:
                allowed &= positions >= lens - window
            self._masks[window] = mx.array(allowed[:, None])
        return self._masks[window]

    @cached_property
    def device_slots(self) -> tuple[mx.array, mx.array]:
        """``slots`` as (block ids, offsets), int32 ``[rows * queries]`` each, on the device."""
        blocks, offsets = np.divmod(self.slots, self.block_size)
        return mx.array(blocks.astype(np.int32)), mx.array(offsets.astype(np.int32))

    @cached_property
    def device_slot_ids(self) -> mx.array:
        """``slots`` as they are, int32 ``[rows * queries]``."""
        return mx.array(self.slots.astype(np.int32))

    def work(self, threadgroups_per_item: int, window: int | None) -> WorkList:
        """The contexts cut into pieces for the kernels, once for all layers that are alike."""
        key = (threadgroups_per_item, window)
        if key not in self._work:
            self._work[key] = work_list(
                self.context_lens,
                self.queries,
                block_size=self.block_size,
                threadgroups_per_item=threadgroups_per_item,
                window=window,
            )
        return self._work[key]

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """What work lists have been asked for."""
        return tuple(self._work)

    @cached_property
    def device_tables(self) -> mx.array:
        return mx.array(self.all_tables)

    @cached_property
    def device_context_lens(self) -> mx.array:
        return mx.array(self.context_lens)
