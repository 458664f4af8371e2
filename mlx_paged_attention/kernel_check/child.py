"""Jobs in a process of their own: a kernel that takes its process down is a failed job like others."""

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence

import msgspec

from mlx_paged_attention.kernel_check.jobs import Job
from mlx_paged_attention.kernel_check.results import Failed, Result

WORKER = (sys.executable, "-m", "mlx_paged_attention.kernel_check.worker")
JOB_SECONDS = 120.0
# A GPU or an MLX that takes every process down would otherwise be asked a hundred times.
MOST_DEATHS = 5


def run_in_child(
    jobs: Sequence[Job], worker: Sequence[str] = WORKER, limit: float = JOB_SECONDS
) -> Iterator[Result]:
    """One result per job, in order.

    Args:
        worker: the command that runs jobs.
        limit: seconds that a job may take before its process is killed.
    """
    for _ in range(MOST_DEATHS):
        done = 0
        for result in _one_child(jobs, worker, limit):
            done += 1
            yield result
        jobs = jobs[done:]
        if not jobs:
            return
    for _ in jobs:
        yield Failed(f"not run: the process died {MOST_DEATHS} times")


def _one_child(jobs: Sequence[Job], worker: Sequence[str], limit: float) -> Iterator[Result]:
    """Results until the process dies; that is a result, too."""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            try:
                child.stdin.write(msgspec.json.encode(jobs))
                child.stdin.close()
            except BrokenPipeError:
                pass  # it died at once, and is asked why below
            for _ in jobs:
                timer = threading.Timer(limit, child.kill)
                timer.start()
                line = child.stdout.readline()
                timed_out = not timer.is_alive()
                timer.cancel()
                if not line:
                    status = child.wait()
                    errors.seek(0)
                    said = errors.read().decode(errors="replace").strip()
                    how = (
                        f"no result within {limit:.0f} s"
                        if timed_out
                        else f"the process died ({_cause(status)})"
                    )
                    yield Failed(f"{how}: {said[-2000:]}" if said else how)
                    return
                yield msgspec.json.decode(line, type=Result)
        finally:
            child.kill()  # nobody waits for the rest, if there is any


def _cause(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
