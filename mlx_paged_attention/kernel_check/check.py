"""Run one job on the GPU at hand; its result."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.kernel_check.decode_case import LSE_FACTOR, TOLERANCE, DecodeCase, errors
from mlx_paged_attention.kernel_check.jobs import (
    DecodeJob,
    Job,
    JoinJob,
    LatentJob,
    MergeJob,
    PoolJob,
    SpeedJob,
)
from mlx_paged_attention.kernel_check.latent_case import LatentCase
from mlx_paged_attention.kernel_check.results import Checked, Failed, Result, Timed
from mlx_paged_attention.kernel_check.speed_case import SpeedCase, gap, in_turns
from mlx_paged_attention.ops.kernels.decode import merge_splits
from mlx_paged_attention.ops.kernels.join import join_rows
from mlx_paged_attention.ops.kernels.order import no_token
from mlx_paged_attention.ops.kernels.pool import copy_blocks, gather_kv, write_kv

_ROUNDS, _SECONDS = 7, 0.1  # of a speed job, the latter per round and contestant
_SPREAD = 256 << 20  # more than the caches of any chip hold


def run(job: Job) -> Result:
    """Compile, run, compare. Whatever goes wrong is a ``Failed``: the next job may well succeed."""
    try:
        match job:
            case DecodeJob():
                return _decode(job)
            case LatentJob():
                return _latent(job)
            case MergeJob():
                return _merge(job)
            case JoinJob():
                return _join(job)
            case PoolJob():
                return _pool(job)
            case SpeedJob():
                return _speed(job)
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}")


def _decode(job: DecodeJob) -> Result:
    size = job.block_size
    dtype = getattr(mx, job.dtype)
    case = DecodeCase.random(
        0,
        dtype,
        job.heads,
        [0, 1, size - 1, size, size + 1, 300],
        queries=job.queries,
        window=job.window,
        sink=job.sink,
        softcap=job.softcap,
        size=size,
    )
    if job.stored is not None:
        case.k, case.v = (plane.astype(getattr(mx, job.stored)) for plane in (case.k, case.v))
    # With a capacity results are merged even where a window leaves one piece.
    target, capacity = (64, 64) if job.split else (1, None)
    got = case.attend(target, capacity, picked=job.picked)
    return _compare(got, case.expected(), TOLERANCE[dtype])


def _latent(job: LatentJob) -> Result:
    size, dtype = job.block_size, getattr(mx, job.dtype)
    contexts = [0, 1, size - 1, size, size + 1, 300]
    case = LatentCase.random(0, dtype, job.heads, job.dims, contexts, size=size)
    if job.stored is not None:
        case.latents, case.ropes = (x.astype(getattr(mx, job.stored)) for x in (case.latents, case.ropes))
    got = case.attend(target=64, capacity=64) if job.split else case.attend(target=1)
    return _compare(got, case.expected(), TOLERANCE[dtype])


def _merge(job: MergeJob) -> Result:
    rng = np.random.default_rng(0)
    heads, counts = 4, (1, 3, 40)
    items = sum(counts)
    parts = rng.standard_normal((items, heads, 1, job.head_dim)).astype(np.float32)
    lses = rng.standard_normal((items, 1, heads)).astype(np.float32)
    lses[0] = lses[2] = -np.inf  # a row with nothing to attend to, and a piece
    sinks = rng.standard_normal(heads).astype(np.float32) if job.sinks else None
    firsts = np.cumsum((0, *counts[:-1]))
    splits = np.column_stack([firsts, counts]).astype(np.int32)

    want, want_lse = np.zeros((len(counts), heads, 1, job.head_dim)), np.zeros((len(counts), 1, heads))
    with np.errstate(divide="ignore", invalid="ignore"):
        for row, (first, count) in enumerate(splits):
            mine = lses[first : first + count, 0].astype(np.float64)  # [pieces, heads]
            every = mine if sinks is None else np.concatenate([mine, sinks[None]])
            want_lse[row, 0] = np.log(np.exp(every).sum(axis=0))
            share = np.nan_to_num(np.exp(mine - want_lse[row, 0]))
            want[row, :, 0] = np.einsum("nh,nhd->hd", share, parts[first : first + count, :, 0])

    dtype = getattr(mx, job.dtype)
    out, lse = merge_splits(
        mx.array(parts), mx.array(lses), mx.array(splits), dtype, None if sinks is None else mx.array(sinks)
    )
    return _compare((np.array(out.astype(mx.float32)), np.array(lse)), (want, want_lse), TOLERANCE[dtype])


def _compare(
    got: tuple[NDArray[np.float32], NDArray[np.float32]],
    want: tuple[NDArray[np.float64], NDArray[np.float64]],
    tolerance: float,
) -> Result:
    error, lse_error = errors(got, want)
    # Asked this way round, NaN is wrong.
    if error <= tolerance and lse_error <= LSE_FACTOR * tolerance:
        return Checked(error, tolerance)
    return Failed(
        f"wrong by {error:.1e} of the largest value ({tolerance:.0e} allowed), "
        f"log-sum-exp by {lse_error:.1e} ({LSE_FACTOR * tolerance:.0e} allowed)"
    )


def _join(job: JoinJob) -> Result:
    rng = np.random.default_rng(0)
    order = rng.permutation(80)[:70].astype(np.int32)
    first, last = (
        mx.array(rng.standard_normal((rows, 4, 128)).astype(np.float32)).astype(getattr(mx, job.dtype))
        for rows in (64, 16)
    )
    want = np.concatenate([_values(first), _values(last)])[order]
    return _exact([join_rows(first, last, mx.array(order))], [want])


def _pool(job: PoolJob) -> Result:
    rng = np.random.default_rng(0)
    dtype, size, kv_heads = getattr(mx, job.dtype), job.block_size, 2
    dims = (job.head_dim, job.v_head_dim)

    def random(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    k_pool, v_pool = (random(6, kv_heads, size, dim) for dim in dims)
    mx.eval(k_pool, v_pool)
    want = [_values(k_pool), _values(v_pool)]
    got = [k_pool, v_pool]
    match job.kernel:
        case "write_kv":
            k, v = (random(3, kv_heads, 1, dim) for dim in dims)
            slots = np.array([size, 5 * size - 1, 3], np.int32)  # the third is in the null block
            mx.eval(write_kv(k, v, k_pool, v_pool, mx.array(slots), no_token()))
            for plane, rows in zip(want, (k, v), strict=True):
                plane[slots[:2] // size, :, slots[:2] % size] = _values(rows)[:2, :, 0]
        case "copy_blocks":
            source, target = mx.array([1, 2], mx.int32), mx.array([5, 3], mx.int32)
            mx.eval(copy_blocks(k_pool, v_pool, source, target, no_token()))
            for plane in want:
                plane[[5, 3]] = plane[[1, 2]]
        case "gather_kv":
            table, first, last = np.array([4, 2, 5], np.int32), size // 2, 3 * size - 1
            *got, _ = gather_kv(k_pool, v_pool, mx.array(table), first, last, no_token())
            at = np.arange(first, last)
            want = [plane[table[at // size], :, at % size].swapaxes(0, 1)[None] for plane in want]
    return _exact(got, want)


def _exact(got: Sequence[mx.array], want: Sequence[NDArray[np.float32]]) -> Result:
    wrong = sum(int((_values(a) != b).sum()) for a, b in zip(got, want, strict=True))
    if wrong:
        return Failed(f"{wrong:,} of {sum(b.size for b in want):,} numbers are wrong")
    return Checked(0.0, 0.0)


def _values(x: mx.array) -> NDArray[np.float32]:
    return np.array(x.astype(mx.float32))


def _speed(job: SpeedJob) -> Result:
    case = SpeedCase(job.rows, job.context, job.kv_heads, job.head_dim, spread=_SPREAD)
    paged, contiguous = case.chains(job.heads)
    apart, allowed = gap(paged(1), contiguous(1)), 2 * TOLERANCE[mx.bfloat16]  # either may be off
    if not apart <= allowed:
        return Failed(
            f"differs from MLX's attention by {apart:.1e} of the largest value ({allowed:.0e} allowed)"
        )
    times = in_turns([paged, contiguous], _ROUNDS, _SECONDS)
    del case, paged, contiguous
    mx.clear_cache()
    return Timed(*times)
