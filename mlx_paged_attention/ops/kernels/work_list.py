"""WorkList: how the contexts of a batch are cut into pieces of about equal size, one per threadgroup."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# A threadgroup's simdgroups take 16 keys each at a time: pieces are cut at multiples of this.
SIMDGROUPS = 4
PIECE = 16 * SIMDGROUPS

# Threadgroups to aim for: several per place on a large chip, so that the last ones to finish do not
# leave it idle for long.
TARGET_THREADGROUPS = 1600


@dataclass(frozen=True)
class WorkList:
    """The pieces of a batch.

    Attributes:
        items: int32 ``[items, 4]``: row, first position, position after the last, 0.
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
    target: int = TARGET_THREADGROUPS,
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
    return rows + max(1, TARGET_THREADGROUPS // threadgroups_per_item)


def cut_contexts(
    context_lens: NDArray[np.int32],
    queries: int,
    *,
    block_size: int,
    threadgroups_per_item: int,
    window: int | None = None,
    capacity: int | None = None,
    target: int = TARGET_THREADGROUPS,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """``items`` and ``splits`` of a :class:`WorkList`.

    Args:
        context_lens: int32 ``[rows * queries]``, 0 included.
        threadgroups_per_item: how many share a piece, one per kv head and tile of queries.
        window: attend to the last ``window`` positions only: pieces begin at its first block.
        capacity: make exactly this many items, the last ones empty.
        target: threadgroups to aim for.
    """
    contexts = context_lens.reshape(-1, queries)
    ends = contexts.max(axis=1)
    begins = np.zeros_like(ends)
    if window is not None:
        begins = np.maximum(contexts.min(axis=1) - window, 0) // block_size * block_size
    pieces = -(-(ends - begins) // PIECE)
    wanted = max(1, target // threadgroups_per_item)
    if capacity is not None:
        wanted = min(wanted, capacity - len(ends))
        assert wanted > 0, "capacity must exceed the rows"
    longest = max(1, -(-int(pieces.sum()) // wanted))  # pieces per item
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
    splits = np.zeros((len(ends), 2 + threadgroups_per_item), np.int32)
    splits[:, 0] = firsts
    splits[:, 1] = counts
    return items, splits
