"""How the server ends: answers that run get an end of their own, and nothing is cut off without a word."""

import asyncio
import json
import logging
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fake_llm import ANSWER, FakeLLM

from mlx_paged_attention.api.server import graceful
from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.api.server.graceful import GracefulServer

LONG = {"prompt": "x", "max_tokens": 250, "ignore_eos": True}


class Running:
    """A server on a thread of its own, and what it is told."""

    def __init__(self, llm: FakeLLM) -> None:
        config = uvicorn.Config(create_app(llm), host="127.0.0.1", port=0, log_config=None)  # type: ignore[arg-type]
        self.llm = llm
        self.server = GracefulServer(config, llm)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=20)

    def stop(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def seconds_until_stopped(self) -> float:
        before = time.monotonic()
        self.thread.join(20)
        assert not self.thread.is_alive(), "the server does not stop"
        return time.monotonic() - before

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"


@contextmanager
def running(llm: FakeLLM) -> Iterator[Running]:
    server = Running(llm)
    server.thread.start()
    until(lambda: server.server.started)
    try:
        yield server
    finally:
        server.server.should_exit = server.server.force_exit = True
        server.thread.join(20)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how long the server waits."""

    def wait(grace: float, last: float = 5.0) -> None:
        monkeypatch.setattr(graceful, "GRACE_SECONDS", grace)
        monkeypatch.setattr(graceful, "LAST_SECONDS", last)

    return wait


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of warning; nothing worse may have been logged."""
    assert not [r for r in caplog.records if r.levelno > logging.WARNING or r.exc_info]
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_an_answer_that_ends_in_time_is_whole(patience: Any, caplog: pytest.LogCaptureFixture) -> None:
    patience(grace=10)
    with running(FakeLLM(step_time=0.01)) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(server.post, prompt="x", max_tokens=100)
        until(lambda: server.llm.active)
        server.stop()
        assert server.seconds_until_stopped() < 5
        assert answer.result().json()["choices"][0]["text"] == "0" + ANSWER[1:]
    assert warnings(caplog) == []


@pytest.mark.parametrize("stream", [True, False])
def test_answers_that_run_on_are_aborted_and_told_so(
    patience: Any, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    patience(grace=0.3)
    with running(FakeLLM(step_time=0.1)) as server, ThreadPoolExecutor() as pool:
        answers = [pool.submit(server.post, **LONG, stream=stream) for _ in range(2)]
        until(lambda: len(server.llm.active) == 2)
        server.stop()
        assert 0.2 < server.seconds_until_stopped() < 5
        for answer in answers:
            response = answer.result()
            assert response.status_code == 200
            if stream:
                *chunks, done = [line for line in response.text.split("\n") if line]
                assert done == "data: [DONE]"
                choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
            else:
                choices = response.json()["choices"]
            assert choices[-1]["finish_reason"] == "abort"
            assert "".join(choice["text"] for choice in choices).startswith("0")
    assert server.llm.aborted == 0
    assert warnings(caplog) == ["2 requests still running 0.3 s after the signal to stop: aborted"]


class Stubborn(FakeLLM):
    """Its requests do not end when they are told to."""

    def abort_all(self) -> int:
        return len(self.active)


@pytest.mark.parametrize("stream", [True, False])
def test_what_does_not_end_then_is_cut_off(
    patience: Any, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    patience(grace=0.2, last=0.3)
    with running(Stubborn(step_time=0.1)) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(server.post, **LONG, stream=stream)
        until(lambda: server.llm.active)
        server.stop()
        assert server.seconds_until_stopped() < 5
        with pytest.raises(httpx.TransportError):
            answer.result()
        assert not server.llm.active
    assert warnings(caplog) == [
        "1 request still running 0.2 s after the signal to stop: aborted",
        "1 connection cut off",
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_a_second_signal_stops_at_once(patience: Any, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    patience(grace=60)
    with running(FakeLLM(step_time=0.1)) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(server.post, **LONG, stream=stream)
        until(lambda: server.llm.active)
        server.stop()
        time.sleep(0.5)
        assert server.thread.is_alive()
        server.stop()
        assert server.seconds_until_stopped() < 2
        with pytest.raises(httpx.TransportError):
            answer.result()
        assert not server.llm.active
    assert warnings(caplog) == ["1 connection cut off"]


def test_nothing_is_said_about_idle_connections(patience: Any, caplog: pytest.LogCaptureFixture) -> None:
    patience(grace=10)
    with running(FakeLLM()) as server, httpx.Client() as client:
        assert client.get(f"{server.url}/health").status_code == 200
        server.stop()
        assert server.seconds_until_stopped() < 2
    assert warnings(caplog) == []
