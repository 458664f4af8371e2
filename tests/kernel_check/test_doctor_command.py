"""``mlx-paged doctor --kernels``: without a GPU, in the emulator as if there were one, and on a GPU."""

import functools
import json

import pytest

from mlx_paged_attention.api import cli
from mlx_paged_attention.api.commands import doctor
from mlx_paged_attention.kernel_check import check
from mlx_paged_attention.kernel_check.jobs import DecodeJob, MergeJob, PoolJob
from mlx_paged_attention.kernel_check.session import check_kernels
from mlx_paged_attention.ops.kernels.make import backend

JOBS = [
    PoolJob("gather_kv", "bfloat16", 64, 48, 8),
    DecodeJob(dtype="float16", heads=(8, 2, 64, 64), block_size=8),
    MergeJob("float16", 64, sinks=True),
]


@pytest.fixture
def mac(monkeypatch, emulator):
    """A machine with kernels for Metal, which run in this process in the emulator; a handful of variants."""
    info = {"device_name": "Apple M9", "architecture": "applegpu_g99s"}
    probed = {"device": "Device(gpu, 0)", "kernels": "metal", "pool": "", "device_info": info}
    monkeypatch.setattr(doctor, "_probe_mlx", lambda: probed)
    monkeypatch.setattr(doctor, "all_jobs", lambda backend: JOBS)
    in_process = functools.partial(map, check.run)
    monkeypatch.setattr(doctor, "check_kernels", functools.partial(check_kernels, run=in_process))


def run(capsys, *arguments):
    """Exit status, stdout and stderr."""
    status = cli.run(["doctor", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.skipif(backend() is not None, reason="there is a GPU")
def test_without_a_gpu_it_refuses_in_one_line_and_the_plain_doctor_says_so_too(capsys):
    status, out, err = run(capsys, "--kernels")
    assert (status, out) == (2, "")
    assert err.startswith(
        "mlx-paged: error: --kernels needs a GPU that MLX can use: here MLX runs on Device(cpu"
    )
    assert err.count("\n") == 1
    status, out, _ = run(capsys)
    assert status == 0
    assert "kernels none, pool host memory" in out


def test_where_mlx_does_not_work_it_refuses_with_the_reason(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_probe_mlx", lambda: {"error": "no library"})
    status, out, err = run(capsys, "--kernels")
    assert (status, out) == (2, "")
    assert err == ("mlx-paged: error: the kernels cannot be checked: MLX does not work here: no library\n")


@pytest.mark.usefixtures("mac")
def test_another_problem_of_the_machine_is_told_in_the_block(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "problems", lambda facts: ["mlx-lm is too old"])
    status, out, _ = run(capsys, "--kernels")
    assert status == 1
    assert "- problem: mlx-lm is too old\n" in out
    assert "3 of 3 kernel variants" in out


@pytest.mark.usefixtures("mac")
def test_right_kernels_give_a_block_to_paste(capsys):
    status, out, _ = run(capsys, "--kernels")
    assert status == 0
    assert out.startswith("### mlx-paged doctor --kernels\n")
    assert "- Apple M9 (applegpu_g99s), kernels for metal\n" in out
    assert "3 of 3 kernel variants compile and are right, 0 failures" in out
    assert "FAILED" not in out


@pytest.mark.usefixtures("mac")
def test_a_wrong_kernel_is_named_and_the_command_fails(capsys, plant):
    plant("merge_splits.metal", "for (int s = 0; s < SG; s++) sum +=", "for (int s = 1; s < SG; s++) sum +=")
    status, out, err = run(capsys, "--kernels")
    assert status == 1
    assert "1 of 3 kernel variants compile and are right, 2 failures" in out
    for job in JOBS[1:]:
        assert f"FAILED {job.name}\n\n    wrong by " in out
        assert f"FAILED {job.name}: wrong by " in err
    assert f"FAILED {JOBS[0].name}" not in out + err


@pytest.mark.usefixtures("mac")
def test_the_report_as_json_has_every_variant(capsys, plant):
    plant("gather_kv.metal", "position % BS;", "index % BS;")
    status, out, _ = run(capsys, "--kernels", "--json")
    assert status == 1
    results = json.loads(out)["kernels"]["results"]
    assert [result["job"] for result in results] == [job.name for job in JOBS]
    assert [result["type"] for result in results] == ["Failed", "Checked", "Checked"]


@pytest.mark.gpu
def test_every_variant_is_right_on_this_gpu(capsys):
    if backend() is None:
        pytest.skip("no GPU that MLX can use")
    status, out, err = run(capsys, "--kernels")
    assert status == 0, out + err
    assert " 0 failures" in out
    assert "| 32 | 1,024 |" in out
