"""Servers to test against: in process, and on a real socket."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from cli_run import Started
from fake_llm import FakeLLM

from mlx_paged_attention.api.server.app import create_app


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line runs on ``Started``, in an environment without settings of ours."""
    monkeypatch.setattr("mlx_paged_attention.api.async_llm.AsyncLLM", Started)
    monkeypatch.setattr(Started, "last", None)
    for name in os.environ:
        if name.startswith("MLX_PAGED_"):
            monkeypatch.delenv(name)


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
async def client(llm: FakeLLM) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of an app around ``llm``, without a socket."""
    transport = httpx.ASGITransport(create_app(llm), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


@pytest.fixture
def serve() -> Callable[..., AbstractContextManager[str]]:
    """A context manager that serves an engine on a loopback port and gives its URL."""
    return serving


@contextmanager
def serving(llm: Any, **app_options: Any) -> Iterator[str]:
    config = uvicorn.Config(create_app(llm, **app_options), host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert thread.is_alive(), "the server ended at once"
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server does not stop"
