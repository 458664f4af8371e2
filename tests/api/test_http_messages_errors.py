"""What ``/v1/messages`` refuses, in the shape and the words of Anthropic's API."""

import json
import re
from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse
from fake_llm import FakeLLM
from messages_client import HI, client_of, filled, http_of, raw_events, streamed, whole
from scripted_llm import ScriptedLLM

TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
PATHS = ("/v1/messages", "/v1/messages/count_tokens")
JSON = {"content-type": "application/json"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def answer(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": list(blocks)}, *HI]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: input should be greater"),
    ({"max_tokens": "5"}, "max_tokens: input should be a valid integer"),
    ({"max_tokens": None}, "max_tokens: input should be a valid integer"),
    ({"messages": []}, "messages: list should have at least 1 item"),
    ({"messages": "hi"}, "messages: input should be a valid list"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages.0.role: input should be 'user', 'assistant'",
    ),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: input should be a valid list"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages holds half of a surrogate pair"),
    (answer({"type": "tool_use", "id": "a", "name": "f", "input": {"x": "\ud800"}}), "messages.*surrogate"),
    (user({"type": "text"}), r"messages.0.content.0.text.text: field required"),
    (user({"type": "text", "text": "x", "more": 1}), "messages.0.content.0.text.more is not a known field"),
    (user({"type": "text", "text": "x"}, IMAGE), "messages.0.content: block 1 has type 'image'.*text only"),
    (user({"type": "document", "source": {}}), "block 0 has type 'document'"),
    (user({"type": "psalm"}), "messages.0.content.0: input tag 'psalm'"),
    (user({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "role 'user' has no tool_use blocks"),
    (user({"type": "tool_result", "tool_use_id": "a"}), "no tool_use before the tool_result.*'a'"),
    (answer({"type": "tool_result", "tool_use_id": "a"}), "role 'assistant' has no tool_result blocks"),
    (
        {"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}, *HI]},
        "role 'system' has no thinking blocks",
    ),
    (answer({"type": "thinking", "thinking": "", "signature": "mlx-paged:?"}), "signature has been changed"),
    (answer({"type": "thinking", "thinking": "", "signature": "mlx-paged:é"}), "signature has been changed"),
    (
        answer({"type": "thinking", "thinking": "", "signature": "mlx-paged:\ud800"}),
        "signature has been changed",
    ),
    ({"system": [IMAGE]}, "system: block 0 has type 'image'"),
    ({"system": [{"type": "thinking", "thinking": "x"}]}, "system.0.type: input should be 'text'"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema: field required"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "'web_search_20250305'.*input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'.*input_schema"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tools": [TOOL | {"output_schema": [{}]}]}, "tools.0.output_schema is not a known field"),
    ({"tools": [TOOL, TOOL]}, "'f' is there twice"),
    ({"tool_choice": {"type": "auto"}}, "tool_choice is only allowed with tools"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice has a name if"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice names 'g'"),
    ({"tool_choice": {"type": "required"}, "tools": [TOOL]}, "tool_choice.type: input should be 'auto'"),
    ({"thinking": {"type": "enabled"}}, "thinking has budget_tokens if"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        "thinking.budget_tokens: input should be greater",
    ),
    ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking has budget_tokens if"),
    ({"output_config": {"effort": "most"}}, "output_config.effort: input should be 'low'"),
    ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type"),
    ({"stop_sequences": [""]}, "stop_sequences must be a non-empty"),
    ({"stop_sequences": "x"}, "stop_sequences: input should be a valid list"),
    ({"temperature": -1}, "temperature must be"),
    ({"extra_body": {"n": 2}}, "n is not a known field"),
    ({"extra_body": {"container": "c"}}, "container: .*input_schema"),
    ({"extra_body": {"mcp_servers": [{"url": "http://x"}]}}, "mcp_servers: no servers are called"),
    (
        {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}},
        "context_man",
    ),
    ({"extra_body": {"speed": "fast"}}, "speed: .*'standard'"),
    ({"extra_body": {"output_format": {"type": "json_schema"}}}, "output_format: .*output_config"),
    ({"system": "x" * 300}, "prompt is too long: it has 327 tokens"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
async def test_what_is_wrong_is_named(body: dict[str, Any], message: str) -> None:
    llm = ScriptedLLM(["x"], reads=("tools",))
    async with http_of(llm) as http:
        sent = filled(body)
        sent |= sent.pop("extra_body")
        for stream in (False, True):
            content = json.dumps(sent | {"stream": stream})  # spells half of a surrogate pair, too
            response = await http.post("/v1/messages", content=content, headers=JSON)
            assert response.status_code == 400, response.text
            error = ErrorResponse.model_validate(response.json())
            assert error.error.type == "invalid_request_error"
            assert error.request_id == response.headers["request-id"]
            assert re.search(message, error.error.message), error.error.message
    assert not llm.prompts


async def test_the_clients_exceptions_tell_the_error() -> None:
    for ask in (whole, streamed):
        with pytest.raises(anthropic.BadRequestError, match="max_tokens") as error:
            await ask(FakeLLM(), max_tokens=0)
        assert error.value.type == "invalid_request_error"
        assert error.value.request_id is not None
        with pytest.raises(anthropic.NotFoundError, match="'other' does not exist") as missing:
            await ask(FakeLLM(), model="other")
        assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        await client_of(FakeLLM()).messages.count_tokens(model="other", messages=HI)


async def test_errors_that_programs_understand_have_a_code() -> None:
    for body, code in (
        ({"model": "other"}, "model_not_found"),
        ({"system": "x" * 300}, "context_length_exceeded"),
        ({"extra_body": {"thread": {"type": "create"}}}, "thread_unsupported_request"),
    ):
        with pytest.raises(anthropic.APIStatusError) as error:
            await whole(FakeLLM(), **body)
        assert error.value.error_code == code
    with pytest.raises(anthropic.BadRequestError) as plain:
        await whole(FakeLLM(), temperature=-1)
    assert plain.value.details is None


async def test_what_is_no_request_has_the_same_shape() -> None:
    async with http_of(FakeLLM(), max_body_bytes=1000) as http:
        for path in PATHS:
            for content in ("{", "", "[]", "[" * 900, '"x"'):
                response = await http.post(path, content=content, headers=JSON)
                assert response.status_code == 400
                ErrorResponse.model_validate(response.json(), strict=True)
            for response, status, kind in (
                (await http.get(path), 405, "invalid_request_error"),
                (await http.get(f"{path}/nothing"), 404, "not_found_error"),
                (await http.post(path, content="x" * 1001, headers=JSON), 413, "request_too_large"),
            ):
                assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
                assert response.json()["type"] == "error"
        # Other APIs keep their own.
        assert (await http.post("/v1/messages_of_mine", json={})).json()["error"]["param"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_is_a_503(stream: bool) -> None:
    llm = FakeLLM()
    llm.dead_reason = "out of memory"
    async with http_of(llm) as http:
        response = await http.post("/v1/messages", json={"max_tokens": 5, "messages": HI, "stream": stream})
        assert (response.status_code, response.json()["error"]["type"]) == (503, "api_error")
        assert "out of memory" in response.json()["error"]["message"]
        assert (await http.post(PATHS[1], json={"messages": HI})).status_code == 503


async def test_a_stream_that_fails_ends_with_an_error() -> None:
    events = await raw_events(FakeLLM(fail_after=3))
    assert [event["type"] for event in events[-2:]] == ["content_block_delta", "error"]
    assert events[-1]["error"]["type"] == "api_error"
    assert "scripted failure" in events[-1]["error"]["message"]
    with pytest.raises(anthropic.APIStatusError, match="scripted failure"):
        await streamed(FakeLLM(fail_after=3))
    with pytest.raises(anthropic.InternalServerError, match="scripted failure"):
        await whole(FakeLLM(fail_after=3))


async def test_an_answer_that_is_cut_off_is_no_answer() -> None:
    llm = ScriptedLLM(["Half", " an answer"], finish_reason="abort")
    events = await raw_events(llm)
    assert [event["type"] for event in events[-2:]] == ["content_block_delta", "error"]
    for ask in (whole, streamed):
        with pytest.raises(anthropic.APIStatusError, match="send it again"):
            await ask(llm)


async def test_keys_are_taken_as_anthropics_clients_send_them() -> None:
    async with http_of(FakeLLM(), api_keys=["key", "other"]) as http:
        body = {"max_tokens": 1, "messages": HI}
        for headers in ({"x-api-key": "other"}, {"authorization": "Bearer key", "x-api-key": "wrong"}):
            assert (await http.post("/v1/messages", json=body, headers=headers)).status_code == 200
        for headers in ({}, {"x-api-key": ""}, {"x-api-key": "Bearer key"}, {"authorization": "key"}):
            response = await http.post("/v1/messages", json=body, headers=headers)
            assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    client = client_of(FakeLLM(), api_key="key", api_keys=["key"])
    assert (await client.messages.create(**filled({}))).content
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        await client_of(FakeLLM(), api_key="wrong", api_keys=["key"]).messages.create(**filled({}))


async def test_prefixes_are_apart_for_keys_in_either_header() -> None:
    llm = FakeLLM()
    async with http_of(llm, api_keys=["a", "b"], prefixes_per_key=True) as http:
        for headers in ({"x-api-key": "a"}, {"authorization": "Bearer a"}, {"x-api-key": "b"}):
            await http.post("/v1/messages", json={"max_tokens": 1, "messages": HI}, headers=headers)
    first, second, third = (params.cache_salt for params in llm.params)
    assert first == second != third
