"""StatePool: what recurrent layers know of each sequence, by slot."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

Arrays = list[list[mx.array | None]]  # of each layer, with a leading axis of rows


@dataclass(frozen=True)
class _Rows:
    """The states of the rows of one forward pass."""

    arrays: Arrays

    def take(self, row: int) -> "_Rows":
        """One of them, in memory of its own."""
        return _Rows(_map(self.arrays, lambda array: mx.contiguous(array[row : row + 1])))

    @property
    def count(self) -> int:
        return next(_each(self.arrays)).shape[0]


class StatePool:
    """States as values: a forward pass makes new ones, and nothing is ever written into.

    So a slot that several sequences go on from needs no copy. The rows of a forward pass stay together,
    and are handed to the next one as they are if it has the same rows.

    Args:
        sizes: how many arrays each recurrent layer keeps.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        # mlx-lm's own caches are what the model reads from and writes to.
        self.caches = [ArraysCache(size) for size in sizes]
        self._slots: dict[int, tuple[_Rows, int]] = {}

    def load(self, slots: Sequence[int]) -> None:
        """Put the states of these slots into the caches, one per row. Slot 0, the start, comes alone."""
        if not self.caches:
            return
        assert 0 not in slots or len(slots) == 1, "a sequence's first tokens share a forward pass"
        if slots[0] == 0:
            for cache in self.caches:
                cache.cache = [None] * len(cache.cache)
            return
        places = [self._slots[slot] for slot in slots]
        sources = list({id(rows): rows for rows, _ in places}.values())
        begins, total = {}, 0
        for rows in sources:
            begins[id(rows)] = total
            total += rows.count
        index = [begins[id(rows)] + row for rows, row in places]
        as_they_are = index == list(range(total))
        order = mx.array(np.array(index, np.int32))
        for i, cache in enumerate(self.caches):
            for j in range(len(cache.cache)):
                parts = [rows.arrays[i][j] for rows in sources]
                cache.cache[j] = _joined(parts, None if as_they_are else order)

    def store(self, sources: Sequence[int], targets: Sequence[int]) -> list[mx.array]:
        """Keep what the caches hold, one row per target, after the rows came from ``sources``.

        Returns:
            Arrays to evaluate.
        """
        if not self.caches:
            return []
        # Models hand back views, such as the last of a chunk's activations, which keep all of them alive.
        rows = _Rows(_map([cache.cache for cache in self.caches], mx.contiguous))
        pending = list(_each(rows.arrays))
        for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if source not in (0, target):
                pending += self.set_apart(source)
            self._slots[target] = (rows, row)
        return pending

    def set_apart(self, slot: int) -> list[mx.array]:
        """Its sequence goes on elsewhere, or has ended: what stays must not keep the other rows alive.

        Returns:
            Arrays to evaluate.
        """
        if slot not in self._slots:
            return []
        rows, row = self._slots[slot]
        if rows.count == 1:
            return []
        alone = rows.take(row)
        self._slots[slot] = (alone, 0)
        return list(_each(alone.arrays))

    def drop(self, slots: Sequence[int]) -> None:
        """Forget these slots, and whatever a forward pass has left in the caches: a step has failed."""
        for slot in slots:
            self._slots.pop(slot, None)
        for cache in self.caches:
            cache.cache = [None] * len(cache.cache)

    def clear(self) -> None:
        """Forget every state."""
        self.drop(list(self._slots))


def _map(arrays: Arrays, function: Callable[[mx.array], mx.array]) -> Arrays:
    return [[None if array is None else function(array) for array in layer] for layer in arrays]


def _each(arrays: Arrays) -> Iterator[mx.array]:
    for layer in arrays:
        for array in layer:
            if array is not None:
                yield array


def _joined(parts: Sequence[mx.array | None], order: mx.array | None) -> mx.array | None:
    """Arrays one after the other, then in this order."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    assert len(present) == len(parts), "some rows have a state that others lack"
    whole = present[0] if len(present) == 1 else mx.concatenate(present)
    return whole if order is None else whole[order]
