"""The pool grows before anybody is preempted, gives back what nobody uses, and sleeps."""

import subprocess
import sys
import time

import mlx.core as mx
import pytest
from elastic import resizing_now_and_then
from engine_hooks import between_steps, check_books, settled_stats, submit
from oracle import assert_matches, greedy, varied_prompt
from scripted_engine import ScriptedEngine

from mlx_paged_attention import LLM
from mlx_paged_attention.engine import engine as engine_module
from mlx_paged_attention.engine.elastic_pool import GROWTH_PAUSE
from mlx_paged_attention.errors import (
    EngineBusyError,
    InvalidRequestError,
    PoolMemoryError,
    RequestFailedError,
)
from mlx_paged_attention.runner import kv_pool
from mlx_paged_attention.runner.memory import DeviceMemory
from mlx_paged_attention.scheduler.step_plan import StepPlan

BLOCKS = 65
BYTES_PER_BLOCK = 4 * 8


def elastic(start=9, **changes):
    return ScriptedEngine(start_blocks=start, num_blocks=BLOCKS, **changes)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = [0.0]
    monkeypatch.setattr(engine_module.time, "monotonic", lambda: now[0])
    return now


def refusing(engine, least):
    """The machine has no memory for more than ``least`` blocks."""
    launch = engine.runner.launch

    def launch_if_it_fits(plan):
        if plan.num_blocks > least[0]:
            raise PoolMemoryError(f"no memory for {plan.num_blocks} blocks")
        return launch(plan)

    engine.runner.launch = launch_if_it_fits


def not_shrinking(engine, refuse):
    """While ``refuse`` says so there is no memory for a smaller pool; the plans that wanted one."""
    launch, refused = engine.runner.launch, []

    def launch_if_it_does_not_shrink(plan):
        if refuse[0] and 0 < plan.num_blocks < engine.runner.fake.num_blocks:
            refused.append(plan)
            raise PoolMemoryError("no memory to shrink")
        return launch(plan)

    engine.runner.launch = launch_if_it_does_not_shrink
    return refused


# ---- growing


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_pool_grows_with_what_is_asked_of_it_and_nobody_is_preempted(runs_ahead):
    engine = elastic()
    engine.runner.runs_ahead = runs_ahead
    for name in "abcd":
        engine.add(name, [ord(name)] * 20, max_tokens=30)
    sizes = [engine.engine.stats().pool_bytes]
    while engine.engine.has_work:
        engine.step()
        sizes.append(engine.engine.stats().pool_bytes)
    stats = engine.engine.stats()
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (9 * BYTES_PER_BLOCK, 54 * BYTES_PER_BLOCK)
    assert stats.pool_growths == 5  # by 9 blocks each
    assert (stats.preemptions, stats.pool_shrinks, stats.pool_growths_refused) == (0, 0, 0)
    assert stats.num_blocks == BLOCKS
    assert stats.pool_budget_bytes == 65 * BYTES_PER_BLOCK
    fixed = ScriptedEngine()
    for name in "abcd":
        fixed.add(name, [ord(name)] * 20, max_tokens=30)
    fixed.run()
    for name in "abcd":
        assert engine.last(name).outputs == fixed.last(name).outputs


def test_no_step_is_in_flight_when_the_size_changes():
    engine = elastic()
    engine.runner.runs_ahead = True
    launch = engine.runner.launch
    in_flight = []

    def watched(plan):
        if plan.num_blocks != engine.runner.fake.num_blocks:
            in_flight.append(len(engine.engine._in_flight))
        return launch(plan)

    engine.runner.launch = watched
    for name in "abcd":
        engine.add(name, [ord(name)] * 20, max_tokens=30)
    engine.run()
    assert len(in_flight) == 6  # the first plan says the size, too
    assert set(in_flight) == {0}


def test_requests_count_with_the_budget_not_with_the_pool_as_it_is():
    engine = elastic(start=2)
    engine.add("long", [1] * 60, max_tokens=40)
    engine.run()
    assert engine.last("long").outputs[0].finish_reason == "length"


def test_a_pool_of_given_blocks_neither_grows_nor_shrinks(clock):
    engine = ScriptedEngine(num_blocks=BLOCKS)
    engine.add("a", [1] * 20, max_tokens=30)
    clock[0] = 1e6
    engine.run()
    clock[0] = 2e6
    engine.engine.give_back()
    assert engine.engine.idle_seconds() is None
    stats = engine.engine.stats()
    assert (stats.pool_growths, stats.pool_shrinks) == (0, 0)
    assert stats.pool_bytes == stats.pool_budget_bytes


# ---- without memory


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_without_memory_requests_are_preempted_and_all_of_them_are_answered(runs_ahead, clock):
    engine = elastic()
    engine.runner.runs_ahead = runs_ahead
    refusing(engine, [18])
    for name in "abcd":
        engine.add(name, [ord(name)] * 20, max_tokens=30)
    engine.run()
    stats = engine.engine.stats()
    assert stats.pool_bytes == 18 * BYTES_PER_BLOCK
    assert stats.pool_growths_refused >= 1
    assert stats.preemptions > 0
    fixed = ScriptedEngine()
    for name in "abcd":
        fixed.add(name, [ord(name)] * 20, max_tokens=30)
    fixed.run()
    for name in "abcd":
        assert engine.last(name).outputs == fixed.last(name).outputs


def test_after_a_while_the_pool_is_asked_to_grow_again(clock):
    engine, most = elastic(), [9]
    refusing(engine, most)
    for name in "ab":
        engine.add(name, [ord(name)] * 20, max_tokens=12)
    engine.step(3)
    assert engine.engine.stats().pool_growths_refused == 1
    most[0] = BLOCKS
    engine.step(3)
    assert engine.engine.stats().pool_growths == 0
    clock[0] += GROWTH_PAUSE
    engine.step(1)
    assert engine.engine.stats().pool_growths == 1
    engine.run()
    assert engine.engine.stats().pool_growths_refused == 1


def test_who_does_not_fit_alone_is_told_that_memory_is_missing_and_others_are_served(clock):
    engine = elastic()
    refusing(engine, [9])
    engine.add("long", [1] * 60, max_tokens=5)
    engine.add("short", [2] * 10, max_tokens=5)
    engine.run()
    error = engine.error("long")
    assert isinstance(error, RequestFailedError)
    assert "no memory for " in str(error)
    assert engine.last("short").outputs[0].finish_reason == "length"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_nobody_is_refused_for_a_want_of_memory_that_is_over(clock, runs_ahead):
    engine, most = elastic(), [9]
    engine.runner.runs_ahead = runs_ahead
    refusing(engine, most)
    engine.add("short", [5] * 20, max_tokens=8, ignore_eos=True)
    engine.add("long", [6] * 40, max_tokens=8, ignore_eos=True)
    engine.step(3)
    assert engine.engine.stats().pool_growths_refused == 1
    most[0] = BLOCKS  # and no time passes
    engine.run()
    assert engine.last("short").outputs[0].finish_reason == "length"
    assert engine.last("long").outputs[0].finish_reason == "length"


def test_an_engine_that_can_schedule_nothing_says_so_though_it_was_refused_memory_before(clock):
    engine, most = elastic(), [9]
    refusing(engine, most)
    engine.add("a", [1] * 20, max_tokens=30, ignore_eos=True)
    engine.add("b", [2] * 20, max_tokens=30, ignore_eos=True)
    engine.step(12)
    assert engine.engine.stats().pool_growths_refused >= 1
    engine.engine._scheduler.schedule = lambda **_: StepPlan(0, [], [], [])
    for request_id in "ab":
        engine.engine._scheduler.abort([request_id])  # behind the engine's back
    with pytest.raises(RuntimeError, match="nothing can be scheduled"):
        engine.step()


# ---- what nobody uses


def test_what_was_not_used_for_a_time_is_given_back(clock):
    engine = elastic(config={"kv_idle_seconds": 60.0})
    assert engine.engine.idle_seconds() is None  # nothing to give back yet
    for name in "abcd":
        engine.add(name, [ord(name)] * 20, max_tokens=30)
    engine.run()
    assert engine.engine.idle_seconds() == 60
    clock[0] = 60
    engine.engine.give_back()  # it was used within this time
    assert engine.engine.stats().pool_shrinks == 0
    clock[0] = 119
    assert engine.engine.idle_seconds() == 1
    clock[0] = 120
    engine.engine.give_back()
    engine.engine._cache.check()
    stats = engine.engine.stats()
    assert (stats.pool_shrinks, stats.pool_bytes) == (1, 9 * BYTES_PER_BLOCK)
    assert engine.runner.plans[-1].num_blocks == 9
    assert engine.engine.idle_seconds() is None
    engine.add("a again", [97] * 20, max_tokens=3)
    engine.run()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_busy_pool_keeps_what_is_used_and_gives_back_the_rest(clock, runs_ahead):
    engine = elastic(config={"kv_idle_seconds": 60.0})
    engine.runner.runs_ahead = runs_ahead
    engine.add("stays", [1] * 20, max_tokens=70)  # the first blocks
    engine.step()
    for name in "abc":
        engine.add(name, [ord(name)] * 20, max_tokens=20)
    engine.step(25)
    before = engine.engine.stats()
    assert before.running == 1
    for seconds in (60, 120):
        clock[0] = seconds
        engine.step(3)
    stats = engine.engine.stats()
    assert stats.pool_shrinks == 1
    assert 18 * BYTES_PER_BLOCK <= stats.pool_bytes < before.pool_bytes
    engine.run()
    assert engine.last("stays").outputs[0].finish_reason == "length"


def test_zero_seconds_keep_everything(clock):
    engine = elastic(config={"kv_idle_seconds": 0})
    for name in "abcd":
        engine.add(name, [ord(name)] * 20, max_tokens=30)
    engine.run()
    clock[0] = 1e9
    engine.engine.give_back()
    assert engine.engine.idle_seconds() is None
    assert engine.engine.stats().pool_shrinks == 0


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "60"])
def test_what_is_no_time_is_refused(value):
    with pytest.raises(InvalidRequestError, match="kv_idle_seconds"):
        ScriptedEngine(config={"kv_idle_seconds": value})


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, float("nan"), True, 0, "1GB"])
def test_what_is_neither_bytes_nor_a_fraction_is_refused(value):
    with pytest.raises(InvalidRequestError, match="kv_memory"):
        ScriptedEngine(config={"kv_memory": value})


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_pool_that_finds_no_memory_to_shrink_stays_and_is_asked_again_a_window_later(clock, runs_ahead):
    engine = elastic(config={"kv_idle_seconds": 60.0})
    engine.runner.runs_ahead = runs_ahead
    for name in "abcd":
        engine.add(name, [ord(name)] * 20, max_tokens=30)
    engine.run()
    engine.add("stays", [1] * 20, max_tokens=70, ignore_eos=True)
    engine.step(3)
    engine.add("gone", [2] * 3, max_tokens=1)
    engine.step(3)
    before = engine.engine.stats()
    refuse = [True]
    refused = not_shrinking(engine, refuse)
    clock[0] = 60
    engine.step(3)
    assert len(refused) == 1
    stats = engine.engine.stats()
    assert engine.engine._cache.num_blocks == engine.engine._pool.num_blocks == engine.runner.fake.num_blocks
    assert (stats.pool_bytes, stats.pool_shrinks, stats.pool_growths_refused) == (before.pool_bytes, 0, 0)
    clock[0] = 119
    engine.step(3)
    assert len(refused) == 1
    refuse[0] = False
    clock[0] = 120
    engine.step(3)
    assert engine.engine.stats().pool_shrinks == 1
    engine.run()
    assert engine.last("stays").outputs[0].finish_reason == "length"


def test_who_is_released_with_a_change_of_size_that_fails_is_released_later():
    engine = elastic()
    engine.add("a", [1] * 20, max_tokens=3)
    engine.run()
    refuse = [True]
    refused = not_shrinking(engine, refuse)
    with pytest.raises(PoolMemoryError, match="no memory to shrink"):
        engine.engine._resize(2)
    assert refused[0].released == ["a"]
    engine.add("b", [2] * 20, max_tokens=3)
    engine.step()
    assert engine.runner.plans[-1].released == ["a"]
    engine.run()


# ---- sleep


def test_who_sends_it_to_sleep_without_memory_is_told_so_and_it_serves_on():
    engine = elastic()
    engine.add("a", [1] * 20, max_tokens=30)
    engine.run()
    before = engine.engine.stats().pool_bytes
    refuse = [True]
    not_shrinking(engine, refuse)
    with pytest.raises(PoolMemoryError, match="no memory to shrink"):
        engine.engine.sleep()
    engine.engine._cache.check()
    assert not engine.engine.is_sleeping
    assert engine.engine.stats().pool_bytes == before
    assert engine.engine._cache.num_blocks == engine.engine._pool.num_blocks
    engine.add("b", [1] * 20, max_tokens=30)
    engine.run()
    assert engine.last("b").outputs == engine.last("a").outputs
    refuse[0] = False
    engine.engine.sleep()
    assert engine.engine.stats().pool_bytes == BYTES_PER_BLOCK


@pytest.mark.parametrize("start", [0, 9])
def test_a_sleeping_engine_has_no_pool_and_forgets_prefixes_and_the_next_request_wakes_it(start):
    engine = elastic(start=start)
    engine.add("a", [1] * 20, max_tokens=9)
    engine.run()
    awake = engine.engine.stats()
    assert awake.cached_blocks > 0
    engine.engine.sleep()
    stats = engine.engine.stats()
    assert engine.engine.is_sleeping
    assert (stats.pool_bytes, stats.cached_blocks, stats.pool_shrinks) == (BYTES_PER_BLOCK, 0, 1)
    assert (stats.num_blocks, stats.free_blocks) == (BLOCKS, BLOCKS - 1)
    engine.engine.sleep()  # again: nothing happens
    engine.add("b", [1] * 20, max_tokens=9)
    assert not engine.engine.is_sleeping
    engine.run()
    assert engine.last("b").outputs == engine.last("a").outputs
    assert engine.last("b").num_cached_tokens == 0


@pytest.mark.parametrize(("start", "blocks"), [(0, BLOCKS), (9, 9)])
def test_waking_up_brings_the_pool_back(start, blocks):
    engine = elastic(start=start)
    engine.engine.wake_up()  # it is awake
    assert engine.engine.stats().pool_growths == 0
    engine.engine.sleep()
    engine.engine.wake_up()
    assert not engine.engine.is_sleeping
    assert engine.engine.stats().pool_bytes == blocks * BYTES_PER_BLOCK
    engine.add("a", [1] * 20, max_tokens=9)
    engine.run()


def test_who_wakes_it_without_memory_is_told_so_and_it_sleeps_on(clock):
    engine, most = elastic(), [1]
    refusing(engine, most)
    engine.engine.sleep()
    with pytest.raises(PoolMemoryError, match="no memory for 9 blocks"):
        engine.engine.wake_up()
    engine.engine._cache.check()
    assert engine.engine.is_sleeping
    most[0] = BLOCKS
    engine.engine.wake_up()
    assert engine.engine.stats().pool_bytes == 9 * BYTES_PER_BLOCK


def test_an_engine_that_serves_somebody_does_not_sleep():
    engine = elastic()
    engine.add("a", [1] * 20, max_tokens=9)
    engine.step()
    with pytest.raises(EngineBusyError, match="serving 1 request: wait"):
        engine.engine.sleep()
    engine.run()
    engine.engine.sleep()


# ---- with real models


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_answers_are_those_of_mlx_lm_while_the_pool_grows_and_shrinks(
    tiny_model, oracle, monkeypatch, name, compiled
):
    if not compiled:  # the pool is MLX's own arrays, which are replaced
        monkeypatch.setitem(sys.modules, "numba", None)
    options = {"skip_tokenizer_init": True, "block_size": 4, "kv_memory": 4 << 20, "max_model_len": 200}
    with LLM(model=str(tiny_model(name)), **options) as llm:
        prompts = [varied_prompt(5 + 9 * i, i) for i in range(8)]
        with resizing_now_and_then(llm):
            outputs = llm.generate(prompts, greedy(30))
            outputs += llm.generate(prompts[::-1], greedy(5))
        check_books(llm)
        stats = settled_stats(llm)
        assert stats.pool_growths >= 2
        assert stats.pool_shrinks >= 1
        for prompt, output in zip(prompts + prompts[::-1], outputs, strict=True):
            answer = output.outputs[0]
            assert_matches(answer, oracle(name).greedy(prompt, len(answer.token_ids)))


def test_answers_are_those_of_mlx_lm_if_the_machine_has_no_memory_to_grow(tiny_model, oracle, monkeypatch):
    options = {
        "skip_tokenizer_init": True,
        "block_size": 4,
        "kv_memory": 4 << 20,
        "max_num_batched_tokens": 64,
    }
    with LLM(model=str(tiny_model("llama")), **options) as llm:
        monkeypatch.setattr(kv_pool, "device_memory", lambda: DeviceMemory(0, "test"))
        prompts = [varied_prompt(40 + i, i) for i in range(6)]
        outputs = llm.generate(prompts, greedy(30))
        stats = settled_stats(llm)
        assert stats.pool_growths_refused >= 1
        assert stats.pool_growths == 0
        assert stats.pool_bytes == llm.info.start_blocks * 4 * llm.info.bytes_per_token
        assert stats.preemptions > 0
        check_books(llm)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 30))


@pytest.mark.parametrize("name", ["llama", "sliding_only"])
def test_an_llm_sleeps_and_wakes(tiny_model, oracle, name):
    prompt = varied_prompt(40, 1)
    expected = oracle(name).greedy(prompt, 8)
    with LLM(model=str(tiny_model(name)), skip_tokenizer_init=True, kv_memory=4 << 20) as llm:
        for _ in range(2):
            assert_matches(llm.generate([prompt], greedy(8))[0].outputs[0], expected)
            llm.sleep()
            assert llm.is_sleeping
            assert llm.stats().pool_bytes == llm.info.pool_bytes // llm.info.num_blocks
        llm.wake_up()
        assert not llm.is_sleeping
        (output,) = llm.generate([prompt], greedy(8))
        assert_matches(output.outputs[0], expected)
        assert output.num_cached_tokens == 0
        with pytest.raises(InvalidRequestError, match="level must be 1"):
            llm.sleep(level=2)
        wait = []
        between_steps(llm, lambda: wait.append(submit(llm, prompt, greedy(50))))
        with pytest.raises(EngineBusyError):
            llm.sleep()
        wait[0]()


def test_an_idle_engine_gives_memory_back_by_itself(tiny_model):
    options = {"skip_tokenizer_init": True, "kv_memory": 4 << 20, "kv_idle_seconds": 0.1}
    with LLM(model=str(tiny_model("llama")), **options) as llm:
        llm.generate([varied_prompt(200, i) for i in range(8)], greedy(8))
        deadline = time.monotonic() + 20
        least = llm.info.start_blocks * 16 * llm.info.bytes_per_token
        while llm.stats().pool_bytes > least:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert llm.stats().pool_bytes == least
        assert llm.stats().pool_shrinks >= 1
        llm.generate([varied_prompt(200, 1)], greedy(8))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="the pool is a GPU's")
def test_a_sleeping_llm_gives_back_what_it_took_to_serve(tiny_model):
    """By the process's size."""
    code = (
        "import sys, psutil\n"
        "from mlx_paged_attention import LLM, SamplingParams\n"
        "resident = lambda: psutil.Process().memory_info().rss >> 20\n"
        "options = {'skip_tokenizer_init': True, 'num_blocks': 20_000, 'max_model_len': 1024}\n"
        "llm = LLM(model=sys.argv[1], **options)\n"
        "llm.generate([[1] * 1000], SamplingParams(temperature=0, max_tokens=4))\n"
        "llm.sleep()\n"
        "before = resident()\n"
        "llm.wake_up()\n"
        "for layer in llm._engine._engine._runner._pool.layers:\n"  # as if all blocks had been used
        "    layer.k[:] = 1\n"
        "    layer.v[:] = 1\n"
        "used = resident()\n"
        "llm.sleep()\n"
        "print(used - before, resident() - before)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model("llama"))], capture_output=True, text=True, check=True
    )
    used, left = map(int, result.stdout.split())
    assert used > 140
    assert left < 10


def test_memory_is_given_back_though_the_last_step_is_still_to_be_read(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(engine_module.time, "monotonic", lambda: now[0])
    engine = elastic(config={"kv_idle_seconds": 5.0})
    engine.runner.runs_ahead = True
    engine.add("big", [65] * 40, max_tokens=20)
    engine.run()
    now[0] = 6.0
    engine.engine.give_back()
    engine.add("small", [70] * 3, max_tokens=2)
    while engine.engine.has_work:
        now[0] += 4.0
        engine.step()
    engine.check_idle()
    assert engine.engine.stats().pool_shrinks > 0
