"""Steps of single tokens, compiled once per bucket: the same tokens, and nothing left behind."""

import gc
import os

import mlx.core as mx
import numpy as np
import pytest
from emulator import metal_kernel, what_is_missing
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import varied_prompt
from step_driver import PACKED, ROWS, StepDriver, load_host
from tiny_models import VOCAB_SIZE

from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.decode_batch import DecodeShape
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels import make
from mlx_paged_attention.ops.kernels.work_list import capacity_for, work_list
from mlx_paged_attention.runner import decode_step
from mlx_paged_attention.runner.decode_step import bucket, width_bucket
from mlx_paged_attention.runner.kv_pool import KernelPool
from mlx_paged_attention.runner.self_check import choose_layout


def emulated(name, inputs, outputs, body, mutable):
    return metal_kernel(
        name,
        inputs,
        outputs,
        body,
        make.source("metal.h"),
        ensure_row_contiguous=False,
        mutable_inputs=mutable,
    )


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request, monkeypatch):
    """Kernels run on the GPU, in compiled functions; or in the emulator, as each is called."""
    if request.param == "gpu":
        if make.backend() is None:
            pytest.skip("no GPU that MLX can use")
        yield
        return
    if reason := what_is_missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    monkeypatch.setattr(make, "compile_kernel", emulated)
    monkeypatch.setattr(KernelLayer, "supports", staticmethod(lambda spec: True))
    make._compiled.cache_clear()
    mx.disable_compile()
    yield
    mx.enable_compile()
    make._compiled.cache_clear()


@pytest.fixture
def traced(monkeypatch):
    """Kernels that only hand on their arguments, so that functions compile where there is no GPU.

    Each step's shape is recorded when it is traced.
    """

    def write(self, keys, values, batch):
        touched = keys.sum() + values.sum() + batch.device_slot_ids.sum() + self.k[:1].sum()
        self.order.token = (touched + self.order.token.sum()).reshape(1)

    def attend_in_place(self, queries, batch, scale, sinks):
        work = batch.work(8, self.spec.window)
        self.order.token = self.order.token + work.items.sum() + batch.device_tables.sum()
        return queries + self.order.token * 0

    monkeypatch.setattr(KernelLayer, "supports", staticmethod(lambda spec: True))
    monkeypatch.setattr(KernelLayer, "write", write)
    monkeypatch.setattr(KernelLayer, "attend_in_place", attend_in_place)
    shapes = []
    step = decode_step._step

    def recorded(host, caches, pool, shape, *arrays):
        shapes.append((shape.rows, shape.width))
        return step(host, caches, pool, shape, *arrays)

    monkeypatch.setattr(decode_step, "_step", recorded)
    return shapes


def run(driver, schedule):
    """Greedy tokens of every request over the steps, each a dict of counts."""
    for counts in schedule:
        driver.step(**counts)
    return driver.tokens


SCHEDULE = [
    {"a": 21, "b": 1},
    {"a": 1, "b": 1, "c": 15},
    {"a": 1, "b": 1, "c": 1},
    {"c": 1},
    {"a": 1, "c": 1},
    {"c": 1, "b": 1, "a": 1, "d": 17},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"d": 1, "b": 1},
]


@pytest.mark.parametrize(("name", "layout"), [("llama", PACKED), ("gemma3", ROWS)])
def test_compiled_decode_samples_what_plain_operations_sample(tiny_model, kernels, monkeypatch, name, layout):
    tokens = []
    for compiled in (False, True):
        host, specs = load_host(tiny_model(name))
        with monkeypatch.context() as patch:
            if not compiled:  # plain operations of MLX, wherever this runs
                patch.setattr(KernelLayer, "supports", staticmethod(lambda spec: False))
            chosen = layout.with_compiled_decode() if compiled else layout
            driver = StepDriver(host, specs, chosen, on_host=False)
        assert isinstance(driver.runner._pool, KernelPool) is compiled
        for request, length in (("a", 21), ("b", 1), ("c", 15), ("d", 17)):
            driver.add(request, varied_prompt(length, length))
        tokens.append(run(driver, SCHEDULE))
    assert tokens[0] == tokens[1]


def test_the_check_at_load_covers_compiled_decode(tiny_model, kernels, monkeypatch):
    host, specs = load_host(tiny_model("llama"))
    layout = choose_layout(host, specs, vocab_size=VOCAB_SIZE, on_host=False)
    assert layout == PACKED.with_compiled_decode()

    unpack = DecodeShape.unpack

    def shifted(self, packed):
        tokens, batch = unpack(self, packed)
        batch.__dict__["offsets"] = batch.offsets + 1
        return tokens, batch

    monkeypatch.setattr(DecodeShape, "unpack", shifted)
    assert choose_layout(host, specs, vocab_size=VOCAB_SIZE, on_host=False) is PACKED


def test_a_bucket_is_traced_once(tiny_model, traced):
    host, specs = load_host(tiny_model("llama"))
    driver = StepDriver(host, specs, PACKED.with_compiled_decode(), on_host=False)
    for request in "abc":
        driver.add(request, varied_prompt(5, 1))
    driver.step(a=5, b=5, c=5)
    for _ in range(5):
        driver.step(a=1, b=1, c=1)
        driver.step(c=1, a=1)
    assert traced == [(4, 64), (2, 64)]
    assert driver.runner._pool.order.token.shape == (1,)


def test_compiled_steps_take_the_pool_that_is_there(tiny_model, traced):
    """A captured pool would be a constant: what replaced it would never be seen."""
    host, specs = load_host(tiny_model("llama"))
    driver = StepDriver(host, specs, PACKED.with_compiled_decode(), on_host=False)
    driver.add("a", varied_prompt(5, 1))
    driver.step(a=5)
    pool = driver.runner._pool
    tokens = []
    for value in (0, 3):
        pool.planes = [mx.full(plane.shape, value, plane.dtype) for plane in pool.planes]
        driver.step(a=1)
        tokens.append(float(pool.order.token[0]))
    assert abs(tokens[1] - tokens[0]) > 1000
    assert traced == [(1, 64)]


def test_nothing_is_kept_alive(tiny_model, traced):
    def serve():
        host, specs = load_host(tiny_model("llama"))
        driver = StepDriver(host, specs, PACKED.with_compiled_decode(), on_host=False)
        driver.add("a", varied_prompt(5, 1))
        for count in (5, 1, 1):
            driver.step(a=count)
        assert isinstance(driver.runner._pool, KernelPool)

    serve()  # what is made once stays
    gc.collect()
    before = mx.get_active_memory()
    serve()
    gc.collect()
    assert mx.get_active_memory() == before


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_what_is_packed_is_unpacked(data):
    size = data.draw(st.sampled_from([8, 16]))
    rows = data.draw(st.integers(1, 9))
    contexts = np.array(data.draw(st.lists(st.integers(1, 900), min_size=rows, max_size=rows)), np.int32)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    width = -(-int(contexts.max()) // size)
    tables = rng.integers(1, 5000, (rows, width)).astype(np.int32)
    tokens, slots = (rng.integers(0, 10**6, rows) for _ in range(2))
    cuts = ((8, None), (3, 64))
    shape = DecodeShape(bucket(rows), width_bucket(width), size, cuts)
    packed = mx.array(shape.pack(tokens.astype(np.int32), contexts - 1, slots, tables))
    got_tokens, batch = shape.unpack(packed)
    assert batch.rows == shape.rows
    padded = np.zeros(shape.rows, np.int32)
    padded[:rows] = contexts
    host = AttentionBatch(contexts - 1, 1, slots, tables, size)
    for got, expected, padding in [
        (got_tokens[:, 0], tokens, 0),
        (batch.offsets, host.starts, 0),
        (batch.device_slot_ids, host.slots, 0),
        (batch.device_context_lens, host.context_lens, 0),
    ]:
        assert np.array(got)[:rows].tolist() == expected.tolist()
        assert (np.array(got)[rows:] == padding).all()
    got = np.array(batch.device_tables)
    assert (got[:rows, :width] == tables).all()
    assert not got[rows:].any()
    assert not got[:, width:].any()
    for threadgroups, window in cuts:
        expected = work_list(
            padded,
            1,
            block_size=size,
            threadgroups_per_item=threadgroups,
            window=window,
            capacity=capacity_for(shape.rows, threadgroups),
        )
        work = batch.work(threadgroups, window)
        assert work.split
        assert mx.array_equal(work.items, expected.items)
        assert mx.array_equal(work.splits, expected.splits)


def test_metadata_on_the_host_does_not_exist_in_a_compiled_step():
    shape = DecodeShape(2, 64, 16, ())
    _, batch = shape.unpack(mx.zeros(4 * 2 + 2 * 64, mx.int32))
    for name in ("starts", "slots", "block_tables", "longest", "context_lens", "written"):
        with pytest.raises(AttributeError):
            getattr(batch, name)


def test_buckets_hold_their_rows_and_waste_little():
    sizes = sorted({bucket(rows) for rows in range(1, 257)})
    assert sizes == [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    for rows in range(1, 257):
        assert rows <= bucket(rows) < max(2 * rows, 2)
        assert bucket(bucket(rows)) == bucket(rows)
    assert [width_bucket(width) for width in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]
