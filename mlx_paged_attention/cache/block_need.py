"""BlockNeed: how many blocks a sequence holds at most, in all layer groups."""

from collections.abc import Sequence

# A step is planned while the one before it may still run, so that blocks behind its window are held, too.
STEPS_AT_ONCE = 2


class BlockNeed:
    """What sequences need of the pool, by their length.

    Args:
        windows: of each layer group; ``None`` looks back on everything.
        block_size: tokens per block.
        step_tokens: most tokens that one sequence computes in a step; without windows it does not matter.
    """

    def __init__(self, windows: Sequence[int | None], block_size: int, step_tokens: int) -> None:
        self.windows = tuple(windows)
        self.block_size = block_size
        self._step_tokens = step_tokens

    def of_group(self, window: int | None, num_tokens: int) -> int:
        """Blocks that a group holds at most on the way to ``num_tokens`` tokens."""
        whole = -(-num_tokens // self.block_size)
        if window is None:
            return whole
        # The steps' tokens and those before them that the first one sees: they may begin and end anywhere
        # in a block.
        span = window - 1 + STEPS_AT_ONCE * self._step_tokens
        return min(whole, 1 + -(-(span - 1) // self.block_size))

    def first_useful(self, window: int | None, num_tokens: int) -> int:
        """Index of the first block that the token after ``num_tokens`` tokens, or a later one, looks at."""
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def most(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at most on the way to ``num_tokens`` tokens."""
        return sum(self.of_group(window, num_tokens) for window in self.windows)

    def longest(self, num_blocks: int, limit: int) -> int:
        """The longest sequence, at most ``limit`` tokens, for which ``num_blocks`` blocks are enough."""
        if self.windows == (None,):
            return min(num_blocks * self.block_size, limit)
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.most(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low
