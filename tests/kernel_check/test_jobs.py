"""What is checked covers what there is."""

import itertools

import msgspec
import pytest

from mlx_paged_attention.kernel_check.jobs import (
    BLOCK_SIZES,
    HEAD_DIMS,
    POOL_KERNELS,
    TYPES,
    DecodeJob,
    Job,
    JoinJob,
    LatentJob,
    MergeJob,
    PoolJob,
    SpeedJob,
    all_jobs,
    decode_grid,
    latent_jobs,
    merge_jobs,
    pool_jobs,
)


def option(job):
    return next((name for name in ("window", "sink", "softcap") if getattr(job, name) is not None), None)


def test_the_grid_has_every_pair_of_choices():
    choices = (HEAD_DIMS, BLOCK_SIZES, TYPES, (None, "window", "sink", "softcap"), (False, True))
    grid = [(job.heads[2], job.block_size, job.dtype, option(job), job.split) for job in decode_grid()]
    for one, other in itertools.combinations(range(len(choices)), 2):
        pairs = {(case[one], case[other]) for case in grid}
        assert pairs == set(itertools.product(choices[one], choices[other]))


def test_kernels_that_move_keys_and_values_are_checked_for_every_type_block_size_and_head_size():
    for kernel in POOL_KERNELS:
        jobs = [job for job in pool_jobs() if job.kernel == kernel]
        assert {(job.dtype, job.block_size) for job in jobs} == set(itertools.product(TYPES, BLOCK_SIZES))
        assert {job.head_dim for job in jobs} == set(HEAD_DIMS)
        assert any(job.head_dim != job.v_head_dim for job in jobs)


def test_merging_is_checked_for_every_head_size_and_type_with_and_without_sinks():
    assert {job.head_dim for job in merge_jobs()} == set(HEAD_DIMS)
    assert {(j.dtype, j.sinks) for j in merge_jobs()} == set(itertools.product(TYPES, (False, True)))


def test_latents_are_checked_for_every_type_and_block_size_whole_and_in_pieces():
    jobs = list(latent_jobs())
    assert {job.dtype for job in jobs} == set(TYPES)
    assert {job.block_size for job in jobs} == set(BLOCK_SIZES)
    assert {(job.heads > 32, job.split) for job in jobs} == set(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_a_failure_is_found_by_its_name(backend):
    jobs = all_jobs(backend)
    assert len({job.name for job in jobs}) == len(jobs)
    kinds = {type(job) for job in jobs}
    merges = {MergeJob} if backend == "metal" else set()
    assert kinds == {DecodeJob, JoinJob, LatentJob, PoolJob, SpeedJob} | merges
    names = "\n".join(job.name for job in jobs)
    for words in (
        "5 queries",
        "stored as bfloat16",
        "heads of 192 and 128",
        "window 133, sinks, soft cap",
        "picked",
    ):
        assert words in names


def test_jobs_travel_as_json():
    jobs = all_jobs("metal")
    assert msgspec.json.decode(msgspec.json.encode(jobs), type=list[Job]) == jobs
