"""``/v1/chat/completions`` over HTTP, on a scripted engine."""

import json
from typing import Any

import httpx
import pytest
from fake_llm import ANSWER, MAX_MODEL_LEN, FakeLLM

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PROMPT = "<user>hi<assistant>"
FIRST = "0" + ANSWER[1:]


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"messages": HI, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(URL, json={"messages": HI, "stream": True, **body})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_an_answer_has_openais_shape(client: httpx.AsyncClient) -> None:
    answer = await post(client, max_tokens=5)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": FIRST[:5], "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["total_tokens"] == len(PROMPT) + 5


async def test_without_a_limit_an_answer_may_fill_the_context(client: httpx.AsyncClient) -> None:
    """mudler/LocalAI#3533: reaching the context's end is a cut too."""
    answer = await post(client, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit_work(client: httpx.AsyncClient, name: str) -> None:
    assert (await post(client, **{name: 3}))["usage"]["completion_tokens"] == 3


async def test_the_role_comes_first_and_the_finish_reason_last(client: httpx.AsyncClient) -> None:
    """ml-explore/mlx-examples#1119, ollama/ollama#4357"""
    chunks = await events(client, max_tokens=8)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * 8 + ["length"]


async def test_a_stream_joins_to_the_whole_answer(client: httpx.AsyncClient) -> None:
    options: dict[str, Any] = {"n": 2, "logprobs": True, "top_logprobs": 2}
    whole = await post(client, **options)
    chunks = await events(client, **options, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
        streamed = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert streamed == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
        assert sum("role" in part["delta"] for part in parts) == 1


@pytest.mark.parametrize(("top", "count"), [(None, 0), (0, 0), (3, 3)])
async def test_logprobs_have_one_entry_per_token(
    client: httpx.AsyncClient, top: int | None, count: int
) -> None:
    answer = await post(client, logprobs=True, top_logprobs=top, max_tokens=2)
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == ("0", [48])
    assert second["token"] == "h"
    assert len(first["top_logprobs"]) == count
    values = [entry["logprob"] for entry in first["top_logprobs"]]
    assert values == sorted(values, reverse=True)


async def test_a_token_that_is_part_of_a_character_has_its_bytes() -> None:
    """abetlen/llama-cpp-python#1787"""
    from mlx_paged_attention.api.server.app import create_app

    transport = httpx.ASGITransport(create_app(FakeLLM("xé")))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await post(client, logprobs=True, max_tokens=2)
    assert answer["choices"][0]["logprobs"]["content"][1]["bytes"] == list("é".encode())[:1]


async def test_minus_infinity_becomes_the_lowest_number(client: httpx.AsyncClient) -> None:
    from mlx_paged_attention.api.server.serving import finite

    assert finite(float("-inf")) == -9999.0
    assert finite(-1.5) == -1.5


async def test_prompt_logprobs_lie_beside_the_choices(client: httpx.AsyncClient) -> None:
    answer = await post(client, prompt_logprobs=0, max_tokens=1)
    assert len(answer["prompt_logprobs"]) == len(PROMPT)
    assert answer["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in await post(client, max_tokens=1)


async def test_content_parts_mean_the_same_as_text(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    """jundot/omlx#2018"""
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    await post(client, max_tokens=1)
    await post(client, messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert llm.prompts[0] == llm.prompts[1] == list(PROMPT.encode())


async def test_template_variables_reach_the_template(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    await post(
        client, add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False}, max_tokens=1
    )
    assert bytes(llm.prompts[0]).decode() == "<user>hi[enable_thinking=False]"


async def test_a_field_may_be_nested_as_deeply_as_any_schema_is(client: httpx.AsyncClient) -> None:
    await post(client, messages=[{"role": "user", "content": "hi", "x": nested(198)}], max_tokens=1)


async def test_harmless_fields_are_accepted(client: httpx.AsyncClient) -> None:
    await post(
        client,
        max_tokens=1,
        user="me",
        store=False,
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        prompt_cache_key="key",
        service_tier="auto",
    )


def nested(depth: int) -> Any:
    return [] if depth == 1 else {"a": nested(depth - 1)}


BAD = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "nobody", "content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10, "max_tokens": 10}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "hi", "x": nested(300)}]}, "messages"),
    ({"chat_template_kwargs": nested(700)}, "chat_template_kwargs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"echo": True}, "echo"),
    ({"chat_template_kwargs": {"request_id": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "prompt"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=[json.dumps(change)[:60] for change, _ in BAD])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_field_is_refused_by_name(
    client: httpx.AsyncClient, change: dict[str, Any], param: str, stream: bool
) -> None:
    response = await client.post(URL, json={"messages": HI, "max_tokens": 4, "stream": stream} | change)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
