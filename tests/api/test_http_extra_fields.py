"""vLLM's fields beside OpenAI's: token ids, control tokens, and those that are refused by name."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fake_llm import FakeLLM
from scripted_llm import ScriptedLLM

from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.engine.outputs import RequestOutput
from mlx_paged_attention.errors import InvalidRequestError

HI = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}


async def post(llm: FakeLLM, body: dict[str, Any], **more: Any) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(llm), raise_app_exceptions=False)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.post(path, json={"max_tokens": 5, **body, **more})


async def chunks(llm: FakeLLM, body: dict[str, Any], **more: Any) -> list[Any]:
    response = await post(llm, body, stream=True, **more)
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


async def test_a_chat_returns_token_ids() -> None:
    whole = (await post(FakeLLM(), HI, return_token_ids=True, n=2)).json()
    assert bytes(whole["prompt_token_ids"]).decode() == "<user>hi<assistant>"
    for choice in whole["choices"]:
        assert bytes(choice["token_ids"]).decode() == choice["message"]["content"]
    streamed = await chunks(FakeLLM(), HI, return_token_ids=True, n=2)
    assert [chunk.get("prompt_token_ids") for chunk in streamed[:2]] == [whole["prompt_token_ids"], None]
    for index in range(2):
        own = [c for chunk in streamed for c in chunk["choices"] if c["index"] == index]
        assert [i for c in own for i in c.get("token_ids", [])] == whole["choices"][index]["token_ids"]
    plain = (await post(FakeLLM(), HI)).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


async def test_token_ids_cover_what_is_told_apart_from_the_text() -> None:
    said = "<think>ab</think>c"
    (choice,) = (await post(ScriptedLLM(list(said)), HI, return_token_ids=True)).json()["choices"]
    assert bytes(choice["token_ids"]).decode() == said


async def test_a_completion_returns_token_ids() -> None:
    body = {"prompt": ["hi", "ho"], "return_token_ids": True, "echo": True}
    whole = (await post(FakeLLM(), body)).json()["choices"]
    streamed = await chunks(FakeLLM(), body)
    for index, prompt in enumerate(("hi", "ho")):
        assert bytes(whole[index]["prompt_token_ids"]).decode() == prompt
        assert prompt + bytes(whole[index]["token_ids"]).decode() == whole[index]["text"]
        own = [c for chunk in streamed for c in chunk["choices"] if c["index"] == index]
        assert own[0]["prompt_token_ids"] == whole[index]["prompt_token_ids"]
        assert not any("prompt_token_ids" in c for c in own[1:])
        assert [i for c in own for i in c["token_ids"]] == whole[index]["token_ids"]
    (alone,) = (await post(FakeLLM(), {**body, "prompt": "hi"}, max_tokens=0)).json()["choices"]
    assert alone["token_ids"] == []


async def test_tokens_of_logprobs_can_be_ids() -> None:
    asked = {"return_tokens_as_token_ids": True}
    (choice,) = (await post(FakeLLM(), HI, logprobs=True, top_logprobs=1, **asked)).json()["choices"]
    first = choice["logprobs"]["content"][0]
    assert first["token"] == f"token_id:{ord(choice['message']['content'][0])}"
    assert first["top_logprobs"][0]["token"].startswith("token_id:")
    (choice,) = (await post(FakeLLM(), PROMPT, logprobs=1, **asked)).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{ord(letter)}" for letter in choice["text"]]
    assert all(name.startswith("token_id:") for name in choice["logprobs"]["top_logprobs"][0])


async def test_reasoning_can_be_left_out() -> None:
    llm = ScriptedLLM(list("<think>ab</think>c"))
    (choice,) = (await post(llm, HI, include_reasoning=False)).json()["choices"]
    assert choice["message"]["content"] == "c"
    assert "reasoning_content" not in choice["message"]
    streamed = await chunks(llm, HI, include_reasoning=False)
    assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in streamed)


async def test_fields_reach_the_engine() -> None:
    llm = FakeLLM()
    assert (await post(llm, PROMPT, skip_special_tokens=False, add_special_tokens=False)).status_code == 200
    assert llm.params[-1].skip_special_tokens is False
    assert llm.prompts[-1] == list(b"hi")
    for value in (True, False):
        response = await post(llm, HI, spaces_between_special_tokens=value)
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("body", "field", "value", "what_to_do"),
    [
        (HI, "echo", True, "put them before it yourself"),
        (HI, "add_special_tokens", True, "send false"),
        (HI, "truncate_prompt_tokens", 5, "send a shorter one"),
        (PROMPT, "truncate_prompt_tokens", 5, "send a shorter one"),
        (HI, "documents", [{"text": "x"}], "chat_template_kwargs"),
        (HI, "chat_template", "{{ messages }}", "chat_template_kwargs"),
        (HI, "logits_processors", ["x"], "logit_bias"),
        (PROMPT, "logits_processors", ["x"], "logit_bias"),
        (HI, "mm_processor_kwargs", {"a": 1}, "leave it out"),
        (HI, "verbosity", "low", "in a message"),
        (HI, "web_search_options", {}, "leave it out"),
        (HI, "moderation", {"model": "m"}, "leave it out"),
        (PROMPT, "include_reasoning", False, "/v1/chat/completions"),
        (HI, "skip_special_tokens", "no", "boolean"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    body: dict[str, Any], field: str, value: Any, what_to_do: str
) -> None:
    response = await post(FakeLLM(), body, **{field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert what_to_do in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", False),
        ("add_special_tokens", False),
        ("documents", []),
        ("mm_processor_kwargs", {}),
        ("verbosity", "medium"),
        ("prediction", {"type": "content", "content": "x"}),
        ("prompt_cache_options", {"mode": "auto"}),
        ("chat_template", None),
    ],
)
async def test_values_that_ask_for_nothing_pass(field: str, value: Any) -> None:
    assert (await post(FakeLLM(), HI, **{field: value})).status_code == 200


class ModelWithoutReasoning(FakeLLM):
    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        raise InvalidRequestError("thinking_token_budget: no reasoning here", "thinking_token_budget")
        yield


@pytest.mark.parametrize("body", [HI, PROMPT, {**HI, "stream": True}])
@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "max_reasoning_tokens"])
async def test_an_engine_that_refuses_a_thinking_budget_calls_it_what_the_client_does(
    body: dict[str, Any], name: str
) -> None:
    error = (await post(ModelWithoutReasoning(), body, **{name: 5})).json()["error"]
    assert (error["param"], error["message"]) == (name, f"{name}: no reasoning here")
