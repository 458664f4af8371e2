"""Faults planted in the project's own kernels are found by the emulator, each barrier's absence among them.

The kernels work on pools of more than 2³² elements, on blocks at the far end, so that an index that is cut to
32 bits leads elsewhere. A result alone would not tell of a barrier: it is mostly right without.
"""

import re
from importlib.resources import files

import mlx.core as mx
import numpy as np
import pytest
from emulated_kernels import emulated_kernels
from emulator import KernelError, SparseArray

from mlx_paged_attention.kernel_check.latent_case import LatentCase
from mlx_paged_attention.ops.kernels import make
from mlx_paged_attention.ops.kernels.decode import paged_decode, threadgroups_per_item
from mlx_paged_attention.ops.kernels.order import no_token
from mlx_paged_attention.ops.kernels.pool import copy_blocks, gather_kv, write_kv
from mlx_paged_attention.ops.kernels.work_list import work_list
from mlx_paged_attention.ops.paged_attention import plain_attention

KV_HEADS, SIZE, DIM = 2, 16, 128
FAR = 2**32 // (KV_HEADS * SIZE * DIM)
LATENT_DIMS = (64, 64)
FAR_LATENTS = 2**32 // (SIZE * LATENT_DIMS[1])
BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\([^)]*\);")
BODIES = [
    file.name
    for file in files("mlx_paged_attention.ops.kernels").joinpath("source").iterdir()
    if file.name.endswith(".metal")
]
BARRIERS = [(name, i) for name in sorted(BODIES) for i in range(len(BARRIER.findall(make.source(name))))]
WEAKER = {
    "a simdgroup's": "simdgroup_barrier(mem_flags::mem_threadgroup);",
    "one that orders no memory": "threadgroup_barrier(mem_flags::mem_none);",
    "one for the other kind of memory": "threadgroup_barrier(mem_flags::mem_device);",
}
BUGS = {
    "a maximum over too few lanes": ("metal.h", "return max(v, simd_shuffle_xor(v, ushort(16)))", "return v"),
    "a maximum over the wrong lanes": (
        "metal.h",
        "max(v, simd_shuffle_xor(v, ushort(16)))",
        "max(v, simd_shuffle_xor(v, ushort(8)))",
    ),
    "a sum over the wrong lanes": (
        "metal.h",
        "return v + simd_shuffle_xor(v, ushort(16))",
        "return v + simd_shuffle_xor(v, ushort(8))",
    ),
    "a lane past the simdgroup": (
        "metal.h",
        "return v + simd_shuffle_xor(v, ushort(16))",
        "return v + simd_shuffle_xor(v, ushort(32))",
    ),
    "the block after": (
        "paged_decode.metal",
        "shuffle(table, at / BS - table_begin)",
        "shuffle(table, at / BS - table_begin + 1)",
    ),
    "another block from the second load on": (
        "paged_decode.metal",
        "const int at = position + 8 * i;",
        "const int at = position + 8 * i - 1;",
    ),
    "a key's index cut to 32 bits": (
        "paged_decode.metal",
        "(size_t(blocks[i]) * KH",
        "(int(blocks[i]) * KH",
    ),
    "a value's index cut to 32 bits": (
        "paged_decode.metal",
        "(size_t(blocks[i / 2]) * KH",
        "(uint(blocks[i / 2]) * KH",
    ),
    "a piece too few": ("merge_splits.metal", "base < count", "base < count - 1"),
    "a piece's weight of another": ("merge_splits.metal", "shuffle(weight, j)", "shuffle(weight, j + 1)"),
    "the block after, of latents": (
        "latent_decode.metal",
        "shuffle(table, at / BS - table_begin)",
        "shuffle(table, at / BS - table_begin + 1)",
    ),
    "a latent's index cut to 32 bits": (
        "latent_decode.metal",
        "latents + line * DV",
        "latents + int(line * DV)",
    ),
    "a rope's index cut to 32 bits": ("latent_decode.metal", "ropes + line * DR", "ropes + int(line * DR)"),
    "results that are not shrunk": (
        "latent_decode.metal",
        "result[t][p][i] *= i < 2 ? top : bottom",
        "result[t][p][i] *= i < 2 ? top : 1.0f",
    ),
    "a simdgroup's scores left out": (
        "latent_decode.metal",
        "for (int s = 0; s < SG; s++) score +=",
        "for (int s = 1; s < SG; s++) score +=",
    ),
    "weights of the first step for all": (
        "latent_decode.metal",
        "position + key < end ?",
        "begin + key < end ?",
    ),
    "a slot's line cut to 32 bits": ("write_kv.metal", "const size_t line", "const int line"),
    "the slot after": ("write_kv.metal", "* BS + slot % BS", "* BS + (slot + 1) % BS"),
    "a copy from an index cut to 32 bits": ("copy_blocks.metal", "const size_t from", "const uint from"),
    "a copy to the block after": ("copy_blocks.metal", "v_pool + to *", "v_pool + (to + 1) *"),
    "a range from an index cut to 32 bits": ("gather_kv.metal", "const size_t from", "const int from"),
    "a range from the block after": ("gather_kv.metal", "position / BS]", "(position + 1) / BS]"),
}


def error():
    """The largest error of two rows' attention, whole and in pieces, and of what is gathered."""
    rng = np.random.default_rng(0)
    lens = np.array([70, 20], np.int32)
    tables = np.array([[3, 1, 7, 5, 9], [10, 11, 0, 0, 0]], np.int32)
    q, k, v = (
        mx.array(rng.standard_normal((1, heads, n, DIM)).astype(np.float16))
        for heads, n in ((4, 2), (KV_HEADS, 90), (KV_HEADS, 90))
    )
    q = q.swapaxes(0, 2)  # [rows, heads, queries, head_dim]
    at = [np.arange(length) for length in lens]
    slots = np.concatenate([table[p // SIZE] * SIZE + p % SIZE for table, p in zip(tables, at, strict=True)])
    near = [np.zeros((12, KV_HEADS, SIZE, DIM), np.float16) for _ in "kv"]
    for plane, new in zip(near, (k, v), strict=True):
        plane[slots // SIZE, :, slots % SIZE] = np.array(new[0].swapaxes(0, 1))

    # The same at the far end, but that two blocks are written elsewhere and copied to their places.
    pools = [SparseArray((FAR + 16, KV_HEADS, SIZE, DIM), mx.float16, np.float16) for _ in "kv"]
    for pool in pools:
        pool.array[FAR:] = np.nan
    place = np.arange(12)
    place[[7, 11]] = 14, 13
    written = (FAR + place[slots // SIZE]) * SIZE + slots % SIZE
    write_kv(k, v, *pools, mx.array(written.astype(np.int32)), no_token())
    source, target = (mx.array(ids, mx.int32) + FAR for ids in ([14, 13], [7, 11]))
    copy_blocks(*pools, source, target, no_token())

    far_tables = mx.array(tables + FAR)
    each = threadgroups_per_item(q, *pools)
    expected = plain_attention(
        q[:, :, 0], *map(mx.array, near), mx.array(tables), mx.array(lens), scale=DIM**-0.5
    )
    errors = []
    for threadgroups in (1, 64):
        work = work_list(lens, 1, block_size=SIZE, threadgroups_per_item=each, target=threadgroups)
        out, _, _ = paged_decode(q, *pools, far_tables, mx.array(lens), work, scale=DIM**-0.5)
        errors.append(mx.abs(out[:, :, 0] - expected).max().item())
    *gathered, _ = gather_kv(*pools, far_tables[0], 5, 70, no_token())
    errors += [mx.abs(x - y[:, :, 5:70]).max().item() for x, y in zip(gathered, (k, v), strict=True)]
    return np.max(errors)


def latent_error():
    """The same of latent attention."""
    case = LatentCase.random(0, mx.float16, 12, LATENT_DIMS, [70, 20], size=SIZE)
    expected, _ = case.expected()
    for name in ("latents", "ropes"):
        near = np.array(getattr(case, name))
        far = SparseArray((FAR_LATENTS + 16, *near.shape[1:]), mx.float16, np.float16)
        far.array[FAR_LATENTS:] = np.nan
        far.array[FAR_LATENTS : FAR_LATENTS + len(near)] = near
        setattr(case, name, far)
    case.tables = case.tables + np.int32(FAR_LATENTS)
    return np.max([np.abs(case.attend(target)[0] - expected).max() for target in (1, 64)])


def error_of(body):
    """That a fault in a file would show in."""
    return latent_error() if body == "latent_decode.metal" else error()


@pytest.fixture
def plant(monkeypatch):
    """Replaces part of a kernel's text, by position."""
    source = make.source

    def plant(file, start, end, instead):
        text = source(file)
        text = text[:start] + instead + text[end:]
        monkeypatch.setattr(make, "source", lambda name: text if name == file else source(name))

    with emulated_kernels(check_address_spaces=False):
        yield plant


def test_without_a_fault_all_is_right_in_pools_of_more_than_2_to_the_32_elements(plant):
    assert error() <= 2e-3
    assert latent_error() <= 4e-3


@pytest.mark.parametrize(("body", "index"), BARRIERS)
@pytest.mark.parametrize("instead", ["nothing", *(pytest.param(i, marks=pytest.mark.slow) for i in WEAKER)])
def test_a_barrier_that_is_missing_or_too_weak_is_reported(plant, body, index, instead):
    place = list(BARRIER.finditer(make.source(body)))[index]
    plant(body, *place.span(), WEAKER.get(instead, ""))
    with pytest.raises(KernelError, match=r"(uninitialised|data race on) threadgroup memory"):
        error_of(body)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_reported_or_gives_a_wrong_result(plant, bug):
    body, right, wrong = BUGS[bug]
    text = make.source(body)
    assert text.count(right) == 1
    plant(body, text.index(right), text.index(right) + len(right), wrong)
    try:
        wrong_by = error_of(body)
    except KernelError:
        return
    assert not wrong_by <= 2e-2
