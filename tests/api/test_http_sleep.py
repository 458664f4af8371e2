"""``/sleep``, ``/wake_up`` and ``/is_sleeping``."""

import httpx
from fake_llm import FakeLLM
from oracle import varied_prompt

from mlx_paged_attention import AsyncLLM
from mlx_paged_attention.api.server.app import create_app


async def test_a_server_is_put_to_sleep_and_woken(llm: FakeLLM, client: httpx.AsyncClient) -> None:
    async def asleep() -> bool:
        response = await client.get("/is_sleeping")
        assert response.status_code == 200
        return bool(response.json()["is_sleeping"])

    assert not await asleep()
    for _ in range(2):
        assert (await client.post("/sleep")).status_code == 200
        assert await asleep()
    assert (await client.get("/health")).status_code == 200
    assert (await client.post("/wake_up")).status_code == 200
    assert not await asleep()
    assert (await client.post("/sleep?level=1")).status_code == 200


async def test_a_level_that_is_not_there_is_refused_with_what_to_do(client: httpx.AsyncClient) -> None:
    response = await client.post("/sleep?level=2")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "level"
    assert "stop the server" in error["message"]
    response = await client.post("/sleep?level=deep")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "level"


async def test_what_would_be_ignored_is_refused(llm: FakeLLM, client: httpx.AsyncClient) -> None:
    for path in ("/sleep?mode=abort", "/wake_up?tags=weights"):
        response = await client.post(path)
        assert response.status_code == 400
        assert "not supported" in response.json()["error"]["message"]
    response = await client.post("/sleep", json={"level": 1})
    assert response.status_code == 400
    assert "?level=1" in response.json()["error"]["message"]
    assert not llm.is_sleeping
    assert (await client.post("/sleep", json={})).status_code == 200


async def test_a_busy_server_does_not_sleep(llm: FakeLLM, client: httpx.AsyncClient) -> None:
    llm.active.add("somebody")
    response = await client.post("/sleep")
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "engine_busy"
    assert not llm.is_sleeping


async def test_a_dead_engine_does_not_sleep_either(llm: FakeLLM, client: httpx.AsyncClient) -> None:
    llm.dead_reason = "scripted"
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        assert (await client.request(method, path)).status_code == 503


async def test_sleeping_needs_the_key(llm: FakeLLM) -> None:
    transport = httpx.ASGITransport(create_app(llm, api_keys=["secret"]))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.post("/sleep")).status_code == 401
        assert not llm.is_sleeping


async def test_over_a_real_engine_memory_goes_and_the_next_request_brings_it_back(tiny_model) -> None:
    async with AsyncLLM(
        model=str(tiny_model("llama")), skip_tokenizer_init=True, kv_memory=4 << 20
    ) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:

            async def pool_bytes() -> float:
                lines = (await client.get("/metrics")).text.splitlines()
                return float(
                    next(line for line in lines if line.startswith("vllm:kv_pool_bytes")).split()[-1]
                )

            async def answer() -> list[int]:
                body = {"prompt": varied_prompt(40, 1), "max_tokens": 5, "temperature": 0, "logprobs": 0}
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200
                return response.json()["choices"][0]["logprobs"]["tokens"]

            first, before = await answer(), await pool_bytes()
            assert (await client.post("/sleep")).status_code == 200
            assert await pool_bytes() == 16 * engine.info.bytes_per_token < before
            assert await answer() == first
            assert not (await client.get("/is_sleeping")).json()["is_sleeping"]
            await client.post("/sleep")
            assert (await client.post("/wake_up")).status_code == 200
            assert await pool_bytes() == engine.info.start_blocks * 16 * engine.info.bytes_per_token
