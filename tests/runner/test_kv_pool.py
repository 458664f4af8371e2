"""The physical arrays: their sizes are read off them, whichever back end holds them."""

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.models.cache_spec import ModelCacheSpec
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.host import HostLayer
from mlx_paged_attention.runner.kv_pool import make_pool

BLOCK_SIZE = 8


def spec(kv_heads=2, k_dim=16, v_dim=16, dtype="float32", window=None):
    planes = (
        Plane("k", dtype, (kv_heads, BLOCK_SIZE, k_dim)),
        Plane("v", dtype, (kv_heads, BLOCK_SIZE, v_dim)),
    )
    return LayerKVSpec(planes, window)


def model(*layers):
    return ModelCacheSpec((), layers, (), BLOCK_SIZE)


@pytest.mark.parametrize("host", [True, False])
def test_the_pool_has_an_array_per_plane_in_the_order_of_the_specs(host):
    specs = [spec(), spec(kv_heads=3, k_dim=24, v_dim=8, window=4), spec(kv_heads=1)]
    pool = make_pool(model(*specs), 5, host=host)
    assert [layer.spec for layer in pool.layers] == specs
    assert all(type(layer) is (HostLayer if host else DeviceLayer) for layer in pool.layers)
    shapes = [(layer.k.shape, layer.v.shape) for layer in pool.layers]
    if host:  # a head's blocks lie together there
        shapes = [tuple((shape[1], shape[0], *shape[2:]) for shape in pair) for pair in shapes]
    assert shapes == [
        ((5, 2, 8, 16), (5, 2, 8, 16)),
        ((5, 3, 8, 24), (5, 3, 8, 8)),
        ((5, 1, 8, 16), (5, 1, 8, 16)),
    ]
    if not host:  # what the host's layers hold before it is written is never read: see their tests among NaN
        assert all(not np.array(plane).any() for layer in pool.layers for plane in (layer.k, layer.v))
    assert (pool.num_blocks, pool.block_size) == (5, BLOCK_SIZE)


@pytest.mark.parametrize("host", [True, False])
def test_bytes_are_those_of_the_arrays(host):
    specs = [spec(), spec(kv_heads=3, k_dim=24, v_dim=8)]
    pool = make_pool(model(*specs), 5, host=host)
    per_token = 4 * (2 * 2 * 16 + 3 * (24 + 8))
    assert pool.bytes_per_token == per_token
    assert pool.nbytes == 5 * BLOCK_SIZE * per_token
    assert pool.nbytes == sum(plane.nbytes for layer in pool.layers for plane in (layer.k, layer.v))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_device_pool_keeps_the_type_of_the_spec(dtype):
    pool = make_pool(model(spec(dtype=dtype)), 3, host=False)
    assert pool.layers[0].k.dtype == getattr(mx, dtype)
    assert pool.bytes_per_token == 2 * 2 * 2 * 16


def test_a_pool_on_a_device_needs_no_compiler():
    """Where there is no CPU extra there is no numba."""
    code = (
        "import sys\n"
        "sys.modules['numba'] = None\n"
        "from mlx_paged_attention.cache.spec import LayerKVSpec, Plane\n"
        "from mlx_paged_attention.models.cache_spec import ModelCacheSpec\n"
        "from mlx_paged_attention.runner.kv_pool import make_pool\n"
        "planes = tuple(Plane(n, 'float32', (1, 4, 8)) for n in 'kv')\n"
        "spec = ModelCacheSpec((), (LayerKVSpec(planes),), (), 4)\n"
        "print(make_pool(spec, 2, host=False).nbytes)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == str(2 * 2 * 4 * 8 * 4), result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_pool_on_the_host_takes_memory_as_blocks_are_written():
    code = (
        "from pathlib import Path\n"
        "import mlx_paged_attention\n"
        "from mlx_paged_attention.cache.spec import LayerKVSpec, Plane\n"
        "from mlx_paged_attention.models.cache_spec import ModelCacheSpec\n"
        "from mlx_paged_attention.runner.kv_pool import make_pool\n"
        "resident = lambda: int(Path('/proc/self/statm').read_text().split()[1]) >> 8\n"
        "layer = LayerKVSpec(tuple(Plane(n, 'float32', (4, 16, 64)) for n in 'kv'))\n"
        "spec = ModelCacheSpec((), (layer,) * 4, (), 16)\n"
        "small = make_pool(spec, 2, host=True)\n"  # all that is imported on demand
        "before = resident()\n"
        "pool = make_pool(spec, 1 << 15, host=True)\n"
        "reserved = resident()\n"
        "for layer in pool.layers: layer.k[:, :4096] = 1\n"
        "print(pool.nbytes >> 20, reserved - before, resident() - reserved)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size, reserved, written = map(int, result.stdout.split())
    assert size == 4096
    assert reserved < 64
    assert 256 - 8 <= written < 256 + 64


def test_a_model_without_attention_has_a_pool_of_no_bytes():
    pool = make_pool(model(), 5, host=False)
    assert (pool.nbytes, pool.bytes_per_token, pool.block_size, pool.pack_limit) == (0, 0, BLOCK_SIZE, 1)
