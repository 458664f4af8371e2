"""One job at a time: a right kernel passes, a wrong one is found; in the emulator."""

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged_attention.kernel_check import check
from mlx_paged_attention.kernel_check.jobs import DecodeJob, LatentJob, MergeJob, PoolJob, SpeedJob, all_jobs
from mlx_paged_attention.kernel_check.results import Checked, Failed, Timed
from mlx_paged_attention.kernel_check.speed_case import SpeedCase, gap, in_turns

HEADS = (8, 2, 64, 64)
JOBS = [
    DecodeJob(dtype="float16", heads=HEADS, block_size=8),
    DecodeJob(dtype="float32", heads=(4, 2, 80, 48), split=False),
    DecodeJob(dtype="bfloat16", heads=HEADS, window=133, sink=0.5, softcap=2.0),
    DecodeJob(dtype="float32", heads=HEADS, stored="bfloat16", queries=2),
    MergeJob("float16", 64, sinks=True),
    MergeJob("float32", 80, sinks=False),
    *(PoolJob(kernel, "bfloat16", 64, 48, 8) for kernel in ("write_kv", "copy_blocks", "gather_kv")),
    LatentJob(dtype="bfloat16", heads=4, dims=(64, 16), block_size=8),
    LatentJob(dtype="float32", heads=4, dims=(64, 16), stored="bfloat16", split=False),
]

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_right_kernel_passes(job):
    result = check.run(job)
    assert isinstance(result, Checked), result
    assert result.error <= result.tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [job for job in all_jobs("metal") if not isinstance(job, SpeedJob)], ids=lambda job: job.name
)
def test_every_variant_passes(job):
    result = check.run(job)
    assert isinstance(result, Checked), result


FAULTS = [
    (JOBS[0], "paged_decode.metal", "high[i] = min(context, end);", "high[i] = min(context - 1, end);"),
    (
        JOBS[1],
        "paged_decode.metal",
        "UNROLL for (int w = 0; w < VALUE_WORDS; w++) value_words[i][w] = 0;",
        "",
    ),
    (JOBS[2], "paged_decode.metal", "low[i] = WINDOW > 0 ? context - WINDOW : 0;", "low[i] = 0;"),
    (JOBS[2], "paged_decode.metal", "if (SOFTCAP) score =", "if (false) score ="),
    (JOBS[2], "merge_splits.metal", "SINKS ? float(sinks[head])", "false ? float(sinks[head])"),
    (
        JOBS[4],
        "merge_splits.metal",
        "for (int s = 0; s < SG; s++) sum +=",
        "for (int s = 1; s < SG; s++) sum +=",
    ),
    (JOBS[5], "merge_splits.metal", "mine < count ?", "mine < count - 1 ?"),
    (JOBS[6], "write_kv.metal", "slot >= BS", "slot >= 0"),
    (JOBS[7], "copy_blocks.metal", "if (at < VALUE_BYTES / 16)", "if (at < VALUE_BYTES / 16 - 1)"),
    (JOBS[8], "gather_kv.metal", "position % BS;", "index % BS;"),
    (JOBS[9], "latent_decode.metal", "if (dim < DR) {", "if (dim < 8) {"),
    (JOBS[9], "latent_decode.metal", "if (position + 8 * i + r >= end)", "if (false)"),
    (JOBS[10], "latent_decode.metal", "position + key < end ?", "position + key < end - 1 ?"),
]


@pytest.mark.parametrize(("job", "file", "right", "wrong"), FAULTS, ids=lambda x: getattr(x, "name", None))
def test_a_planted_fault_is_found(job, file, right, wrong, plant):
    plant(file, right, wrong)
    result = check.run(job)
    assert isinstance(result, Failed)
    assert re.match(
        r"wrong by \S+ of the largest value|[\d,]+ of [\d,]+ numbers are wrong|\w*Error", result.problem
    )


def test_text_that_no_compiler_takes_is_told_with_the_compilers_words(plant):
    plant("write_kv.metal", "const int slot = slots[token];", "const int slot = slats[token];")
    result = check.run(JOBS[6])
    assert isinstance(result, Failed)
    assert "slats" in result.problem


def test_decode_is_timed_in_turns_and_compared_with_mlx(monkeypatch):
    monkeypatch.setattr(check, "_ROUNDS", 3)
    monkeypatch.setattr(check, "_SECONDS", 0.0)
    job = SpeedJob(rows=2, context=64, heads=4, kv_heads=2, head_dim=64)
    result = check.run(job)
    assert isinstance(result, Timed), result
    assert len(result.paged) == len(result.contiguous) == 3
    assert min(result.paged + result.contiguous) > 0


def test_a_fast_but_wrong_kernel_gets_no_time(plant):
    plant("paged_decode.metal", "float score = scores[t][i] * scale;", "float score = scores[t][i];")
    result = check.run(SpeedJob(rows=2, context=64, heads=4, kv_heads=2, head_dim=64))
    assert isinstance(result, Failed)
    assert "differs from MLX's attention" in result.problem


def test_both_contestants_attend_to_the_same_tokens_and_enough_of_them():
    case = SpeedCase(2, 64, 2, 64, spread=3 * 2 * 2 * 64 * 2 * 64 * 2)
    assert case.kv_bytes == SpeedJob(2, 64, 4, 2, 64).kv_bytes
    assert len(case.tables) == 3
    used = np.concatenate([np.array(table).reshape(-1) for table in case.tables])
    assert sorted(used) == list(range(1, len(used) + 1))
    paged, contiguous = case.chains(4)
    assert gap(paged(4), contiguous(4)) < 2e-2


def test_chains_are_run_in_turns():
    order = []

    def chain(name):
        def build(links):
            order.append(name)
            return mx.zeros((links,)) + 1

        return build

    times = in_turns([chain("a"), chain("b")], rounds=3, seconds=0.0)
    assert [len(each) for each in times] == [3, 3]
    assert "".join(order[-6:]) == "abbaab"
