"""BlockTables: the block tables of all requests in the runner, one array."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """A line of block ids per request and layer group, so that those of a step are found by one indexing.

    Args:
        num_groups: layer groups; a request's tables are equally long in all of them.
    """

    def __init__(self, num_groups: int = 1) -> None:
        self._ids = np.zeros((num_groups, 16, 64), np.int32)
        self._lengths = np.zeros(16, np.int64)
        self._lines: dict[str, int] = {}
        self._free = list(range(16))

    def add(self, request_id: str) -> None:
        """An empty table in each group."""
        if not self._free:
            lines = len(self._lengths)
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)], axis=1)
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
            self._free = list(range(lines, 2 * lines))
        line = self._lines[request_id] = self._free.pop()
        self._ids[:, line] = 0
        self._lengths[line] = 0

    def remove(self, request_id: str) -> None:
        """Forget a table; nothing if there is none."""
        line = self._lines.pop(request_id, None)
        if line is not None:
            self._free.append(line)

    def extend(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Append ``block_ids``: equally many for each group, one group after the other."""
        if not block_ids:
            return
        new = np.reshape(np.array(block_ids, np.int32), (len(self._ids), -1))
        line = self._lines[request_id]
        begin = int(self._lengths[line])
        end = begin + new.shape[1]
        width = self._ids.shape[2]
        if end > width:
            self._ids = np.pad(self._ids, ((0, 0), (0, 0), (0, max(end, 2 * width) - width)))
        self._ids[:, line, begin:end] = new
        self._lengths[line] = end

    def change(self, request_id: str, index: int, block_ids: Sequence[int]) -> None:
        """Put other blocks, one for each group, in the place of those at ``index``."""
        line = self._lines[request_id]
        assert index < self._lengths[line]
        self._ids[:, line, index] = block_ids

    def of(self, request_ids: Sequence[str], width: int, group: int = 0) -> NDArray[np.int32]:
        """The first ``width`` blocks of each, int32 ``[requests, up to width]``, padded with 0."""
        return self._ids[group, [self._lines[request_id] for request_id in request_ids], :width]
