"""The process that runs jobs may die at any of them."""

import sys

import pytest

from mlx_paged_attention.kernel_check.child import MOST_DEATHS, run_in_child
from mlx_paged_attention.kernel_check.jobs import PoolJob
from mlx_paged_attention.kernel_check.results import Checked, Failed

JOBS = [PoolJob("write_kv", "float16", dim, dim, 8) for dim in (64, 80, 96, 112)]

# Does what a job's head size stands for; one worker's JSON is the next one's stdin.
WORKER = """
import json, os, sys, time
for job in json.load(sys.stdin):
    match ACTIONS.get(str(job["head_dim"])):
        case "crash": print("GPU fault", file=sys.stderr, flush=True); os.abort()
        case "exit": sys.exit(3)
        case "hang": time.sleep(60)
    print(json.dumps({"type": "Checked", "error": job["head_dim"], "tolerance": 1.0}), flush=True)
"""


def worker(**actions):
    named = {name.removeprefix("at"): action for name, action in actions.items()}
    return [sys.executable, "-c", f"ACTIONS = {named!r}\n{WORKER}"]


def test_each_job_gets_its_result():
    assert list(run_in_child(JOBS, worker())) == [Checked(job.head_dim, 1.0) for job in JOBS]


def test_a_job_that_takes_its_process_down_is_a_failure_and_the_next_ones_are_run():
    first, second, third, last = run_in_child(JOBS, worker(at80="crash", at96="exit"))
    assert second == Failed("the process died (SIGABRT): GPU fault")
    assert third == Failed("the process died (exit status 3)")
    assert (first, last) == (Checked(64, 1.0), Checked(112, 1.0))


def test_a_job_that_never_ends_is_a_failure_and_the_next_ones_are_run():
    results = list(run_in_child(JOBS, worker(at80="hang"), limit=2.0))
    assert results[1] == Failed("no result within 2 s")
    assert [type(result) for result in results] == [Checked, Failed, Checked, Checked]


def test_a_machine_on_which_every_job_dies_is_not_asked_for_ever():
    jobs = JOBS[:1] * (MOST_DEATHS + 2)
    results = list(run_in_child(jobs, worker(at64="crash")))
    assert len(results) == len(jobs)
    assert [result.problem.split(":")[0] for result in results[-3:]] == [
        "the process died (SIGABRT)",
        "not run",
        "not run",
    ]


def test_the_real_worker_answers_with_what_went_wrong_where_there_is_no_gpu():
    from mlx_paged_attention.ops.kernels.make import backend

    if backend() is not None:
        pytest.skip("there is a GPU")
    (result,) = run_in_child(JOBS[:1])
    assert isinstance(result, Failed)
    assert "Metal" in result.problem
