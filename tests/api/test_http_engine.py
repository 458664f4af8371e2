"""The server on the real engine, with a tiny random model (token ids only)."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_http_server import Scrape
from test_http_socket import http_post, until

from mlx_paged_attention.api.async_llm import AsyncLLM
from mlx_paged_attention.engine.outputs import RequestOutput
from mlx_paged_attention.sampling.params import SamplingParams

Url = str


def varied(length: int, seed: int) -> list[int]:
    """Token ids that do not repeat in step with anything."""
    return [(7 * i + 13 * seed + i * i) % 250 + 3 for i in range(length)]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Path]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(
        str(tiny_model("llama")),
        skip_tokenizer_init=True,
        num_blocks=600,
        max_model_len=4200,
        max_num_seqs=32,
        max_num_batched_tokens=32,
    )
    yield llm
    llm.close()


@pytest.fixture
def url(llm: AsyncLLM, serve: Callable[..., AbstractContextManager[str]]) -> Iterator[Url]:
    with serve(llm, served_model_names=["tiny"]) as url:
        yield url


def complete(url: Url, prompt: Any, max_tokens: int = 8, **body: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{url}/v1/completions",
        json={"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0, **body},
        timeout=60,
    )
    assert response.status_code == 200, response.text
    return response.json()


def tokens(answer: dict[str, Any], choice: int = 0) -> list[str]:
    return answer["choices"][choice]["logprobs"]["tokens"]


def idle(llm: AsyncLLM) -> bool:
    stats = llm.stats()
    return stats.running == stats.waiting == stats.used_blocks == 0


def test_an_answer_equals_the_engines_own(llm: AsyncLLM, url: Url) -> None:
    async def directly() -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=8)
        async for output in llm.generate(varied(20, 1), params, output_kind="final"):
            last = output
        return last

    expected = asyncio.run(directly()).outputs[0].token_ids
    assert tokens(complete(url, varied(20, 1))) == [f"token_id:{token}" for token in expected]


def test_beam_search_answers_over_http_as_in_process(llm: AsyncLLM, url: Url) -> None:
    async def directly() -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=8, n=2, best_of=4, use_beam_search=True)
        async for output in llm.generate(varied(20, 1), params, output_kind="final"):
            last = output
        return last

    expected = asyncio.run(directly()).outputs
    body = {"prompt": varied(20, 1), "max_tokens": 8, "n": 2, "best_of": 4, "use_beam_search": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == [answer.finish_reason for answer in expected]
    assert response.json()["usage"]["completion_tokens"] == sum(len(answer.token_ids) for answer in expected)
    assert idle(llm)


def test_usage_counts_the_answers_that_are_returned(url: Url) -> None:
    """As vLLM's: ``best_of`` answers are computed, and the tokens of ``n`` counted."""
    body = {"prompt": varied(20, 13), "max_tokens": 8, "ignore_eos": True, "seed": 1}
    for n, best_of in ((1, 1), (2, 4), (1, 3)):
        asked = {**body, "n": n, "best_of": best_of}
        usage = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, 8 * n)
        assert usage["total_tokens"] == 20 + 8 * n


def test_several_prompts_and_n_come_back_in_order(url: Url) -> None:
    answer = complete(url, [varied(5, 1), varied(9, 2)], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = [tokens(complete(url, varied(5, 1))), tokens(complete(url, varied(9, 2)))]
    assert [tokens(answer, index) for index in range(4)] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer["usage"]["prompt_tokens"] == 14
    assert answer["usage"]["completion_tokens"] == 32


@pytest.mark.parametrize("salt", [None, "theirs"])
def test_prefixes_are_shared_within_a_key_and_not_across(
    llm: AsyncLLM, serve: Callable[..., AbstractContextManager[str]], salt: str | None
) -> None:
    prompt = varied(70, 11 if salt is None else 12)
    extra = {} if salt is None else {"cache_salt": salt}
    with serve(llm, served_model_names=["tiny"], api_keys=["one", "two"], prefixes_per_key=True) as url:

        def cached(key: str, **more: Any) -> int:
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **extra, **more}
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached("one"), cached("one"), cached("two"), cached("two")] == [0, 64, 0, 64]
        assert cached("one", cache_salt="other") == 0  # a client's own salt parts it further


def test_cached_tokens_are_told_in_both_modes(url: Url) -> None:
    """jundot/omlx#919"""
    prompt = varied(70, 3)
    first, second = complete(url, prompt), complete(url, prompt)
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second)]
    assert cached == [0, 64]
    assert tokens(first) == tokens(second)


def test_a_seeded_answer_does_not_depend_on_others(url: Url) -> None:
    """vllm-project/vllm#51226"""
    options = {"temperature": 0.8, "max_tokens": 16}

    def seeded(_: int) -> list[str]:
        return tokens(complete(url, varied(6, 1), seed=42, **options))

    def unseeded(_: int) -> list[str]:
        return tokens(complete(url, varied(6, 1), **options))

    alone = seeded(0)
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(unseeded, number) for number in range(4)]
        again = list(pool.map(seeded, range(4)))
    assert again == [alone] * 4
    assert len({tuple(other.result()) for other in others}) > 1


def test_without_a_seed_answers_differ(url: Url) -> None:
    """Blaizzy/mlx-vlm#1818, yanun0323/Whallm#8"""

    def draw(_: int) -> tuple[str, ...]:
        return tuple(tokens(complete(url, varied(6, 4), 16, temperature=1.0)))

    assert len({draw(number) for number in range(3)}) > 1
    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(draw, range(3)))) > 1


@pytest.mark.parametrize("prompt", [[3, 256], [3, 99999999], [-1], [1.5]])
def test_bad_token_ids_are_a_400_and_the_next_request_is_answered(url: Url, prompt: list[Any]) -> None:
    """vllm-project/vllm#30895"""
    response = httpx.post(f"{url}/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert len(tokens(complete(url, varied(5, 1), 2))) == 2


def test_what_can_never_fit_is_refused_with_both_numbers(url: Url) -> None:
    response = httpx.post(f"{url}/v1/completions", json={"prompt": varied(4300, 1)})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "prompt is too long" in error["message"], "what LiteLLM and LangChain look for"
    assert "4300" in error["message"]
    assert "4200" in error["message"]


def test_metrics_add_up(llm: AsyncLLM, serve: Callable[..., AbstractContextManager[str]]) -> None:
    requests, count, prompt = 5, 6, 20
    with serve(llm, served_model_names=["tiny"]) as url:
        for number in range(requests):
            complete(url, varied(prompt, 50 + number), count, ignore_eos=True)
        text = httpx.get(f"{url}/metrics").text
    metric = Scrape(text)

    def value(name: str, **labels: str) -> float:
        return metric(name, model_name="tiny", **labels)

    assert value("time_to_first_token_seconds_count") == requests
    assert value("inter_token_latency_seconds_count") == requests * (count - 1)
    assert value("generation_tokens_total") == requests * count
    assert value("prompt_tokens_total") == requests * prompt
    assert value("request_success_total", finished_reason="length") == requests
    assert value("e2e_request_latency_seconds_count") == requests
    assert value("prefix_cache_hits_total") <= value("prefix_cache_queries_total")
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_a_long_prefill_frees_its_blocks_at_once(
    llm: AsyncLLM, url: Url, stream: bool
) -> None:
    """lmstudio-ai/.github#10"""
    host, port = url.removeprefix("http://").split(":")
    body = {"prompt": varied(4000, 90 + stream), "max_tokens": 50, "stream": stream}
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(http_post("/v1/completions", body))
        until(lambda: llm.stats().used_blocks > 2, 5)  # a chunk has been prefilled
    steps = llm.stats().steps
    complete(url, varied(5, 2), 1)
    # The step on its way, the answer's own, and what ran before the connection's end was noticed.
    assert llm.stats().steps - steps < 4000 / 32 / 2
    until(lambda: idle(llm), 1)


def test_clients_that_give_up_leave_nothing_behind(llm: AsyncLLM, url: Url) -> None:
    """A burst of requests that all time out; a small one is answered right after."""

    def give_up(number: int) -> bool:
        try:
            body = {"prompt": varied(3000, number), "max_tokens": 1000}
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.5)
        except httpx.TimeoutException:
            return True
        return False

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(give_up, range(32)))
    started = time.monotonic()
    assert len(tokens(complete(url, varied(5, 1), 2))) == 2
    assert time.monotonic() - started < 5
    until(lambda: idle(llm), 1)


def test_many_clients_at_once_all_get_their_own_answers(llm: AsyncLLM, url: Url) -> None:
    """waybarrios/vllm-mlx#18, madroidmaq/mlx-omni-server#108"""
    shared = varied(40, 7)
    prompts = [[*shared, *varied(5, seed)] for seed in range(8)]
    alone = [tokens(complete(url, prompt)) for prompt in prompts]

    def call(number: int) -> bool:
        if number % 5 == 4:
            return httpx.get(f"{url}/metrics").status_code == 200
        return tokens(complete(url, prompts[number % 8])) == alone[number % 8]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(call, range(100)))
    until(lambda: idle(llm), 1)


def test_a_half_downloaded_model_is_refused_by_name_and_no_port_is_opened(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """tenstorrent/tt-inference-server#4986"""
    import json
    import shutil

    from mlx_paged_attention.api import cli

    shutil.copytree(tiny_model("llama"), tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").rename(tmp_path / "half" / "model-00001-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "half" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (tmp_path / "half" / "model-00002-of-00002.safetensors.incomplete").write_bytes(b"x")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    status = cli.run(["serve", "--model", str(tmp_path / "half"), "--port", str(port)])
    err = capsys.readouterr().err
    assert status == 2
    assert "model-00002-of-00002.safetensors" in err.splitlines()[-1]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
