"""Threads that may own MLX: they are parked and used again, and never end.

When an operating-system thread ends, MLX's thread-local state lets go of Python objects. Before
Python 3.13 ``Thread.join`` returns ahead of that, so that a thread ending while the interpreter
shuts down aborts the process. A parked daemon thread has no such moment.
"""

import queue
import threading
from collections.abc import Callable

_Job = Callable[[], None]
_parked: "queue.SimpleQueue[queue.SimpleQueue[_Job]]" = queue.SimpleQueue()
_unfinished: set[threading.Event] = set()


def run_on_mlx_thread(job: _Job) -> threading.Event:
    """Start ``job`` on a parked thread, or on a new one; the event is set when it has returned.

    ``job`` must not raise.
    """
    done = threading.Event()

    def work() -> None:
        try:
            job()
        finally:
            _unfinished.discard(done)
            done.set()

    _unfinished.add(done)
    try:
        jobs = _parked.get_nowait()
    except queue.Empty:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="mlx-paged-engine", daemon=True).start()
    jobs.put(work)
    return done


def has_busy_thread() -> bool:
    """Whether a job has not returned yet."""
    return bool(_unfinished)


def _serve(jobs: "queue.SimpleQueue[_Job]") -> None:
    while True:
        job: _Job | None = jobs.get()
        assert job is not None
        job()
        job = None  # let go of what it held while parked
        _parked.put(jobs)
