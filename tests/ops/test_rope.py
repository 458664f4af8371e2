"""Rotary embedding in MLX operations is MLX's own, and stands in where its CUDA kernel cannot be launched."""

import mlx.core as mx
import numpy as np
import pytest
from emulated_kernels import skip_without_gpu

from mlx_paged_attention.ops import rope as module
from mlx_paged_attention.ops.rope import plain_rope, rope

DTYPES = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}


def wave_lengths(dims):
    return mx.power(500.0, mx.arange(dims // 2) / dims * 2) * 1.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_freqs", [False, True])
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("head_dim", "dims"), [(16, 16), (64, 16), (80, 20), (8, 8)])
@pytest.mark.parametrize("queries", [1, 3])
def test_rope_in_plain_operations_is_mlxs(dtype, with_freqs, traditional, head_dim, dims, queries):
    a = mx.random.normal((5, 3, queries, head_dim), key=mx.random.key(1)).astype(dtype)
    offset = mx.array([0, 7, 1000, 31, 5])
    freqs = wave_lengths(dims) if with_freqs else None
    base = None if with_freqs else 10_000.0
    ours = plain_rope(a, dims, traditional, base, 0.5, offset, freqs)
    theirs = mx.fast.rope(a, dims, traditional=traditional, base=base, scale=0.5, offset=offset, freqs=freqs)
    assert ours.dtype == theirs.dtype == dtype
    # Angles of a thousand radians are known to a few parts in ten million.
    tolerance = max(DTYPES[dtype], 2e-4)
    np.testing.assert_allclose(
        np.array(ours.astype(mx.float32)), np.array(theirs.astype(mx.float32)), atol=tolerance
    )


def test_one_offset_serves_all_rows():
    a = mx.random.normal((2, 3, 4, 16), key=mx.random.key(2))
    ours = plain_rope(a, 16, False, 100.0, 1.0, 9, None)
    theirs = mx.fast.rope(a, 16, traditional=False, base=100.0, scale=1.0, offset=9)
    np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dims", "plain"),
    [
        ((127, 4, 1, 16), 16, False),
        ((128, 2, 1, 16), 16, True),  # a row's last heads count as four
        ((128, 4, 1, 16), 16, True),  # 128 fours of heads, 8 pairs of dimensions
        ((128, 4, 1, 64), 16, True),
        ((64, 8, 1, 30), 30, True),
        ((128, 4, 1, 32), 32, False),  # 16 pairs leave 64 of 1,024 threads
        ((128, 4, 2, 16), 16, False),
        ((128, 4, 2, 14), 14, True),
        ((4096, 32, 1, 128), 128, False),
    ],
)
def test_plain_operations_are_for_what_mlx_cannot_launch_alone(monkeypatch, shape, dims, plain):
    taken = []
    monkeypatch.setattr(module, "plain_rope", lambda *_: taken.append("plain"))
    monkeypatch.setattr(module, "_mlx_rope", lambda *_, **__: taken.append("mlx"))
    rope(mx.zeros(shape), dims, traditional=False, base=10.0, scale=1.0, offset=mx.zeros(shape[0], mx.int32))
    assert taken == ["plain" if plain else "mlx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [8, 14, 16, 20, 30, 32, 64])
@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("heads", [1, 2, 4, 6])
@pytest.mark.parametrize("rows", [1, 127, 128, 1000])
def test_every_number_of_rows_can_be_turned_on_a_gpu(dims, queries, heads, rows):
    skip_without_gpu()
    a = mx.random.normal((rows, heads, queries, dims), key=mx.random.key(3))
    offset = mx.arange(rows) % 97
    out = rope(a, dims, traditional=False, base=100.0, scale=1.0, offset=offset)
    mx.eval(out)
    expected = plain_rope(a, dims, False, 100.0, 1.0, offset, None)
    np.testing.assert_allclose(np.array(out), np.array(expected), atol=1e-4)
