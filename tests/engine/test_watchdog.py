"""Nobody waits for an engine that hangs, and no alarm is raised for one that is only slow."""

import threading
import time

import pytest
from fake_runner import expected_output
from test_async_engine import PROMPT, TIMEOUT, Stream, start  # noqa: F401  # a fixture

from mlx_paged_attention.engine.watchdog import Watchdog, thread_stacks
from mlx_paged_attention.errors import EngineDeadError
from mlx_paged_attention.sampling.params import SamplingParams


def until(condition, seconds=TIMEOUT):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_step_that_hangs_is_reported_once_and_forgiven_when_it_ends(start, caplog):  # noqa: F811
    engine = start(watchdog_seconds=1.0)
    engine.runner.hold()
    stream = Stream(engine, "stuck")
    assert engine.runner.in_step.wait(TIMEOUT)
    waiting = Stream(engine, "waiting", [1, 2, 3])
    until(lambda: engine.stalled_reason)
    assert "no step has ended" in engine.stalled_reason
    assert engine.dead_reason is None
    engine.runner.may_step.set()
    assert stream.tokens() == expected_output(PROMPT, 8)
    assert waiting.tokens() == expected_output([1, 2, 3], 8)
    until(lambda: engine.stalled_reason is None)
    (report,) = [record.getMessage() for record in caplog.records if "in flight" in record.getMessage()]
    assert "step 0: 10 tokens" in report
    assert "stuck: tokens 0 to 9, new blocks [1, 2, 3]" in report
    assert "running: 1" in report
    assert "thread mlx-paged-engine" in report
    assert "may_step.wait" in report  # where it hangs


def test_an_engine_that_hangs_for_good_is_given_up_and_everybody_is_told(start, caplog):  # noqa: F811
    engine = start(watchdog_seconds=0.3)
    engine.runner.hold()
    streams = [Stream(engine, "stuck")]
    assert engine.runner.in_step.wait(TIMEOUT)
    streams += [Stream(engine, f"queued {n}") for n in range(3)]
    resetting = []

    def reset():
        with pytest.raises(EngineDeadError, match="given up") as refused:
            engine.reset_prefix_cache()
        resetting.append(refused)

    thread = threading.Thread(target=reset)
    thread.start()
    for stream in streams:
        error = stream.next()
        assert isinstance(error, EngineDeadError)
        assert "given up" in str(error)
    thread.join(TIMEOUT)
    assert resetting
    assert "given up" in engine.dead_reason
    with pytest.raises(EngineDeadError, match="given up"):
        Stream(engine, "late")
    begun = time.monotonic()
    engine.close()  # does not wait for what never ends
    assert time.monotonic() - begun < 5
    # Even if it ends after all, nobody hears of it.
    engine.runner.may_step.set()
    assert engine._ended.wait(TIMEOUT)
    assert all(stream.items.empty() for stream in streams)
    assert "given up" in engine.dead_reason


def test_slow_steps_and_idle_times_raise_no_alarm(start, caplog):  # noqa: F811
    engine = start(watchdog_seconds=1.0)
    launch = engine.runner.launch

    def slow(plan):
        time.sleep(0.15)
        return launch(plan)

    engine.runner.launch = slow
    assert Stream(engine).tokens() == expected_output(PROMPT, 8)
    time.sleep(1.1)
    assert Stream(engine).tokens() == expected_output(PROMPT, 8)
    assert engine.stalled_reason is None
    assert not caplog.records


def watchdogs():
    return {thread for thread in threading.enumerate() if thread.name == "mlx-paged-watchdog"}


def test_zero_seconds_means_no_watchdog(start):  # noqa: F811
    before = watchdogs()
    engine = start(watchdog_seconds=0)
    assert Stream(engine).tokens() == expected_output(PROMPT, 8)
    assert watchdogs() <= before


def test_watchdogs_end_with_their_engines(start):  # noqa: F811
    before = watchdogs()
    engines = [start() for _ in range(4)]
    for engine in engines:
        assert Stream(engine).tokens() == expected_output(PROMPT, 8)
    assert len(watchdogs() - before) == 4
    for engine in engines:
        engine.close()
    until(lambda: watchdogs() <= before)


def test_a_scheduler_that_plans_nothing_ends_the_engine_at_once(start, monkeypatch, caplog):  # noqa: F811
    engine = start()
    monkeypatch.setattr(engine._engine._scheduler, "_schedule_waiting", lambda draft: None)
    error = Stream(engine).result()
    assert isinstance(error, EngineDeadError)
    assert "nothing can be scheduled for 1 live requests" in str(error)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.exc_info


def test_time_in_which_the_whole_process_stood_still_does_not_count():
    now = 0.0
    told = []
    looks = threading.Semaphore(0)

    def look():
        """Let two looks pass, so that one has seen the clock as it is."""
        for _ in range(2):
            assert looks.acquire(timeout=TIMEOUT)

    with Watchdog(
        0.08,
        busy=lambda: True,
        progress=looks.release,
        stalled=lambda seconds: told.append("stalled"),
        resumed=lambda: told.append("resumed"),
        give_up=lambda seconds: told.append("given up"),
        clock=lambda: now,
    ):
        look()
        now += 8 * 3600
        look()
        assert told == []
        for _ in range(5):
            now += 0.01
            look()
        assert told == []
        now += 8 * 3600
        until(lambda: told == ["stalled"])
        for _ in range(3):
            now += 0.02
            look()
        assert told == ["stalled"]


def test_an_aborted_request_of_a_hanging_engine_is_told_too(start):  # noqa: F811
    engine = start(watchdog_seconds=0.2)
    engine.runner.hold()
    stream = Stream(engine, "stuck")
    assert engine.runner.in_step.wait(TIMEOUT)
    engine.abort("stuck")
    assert isinstance(stream.next(), EngineDeadError)
    engine.runner.may_step.set()
    assert engine._ended.wait(TIMEOUT)
    assert stream.items.empty()


def test_the_stack_of_every_thread_is_shown():
    text = thread_stacks()
    assert "thread MainThread" in text
    assert "test_the_stack_of_every_thread_is_shown" in text


def test_prepared_requests_that_were_never_started_are_not_told(start):  # noqa: F811
    engine = start()
    heard = []
    engine.prepare("r", PROMPT, SamplingParams(max_tokens=1), kind="final", emit=heard.append)
    engine.close()
    assert heard == []
