"""WorkList: how the contexts of a batch are cut into pieces of about equal size, one per threadgroup."""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops.kernels.make import backend

# A threadgroup's simdgroups take 16 keys each at a time: pieces are cut at multiples of this.
SIMDGROUPS = 4
PIECE = 16 * SIMDGROUPS


class Chip(NamedTuple):
    """What the estimate of :func:`_best_length` reckons with.

    Attributes:
        resident: threadgroups at work at the same time.
        alone: how long one takes alone to advance by a piece, if as many as are resident take 1.
        merging: how long it takes to merge, however many pieces.
    """

    resident: int
    alone: float
    merging: float


# H200: 2 threadgroups on each of 132 multiprocessors, which their shared memory allows; half of them keep
# the memory busy. Apple silicon: 3 on each of 40 cores, reckoned from the size of the registers; smaller
# chips take several turns, larger ones are not quite filled. They have less under way than on an H200,
# and another kernel merges; none of that was measured.
CHIPS = {"cuda": Chip(264, 0.45, 0.65), "metal": Chip(120, 0.8, 2.0)}

# Pieces of an item that is long at work.
LONG = 64

# Into how many items the longest context may be cut.
_CUTS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64])


@dataclass(frozen=True)
class WorkList:
    """The pieces of a batch.

    Attributes:
        items: int32 ``[items, 4]``: row, first position, position after the last, and 1 for an item
            that only fills up the list.
        splits: int32 ``[rows, 2 + threadgroups_per_item]``: each row's first item and its number
            of items, then a counter for each of the threadgroups that share an item, which is 0
            unless a kernel is at work.
        split: some row has several items, so that results must be merged.
    """

    items: mx.array
    splits: mx.array
    split: bool


def work_list(
    context_lens: NDArray[np.int32],
    queries: int,
    *,
    block_size: int,
    threadgroups_per_item: int,
    window: int | None = None,
    capacity: int | None = None,
    target: int | None = None,
) -> WorkList:
    """Cut the contexts of ``[rows * queries]`` tokens: :func:`cut_contexts`, on the device.

    With a ``capacity`` results are merged always, so that steps of any contexts have the same shapes.
    """
    items, splits = cut_contexts(
        context_lens,
        queries,
        block_size=block_size,
        threadgroups_per_item=threadgroups_per_item,
        window=window,
        capacity=capacity,
        target=target,
    )
    return WorkList(mx.array(items), mx.array(splits), capacity is not None or len(items) > len(splits))


def capacity_for(rows: int, threadgroups_per_item: int) -> int:
    """Items that are enough for ``rows`` of any contexts."""
    return rows + max(1, 2 * _chip().resident // threadgroups_per_item)


def cut_contexts(
    context_lens: NDArray[np.int32],
    queries: int,
    *,
    block_size: int,
    threadgroups_per_item: int,
    window: int | None = None,
    capacity: int | None = None,
    target: int | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """``items`` and ``splits`` of a :class:`WorkList`.

    Args:
        context_lens: int32 ``[rows * queries]``, 0 included.
        threadgroups_per_item: how many share a piece, one per kv head and tile of queries.
        window: attend to the last ``window`` positions only: pieces begin at its first block.
        capacity: make exactly this many items, the last ones empty.
        target: threadgroups to aim for; as many as should be fastest by default.
    """
    contexts = context_lens.reshape(-1, queries)
    ends = contexts.max(axis=1)
    begins = np.zeros_like(ends)
    if window is not None:
        begins = np.maximum(contexts.min(axis=1) - window, 0) // block_size * block_size
    pieces = -(-(ends - begins) // PIECE)
    if target is None:
        longest = _best_length(pieces, threadgroups_per_item, capacity)
    else:
        wanted = max(1, target // threadgroups_per_item)
        if capacity is not None:
            wanted = min(wanted, capacity - len(ends))
            assert wanted > 0, "capacity must exceed the rows"
        longest = max(1, -(-int(pieces.sum()) // wanted))
    counts = np.maximum(-(-pieces // longest), 1)
    length = -(-pieces // counts) * PIECE  # positions per item of each row

    rows = np.repeat(np.arange(len(ends), dtype=np.int32), counts)
    firsts = np.cumsum(counts) - counts
    index = np.arange(len(rows), dtype=np.int32) - firsts[rows]
    start = begins[rows] + index * length[rows]
    items = np.zeros((max(len(rows), capacity or 0), 4), np.int32)
    items[: len(rows), 0] = rows
    items[: len(rows), 1] = start
    items[: len(rows), 2] = np.minimum(start + length[rows], ends[rows])
    items[len(rows) :, 3] = 1
    splits = np.zeros((len(ends), 2 + threadgroups_per_item), np.int32)
    splits[:, 0] = firsts
    splits[:, 1] = counts
    return items, splits


def _chip() -> Chip:
    return CHIPS[backend() or "metal"]


def _best_length(pieces: NDArray[np.int32], threadgroups_per_item: int, capacity: int | None) -> int:
    """Pieces per item with which a batch should take the least time.

    Time is counted in the time that a chip full of threadgroups takes to advance by a piece. The
    constants fit what the kernel alone took on an H200: memory is the limit, a partly filled last wave
    uses it badly, and so do threadgroups that are long at work while others have come to their end; a
    threadgroup alone cannot use it, each wave has to begin, and merging costs something.
    """
    chip = _chip()
    lengths = np.maximum(-(-pieces.max() // _CUTS), 1)
    items = np.maximum(-(-pieces // lengths[:, None]), 1).sum(axis=1)
    full = threadgroups_per_item / chip.resident
    waves = items * full
    begun = np.ceil(waves)
    memory = pieces.sum() * full * (1 + np.where(waves > 1, 0.9 * (begun - waves) / (waves * begun), 0.0))
    cuts = -(-pieces.max() // lengths)
    merging = np.where(cuts > 1, chip.merging + 0.03 * cuts, 0.0)
    time = np.maximum(memory, chip.alone * lengths) + 1.2 * begun + merging
    time *= np.where((waves > 1) & (lengths > LONG), 1.05, 1.0)
    best = 0
    for i in range(1, len(_CUTS)):
        fits = capacity is None or items[i] <= capacity
        if fits and time[i] < 0.97 * time[best]:
            best = i
    return int(lengths[best])
