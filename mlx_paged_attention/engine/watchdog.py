"""Watchdog: a thread that notices when the engine's thread has work to do and gets nowhere."""

import sys
import threading
import time
import traceback
from collections.abc import Callable

# Of the time between two looks, so many intervals count at most. If it was longer, the whole process stood
# still, be it in a suspended laptop or in a debugger, and that says nothing about the engine.
_MOST_INTERVALS = 2


class Watchdog:
    """Looks at the engine about once a second, inside a ``with`` block.

    Time in which the process itself stood still does not count.

    Args:
        seconds: without progress, until ``stalled`` is called; twice as many, until ``give_up`` is.
        busy: whether there is work to do.
        progress: any value that changes whenever a step has ended.
        stalled: called once when the engine hangs, and again if it does so after it had gone on.
        resumed: called when it goes on after all.
        give_up: called once, and nothing after it.
    """

    def __init__(
        self,
        seconds: float,
        *,
        busy: Callable[[], bool],
        progress: Callable[[], object],
        stalled: Callable[[float], None],
        resumed: Callable[[], None],
        give_up: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._busy, self._progress = busy, progress
        self._stalled, self._resumed, self._give_up = stalled, resumed, give_up
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mlx-paged-watchdog", daemon=True)

    def __enter__(self) -> None:
        if self._seconds:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        interval = min(1.0, self._seconds / 8)
        standing, is_stalled, seen = 0.0, False, self._progress()
        looked = self._clock()
        while not self._ended.wait(interval):
            now = self._clock()
            standing += min(now - looked, _MOST_INTERVALS * interval)
            looked = now
            progress = self._progress()
            if progress != seen or not self._busy():
                standing, seen = 0.0, progress
                if is_stalled:
                    is_stalled = False
                    self._resumed()
            elif standing >= 2 * self._seconds:
                self._give_up(standing)
                return
            elif standing >= self._seconds and not is_stalled:
                is_stalled = True
                self._stalled(standing)


def thread_stacks() -> str:
    """Where each thread of the process is, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
