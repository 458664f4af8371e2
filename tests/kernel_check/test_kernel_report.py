"""The block to paste."""

import json

from mlx_paged_attention.kernel_check.jobs import MergeJob, PoolJob, SpeedJob
from mlx_paged_attention.kernel_check.report import KernelReport
from mlx_paged_attention.kernel_check.results import Checked, Failed, Timed

RIGHT = (MergeJob("float16", 64, sinks=True), Checked(3e-4, 2e-3))
EXACT = (PoolJob("write_kv", "float16", 64, 64, 8), Checked(0.0, 0.0))
FAST = (SpeedJob(8, 4096), Timed([1e-4, 2e-4, 1e-4], [3e-4, 2e-4, 2e-4]))


def wrong(dim, problem="wrong by 1.0"):
    return MergeJob("float32", dim, sinks=False), Failed(problem)


def test_all_well():
    report = KernelReport([RIGHT, EXACT, FAST], 41.6)
    assert report.failures == []
    text = report.as_markdown(["mlx 0.32.4", "Apple M9"])
    assert text.startswith("### mlx-paged doctor --kernels\n\n- mlx 0.32.4\n- Apple M9\n\n")
    assert "2 of 2 kernel variants compile and are right, 0 failures; took 42 s." in text
    assert "3.0e-04 (2e-03 allowed)" in text
    # 134 MB in 100 µs; per round 3, 1 and 2 times as long.
    assert text.endswith("| 8 | 4,096 | 100 | 200 | 2.00 (1.00 to 3.00) | 1,342 |")


def test_failures_are_counted_and_told_by_variant():
    slow = (SpeedJob(1, 4096), Failed("differs from MLX's attention by 1"))
    report = KernelReport([RIGHT, wrong(80, "error:\n  no such word"), slow], 1.0)
    text = report.as_markdown([])
    assert "1 of 2 kernel variants compile and are right, 2 failures;" in text
    assert "FAILED merge_splits float32, heads of 80\n\n    error:\n      no such word\n" in text
    assert "FAILED speed of 1 x 4,096 tokens\n\n    differs from MLX's attention by 1" in text
    assert "ratio" not in text


def test_many_long_failures_are_all_named_and_still_fit_into_an_issue():
    report = KernelReport([wrong(dim, "x" * 10_000) for dim in range(90)], 1.0)
    text = report.as_markdown([])
    assert len(text) < 50_000
    for dim in range(90):
        assert f"FAILED merge_splits float32, heads of {dim}\n" in text


def test_the_report_is_json_too():
    report = json.loads(json.dumps(KernelReport([RIGHT, wrong(80), FAST], 1.5).as_json()))
    assert (report["seconds"], report["failures"]) == (1.5, 1)
    right, failed, fast = report["results"]
    assert right == {"job": RIGHT[0].name, "type": "Checked", "error": 3e-4, "tolerance": 2e-3}
    assert failed == {"job": wrong(80)[0].name, "type": "Failed", "problem": "wrong by 1.0"}
    assert fast["paged"] == [1e-4, 2e-4, 1e-4]
