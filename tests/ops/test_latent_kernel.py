"""The kernel for latent attention, run by the Metal emulator, and on the GPU where there is one."""

import mlx.core as mx
import numpy as np
import pytest
from emulated_kernels import emulated_kernels, skip_without_gpu

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.kernel_check.decode_case import LSE_FACTOR, TOLERANCE
from mlx_paged_attention.kernel_check.latent_case import SCALE, LatentCase
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels import latent
from mlx_paged_attention.ops.latent_attention import plain_latent_attention
from mlx_paged_attention.ops.paged_attention import gather_blocks

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).split(".")[-1])
CUTS = pytest.mark.parametrize("target", [1, 64], ids=["whole", "split"])
EDGES = [0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 150]


@pytest.fixture(autouse=True, params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Where kernels run in a test."""
    if request.param == "gpu":
        skip_without_gpu()
        yield
        return
    with emulated_kernels():
        yield


def check(case, target=64):
    dtype = case.q.dtype
    error, lse_error = case.errors(target)
    assert error <= TOLERANCE[dtype]
    assert lse_error <= LSE_FACTOR * TOLERANCE[dtype]


@DTYPES
@CUTS
def test_every_length_around_a_block_and_a_step_is_right(dtype, target):
    check(LatentCase.random(0, dtype, 4, (64, 16), EDGES), target)


@DTYPES
def test_latents_of_512_and_64_are_right(dtype):
    check(LatentCase.random(1, dtype, 16, (512, 64), [0, 1, 17, 100]))


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        (mx.float16, (16, 8)),
        (mx.float32, (32, 8)),
        (mx.bfloat16, (48, 24)),
        (mx.float16, (192, 128)),
        (mx.bfloat16, (256, 32)),
        (mx.float32, (256, 64)),
        (mx.float16, (384, 72)),
    ],
    ids=str,
)
def test_every_size_of_latent_is_right(dtype, dims):
    assert latent.supports_latents(dtype, 16, *dims)
    check(LatentCase.random(2, dtype, 4, dims, [1, 17, 70]))


def test_what_there_is_no_kernel_for_is_known():
    for dtype, size, *dims in (
        (mx.float16, 16, 576, 64),
        (mx.float16, 16, 1024, 64),
        (mx.float16, 16, 80, 16),
        (mx.float16, 16, 128, 12),
        (mx.float16, 16, 16, 64),
        (mx.float16, 12, 128, 64),
        (mx.int32, 16, 128, 64),
    ):
        assert not latent.supports_latents(dtype, size, *dims)


@pytest.mark.parametrize("heads", [1, 15, 16, 17, 40])
def test_every_number_of_heads_is_right(heads):
    check(LatentCase.random(3, mx.float16, heads, (64, 16), [1, 17, 70]))


@DTYPES
@pytest.mark.parametrize("heads", [17, 40])
def test_two_tiles_of_heads_share_what_they_load(dtype, heads, monkeypatch):
    monkeypatch.setattr(latent, "tiles", lambda *_: 2)  # as on CUDA; small, so that Metal has the memory, too
    case = LatentCase.random(4, dtype, heads, (32, 8), [1, 33, 70])
    assert latent.latent_threadgroups_per_item(case.q, case.latents) == -(-heads // 32)
    check(case)


@pytest.mark.parametrize("size", [8, 32, 64])
def test_every_size_of_block_is_right(size):
    check(LatentCase.random(5, mx.float16, 4, (64, 16), [0, 1, 7, 8, 9, 63, 64, 65, 600], size=size))


@CUTS
def test_a_row_without_context_gives_zero_and_a_log_sum_exp_of_minus_infinity(target):
    out, lse = LatentCase.random(6, mx.float16, 4, (64, 16), [0, 200]).attend(target)
    assert (out[0] == 0).all()
    assert np.isneginf(lse[0]).all()
    assert np.isfinite(lse[1]).all()


def test_results_are_right_in_a_list_that_is_filled_up():
    case = LatentCase.random(7, mx.float16, 4, (64, 16), [300, 0, 65])
    got, want = case.attend(capacity=20), case.expected()
    for ours, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-2)


def test_queries_may_lie_in_memory_as_they_like():
    case = LatentCase.random(8, mx.float16, 4, (64, 16), [20, 33])
    expected, _ = case.attend()
    case.q = mx.contiguous(case.q.transpose(1, 3, 2, 0)).transpose(3, 0, 2, 1)
    case.q_rope = mx.contiguous(case.q_rope.swapaxes(0, 1)).swapaxes(0, 1)
    np.testing.assert_array_equal(case.attend()[0], expected)


def test_stored_and_computed_types_may_differ():
    case = LatentCase.random(9, mx.float32, 4, (64, 16), [20, 100])
    case.latents, case.ropes = case.latents.astype(mx.bfloat16), case.ropes.astype(mx.bfloat16)
    check(case)


@pytest.mark.parametrize("shift", [-60.0, 60.0])
def test_moving_every_score_by_a_constant_changes_nothing(shift):
    case = LatentCase.random(10, mx.float32, 4, (64, 16), [1, 33, 200])
    case.q_rope[..., -1] = 1.0
    case.ropes[..., -1] = 0.0
    plain, plain_lse = case.attend(target=16)
    case.ropes[..., -1] = shift
    moved, moved_lse = case.attend(target=16)
    np.testing.assert_allclose(moved, plain, atol=1e-4)
    np.testing.assert_allclose(moved_lse, plain_lse + shift, atol=1e-3)


def test_the_plain_reference_says_the_same():
    case = LatentCase.random(11, mx.float32, 4, (64, 16), [5, 40])
    latents, ropes = (
        mx.nan_to_num(gather_blocks(pool, mx.array(case.tables))) for pool in (case.latents, case.ropes)
    )
    mask = (mx.arange(latents.shape[2]) < mx.array(case.lens)[:, None])[:, None, None]
    out = plain_latent_attention(case.q, case.q_rope, latents, ropes, mask, scale=SCALE)
    np.testing.assert_allclose(np.array(out[:, :, 0]), case.expected()[0], atol=1e-5)


def test_layers_with_the_kernel_and_without_remember_what_they_were_given():
    rng = np.random.default_rng(12)
    planes = (Plane("latent", "float32", (1, 8, 32)), Plane("rope", "float32", (1, 8, 8)))
    spec = LayerKVSpec(planes)
    layers = [KernelLayer(spec, 12), DeviceLayer(spec, 12)]
    tables = np.array([[3, 1, 7, 5], [2, 8, 4, 6]], np.int32)
    held = [np.zeros((2, 1, 0, dim), np.float32) for dim in (32, 8)]
    start = 0
    for queries in (6, 1, 1, 1, 13, 1):
        new = [rng.standard_normal((2, 1, queries, dim)).astype(np.float32) for dim in (32, 8)]
        held = [np.concatenate(pair, axis=2) for pair in zip(held, new, strict=True)]
        at = np.arange(start, start + queries)
        slots = (tables[:, at // 8] * 8 + at % 8).reshape(-1).astype(np.int64)
        batch = AttentionBatch(np.full(2, start, np.int32), queries, slots, tables, 8)
        start += queries
        latents, ropes = map(mx.array, new)
        if queries > 1:
            for layer in layers:
                layer.write(latents, ropes, batch)
                for plane, whole in zip(layer.gather_rows(batch), held, strict=True):
                    np.testing.assert_array_equal(np.array(plane), whole)
            continue
        q, q_rope = (mx.array(rng.standard_normal((2, 4, 1, dim)).astype(np.float32)) for dim in (32, 8))
        expected = plain_latent_attention(q, q_rope, *map(mx.array, held), batch.mask(None), scale=0.3)
        for layer in layers:
            out = layer.attend_latents(q, q_rope, latents, ropes, batch, scale=0.3)
            np.testing.assert_allclose(np.array(out), np.array(expected), atol=1e-4)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("dims", [(512, 64), (256, 32)], ids=str)
@pytest.mark.parametrize("size", [8, 16, 64])
def test_grid_of_heads_latents_and_blocks(dtype, heads, dims, size):
    check(LatentCase.random(20, dtype, heads, dims, [1, size - 1, size, size + 1, 500], size=size))
