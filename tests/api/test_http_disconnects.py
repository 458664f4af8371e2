"""Clients that go away at every stage of a request, on the real engine and a real socket."""

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_http_socket import http_post, until

from mlx_paged_attention.api.async_llm import AsyncLLM

SEATS = 2


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Path]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(
        str(tiny_model("llama")),
        skip_tokenizer_init=True,
        num_blocks=1500,
        max_model_len=8000,
        max_num_seqs=SEATS,
        max_num_batched_tokens=16,
    )
    yield llm
    llm.close()


@pytest.fixture
def url(llm: AsyncLLM, serve: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    with serve(llm, served_model_names=["tiny"]) as url:
        yield url
        until(lambda: idle(llm), 5)


def idle(llm: AsyncLLM) -> bool:
    stats = llm.stats()
    open_requests = len(llm._engine._open) + len(llm._running)
    return stats.running == stats.waiting == stats.used_blocks == open_requests == 0


class Client:
    """A connection that has sent a request, and can be torn in either way."""

    def __init__(self, url: str, *, reset: bool) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._connection = socket.create_connection((host, int(port)), timeout=20)
        self._reset = reset

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def read_until(self, words: bytes) -> None:
        seen = b""
        while words not in seen:
            part = self._connection.recv(4096)
            assert part, seen
            seen += part

    def go_away(self) -> None:
        if self._reset:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()


def request(prompt: int, *, stream: bool, max_tokens: int = 4000, **more: Any) -> bytes:
    tokens = [(7 * i + prompt) % 250 + 3 for i in range(prompt)]
    body = {"prompt": tokens, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True, **more}
    return http_post("/v1/completions", body)


def still_answers(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 3}, timeout=20)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode", "n"])
def test_a_client_that_goes_away_frees_its_blocks(
    llm: AsyncLLM, url: str, stage: str, stream: bool, reset: bool
) -> None:
    client = Client(url, reset=reset)
    holders = []
    if stage == "queued":
        holders = [Client(url, reset=False) for _ in range(SEATS)]
        for number, holder in enumerate(holders):
            holder.send(request(10 + number, stream=True))
        until(lambda: llm.stats().running == SEATS, 10)
        client.send(request(300, stream=stream))
        until(lambda: llm.stats().waiting == 1, 10)
        client.go_away()
        until(lambda: llm.stats().waiting == 0, 5)
        assert llm.stats().running == SEATS  # and nobody else has noticed
        for holder in holders:
            holder.go_away()
    elif stage == "prefill":
        client.send(request(3900, stream=stream))
        until(lambda: llm.stats().used_blocks > 3, 10)
        client.go_away()
    else:
        client.send(request(20, stream=stream, n=2 if stage == "n" else 1))
        if stream:
            client.read_until(b"data: ")
        until(lambda: llm.stats().used_blocks > 3, 10)
        client.go_away()
    until(lambda: idle(llm), 5)
    still_answers(url)


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_client_that_goes_away_before_its_request_is_whole_never_reaches_the_engine(
    llm: AsyncLLM, url: str, share: float, reset: bool
) -> None:
    steps = llm.stats().steps
    whole = request(500, stream=False)
    client = Client(url, reset=reset)
    client.send(whole[: int(share * len(whole))])
    client.go_away()
    still_answers(url)
    assert llm.stats().steps - steps <= 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_at_once_frees_its_blocks(llm: AsyncLLM, url: str, stream: bool) -> None:
    """Before the headers of the answer, wherever the request has come by then."""
    for number in range(20):
        client = Client(url, reset=number % 2 == 1)
        client.send(request(50 + number, stream=stream))
        client.go_away()
    until(lambda: idle(llm), 10)
    still_answers(url)


def test_a_client_that_goes_away_between_two_chunks_frees_its_blocks(llm: AsyncLLM, url: str) -> None:
    for chunks in range(1, 6):
        client = Client(url, reset=False)
        client.send(request(30, stream=True))
        for _ in range(chunks):
            client.read_until(b"\n\n")
        client.go_away()
        until(lambda: idle(llm), 5)
    still_answers(url)


def test_a_client_that_stops_reading_holds_up_nobody(llm: AsyncLLM, url: str) -> None:
    sleeper = Client(url, reset=True)
    sleeper.send(request(20, stream=True, logprobs=5))
    until(lambda: llm.stats().running == 1, 10)
    still_answers(url)
    sleeper.go_away()
    until(lambda: idle(llm), 5)
