"""StepLimit: how much a step may compute, after one has found no memory."""

# Steps that must end well before the limit is doubled again.
CALM_STEPS = 64


class StepLimit:
    """Most tokens, and so most requests, of a step; ``None`` as long as memory has sufficed.

    It is halved whenever a step fails for want of memory, and doubled after a while without such a failure.

    Args:
        most: tokens from which on there is no need for a limit.
    """

    def __init__(self, most: int) -> None:
        self.tokens: int | None = None
        self._most = most
        self._calm = 0

    @property
    def exhausted(self) -> bool:
        """There can be no smaller step, and since the limit has come to this none has ended."""
        return self.tokens == 1 and self._calm == 0

    def apply(self, count: int) -> int:
        """``count``, or less."""
        return count if self.tokens is None else min(count, self.tokens)

    def lower(self, failed: int) -> int:
        """A step of ``failed`` tokens found no memory; what the next one may compute, at least 1."""
        self.tokens = max(1, self.apply(failed) // 2)
        self._calm = 0
        return self.tokens

    def step_ended(self) -> None:
        """A step has found its memory."""
        if self.tokens is None:
            return
        self._calm += 1
        if self._calm == CALM_STEPS:
            self._calm = 0
            self.tokens = 2 * self.tokens if 2 * self.tokens < self._most else None
