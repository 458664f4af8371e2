"""The server with the default model: real text, a real chat template, OpenAI's client."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import openai
import pytest

from mlx_paged_attention.api.async_llm import AsyncLLM

pytestmark = pytest.mark.model

HI: Any = [{"role": "user", "content": "hi"}]
FRANCE = "The capital of France is"
FRANCE_IDS = [504, 3575, 282, 4649, 314]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(max_model_len=1024, num_blocks=257)
    yield llm
    llm.close()


@pytest.fixture
def url(llm: AsyncLLM, serve: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    with serve(llm) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(url: str, prompt: Any, **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def chat(url: str, messages: Any = HI, **body: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **body}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_model_knows_the_capital_of_france(url: str) -> None:
    assert "Paris" in complete(url, FRANCE)["choices"][0]["text"]


def test_text_and_its_token_ids_are_the_same_prompt(url: str) -> None:
    """sgl-project/sglang#736"""
    by_text, by_ids = complete(url, FRANCE), complete(url, FRANCE_IDS)
    assert by_text["usage"]["prompt_tokens"] == by_ids["usage"]["prompt_tokens"] == 5
    assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"]
    pair = complete(url, [FRANCE_IDS[:2], FRANCE_IDS[2:4]])
    assert [choice["index"] for choice in pair["choices"]] == [0, 1]


def test_chat_and_the_rendered_prompt_agree(llm: AsyncLLM, url: str) -> None:
    """vllm-project/vllm#6699, vllm-project/vllm#55288"""
    assert llm.tokenizer is not None
    rendered = llm.tokenizer.render_chat(HI)
    by_chat, by_prompt = chat(url, max_tokens=16), complete(url, rendered, max_tokens=16)
    assert by_chat["usage"]["prompt_tokens"] == by_prompt["usage"]["prompt_tokens"] == 31
    assert by_chat["choices"][0]["message"]["content"] == by_prompt["choices"][0]["text"]
    with_system = [{"role": "system", "content": "x"}, *HI]
    assert chat(url, with_system)["usage"]["prompt_tokens"] == 16


def test_the_same_conversation_in_other_shapes_gets_the_same_answer(url: str) -> None:
    """jundot/omlx#2018, vllm-project/vllm#13978"""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert chat(url, parts)["choices"] == chat(url)["choices"]
    turn = {"role": "user", "content": "again"}
    plain = chat(url, [*HI, {"role": "assistant", "content": "ok"}, turn])
    empty = chat(url, [*HI, {"role": "assistant", "content": "ok", "tool_calls": []}, turn])
    assert plain["choices"] == empty["choices"]
    assert plain["usage"]["prompt_tokens"] == empty["usage"]["prompt_tokens"]


def test_developer_is_another_word_for_system(url: str) -> None:
    """jundot/omlx#2018"""
    system, developer = (
        chat(url, [{"role": role, "content": "Be brief."}, *HI]) for role in ("system", "developer")
    )
    assert developer["choices"] == system["choices"]
    assert developer["usage"]["prompt_tokens"] == system["usage"]["prompt_tokens"]


def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI, llm: AsyncLLM) -> None:
    options: Any = {"model": llm.info.model, "messages": HI, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_cached_tokens_are_told_for_chat_too(url: str) -> None:
    """jundot/omlx#919"""
    messages = [{"role": "user", "content": "one two three " * 40}]
    first, second = chat(url, messages), chat(url, messages)
    prompt = first["usage"]["prompt_tokens"]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second)]
    # What other conversations share of it is the template's beginning.
    assert cached[0] <= 32
    assert cached[1] == 16 * ((prompt - 1) // 16)


def test_a_cut_answer_says_length(url: str) -> None:
    """mudler/LocalAI#3533"""
    answer = chat(url, max_tokens=3, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_echo_scores_the_prompt(url: str) -> None:
    """ggml-org/llama.cpp#27174"""
    (choice,) = complete(url, FRANCE, echo=True, logprobs=1, max_tokens=1)["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == 6
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [0, 3, 11, 14, 21, 24]
    assert choice["text"].startswith(FRANCE)
    alone = complete(url, FRANCE, echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert alone["text"] == FRANCE
    assert len(alone["logprobs"]["tokens"]) == 5


def test_prompt_logprobs_do_not_depend_on_sampling(url: str) -> None:
    """vllm-project/vllm#10234"""
    prompt = "correct horse battery staple"
    options: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 2}
    warm = complete(url, prompt, **options, temperature=1, top_k=1)["choices"][0]["logprobs"]
    cold = complete(url, prompt, **options)["choices"][0]["logprobs"]
    assert warm["tokens"] == cold["tokens"]
    assert warm["token_logprobs"][1:] == pytest.approx(cold["token_logprobs"][1:], abs=1e-4)


def test_logprobs_of_chat_have_text_bytes_and_sorted_alternatives(url: str) -> None:
    """abetlen/llama-cpp-python#1787"""
    answer = chat(url, logprobs=True, top_logprobs=3, max_tokens=4)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("stop", ["Paris", "ari", ["zzz", "is."]])
@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_cuts_the_text(url: str, stop: Any, keep: bool) -> None:
    free = complete(url, FRANCE)["choices"][0]["text"]
    found = next(s for s in ([stop] if isinstance(stop, str) else stop) if s in free)
    (choice,) = complete(url, FRANCE, stop=stop, include_stop_str_in_output=keep)["choices"]
    assert choice["text"] == free.split(found)[0] + (found if keep else "")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", found)


def test_logit_bias_forces_and_forbids_tokens(url: str) -> None:
    forced = complete(url, FRANCE, logit_bias={"1234": 100}, logprobs=0, max_tokens=4)["choices"][0]
    assert len(set(forced["logprobs"]["tokens"])) == 1
    free = complete(url, FRANCE, max_tokens=1)["choices"][0]["text"]
    response = httpx.post(f"{url}/v1/completions", json={"prompt": FRANCE, "logit_bias": {"999999": 1}})
    assert response.status_code == 400
    paris = complete(url, " Paris", echo=True, logprobs=0, max_tokens=0, prompt_logprobs=0)
    assert paris["choices"][0]["text"] == " Paris" == free
    forbidden = complete(url, FRANCE, max_tokens=1, logit_bias={"7042": -100})["choices"][0]["text"]
    assert forbidden != free


@pytest.mark.parametrize(
    ("change", "param"),
    [({"temperature": 999999}, "temperature"), ({"top_k": -5}, "top_k"), ({"min_p": 2}, "min_p")],
)
def test_extreme_values_are_refused_and_the_next_request_answered(
    url: str, change: dict[str, Any], param: str
) -> None:
    """ggml-org/llama.cpp#19367"""
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI} | change)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert chat(url, max_tokens=1)["usage"]["completion_tokens"] == 1


def test_several_answers_stream_to_their_own_ends_and_differ_under_one_seed(client: openai.OpenAI) -> None:
    """vllm-project/vllm#11898"""
    options: Any = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Tell a short story."}],
        "n": 3,
        "seed": 7,
        "temperature": 1.0,
        "max_tokens": 24,
        "stop": ["."],
    }
    runs = []
    for _ in range(2):
        texts, ends, usage = ["", "", ""], [0, 0, 0], None
        for chunk in client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                assert not ends[choice.index], "nothing comes after the end"
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] += choice.finish_reason is not None
        assert ends == [1, 1, 1]
        assert usage is not None
        runs.append((texts, usage.completion_tokens))
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) >= 2
    whole = client.chat.completions.create(**options)
    assert [choice.message.content for choice in whole.choices] == runs[0][0]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == runs[0][1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_prompt_that_is_too_long_is_refused_before_a_stream_begins(
    url: str, llm: AsyncLLM, path: str, stream: bool
) -> None:
    """ollama/ollama#17889"""
    text = "one two three " * 1000
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    before = llm.stats()
    response = httpx.post(f"{url}/v1/{path}", json={**prompt, "stream": stream}, timeout=60)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert re.search(
        r"the prompt is too long: it has \d{4} tokens; with max_model_len 1024", error["message"]
    )
    assert llm.stats() == before


async def test_a_prompt_that_is_too_long_is_a_value_error_in_a_program(llm: AsyncLLM) -> None:
    """ollama/ollama#17889"""
    with pytest.raises(ValueError, match="1024"):
        await anext(llm.generate("one two three " * 1000))


def test_a_picture_is_refused_and_nothing_of_it_is_cached(url: str, llm: AsyncLLM) -> None:
    """waybarrios/vllm-mlx#726"""
    before = llm.stats()
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "What is this?"}, picture]
    body = {"messages": [{"role": "user", "content": parts}]}
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "text only" in response.json()["error"]["message"]
    assert llm.stats() == before
