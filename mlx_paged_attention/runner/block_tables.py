"""BlockTables: the block tables of all requests in the runner, one array."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """A line of block ids for each request, so that those of a step are found by one indexing."""

    def __init__(self) -> None:
        self._ids = np.zeros((16, 64), np.int32)
        self._lengths = np.zeros(16, np.int64)
        self._lines: dict[str, int] = {}
        self._free = list(range(16))

    def add(self, request_id: str) -> None:
        """An empty table."""
        if not self._free:
            lines = len(self._ids)
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
            self._free = list(range(lines, 2 * lines))
        line = self._lines[request_id] = self._free.pop()
        self._ids[line] = 0
        self._lengths[line] = 0

    def remove(self, request_id: str) -> None:
        """Forget a table; nothing if there is none."""
        line = self._lines.pop(request_id, None)
        if line is not None:
            self._free.append(line)

    def extend(self, request_id: str, block_ids: Sequence[int]) -> None:
        if not block_ids:
            return
        line = self._lines[request_id]
        begin = int(self._lengths[line])
        end = begin + len(block_ids)
        if end > self._ids.shape[1]:
            more = max(end, 2 * self._ids.shape[1]) - self._ids.shape[1]
            self._ids = np.pad(self._ids, ((0, 0), (0, more)))
        self._ids[line, begin:end] = block_ids
        self._lengths[line] = end

    def change(self, request_id: str, index: int, block_id: int) -> None:
        """Put another block in the place of one."""
        line = self._lines[request_id]
        assert index < self._lengths[line]
        self._ids[line, index] = block_id

    def of(self, request_ids: Sequence[str], width: int) -> NDArray[np.int32]:
        """The first ``width`` blocks of each, int32 ``[requests, up to width]``, padded with 0."""
        return self._ids[[self._lines[request_id] for request_id in request_ids], :width]
