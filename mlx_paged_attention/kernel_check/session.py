"""From a back end to a report: run every job behind a progress bar."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from tqdm.auto import tqdm

from mlx_paged_attention.kernel_check.child import run_in_child
from mlx_paged_attention.kernel_check.jobs import Job
from mlx_paged_attention.kernel_check.report import KernelReport
from mlx_paged_attention.kernel_check.results import Failed, Result

Runner = Callable[[Sequence[Job]], Iterator[Result]]


def check_kernels(jobs: Sequence[Job], run: Runner = run_in_child) -> KernelReport:
    """Run jobs; failures are told on stderr as they come, the bar is shown on a terminal.

    Args:
        run: makes one result per job, in order.
    """
    begin = time.monotonic()
    results: list[Result] = []
    with tqdm(total=len(jobs), unit="check", disable=None) as bar:
        outcomes = run(jobs)
        for job in jobs:
            bar.set_description(job.name[:60])
            result = next(outcomes)
            results.append(result)
            if isinstance(result, Failed):
                bar.write(f"FAILED {job.name}: {result.problem}", file=sys.stderr)
            bar.update()
    return KernelReport(list(zip(jobs, results, strict=True)), time.monotonic() - begin)
