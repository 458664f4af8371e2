"""ElasticPool: how many blocks the KV pool has, and when that is to change."""

from mlx_paged_attention.cache.use_window import UseWindow

# After the machine had no memory for the pool to grow, it is asked again only after so many seconds.
GROWTH_PAUSE = 5.0


class ElasticPool:
    """The size of the pool as the runner has it. Whoever changes that says so here. Times are in seconds.

    Args:
        num_blocks: at the start, and at least as long as it does not sleep.
        growth: blocks that it grows by.
        window: of the uses that are looked at before blocks are given back; ``None``: none ever are.

    Attributes:
        num_blocks: that it has.
        least: as it was at the start.
        num_growths, num_shrinks: how often the size changed.
        num_refusals: times that there was no memory to grow.
        refusal: why, the last time.
        is_sleeping: it has been given back, and nobody has come to use it.
    """

    def __init__(self, num_blocks: int, growth: int, window: UseWindow | None) -> None:
        self.num_blocks = self.least = num_blocks
        self.num_growths = self.num_shrinks = 0
        self.num_refusals = 0
        self.refusal = ""
        self.is_sleeping = False
        self._growth = growth
        self._window = window
        self._grow_again = 0.0

    def changed(self, num_blocks: int) -> None:
        """It has so many blocks now, which may be as many as before."""
        self.num_growths += num_blocks > self.num_blocks
        self.num_shrinks += num_blocks < self.num_blocks
        self.num_blocks = num_blocks

    def refused(self, reason: str, now: float) -> None:
        """There was no memory to grow."""
        self.num_refusals += 1
        self.refusal = reason
        self._grow_again = now + GROWTH_PAUSE

    def may_grow_again(self, now: float) -> bool:
        """There was no memory to grow, and that is a while ago."""
        return self.num_refusals > 0 and now >= self._grow_again

    def to_keep(self, num_held: int, now: float) -> int | None:
        """Of the blocks that it has, how many are enough; ``None`` if it is to stay as it is.

        Args:
            num_held: blocks that requests hold now.
        """
        most = None if self._window is None else self._window.observe(num_held, now)
        if most is None:
            return None
        steps = max(0, -(-(1 + most - self.least) // self._growth))
        needed = self.least + steps * self._growth
        return needed if needed < self.num_blocks else None

    def idle_seconds(self, now: float) -> float | None:
        """Seconds to wait at most before asking :meth:`to_keep`; ``None``: there is nothing to give back."""
        if self._window is None or self.num_blocks <= self.least:
            return None
        return self._window.left(now)
