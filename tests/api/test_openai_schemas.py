"""Answers, chunks, models and errors against OpenAI's own description of them."""

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from fake_llm import FakeLLM
from scripted_llm import ScriptedLLM

from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.errors import RequestFailedError

COMPONENTS = json.loads((Path(__file__).parents[1] / "data/openai_schemas.json").read_text())["components"]

# Fields that OpenAI does not have, and why they are sent.
EXTRA_FIELDS = {
    "stop_reason": "vLLM's: which stop string or token it was",
    "prompt_logprobs": "vLLM's, where they were asked for",
    "reasoning_content": "what every server of open models calls it",
    "root": "vLLM's: the model behind a name",
    "max_model_len": "vLLM's: routers and evaluation harnesses read it",
}


def without_deviations(value: Any, name: str) -> Any:
    """The value with what the document forbids, and we send knowingly, made into what it allows."""
    if name == "CreateCompletionResponse":
        # The document has one schema for whole answers and chunks, and forgets what a chunk has not yet:
        # OpenAI's API sends null for both, too.
        if value.get("usage", {}) is None:
            del value["usage"]
        for choice in value["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            # The first token of an echoed prompt follows nothing; OpenAI's API answered null, too.
            if choice["logprobs"] and choice["logprobs"]["token_logprobs"][:1] == [None]:
                choice["logprobs"]["token_logprobs"][0] = 0.0
                choice["logprobs"]["top_logprobs"][0] = {}
    if name == "CreateChatCompletionStreamResponse":
        for choice in value["choices"]:  # vLLM's word for an answer that the server ended
            if choice["finish_reason"] == "abort":
                choice["finish_reason"] = "stop"
    return value


# One list of models serves Anthropic's clients, too, and has their fields.
EXTRA_FIELDS |= dict.fromkeys(
    (
        *("has_more", "first_id", "last_id", "type", "display_name", "created_at"),
        *("lifecycle", "max_input_tokens", "max_tokens"),
    ),
    "Anthropic's, of models and lists of them",
)

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLS = '<think>Hm.</think>\nSee. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def closed(schema: Any) -> Any:
    """The schema with nothing allowed that it does not name, but our extra fields."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        result["properties"] |= {name: {} for name in EXTRA_FIELDS}
        result["additionalProperties"] = False
    return result


def validate(value: Any, name: str) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": closed(COMPONENTS)}
    jsonschema_rs.validator_for(schema).validate(without_deviations(value, name))


def connect(llm: FakeLLM, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(llm, **options), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


WITH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True}
TEXTS: list[dict[str, Any]] = [
    {},
    {"n": 3, "max_tokens": 4},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 5, "n": 2},
    {"prompt_logprobs": 1},
    WITH_USAGE,
]
TOOL_CALLS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "n": 2},
    {"tools": TOOLS, **WITH_USAGE},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"n": 2, "max_tokens": 3},
    {"prompt": ["a", "b"], "logprobs": 2},
    {"logprobs": 0, "echo": True},
    {"echo": True, "logprobs": 3, "max_tokens": 0},
    {"stream_options": {"include_usage": True}, "stream": True},
]


async def answers(llm: FakeLLM, path: str, body: dict[str, Any]) -> list[tuple[Any, bool]]:
    """A whole answer and all chunks of a stream, each with whether it is a chunk."""
    found: list[tuple[Any, bool]] = []
    async with connect(llm) as client:
        if not body.get("stream"):
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            found.append((response.json(), False))
        if "prompt_logprobs" not in body:
            response = await client.post(path, json={**body, "stream": True})
            assert response.status_code == 200, response.text
            found += [(event, True) for event in events(response)]
    return found


@pytest.mark.parametrize(
    ("pieces", "body"), [*((None, body) for body in TEXTS), *((list(CALLS), body) for body in TOOL_CALLS)]
)
async def test_chats_are_as_openai_describes_them(pieces: list[str] | None, body: dict[str, Any]) -> None:
    llm = FakeLLM() if pieces is None else ScriptedLLM(pieces)
    for answer, is_chunk in await answers(llm, "/v1/chat/completions", {"messages": HI, **body}):
        validate(answer, "CreateChatCompletionStreamResponse" if is_chunk else "CreateChatCompletionResponse")


@pytest.mark.parametrize("body", COMPLETIONS)
async def test_completions_are_as_openai_describes_them(body: dict[str, Any]) -> None:
    for answer, _ in await answers(FakeLLM(), "/v1/completions", {"prompt": "ab", **body}):
        validate(answer, "CreateCompletionResponse")


async def test_models_and_errors_are_as_openai_describes_them() -> None:
    async with connect(FakeLLM(), served_model_names=["a/b", "c"]) as client:
        validate((await client.get("/v1/models")).json(), "ListModelsResponse")
        validate((await client.get("/v1/models/a/b")).json(), "Model")
        for path, body, status in (
            ("/v1/chat/completions", {"messages": []}, 400),
            ("/v1/chat/completions", {"messages": HI, "model": "other"}, 404),
            ("/v1/completions", {"prompt": "x" * 300}, 400),
            ("/v1/completions", {"prompt": 1}, 400),
            ("/v1/embeddings", {"input": "x"}, 404),
            ("/v1/models", {}, 405),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == status
            validate(response.json(), "ErrorResponse")
    async with connect(FakeLLM(), api_keys=["k"], max_body_bytes=10) as client:
        for headers, status in (({}, 401), ({"Authorization": "Bearer k"}, 413)):
            response = await client.post("/v1/completions", json={"prompt": "x" * 20}, headers=headers)
            assert response.status_code == status
            validate(response.json(), "ErrorResponse")


async def test_errors_of_the_server_are_as_openai_describes_them() -> None:
    class Failing(FakeLLM):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise RequestFailedError("the step failed")
            yield

    async with connect(Failing()) as client:
        response = await client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 500
        validate(response.json(), "ErrorResponse")
    async with connect(FakeLLM(fail_after=3)) as client:
        *chunks, error = events(await client.post("/v1/completions", json={"prompt": "x", "stream": True}))
        assert len(chunks) == 3
        validate(error, "ErrorResponse")
        response = await client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
        validate(response.json(), "ErrorResponse")


async def test_an_aborted_stream_says_what_openai_has_no_word_for() -> None:
    llm = FakeLLM()
    llm.ending = True
    async with connect(llm) as client:
        response = await client.post("/v1/chat/completions", json={"messages": HI, "stream": True})
        *_, last = events(response)
        assert last["choices"][0]["finish_reason"] == "abort"
        validate(last, "CreateChatCompletionStreamResponse")
