"""UseWindow: how many blocks requests have held lately, to know which memory nobody misses."""


class UseWindow:
    """The most blocks held at once within a time, which begins anew when it is over.

    So what is not used is noticed after between one and two such times.

    Args:
        seconds: its length.
        now: seconds of any clock.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._end = now + seconds
        self._most = 0

    def left(self, now: float) -> float:
        """Seconds until it is over."""
        return max(0.0, self._end - now)

    def observe(self, held: int, now: float) -> int | None:
        """So many blocks are held; at the end of the window, the most there were, else ``None``."""
        self._most = max(self._most, held)
        if now < self._end:
            return None
        most, self._most = self._most, held
        self._end = now + self._seconds
        return most
