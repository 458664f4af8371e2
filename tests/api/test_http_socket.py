"""The server on a real socket: OpenAI's own client, and clients that go away."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import httpx
import openai
import pytest
from fake_llm import ANSWER, FakeLLM

Serve = Callable[..., AbstractContextManager[str]]
MODEL = "fake/bytes"
HI: Any = [{"role": "user", "content": "hi"}]
FIRST = "0" + ANSWER[1:]


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def http_post(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def openai_client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, **options)


def test_openais_client_works_as_it_is(serve: Serve) -> None:
    with serve(FakeLLM(), api_keys=["key"]) as url, openai_client(url) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL

        text = client.completions.create(model=MODEL, prompt="x", max_tokens=5, logprobs=1)
        assert text.choices[0].text == FIRST[:5]
        assert text.usage is not None
        assert text.usage.prompt_tokens_details is not None
        assert text.usage.prompt_tokens_details.cached_tokens == 0

        chat = client.chat.completions.create(
            model=MODEL, messages=HI, max_completion_tokens=5, logprobs=True, extra_body={"top_k": 5}
        )
        assert chat.choices[0].message.content == FIRST[:5]
        assert chat.choices[0].logprobs is not None

        for answer in (text, chat):
            type(answer).model_validate(answer.model_dump(), strict=False)


def test_openais_client_streams(serve: Serve) -> None:
    with serve(FakeLLM()) as url, openai_client(url) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == FIRST
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(ANSWER)
        texts = client.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=50)
        assert "".join(chunk.choices[0].text for chunk in texts) == FIRST


def test_openais_client_sees_our_errors_as_its_own(serve: Serve) -> None:
    with serve(FakeLLM(fail_after=3), api_keys=["key"]) as url, openai_client(url) as client:
        with pytest.raises(openai.BadRequestError, match="temperature") as bad:
            client.completions.create(model=MODEL, prompt="x", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.APIError, match="scripted failure"):
            list(client.completions.create(model=MODEL, prompt="x", stream=True))
        with pytest.raises(openai.InternalServerError):
            client.models.list()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("first_step", [0.0, 30.0], ids=["between tokens", "before the first token"])
def test_a_client_that_goes_away_frees_its_request_within_a_second(
    serve: Serve, stream: bool, path: str, first_step: float
) -> None:
    llm = FakeLLM(first_step=first_step, step_time=0.2)
    body: dict[str, Any] = {"stream": stream, "max_tokens": 200, "ignore_eos": True}
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": HI}
    with serve(llm) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(http_post(path, body))
            until(lambda: len(llm.active) == 1, 5)
            time.sleep(0.3)
        until(lambda: not llm.active, 1)
        assert llm.aborted == 1


def test_several_prompts_are_all_freed_when_their_client_goes_away(serve: Serve) -> None:
    llm = FakeLLM(step_time=0.2)
    with serve(llm) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{url}/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 200}, timeout=0.5
            )
        until(lambda: not llm.active, 1)
        assert llm.aborted == 3


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
def test_streams_closed_at_any_chunk_leave_a_working_server(
    serve: Serve, reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """ml-explore/mlx-lm#677"""
    llm = FakeLLM(step_time=0.005)
    with serve(llm) as url:
        host, port = url.removeprefix("http://").split(":")
        body = {"prompt": "x", "stream": True, "max_tokens": 100, "ignore_eos": True}
        request = http_post("/v1/completions", body)

        def close_early(number: int) -> None:
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(request)
                for _ in range(number % 7):
                    connection.recv(200)
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        threads = threading.active_count()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(close_early, range(50)))
        until(lambda: not llm.active, 1)
        assert threading.active_count() == threads
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 5}).json()
        assert answer["choices"][0]["text"] == FIRST[:5]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_many_clients_that_give_up_leave_nothing_behind(serve: Serve) -> None:
    """A burst of requests that all time out; a small one is answered right after."""
    llm = FakeLLM(step_time=0.1)
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}

    def give_up(_: int) -> bool:
        try:
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.5)
        except httpx.TimeoutException:
            return True
        return False

    with serve(llm) as url:
        with ThreadPoolExecutor(20) as pool:
            assert all(pool.map(give_up, range(40)))
        until(lambda: not llm.active, 1)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=5)
        assert answer.status_code == 200
        metrics = httpx.get(f"{url}/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{engine="0",model_name="{MODEL}"}} 0.0' in metrics


def test_a_chunked_body_without_end_is_refused_and_others_are_served(serve: Serve) -> None:
    with serve(FakeLLM(), max_body_bytes=10_000) as url:

        def endless() -> Any:
            for _ in range(1000):
                yield b"x" * 1000

        try:
            response = httpx.post(
                f"{url}/v1/completions", content=endless(), headers={"content-type": "application/json"}
            )
            assert response.status_code == 413
        except httpx.WriteError:
            pass  # the server closed the connection while we were still sending: also a refusal
        assert httpx.get(f"{url}/health").status_code == 200
