"""Steps compiled once per shape: the same tokens, and nothing left behind."""

import gc

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from emulated_kernels import emulated_kernels, skip_without_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import varied_prompt
from step_driver import PACKED, ROWS, StepDriver, load_host
from tiny_models import VOCAB_SIZE

from mlx_paged_attention.ops import kernel_layer, packing
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels.work_list import capacity_for, work_list
from mlx_paged_attention.ops.packing import TILE, Packing
from mlx_paged_attention.ops.step_shape import (
    DecodeShape,
    MixedShape,
    bucket,
    capacity,
    shape_of,
    width_bucket,
)
from mlx_paged_attention.runner import compiled_step
from mlx_paged_attention.runner.kv_pool import KernelPool
from mlx_paged_attention.runner.self_check import choose_layout
from mlx_paged_attention.scheduler.step_plan import UNKNOWN_TOKEN, PlannedRow


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request):
    """Kernels run on the GPU, in compiled functions; or in the emulator, as each is called."""
    if request.param == "gpu":
        skip_without_gpu()
        yield
        return
    with emulated_kernels():
        mx.disable_compile()
        yield
        mx.enable_compile()


@pytest.fixture
def traced(monkeypatch):
    """Kernels that only hand on their arguments, so that functions compile where there is no GPU.

    Each step's shape is recorded when it is traced.
    """

    def write(self, keys, values, batch):
        touched = keys.sum() + values.sum() + batch.device_slot_ids.sum() + self.k[:1].sum()
        self.order.token = (touched + self.order.token.sum()).reshape(1)

    def attend_in_place(self, queries, batch, scale, sinks, picked=None):
        work = batch.work(8, self.spec.window)
        self.order.token = self.order.token + work.items.sum() + batch.device_tables.sum()
        if picked is not None:
            queries = queries[picked.reshape(-1)]
        return queries + self.order.token * 0

    monkeypatch.setattr(KernelLayer, "supports", staticmethod(lambda spec: True))
    monkeypatch.setattr(KernelLayer, "write", write)
    monkeypatch.setattr(KernelLayer, "attend_in_place", attend_in_place)
    monkeypatch.setattr(kernel_layer, "join_rows", lambda a, b, order: mx.concatenate([a, b])[order])
    shapes = []
    step = compiled_step._step

    def recorded(host, caches, pool, shape, *arrays):
        shapes.append(shape)
        return step(host, caches, pool, shape, *arrays)

    monkeypatch.setattr(compiled_step, "_step", recorded)
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


@pytest.mark.parametrize(("name", "layout"), [("llama", PACKED), ("gemma3", ROWS), ("gemma3", PACKED)])
def test_compiled_steps_sample_what_plain_operations_sample(tiny_model, kernels, monkeypatch, name, layout):
    monkeypatch.setattr(packing, "GATHER_BEYOND", dict.fromkeys(("cuda", "metal"), 20))
    tokens = []
    for compiled in (False, True):
        host, spec = load_host(tiny_model(name))
        with monkeypatch.context() as patch:
            if not compiled:  # plain operations of MLX, wherever this runs
                patch.setattr(KernelLayer, "supports", staticmethod(lambda spec: False))
            chosen = layout.with_compiled_steps() if compiled else layout
            driver = StepDriver(host, spec, chosen, on_host=False)
        assert isinstance(driver.runner._pool, KernelPool) is compiled
        for request, length in (("a", 21), ("b", 1), ("c", 15), ("d", 17)):
            driver.add(request, varied_prompt(length, length))
        tokens.append(run(driver, SCHEDULE))
    assert tokens[0] == tokens[1]


def test_a_step_may_start_from_tokens_that_are_still_on_the_device(tiny_model, oracle, kernels, monkeypatch):
    """A decode step and a mixed one, their rows in other orders than those of the step before."""
    monkeypatch.setattr(packing, "GATHER_BEYOND", dict.fromkeys(("cuda", "metal"), 1000))
    host, spec = load_host(tiny_model("llama"))
    driver = StepDriver(host, spec, PACKED.with_compiled_steps(), on_host=False)
    prompts = {
        name: varied_prompt(length, length) for name, length in (("a", 21), ("b", 3), ("c", 15), ("d", 17))
    }
    for name in "abc":
        driver.add(name, prompts[name])
    starts = {name: len(prompts[name]) for name in "abc"}
    launched = [driver.runner.launch(driver.plan(a=21, b=3, c=15))]
    driver.add("d", prompts["d"])
    for order, others in (("cab", {}), ("bca", {"d": 9}), ("ab", {"d": 8})):
        plan = driver.plan(**others)
        rows = [PlannedRow(name, [UNKNOWN_TOKEN], starts[name], [], starts[name], True) for name in order]
        for name in order:
            starts[name] += 1
        launched.append(driver.runner.launch(msgspec.structs.replace(plan, rows=[*rows, *plan.rows])))
    assert {type(shape) for shape in driver.runner._compiled._compiled} == {DecodeShape, MixedShape}
    for step in launched:
        driver.take(step.read())
    for name, count in (("a", 4), ("b", 4), ("c", 3), ("d", 1)):
        output = driver.tokens[name][len(prompts[name]) :]
        assert output == oracle("llama").greedy(prompts[name], count).token_ids


def test_after_a_launch_that_failed_steps_are_right(tiny_model, oracle, kernels, monkeypatch):
    """The failure comes with a step in flight and half of the pool written."""
    host, spec = load_host(tiny_model("llama"))
    driver = StepDriver(host, spec, PACKED.with_compiled_steps(), on_host=False)
    prompts = {name: varied_prompt(length, length) for name, length in (("a", 21), ("b", 3), ("c", 15))}
    for name in "ab":
        driver.add(name, prompts[name])
    first = driver.runner.launch(driver.plan(a=21, b=3))
    driver.add("c", prompts["c"])
    second_layer = driver.runner._pool.layers[1]
    with monkeypatch.context() as patch:
        patch.setattr(second_layer, "attend", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.runner.launch(driver.plan(c=15))
    driver.take(first.read())
    driver.release("c")
    driver.add("d", prompts["c"])
    driver.step(a=1, d=15)
    driver.step(d=1, b=1, a=1)
    for name, prompt, count in (("a", "a", 3), ("b", "b", 2), ("d", "c", 2)):
        output = driver.tokens[name][len(prompts[prompt]) :]
        assert output == oracle("llama").greedy(prompts[prompt], count).token_ids


@pytest.mark.parametrize("kind", [DecodeShape, MixedShape])
def test_the_check_at_load_covers_compiled_steps(tiny_model, kernels, monkeypatch, kind):
    monkeypatch.setattr(packing, "GATHER_BEYOND", dict.fromkeys(("cuda", "metal"), 1000))
    host, spec = load_host(tiny_model("llama"))
    layout = choose_layout(host, spec, vocab_size=VOCAB_SIZE, on_host=False)
    assert layout == PACKED.with_compiled_steps()

    unpack = kind.unpack

    def shifted(self, packed):
        tokens, batch, wanted = unpack(self, packed)
        batch.__dict__["offsets"] = batch.offsets + 1
        return tokens, batch, wanted

    monkeypatch.setattr(kind, "unpack", shifted)
    assert choose_layout(host, spec, vocab_size=VOCAB_SIZE, on_host=False) is PACKED


def test_a_bucket_is_traced_once(tiny_model, traced, monkeypatch):
    host, spec = load_host(tiny_model("llama"))
    driver = StepDriver(host, spec, PACKED.with_compiled_steps(), on_host=False)
    for request in "abc":
        driver.add(request, varied_prompt(5, 1))
    monkeypatch.setattr(packing, "GATHER_BEYOND", {"metal": 1000})
    driver.step(a=5, b=5, c=5)
    for _ in range(5):
        driver.step(a=1, b=1, c=1)
        driver.step(c=1, a=1)
    assert [(type(shape), shape.tokens) for shape in traced] == [
        (MixedShape, 16),
        (DecodeShape, 4),
        (DecodeShape, 2),
    ]
    assert driver.runner._pool.order.token.shape == (1,)


def test_compiled_steps_take_the_pool_that_is_there(tiny_model, traced):
    """A captured pool would be a constant: what replaced it would never be seen."""
    host, spec = load_host(tiny_model("llama"))
    driver = StepDriver(host, spec, PACKED.with_compiled_steps(), on_host=False)
    driver.add("a", varied_prompt(5, 1))
    driver.step(a=5)
    pool = driver.runner._pool
    tokens = []
    for value in (0, 3):
        pool.planes = [mx.full(plane.shape, value, plane.dtype) for plane in pool.planes]
        driver.step(a=1)
        tokens.append(float(pool.order.token[0]))
    assert abs(tokens[1] - tokens[0]) > 1000
    assert [(shape.tokens, shape.width) for shape in traced if isinstance(shape, DecodeShape)] == [(1, 64)]


def test_when_the_pool_changes_its_size_what_was_compiled_goes_and_old_arrays_are_freed(tiny_model, traced):
    host, spec = load_host(tiny_model("llama"))
    driver = StepDriver(host, spec, PACKED.with_compiled_steps(), on_host=False)
    driver.add("a", varied_prompt(5, 1))
    driver.step(a=5)
    driver.step(a=1)
    pool, compiled = driver.runner._pool, driver.runner._compiled
    assert compiled._compiled
    traced.clear()
    before = mx.get_active_memory()
    resized = msgspec.structs.replace(driver.plan(a=1), num_blocks=128)
    driver.take(driver.runner.launch(resized).read())
    assert [type(shape) for shape in traced] == [DecodeShape]
    assert len(compiled._compiled) == 1
    assert [plane.shape[0] for plane in pool.planes] == [128] * len(pool.planes)
    gc.collect()
    assert mx.get_active_memory() - before < 65 * pool.nbytes // 128  # 64 blocks came, and none is held twice


def test_nothing_is_kept_alive(tiny_model, traced):
    def serve():
        host, spec = load_host(tiny_model("llama"))
        driver = StepDriver(host, spec, PACKED.with_compiled_steps(), on_host=False)
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
    host = AttentionBatch(contexts - 1, 1, slots, tables, size)
    packed = mx.array(shape.pack(tokens.astype(np.int32), host, np.arange(rows, dtype=np.int32)))
    got_tokens, batch, wanted = shape.unpack(packed)
    assert wanted is None
    assert batch.rows == shape.tokens
    padded = np.zeros(shape.tokens, np.int32)
    padded[:rows] = contexts
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
            capacity=capacity_for(shape.tokens, threadgroups),
        )
        work = batch.work(threadgroups, window)
        assert work.split
        assert mx.array_equal(work.items, expected.items)
        assert mx.array_equal(work.splits, expected.splits)


def test_metadata_on_the_host_does_not_exist_in_a_compiled_step():
    shape = DecodeShape(2, 64, 16, ())
    _, batch, _ = shape.unpack(mx.zeros(4 * 2 + 2 * 64, mx.int32))
    for name in ("starts", "slots", "block_tables", "longest", "context_lens", "written"):
        with pytest.raises(AttributeError):
            getattr(batch, name)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=9),
    st.integers(0, 99),
)
def test_what_is_packed_of_a_mixed_step_is_unpacked(runs, seed):
    size, cuts, tile_cuts = 8, ((8, None), (3, 64)), ((16, None),)
    rng = np.random.default_rng(seed)
    lengths = [length for _, length in runs]
    ends = np.cumsum(lengths)
    starts = np.concatenate([np.arange(start, start + length) for start, length in runs]).astype(np.int32)
    tables = np.repeat(rng.integers(1, 5000, (len(runs), 45)), lengths, axis=0).astype(np.int32)
    spans = tuple((int(end - n), int(end)) for end, n in zip(ends, lengths, strict=True))
    total = int(ends[-1])
    tokens, slots = (rng.integers(0, 10**6, total) for _ in range(2))
    batch = AttentionBatch(starts, 1, slots, tables, size, runs=spans)
    wanted = (ends - 1).astype(np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "GATHER_BEYOND", {"metal": 1000})
        parts = Packing.of(batch)
    shape = shape_of(batch, len(wanted), cuts, tile_cuts)
    if batch.singles_only:
        assert isinstance(shape, DecodeShape)
        return
    assert isinstance(shape, MixedShape)
    got_tokens, got, got_wanted = shape.unpack(mx.array(shape.pack(tokens.astype(np.int32), batch, wanted)))
    assert np.array(got_tokens)[:total, 0].tolist() == tokens.tolist()
    assert np.array(got.offsets)[:total].tolist() == starts.tolist()
    assert np.array(got.device_slot_ids)[:total].tolist() == slots.tolist()
    assert np.array(got_wanted)[: len(wanted)].tolist() == wanted.tolist()
    # Follow each token through the parts: it must meet its own context and its own table.
    picked = got.packing.device_singles, got.packing.device_tiles
    sources = np.concatenate([np.array(tokens).reshape(-1) for tokens in picked])
    single, tile = got.packing.single_batch, got.packing.tile_batch
    lens = np.concatenate([np.array(x.device_context_lens) for x in (single, tile)])
    lines = [np.array(single.device_tables), np.repeat(np.array(tile.device_tables), TILE, axis=0)]
    places = np.array(got.packing.device_order)[:total]
    assert sources[places].tolist() == list(range(total))
    assert lens[places].tolist() == batch.context_lens.tolist()
    assert (np.concatenate(lines)[places, :45] == tables).all()
    # What is padding has no context: it costs nothing and reads nothing.
    assert not np.array(single.device_context_lens)[len(parts.singles) :].any()
    assert not np.array(tile.device_context_lens)[parts.tiles.size :].any()
    for part, queries, its_cuts in ((single, 1, cuts), (tile, TILE, tile_cuts)):
        for threadgroups, window in its_cuts:
            expected = work_list(
                np.array(part.device_context_lens),
                queries,
                block_size=size,
                threadgroups_per_item=threadgroups,
                window=window,
                capacity=capacity_for(part.device_tables.shape[0], threadgroups),
            )
            work = part.work(threadgroups, window)
            assert mx.array_equal(work.items, expected.items)
            assert mx.array_equal(work.splits, expected.splits)


def test_a_step_that_gathers_contexts_has_no_fixed_shape(monkeypatch):
    monkeypatch.setattr(packing, "GATHER_BEYOND", {"metal": 10})
    batch = AttentionBatch(
        np.arange(20, dtype=np.int32), 1, np.arange(20), np.ones((20, 3), np.int32), 8, runs=((0, 20),)
    )
    assert Packing.of(batch).gathered == ((0, 20),)
    assert shape_of(batch, 1, (), ()) is None


def test_buckets_hold_their_rows_and_waste_little():
    sizes = sorted({bucket(rows) for rows in range(1, 257)})
    assert sizes == [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    for rows in range(1, 257):
        assert rows <= bucket(rows) < max(2 * rows, 2)
        assert bucket(bucket(rows)) == bucket(rows)
    assert [capacity(count, 16) for count in (0, 16, 17, 64, 65, 1000)] == [16, 16, 64, 64, 256, 1024]
    assert [width_bucket(width) for width in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]
