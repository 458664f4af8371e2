"""The physical arrays: their sizes are read off them, whichever back end holds them."""

import contextlib
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from emulated_kernels import emulated_kernels
from engine_hooks import block_planes

from mlx_paged_attention.cache.layer_groups import LayerGroup
from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.errors import PoolMemoryError
from mlx_paged_attention.models.cache_spec import ModelCacheSpec
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.host import HostLayer
from mlx_paged_attention.ops.layer import resized
from mlx_paged_attention.runner import kv_pool
from mlx_paged_attention.runner.kv_pool import make_pool
from mlx_paged_attention.runner.memory import DeviceMemory

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


@pytest.mark.parametrize("host", [True, False])
def test_a_block_is_copied_once_for_all_layers_at_its_place(host, monkeypatch):
    groups = (LayerGroup(None, (0,)), LayerGroup(4, (1,)))
    pool = make_pool(model(spec(), spec(window=4)), 4, host=host, groups=groups)
    kind, copied = type(pool.layers[0]), []
    copy = kind.copy
    monkeypatch.setattr(kind, "copy", lambda layer, *blocks: (copied.append(blocks), copy(layer, *blocks)))
    keys, _ = block_planes(pool.layers[0])
    keys[:], keys[1] = 0.0, 5.0
    pool.copy(1, 2)
    assert copied == [([1], [2])]
    for layer in pool.layers:
        assert np.array(block_planes(layer)[0])[:, 0, 0, 0].tolist() == [0, 5, 5, 0]


def test_after_a_copy_no_layer_at_its_place_reads_what_it_held_of_the_block_before():
    groups = (LayerGroup(None, (0,)), LayerGroup(4, (1,)))
    pool = make_pool(model(spec(), spec(window=4)), 4, host=True, groups=groups)
    keys, _ = block_planes(pool.layers[0])
    keys[:], keys[1] = 0.0, 5.0
    for expected in (0, 5):
        for layer in pool.layers:
            table = np.array([2], np.int32)
            assert layer._copy.hold(table, 0, BLOCK_SIZE) is None  # asked for the first time
            held = layer._copy.hold(table, 0, BLOCK_SIZE)[0][0]
            assert np.unique(np.array(held)).tolist() == [expected]
        pool.copy(1, 2)


# ---- pools that change their size


def filled(pool):
    """Every block of every plane gets a value of its own; returns them as numpy arrays, blocks first."""
    for i, layer in enumerate(pool.layers):
        for j, name in enumerate("kv"):
            plane = getattr(layer, name)
            if isinstance(plane, np.ndarray):
                plane[:] = np.arange(plane.size, dtype=np.float32).reshape(plane.shape) + i + j / 2
            else:
                values = (mx.arange(plane.size) % 251 + i + j / 2).reshape(plane.shape)
                setattr(layer, name, values.astype(plane.dtype))
    mx.eval([plane for layer in pool.layers for plane in (layer.k, layer.v) if isinstance(plane, mx.array)])
    return contents(pool, pool.num_blocks)


def contents(pool, num_blocks):
    planes = [plane for layer in pool.layers for plane in block_planes(layer)]
    return [
        np.array(plane.astype(mx.float32) if isinstance(plane, mx.array) else plane)[:num_blocks]
        for plane in planes
    ]


@pytest.fixture(params=["host", "device", "kernels"])
def elastic_pool(request):
    """A pool of 6 blocks, of each kind, which may have up to 40."""
    specs = model(spec(), spec(kv_heads=3, k_dim=32, v_dim=16), spec(kv_heads=1))
    if request.param != "kernels":
        yield make_pool(specs, 6, host=request.param == "host", max_blocks=40)
        return
    with emulated_kernels():
        yield make_pool(specs, 6, host=False, max_blocks=40)


def test_what_blocks_hold_survives_growing_and_shrinking(elastic_pool):
    pool = elastic_pool
    per_block = pool.nbytes // 6
    before = filled(pool)
    for size in (7, 40, 20, 3):
        pool.resize(size)
        assert (pool.num_blocks, pool.nbytes) == (size, size * per_block)
        kept = min(size, 6)
        for now, then in zip(contents(pool, kept), before, strict=True):
            np.testing.assert_array_equal(now, then[:kept])
    pool.resize(40)
    filled(pool)  # all of them can be written


def test_a_pool_that_finds_no_memory_stays_as_it_is(elastic_pool, monkeypatch):
    before = filled(elastic_pool)
    nbytes = elastic_pool.nbytes
    monkeypatch.setattr(kv_pool, "device_memory", lambda: DeviceMemory(nbytes, "test"))
    elastic_pool.resize(12)
    elastic_pool.resize(6)
    with pytest.raises(PoolMemoryError, match=r"cannot grow from 6 to 13 blocks: 0 MiB more are needed"):
        elastic_pool.resize(13)
    assert (elastic_pool.num_blocks, elastic_pool.nbytes) == (6, nbytes)
    for now, then in zip(contents(elastic_pool, 6), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("error", [RuntimeError("[malloc] Unable to allocate"), MemoryError()])
def test_layers_that_had_grown_shrink_again_if_a_later_one_cannot(monkeypatch, error):
    pool = make_pool(model(spec(), spec(), spec()), 6, host=False)
    before = filled(pool)
    resize = DeviceLayer.resize

    def fail_in_the_last_one(layer, num_blocks):
        if layer is pool.layers[2]:
            raise error
        resize(layer, num_blocks)

    monkeypatch.setattr(DeviceLayer, "resize", fail_in_the_last_one)
    with pytest.raises(PoolMemoryError):
        pool.resize(9)
    assert pool.num_blocks == 6
    assert [layer.k.shape[0] for layer in pool.layers] == [6, 6, 6]
    for now, then in zip(contents(pool, 6), before, strict=True):
        np.testing.assert_array_equal(now, then)


def failing(monkeypatch, layer, halfway, at_once=None):
    """The layer finds no memory for so many blocks: for its second plane, or for none."""
    resize = DeviceLayer.resize

    def fail_halfway(changed, num_blocks):
        if changed is layer and num_blocks in (halfway, at_once):
            if num_blocks == halfway:
                changed.k = resized(changed.k, num_blocks)
            raise RuntimeError("[malloc] Unable to allocate")
        resize(changed, num_blocks)

    monkeypatch.setattr(DeviceLayer, "resize", fail_halfway)


@pytest.mark.parametrize("size", [3, 9])
def test_a_change_of_size_that_fails_halfway_is_undone(monkeypatch, size):
    groups = [LayerGroup(None, (0, 1)), LayerGroup(4, (2, 3))]
    pool = make_pool(model(spec(), spec(), spec(window=4), spec(window=4)), 6, host=False, groups=groups)
    filled(pool)
    for first, twin in pool.places:
        twin.follow(first)
    before = contents(pool, 6)
    failing(monkeypatch, pool.layers[1], size)
    change = "grow" if size > 6 else "shrink"
    with pytest.raises(PoolMemoryError, match=f"cannot {change} from 6 to {size} blocks"):
        pool.resize(size)
    assert pool.num_blocks == 6
    for layer in pool.layers:
        assert (layer.k.shape[0], layer.v.shape[0]) == (6, 6)
    assert pool.layers[3].k is pool.layers[1].k
    kept = min(6, size)
    for now, then in zip(contents(pool, kept), [plane[:kept] for plane in before], strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_pool_that_can_neither_shrink_nor_grow_back_has_the_blocks_that_all_layers_have(monkeypatch):
    pool = make_pool(model(spec(), spec(), spec()), 6, host=False)
    before = filled(pool)
    failing(monkeypatch, pool.layers[1], halfway=3, at_once=6)
    pool.resize(3)
    assert pool.num_blocks == 3
    assert all(len(plane) >= 3 for layer in pool.layers for plane in (layer.k, layer.v))
    for now, then in zip(contents(pool, 3), [plane[:3] for plane in before], strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("kind", ["device", "kernels"])
@pytest.mark.parametrize("sizes", [(600, 800), (800, 200)])
def test_beside_the_pool_no_more_than_one_layer_is_held(kind, sizes):
    """By MLX's own count of its memory, at its peak."""
    layer = spec(kv_heads=4, k_dim=64, v_dim=64)
    with emulated_kernels() if kind == "kernels" else contextlib.nullcontext():
        pool = make_pool(model(*[layer] * 8), sizes[0], host=False)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        pool.resize(sizes[1])
    larger = max(sizes) * layer.bytes_per_block
    assert mx.get_active_memory() - before == (sizes[1] - sizes[0]) * 8 * layer.bytes_per_block
    assert mx.get_peak_memory() - before <= max(0, (sizes[1] - sizes[0]) * 8 * layer.bytes_per_block) + larger


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_pool_on_the_host_grows_for_nothing_and_gives_its_pages_back():
    """By the process's size, and its peak, as the kernel counts them."""
    code = (
        "import re\n"
        "from pathlib import Path\n"
        "import mlx_paged_attention\n"
        "from mlx_paged_attention.cache.spec import LayerKVSpec, Plane\n"
        "from mlx_paged_attention.models.cache_spec import ModelCacheSpec\n"
        "from mlx_paged_attention.runner.kv_pool import make_pool\n"
        "def status(name):\n"
        "    lines = Path('/proc/self/status').read_text()\n"
        "    return int(re.search(name + r':\\s+(\\d+) kB', lines)[1]) >> 10\n"
        "layer = LayerKVSpec(tuple(Plane(n, 'float32', (4, 16, 64)) for n in 'kv'))\n"
        "spec = ModelCacheSpec((), (layer,) * 8, (), 16)\n"  # 256 KiB a block
        "pool = make_pool(spec, 64, host=True, max_blocks=8192)\n"
        "before = status('VmRSS')\n"
        "pool.resize(4096)\n"
        "grown = status('VmRSS') - before\n"
        "for layer in pool.layers: layer.k[:, :2048] = 1; layer.v[:, :2048] = 1\n"
        "written = status('VmRSS') - before\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"  # the peak begins anew
        "pool.resize(1024)\n"
        "print(grown, written, status('VmHWM') - before - written, status('VmRSS') - before)\n"
        "pool.resize(1)\n"
        "print(status('VmRSS') - before)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, written, beside, half, none = map(int, result.stdout.split())
    assert grown < 8
    assert written >= 512
    assert beside <= 64 + 8  # a layer of 2,048 blocks; half of one, in fact
    assert half < 256 + 16
    assert none < 16


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_pool_of_small_arrays_gives_its_pages_back_every_time():
    """Arrays for which an allocator does not ask the system each time, and others between them."""
    code = (
        "import re\n"
        "from pathlib import Path\n"
        "import mlx_paged_attention\n"
        "import mlx.core as mx\n"
        "from mlx_paged_attention.cache.spec import LayerKVSpec, Plane\n"
        "from mlx_paged_attention.models.cache_spec import ModelCacheSpec\n"
        "from mlx_paged_attention.runner.kv_pool import make_pool\n"
        "def resident():\n"
        "    lines = Path('/proc/self/status').read_text()\n"
        "    return int(re.search(r'VmRSS:\\s+(\\d+) kB', lines)[1]) >> 10\n"
        "mx.eval(mx.ones((31 << 20,), mx.int8))\n"  # the system need not be asked for as much any more
        "layer = LayerKVSpec(tuple(Plane(n, 'float32', (4, 16, 64)) for n in 'kv'))\n"
        "spec = ModelCacheSpec((), (layer,) * 32, (), 16)\n"
        "pool = make_pool(spec, 1, host=True, max_blocks=256)\n"  # 64 arrays of 4 MiB
        "pool.resize(1)\n"
        "before, between = resident(), []\n"
        "for _ in range(3):\n"
        "    pool.resize(256)\n"
        "    for layer in pool.layers:\n"
        "        layer.k[:] = 1; layer.v[:] = 1\n"
        "        between.append(mx.ones((1 << 12,))); mx.eval(between)\n"
        "    written = resident()\n"
        "    pool.resize(1)\n"
        "    print(written - before, resident() - before)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for line in result.stdout.splitlines():
        written, asleep = map(int, line.split())
        assert written >= 250
        assert asleep < 16
