"""DeviceBatch: a batch whose metadata is on the device only, as slices of one array."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops.batch import AttentionBatch, Cut
from mlx_paged_attention.ops.kernels.work_list import WorkList, capacity_for, cut_contexts
from mlx_paged_attention.ops.packing import Packing

Fields = Mapping[str, tuple[int, ...]]


class DeviceBatch(AttentionBatch):
    """Rows of ``queries`` tokens, for the functions that are compiled.

    While a step is compiled there are no values to look at: whatever asks for metadata on the host, or
    for what was not given here, fails, instead of making a constant of what it finds.

    Args:
        work: the work lists, for every cut that the layers ask for.
        given: other attributes of :class:`AttentionBatch`, such as ``device_tables``.
    """

    def __init__(
        self, block_size: int, *, queries: int = 1, work: dict[Cut, WorkList] | None = None, **given: object
    ) -> None:
        self.__dict__.update(block_size=block_size, queries=queries, _work=work, **given)

    def joined_by(self, others: "Sequence[DeviceBatch]") -> "DeviceBatch":
        """This batch, with those of the layer groups after the first."""
        self.__dict__["other_groups"] = tuple(others)
        return self

    @property
    def rows(self) -> int:
        return int(self.offsets.shape[0])


class DevicePacking(Packing):
    """Singles and tiles of a compiled step; nothing in it is gathered.

    Args:
        device_singles, device_tiles, device_order: int32 ``[singles, 1]``, ``[tiles, TILE]`` and
            ``[tokens]``, padding included.
        parts: ``single_batch`` and ``tile_batch``.
    """

    def __init__(
        self, device_singles: mx.array, device_tiles: mx.array, device_order: mx.array, **parts: DeviceBatch
    ) -> None:
        self.__dict__.update(
            device_singles=device_singles,
            device_tiles=device_tiles,
            device_order=device_order,
            has_singles=True,
            has_tiles=True,
            gathered=(),
            gathered_batches=(),
            **parts,
        )


def pack(fields: Fields, values: Mapping[str, NDArray[np.integer]]) -> NDArray[np.int32]:
    """All values in one array, each in the first places of its field, the rest 0."""
    parts = []
    for name, shape in fields.items():
        part = np.zeros(shape, np.int32)
        part[tuple(map(slice, values[name].shape))] = values[name]
        parts.append(part.reshape(-1))
    return np.concatenate(parts)


def unpack(fields: Fields, packed: mx.array) -> dict[str, mx.array]:
    """The fields as slices of what :func:`pack` made."""
    ends = np.cumsum([0, *[math.prod(shape) for shape in fields.values()]]).tolist()
    return {
        name: packed[begin:end].reshape(shape)
        for (name, shape), (begin, end) in zip(fields.items(), pairwise(ends), strict=True)
    }


def cut(
    prefix: str, context_lens: NDArray[np.int32], queries: int, block_size: int, cuts: tuple[Cut, ...]
) -> dict[str, NDArray[np.int32]]:
    """Work lists by name, of the same shapes whatever the contexts."""
    lists: dict[str, NDArray[np.int32]] = {}
    for i, (threadgroups_per_item, window) in enumerate(cuts):
        lists[f"{prefix}items{i}"], lists[f"{prefix}splits{i}"] = cut_contexts(
            context_lens,
            queries,
            block_size=block_size,
            threadgroups_per_item=threadgroups_per_item,
            window=window,
            capacity=capacity_for(len(context_lens) // queries, threadgroups_per_item),
        )
    return lists


def cut_fields(prefix: str, rows: int, cuts: tuple[Cut, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of what :func:`cut` makes."""
    fields: dict[str, tuple[int, ...]] = {}
    for i, (threadgroups_per_item, _) in enumerate(cuts):
        fields[f"{prefix}items{i}"] = (capacity_for(rows, threadgroups_per_item), 4)
        fields[f"{prefix}splits{i}"] = (rows, 2 + threadgroups_per_item)
    return fields


def work_of(prefix: str, arrays: Mapping[str, mx.array], cuts: tuple[Cut, ...]) -> dict[Cut, WorkList]:
    """What :func:`cut` made, once it is on the device."""
    return {
        key: WorkList(arrays[f"{prefix}items{i}"], arrays[f"{prefix}splits{i}"], split=True)
        for i, key in enumerate(cuts)
    }
