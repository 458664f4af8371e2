"""What all routes share: errors, keys, limits, health, metrics; on a scripted engine."""

import asyncio
import json
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from fake_llm import FakeLLM
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect

from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.errors import RequestFailedError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}


def connect(llm: FakeLLM, **app_options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(llm, **app_options), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("content", "headers"),
    [
        ("{", JSON),
        ("", JSON),
        ("[]", JSON),
        ('"text"', JSON),
        ("{}", JSON),
        ("[" * 100_000, JSON),
        ('{"prompt": "x"}', {"content-type": "text/plain"}),
        ('{"prompt": "x"}', {}),
        ("prompt=x", {"content-type": "application/x-www-form-urlencoded"}),
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(
    client: httpx.AsyncClient, path: str, content: str, headers: dict[str, str]
) -> None:
    response = await client.post(path, content=content, headers=headers)
    assert response.status_code == 400
    error = error_of(response)
    if headers != JSON:
        assert "application/json" in error["message"]


async def test_unknown_routes_and_methods_have_the_same_error_shape(client: httpx.AsyncClient) -> None:
    for path, status in (("/v1/nothing", 404), (COMPLETIONS, 405)):
        response = await client.get(path)
        assert response.status_code == status
        error_of(response)


async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, HI)):
        response = await client.post(path, json={**body, "model": "other"})
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"
    assert (await client.get("/v1/models/other")).status_code == 404


async def test_models_are_listed_under_the_names_they_are_served_by() -> None:
    async with connect(FakeLLM(), served_model_names=["first", "org/second"]) as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["first", "org/second"]
        model = (await client.get("/v1/models/org/second")).json()
        assert model == listed["data"][1]
        assert (model["object"], model["owned_by"]) == ("model", "mlx-paged-attention")
        assert model["max_model_len"] == 256
        answer = await client.post(COMPLETIONS, json={"prompt": "x", "model": "org/second"})
        assert answer.json()["model"] == "org/second"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/"])
async def test_the_root_says_what_is_here(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path, follow_redirects=True)
    assert response.status_code == 200
    here = response.json()
    assert (here["name"], here["version"]) == ("mlx-paged-attention", version("mlx-paged-attention"))
    assert {"/v1/models", "/health", "/metrics", "/openapi.json"} <= set(here["paths"])
    for named in here["paths"]:
        # Those that want a body answer 405 to a GET, none 404.
        assert (await client.get(named)).status_code in (200, 405)


async def test_health_and_version(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/ping"):
        assert (await client.get(path)).status_code == 200
    assert (await client.get("/version")).json() == {"version": version("mlx-paged-attention")}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_is_a_503_everywhere(stream: bool) -> None:
    """ml-explore/mlx-lm#1505"""
    llm = FakeLLM()
    llm.dead_reason = "out of memory"
    async with connect(llm) as client:
        for path in ("/health", "/ping", "/v1/models", "/v1/models/x", "/metrics", "/debug/blocks"):
            response = await client.get(path)
            assert response.status_code == 503, path
            assert "out of memory" in error_of(response)["message"]
        for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, HI)):
            response = await client.post(path, json={**body, "stream": stream})
            assert response.status_code == 503
            assert error_of(response)["code"] == "engine_dead"


async def test_an_engine_that_hangs_turns_health_red_and_green_again(
    client: httpx.AsyncClient, llm: FakeLLM
) -> None:
    llm.stalled_reason = "no step has ended for 300 s"
    for path in ("/health", "/ping"):
        response = await client.get(path)
        assert response.status_code == 503
        assert error_of(response) == {
            "message": "no step has ended for 300 s",
            "type": "server_error",
            "param": None,
            "code": "engine_stalled",
        }
    llm.stalled_reason = None
    assert (await client.get("/health")).status_code == 200


async def test_an_engine_that_dies_ends_running_requests_with_an_error() -> None:
    """ml-explore/mlx-lm#1505"""
    llm = FakeLLM(fail_after=3)
    async with connect(llm) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert [json.loads(event)["choices"][0]["text"] for event in events[:3]] == ["0", "h", "e"]
        assert json.loads(events[3])["error"]["code"] == "engine_dead"
        assert events[4:] == ["[DONE]"]
        assert (await client.get("/health")).status_code == 503
    async with connect(FakeLLM(fail_after=3)) as client:
        assert (await client.post(CHAT, json=HI)).status_code == 503


async def test_a_fault_of_ours_is_a_500_in_the_same_shape() -> None:
    class Broken(FakeLLM):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("secret detail")
            yield

    async with connect(Broken()) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x"})
    assert response.status_code == 500
    error = error_of(response)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_has_the_cause_of_a_failed_step(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeLLM):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            async for output in super().generate(*arguments, **options):
                if stream:
                    yield output
                raise RequestFailedError("request r failed") from MemoryError("no room for scores")

    async with connect(Failing()) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    assert "request_failed" in response.text
    assert "MemoryError: no room for scores" in caplog.text


async def test_a_large_body_is_a_413_whether_announced_or_not() -> None:
    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 100

    async with connect(FakeLLM(), max_body_bytes=1000) as client:
        for content in (b"x" * 1001, chunks()):
            response = await client.post(COMPLETIONS, content=content, headers=JSON)
            assert response.status_code == 413
            assert "1000" in error_of(response)["message"]
        assert (await client.post(COMPLETIONS, json={"prompt": "x" * 10})).status_code == 200


@pytest.mark.parametrize(
    "header",
    [None, "", "key", "Bearer", "Bearer wrong", "Bearer KEY", "Basic key", "Bearer key2", "Bearer kéy"],
)
async def test_every_route_but_the_health_checks_needs_the_key(header: str | None) -> None:
    """waybarrios/vllm-mlx#317"""
    app = create_app(FakeLLM(), api_keys=["key", "other key"])
    paths = [path for path in app.openapi()["paths"] if path not in ("/health", "/ping")]
    paths += ["/openapi.json", "/nothing"]
    headers = {} if header is None else {"authorization": header.encode()}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for path in paths:
            for method in ("GET", "POST", "DELETE", "OPTIONS"):
                response = await client.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path)
                assert response.headers["x-should-retry"] == "false", "another try ends as this one did"
                if path.startswith("/v1/messages"):
                    assert response.json()["error"]["type"] == "authentication_error"
                else:
                    assert error_of(response)["code"] == "invalid_api_key"
        assert (await client.get("/health", headers=headers)).status_code == 200
        for key in ("Bearer key", "bearer other key"):
            assert (await client.get("/v1/models", headers={"authorization": key})).status_code == 200


async def test_no_page_of_another_site_may_read_answers(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "x"}, headers={"origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_a_disconnect_while_waiting_for_a_whole_answer_frees_the_request() -> None:
    llm = FakeLLM(step_time=0.05)
    sent: list[Any] = []
    gone = asyncio.Event()
    messages = [{"type": "http.request", "body": b'{"prompt": "x", "max_tokens": 200}'}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    answering = asyncio.create_task(create_app(llm)(scope, receive, send))
    while not llm.active:
        await asyncio.sleep(0.01)
    gone.set()
    await asyncio.wait_for(answering, 1)
    assert llm.active == set()
    assert llm.aborted == 1


class Scrape:
    """One reading of ``/metrics``."""

    def __init__(self, text: str) -> None:
        self._samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        labels = {"model_name": "fake/bytes", "engine": "0", **labels}
        (value,) = [
            s.value for s in self._samples if s.name == f"vllm:{name}" and labels.items() <= s.labels.items()
        ]
        return value


async def scrape(client: httpx.AsyncClient) -> Scrape:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return Scrape(response.text)


async def test_metrics_add_up_over_requests_and_tokens() -> None:
    requests, tokens, prompt = 6, 9, 4
    llm = FakeLLM(step_time=0.002, first_step=0.01, cached=lambda ids: 1)
    async with connect(llm) as client:
        for number in range(requests):
            body = {"prompt": "x" * prompt, "max_tokens": tokens, "stream": number % 2 == 0}
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        metric = await scrape(client)
    assert metric("time_to_first_token_seconds_count") == requests
    assert metric("inter_token_latency_seconds_count") == requests * (tokens - 1)
    assert metric("inter_token_latency_seconds_sum") >= requests * (tokens - 1) * 0.002
    assert metric("generation_tokens_total") == requests * tokens
    assert metric("prompt_tokens_total") == requests * prompt
    assert metric("prompt_tokens_cached_total") == requests
    assert metric("request_success_total", finished_reason="length") == requests
    assert metric("request_success_total", finished_reason="stop") == 0
    assert metric("request_prompt_tokens_sum") == requests * prompt
    assert metric("request_generation_tokens_sum") == requests * tokens
    assert metric("request_params_max_tokens_sum") == requests * tokens
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert metric(f"{name}_seconds_count") == requests
    assert metric("e2e_request_latency_seconds_sum") >= requests * 0.01


async def test_the_engines_own_numbers_are_read_at_the_scrape(
    client: httpx.AsyncClient, llm: FakeLLM
) -> None:
    llm.active = {"a", "b"}
    metric = await scrape(client)
    assert metric("num_requests_running") == 2
    assert metric("num_requests_waiting") == 0
    assert metric("kv_cache_usage_perc") == 2 / 100
    assert metric("num_preemptions_total") == 3
    assert metric("kv_pool_bytes") * 2 == metric("kv_pool_budget_bytes") == llm.info.pool_bytes
    assert metric("kv_pool_growths_total") == 5
    assert metric("kv_pool_shrinks_total") == 2
    assert metric("kv_pool_growths_refused_total") == 1
    assert metric("prefix_cache_queries_total") == 640
    assert metric("prefix_cache_hits_total") == 320
    assert metric("cache_config_info", block_size="16", num_gpu_blocks="101") == 1


async def test_token_totals_equal_the_sums_over_requests_when_some_abort() -> None:
    """vllm-project/vllm#55634, vllm-project/vllm#22545"""
    llm = FakeLLM()
    async with connect(llm) as client:
        serving = client._transport.app.state.serving  # type: ignore[attr-defined]
        params = _params(max_tokens=10)
        for number in range(10):
            outputs = serving.generate("xyz", params)
            async for _ in outputs:
                if number >= 5:
                    break
            await outputs.aclose()
        never_started = serving.generate("xyz", params)
        await never_started.aclose()
        metric = await scrape(client)
    assert metric("request_success_total", finished_reason="length") == 5
    assert metric("request_success_total", finished_reason="abort") == 5
    assert metric("prompt_tokens_total") == metric("request_prompt_tokens_sum") == 30
    assert metric("generation_tokens_total") == metric("request_generation_tokens_sum") == 55
    assert metric("num_requests_running") == 0
    assert metric("kv_cache_usage_perc") == 0
    assert llm.aborted == 5


def _params(**fields: Any) -> Any:
    from mlx_paged_attention.sampling.params import SamplingParams

    return SamplingParams(**fields)


async def test_a_refused_request_is_not_counted_as_aborted() -> None:
    async with connect(FakeLLM()) as client:
        for prompt in ([256], [1] * 256):
            assert (await client.post(COMPLETIONS, json={"prompt": prompt})).status_code == 400
        metric = await scrape(client)
    for reason in ("stop", "length", "abort"):
        assert metric("request_success_total", finished_reason=reason) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "x"}), (COMPLETIONS, {"prompt": ["x", "y"]}), (CHAT, HI)],
    ids=["completions", "several prompts", "chat"],
)
async def test_a_stream_that_cannot_be_sent_ends_its_requests_at_once(
    path: str, body: dict[str, Any]
) -> None:
    llm = FakeLLM(step_time=0.01)
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    messages = [{"type": "http.request", "body": json.dumps({**body, "stream": True}).encode()}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message.get("body") and len(llm.active) == prompts:
            raise OSError("the connection is gone")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},  # from here on servers may raise in send
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(create_app(llm)(scope, receive, send), 10)
    # At once: nothing is left for the garbage collector to close.
    assert not llm.active
    assert llm.aborted == prompts


async def test_load_counts_prompts_that_are_being_answered() -> None:
    async with connect(FakeLLM(step_time=0.01)) as client:
        loads = [(await client.get("/load")).json()["server_load"]]
        answering = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "x"}))
        await asyncio.sleep(0.05)
        loads.append((await client.get("/load")).json()["server_load"])
        await answering
        loads.append((await client.get("/load")).json()["server_load"])
    assert loads == [0, 1, 0]
