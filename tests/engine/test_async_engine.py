"""The engine's thread: requests from any thread, closing at any moment, nobody left waiting."""

import gc
import queue
import threading
import time
import weakref

import pytest
from fake_runner import FakeRunner, expected_output, varied_prompt
from scripted_engine import ScriptedRunner, make_info

import mlx_paged_attention.engine.loading as loading
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.async_engine import AsyncEngine
from mlx_paged_attention.engine.mlx_thread import run_on_mlx_thread
from mlx_paged_attention.engine.outputs import RequestOutput
from mlx_paged_attention.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    RequestFailedError,
    RequestTooLongError,
)
from mlx_paged_attention.models.source import ModelSource
from mlx_paged_attention.sampling.params import SamplingParams

PROMPT = varied_prompt(10, 1)
TIMEOUT = 20


class Runner(ScriptedRunner):
    """A fake runner whose steps a test can hold up."""

    def __init__(self, info):
        super().__init__()
        self.fake = FakeRunner(info.block_size)
        self.may_step = threading.Event()
        self.may_step.set()
        self.in_step = threading.Event()
        self.threads = set()

    def launch(self, plan):
        self.threads.add(threading.get_ident())
        self.in_step.set()
        assert self.may_step.wait(TIMEOUT)
        return super().launch(plan)

    def hold(self):
        self.may_step.clear()
        self.in_step.clear()


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts engines on fake runners; closes them at the end."""
    engines = []

    def load(config, source, progress, grammars):
        progress(f"loading {source.name}")
        info = make_info(model=source.name)
        return loading.LoadedEngine(info, Runner(info), "fingerprint")

    monkeypatch.setattr(loading, "load_engine", load)

    def make(progress=lambda _: None, **config):
        source = ModelSource("directory", tmp_path, "fake")
        engine = AsyncEngine(EngineConfig(**config), source, None, progress)
        engine.runner = engine._engine._runner
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.runner.may_step.set()
        engine.close()


class Stream:
    """What a request's ``emit`` receives."""

    def __init__(self, engine, request_id="r", prompt=PROMPT, *, kind="final", **params):
        self.items = queue.SimpleQueue()
        options = {"temperature": 0.0, "max_tokens": 8, **params}
        sampling = SamplingParams(**options)
        engine.start(engine.prepare(request_id, prompt, sampling, kind=kind, emit=self.items.put))

    def next(self):
        return self.items.get(timeout=TIMEOUT)

    def result(self):
        """The last output or error; nothing may come after it."""
        while True:
            item = self.next()
            if isinstance(item, Exception) or item.finished:
                assert self.items.empty()
                return item

    def tokens(self):
        result = self.result()
        assert isinstance(result, RequestOutput), result
        return result.outputs[0].token_ids


def test_a_request_is_served_on_the_engines_thread_alone(start):
    engine = start()
    assert Stream(engine).tokens() == expected_output(PROMPT, 8)
    assert len(engine.runner.threads) == 1
    assert threading.get_ident() not in engine.runner.threads


def test_loading_happens_on_that_thread_too_and_reports_its_progress(start):
    lines = []
    engine = start(progress=lambda line: lines.append((line, threading.get_ident())))
    Stream(engine).result()
    ((line, thread),) = lines
    assert line == "loading fake"
    assert {thread} == engine.runner.threads


def test_many_threads_submit_at_once_and_each_gets_its_own_answer(start):
    engine = start()
    answers = {}

    def work(number):
        for turn in range(10):
            prompt = varied_prompt(number + 3 * turn + 1, number)
            answers[number, turn] = (prompt, Stream(engine, f"{number}-{turn}", prompt).tokens())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(answers) == 80
    for prompt, tokens in answers.values():
        assert tokens == expected_output(prompt, 8)
    assert engine.stats().used_blocks == 0


@pytest.mark.parametrize(
    "error", [ModelLoadError("no such file"), InvalidRequestError("bad", "device"), OSError("?")]
)
def test_an_error_in_loading_reaches_the_caller_as_it_is(start, monkeypatch, error):
    def load(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_engine", load)
        with pytest.raises(type(error)) as raised:
            start()
    assert raised.value is error
    assert Stream(start()).tokens() == expected_output(PROMPT, 8)


def test_an_error_of_the_progress_callback_reaches_the_caller(start):
    def progress(line):
        raise ZeroDivisionError(line)

    with pytest.raises(ZeroDivisionError, match="loading fake"):
        start(progress=progress)


def test_what_cannot_be_served_is_refused_in_the_callers_thread(start):
    engine = start()
    with pytest.raises(InvalidRequestError, match="empty"):
        Stream(engine, prompt=[])
    with pytest.raises(RequestTooLongError):
        Stream(engine, prompt=[1] * 100)
    assert engine.stats().steps == 0


def test_an_id_in_use_is_answered_through_emit(start):
    engine = start()
    engine.runner.hold()
    first = Stream(engine)
    assert engine.runner.in_step.wait(TIMEOUT)
    second = Stream(engine, prompt=[1, 2])
    engine.runner.may_step.set()
    error = second.result()
    assert isinstance(error, InvalidRequestError)
    assert error.param == "request_id"
    assert first.tokens() == expected_output(PROMPT, 8)


def test_an_aborted_request_gets_a_last_output_and_its_blocks_are_free_by_then(start):
    engine = start()
    engine.runner.hold()
    stream = Stream(engine, max_tokens=80, kind="delta")
    assert engine.runner.in_step.wait(TIMEOUT)
    engine.abort("r")
    engine.runner.may_step.set()
    result = stream.result()
    assert result.outputs[0].finish_reason == "abort"
    assert engine.stats().used_blocks == 0


def test_aborting_after_the_end_or_the_unknown_does_nothing(start):
    engine = start()
    stream = Stream(engine)
    stream.result()
    engine.abort("r")
    engine.abort("nobody")
    assert Stream(engine).tokens() == expected_output(PROMPT, 8)
    assert stream.items.empty()
    engine.close()
    engine.abort("r")


def test_whoever_reads_an_output_finds_it_counted(start):
    """Read within ``emit``, so that no thread has to win a race."""
    engine = start()
    seen = queue.SimpleQueue()
    params = SamplingParams(max_tokens=3, temperature=0.0)

    def emit(output):
        seen.put((output.finished, engine.stats()))

    engine.start(engine.prepare("r", PROMPT, params, kind="delta", emit=emit))
    stats = [seen.get(timeout=TIMEOUT) for _ in range(3)]
    assert [(finished, s.running, s.steps) for finished, s in stats] == [
        (False, 1, 1),
        (False, 1, 2),
        (True, 0, 3),
    ]
    assert [s.used_blocks for _, s in stats] == [3, 3, 0]


def test_a_failed_step_is_counted_by_the_time_its_error_is_read(start):
    engine = start()
    engine.runner.failures = [RuntimeError("boom")]
    assert isinstance(Stream(engine).result(), RequestFailedError)
    assert (engine.stats().used_blocks, engine.stats().running) == (0, 0)
    assert Stream(engine).tokens() == expected_output(PROMPT, 8)
    assert engine.dead_reason is None


def test_three_failed_steps_end_the_engine_and_everyone_is_told(start):
    engine = start()
    engine.runner.failures = [RuntimeError("boom")] * 3
    engine.runner.hold()
    streams = [Stream(engine, "r0")]
    assert engine.runner.in_step.wait(TIMEOUT)
    # Admitted only after the first step has failed, so that a second and a third can.
    streams += [Stream(engine, f"r{i}", varied_prompt(90, i), max_tokens=5) for i in range(1, 12)]
    engine.runner.may_step.set()
    results = [stream.result() for stream in streams]
    failed = [r for r in results if isinstance(r, RequestFailedError)]
    dead = [r for r in results if isinstance(r, EngineDeadError)]
    assert len(failed) >= 3
    assert len(dead) >= 1
    assert len(failed) + len(dead) == 12
    assert engine.dead_reason == "the engine stopped after RuntimeError: boom"
    with pytest.raises(EngineDeadError, match="RuntimeError: boom") as refused:
        Stream(engine)
    assert isinstance(refused.value.__cause__, RuntimeError)
    assert engine.stats().running == 0 or dead


def test_an_engine_that_dies_with_its_books_in_disorder_still_tells_everyone(start, monkeypatch):
    engine = start()
    engine.runner.hold()
    streams = [Stream(engine, name) for name in ("a", "b")]
    assert engine.runner.in_step.wait(TIMEOUT)

    def disagree(request_ids):
        raise AssertionError("block 3 is freed twice")

    monkeypatch.setattr(engine._engine._scheduler, "abort", disagree)
    for name in ("a", "b"):  # the first ends the engine, the second is still in the queue then
        engine.abort(name)
    engine.runner.may_step.set()
    for stream in streams:
        result = stream.result()
        assert isinstance(result, EngineDeadError)
        assert "block 3 is freed twice" in str(result)


def test_closing_while_requests_run_ends_them_all(start):
    engine = start()
    engine.runner.hold()
    streams = [Stream(engine, f"r{i}", varied_prompt(20, i), max_tokens=70) for i in range(20)]
    assert engine.runner.in_step.wait(TIMEOUT)
    closing = threading.Thread(target=engine.close)
    closing.start()
    late = []
    while True:
        try:
            late.append(Stream(engine, f"late{len(late)}", [1]))
        except EngineDeadError:
            break
        if len(late) == 5:
            engine.runner.may_step.set()
    closing.join(TIMEOUT)
    assert not closing.is_alive()
    for stream in streams + late:
        result = stream.result()
        assert isinstance(result, EngineDeadError)
        assert str(result) == "the engine was closed"


def test_after_closing_everything_is_refused_and_closing_again_is_fine(start):
    engine = start()
    Stream(engine).result()
    stats = engine.stats()
    engine.close()
    engine.close()
    assert engine.dead_reason == "the engine was closed"
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        Stream(engine)
    with pytest.raises(EngineDeadError):
        engine.reset_prefix_cache()
    assert engine.stats() == stats
    assert engine.info.model == "fake"


def test_a_closed_engine_gives_up_its_runner_even_while_it_is_held(start):
    engine = start()
    Stream(engine).result()
    runner = weakref.ref(engine.runner)
    engine.runner = None
    engine.close()
    gc.collect()
    assert runner() is None
    engine.runner = Runner(make_info())  # for the fixture


def test_closing_on_the_engines_own_thread_does_not_wait_for_itself(start):
    """A garbage collection that ends the last reference runs wherever it happens to."""
    engine = start()
    closed = threading.Event()

    def emit(_):
        engine.close()
        closed.set()

    params = SamplingParams(max_tokens=1)
    engine.start(engine.prepare("r", PROMPT, params, kind="final", emit=emit))
    assert closed.wait(TIMEOUT)
    engine.close()
    assert engine.dead_reason == "the engine was closed"


def test_the_prefix_cache_is_reset_from_outside(start):
    engine = start()
    Stream(engine, prompt=varied_prompt(30, 1)).result()
    assert engine.stats().cached_blocks > 0
    assert engine.reset_prefix_cache()
    assert engine.stats().cached_blocks == 0
    engine.runner.hold()
    stream = Stream(engine)
    assert engine.runner.in_step.wait(TIMEOUT)
    answer = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(engine.reset_prefix_cache())).start()
    while engine._commands.empty():
        time.sleep(0.001)
    engine.runner.may_step.set()
    assert answer.get(timeout=TIMEOUT) is False
    assert stream.tokens() == expected_output(PROMPT, 8)


def test_two_engines_serve_side_by_side(start):
    one, other = start(), start()
    one.runner.hold()
    held = Stream(one)
    assert Stream(other, "same-id").tokens() == expected_output(PROMPT, 8)
    one.close_later = threading.Thread(target=other.close)
    one.close_later.start()
    one.close_later.join(TIMEOUT)
    one.runner.may_step.set()
    assert held.tokens() == expected_output(PROMPT, 8)
    assert one.runner.threads.isdisjoint(other.runner.threads)


def engine_threads():
    return sum(thread.name == "mlx-paged-engine" for thread in threading.enumerate())


def test_threads_are_used_again_and_do_not_grow_over_twenty_engines(start):
    start().close()
    before = engine_threads()
    for _ in range(20):
        engine = start()
        assert Stream(engine).tokens() == expected_output(PROMPT, 8)
        engine.close()
    # One may still be on its way back when the next engine asks for it.
    assert engine_threads() <= before + 1


@pytest.mark.parametrize("command", ["add", "fork"])
def test_whoever_sent_what_the_engine_died_of_is_told_so(start, monkeypatch, command):
    def fail(*_, **__):
        raise OSError("planted")

    engine = start()
    monkeypatch.setattr(engine._engine, command, fail)
    answers = queue.SimpleQueue()
    if command == "fork":
        engine.fork("r", "s", None, index=0, kind="final", emit=answers.put)
    else:
        params = SamplingParams(max_tokens=3)
        engine.start(engine.prepare("r", PROMPT, params, kind="final", emit=answers.put))
    error = answers.get(timeout=TIMEOUT)
    assert isinstance(error, EngineDeadError)
    assert "planted" in str(error)
    engine.close()
    assert answers.empty()
    assert not engine._open


def test_a_thread_that_failed_to_load_is_used_again(start, monkeypatch):
    def load(*_):
        raise ModelLoadError("no")

    start().close()
    before = engine_threads()
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_engine", load)
        for _ in range(5):
            with pytest.raises(ModelLoadError):
                start()
    assert engine_threads() <= before + 1


def test_a_parked_thread_holds_nothing_of_its_last_job():
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)

    def make_job(held):
        return lambda: vars(held)

    run_on_mlx_thread(make_job(thing)).wait(TIMEOUT)
    del thing
    deadline = time.monotonic() + TIMEOUT
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None
