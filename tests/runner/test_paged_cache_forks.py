"""A copy of a paged cache goes its own way: what it shares with the others is never written by either."""

import copy
import gc
import sys

import mlx.core as mx
import numpy as np
import pytest
from emulated_kernels import emulated_kernels, skip_without_gpu
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load_model
from oracle import varied_prompt

from mlx_paged_attention import make_paged_cache
from mlx_paged_attention.errors import RequestTooLongError
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.host import HostLayer
from mlx_paged_attention.ops.kernel_layer import KernelLayer

BLOCK_SIZE = 8


@pytest.fixture(params=["host", "plain MLX", "emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def kind(request, monkeypatch):
    """The kind of layer that keys and values lie in."""
    if request.param == "host":
        yield HostLayer
        return
    monkeypatch.setitem(sys.modules, "numba", None)
    if request.param == "plain MLX":
        yield DeviceLayer
        return
    if request.param == "gpu":
        skip_without_gpu()
        yield KernelLayer
        return
    with emulated_kernels():
        yield KernelLayer


def more(model, cache, seed, length, count=5):
    """The tokens generated behind ``length`` new ones."""
    steps = generate_step(mx.array(varied_prompt(length, seed)), model, max_tokens=count, prompt_cache=cache)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_copies_generate_what_copies_of_mlx_lms_cache_generate(tiny_model, kind, name):
    model, _ = load_model(tiny_model(name))
    results = []
    for cache in (make_prompt_cache(model), make_paged_cache(model, max_tokens=256, block_size=BLOCK_SIZE)):
        said = [more(model, cache, 1, 21, count=1)]
        second = copy.deepcopy(cache)
        said.append(more(model, second, 2, 3))
        third = copy.deepcopy(second)
        for seed, each in enumerate([cache, third, second, cache, third]):
            said.append(more(model, each, seed, 1 + seed % 3))
        results.append(said)
        assert len({each[0].offset for each in (cache, second, third)}) > 1
    assert results[0] == results[1]
    assert {type(entry.layer) for entry in cache} == {kind}


def compute(model, cache, seed, length):
    mx.eval(model(mx.array([varied_prompt(length, seed)]), cache=cache))


def blocks(layer):
    """Keys and values as ``[blocks, kv_heads, block_size, dim]``."""
    mx.eval(layer.state)
    layer.flush()
    planes = [np.array(plane) for plane in (layer.k, layer.v)]
    return [plane.swapaxes(0, 1) if isinstance(layer, HostLayer) else plane for plane in planes]


def test_the_first_write_into_a_shared_block_copies_it_and_nothing_else(tiny_model, kind):
    model, _ = load_model(tiny_model("llama"))
    cache = make_paged_cache(model, max_tokens=64, block_size=BLOCK_SIZE)
    compute(model, cache, 1, BLOCK_SIZE + 3)
    before = [blocks(entry.layer) for entry in cache]
    fork = copy.deepcopy(cache)
    compute(model, fork, 2, 1)
    for entry, old in zip(cache, before, strict=True):
        for plane, expected in zip(blocks(entry.layer), old, strict=True):
            np.testing.assert_array_equal(plane[1], expected[1])
            np.testing.assert_array_equal(plane[2], expected[2])
            np.testing.assert_array_equal(plane[3, :, :3], expected[2, :, :3])
            assert np.abs(plane[3, :, 3]).max() > 0
    assert fork[0]._sequence._table.block_ids() == [1, 3]
    compute(model, cache, 2, 1)
    assert cache[0]._sequence._table.block_ids() == [1, 2]


def test_tokens_that_are_computed_again_after_a_copy_do_not_reach_it(tiny_model):
    """The same positions again: what could be written in place the first time may not be now."""
    model, _ = load_model(tiny_model("llama"))
    cache = make_paged_cache(model, max_tokens=64, block_size=BLOCK_SIZE)
    theirs = make_prompt_cache(model)
    for each in (cache, theirs):
        compute(model, each, 5, 5)
        compute(model, each, 4, 4)
    fork = copy.deepcopy(cache)
    trim_prompt_cache(cache, 4)
    compute(model, cache, 9, 4)
    assert more(model, fork, 3, 2) == more(model, theirs, 3, 2)


def test_copies_share_the_room_there_is_and_give_it_back(tiny_model):
    model, _ = load_model(tiny_model("llama"))
    cache = make_paged_cache(model, max_tokens=6 * BLOCK_SIZE, block_size=BLOCK_SIZE)
    compute(model, cache, 1, 3 * BLOCK_SIZE)  # three blocks
    for _ in range(10):
        forks = [copy.deepcopy(cache) for _ in range(3)]
        for fork in forks:
            compute(model, fork, 2, 1)  # one more for each
        with pytest.raises(RequestTooLongError, match="larger max_tokens, or drop a copy"):
            compute(model, cache, 2, 1)
        del fork, forks
        gc.collect()
    compute(model, cache, 2, 3 * BLOCK_SIZE)
