"""Forms of answers over HTTP, on the real engine."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from tiny_text_model import write_tiny_text_model

from mlx_paged_attention.api.async_llm import AsyncLLM
from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.api.server.errors import describe
from mlx_paged_attention.errors import FormFailedError

ENUM = {"enum": ["left", "right"]}
STRICT = {"type": "json_schema", "json_schema": {"name": "way", "schema": ENUM, "strict": True}}
WAY = {"name": "way", "description": "a way", "schema": ENUM}
FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": STRICT}, '"(left|right)"'),
    ({"response_format": {"type": "json_schema", "json_schema": WAY}}, '"(left|right)"'),
    ({"structured_outputs": {"json": ENUM}}, '"(left|right)"'),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"guided_json": ENUM}, '"(left|right)"'),
    ({"guided_json": json.dumps(ENUM)}, '"(left|right)"'),
    ({"guided_regex": r"\d\d"}, r"\d\d"),
    ({"guided_choice": ["up", "down"]}, "up|down"),
    ({"guided_grammar": 'start: "(" start ")" | "x" "y"'}, r"\(*xy\)*"),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path = write_tiny_text_model(tmp_path_factory.mktemp("text-model"))
    llm = AsyncLLM(str(path), num_blocks=128, max_num_seqs=16)
    yield llm
    llm.close()


@pytest.fixture
async def client(llm: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(llm), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server/v1", timeout=60) as client:
        yield client


async def chat(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Where?"}]
    return await client.post("/chat/completions", json={"messages": messages, "max_tokens": 60, **body})


@pytest.mark.parametrize(("body", "pattern"), FORMATS, ids=[str(body)[:60] for body, _ in FORMATS])
async def test_each_way_to_ask_for_a_form_is_followed_streaming_or_not(
    client: httpx.AsyncClient, body: dict[str, Any], pattern: str
) -> None:
    for seed in range(3):
        response = await chat(client, seed=seed, **body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        text = choice["message"]["content"]
        assert re.fullmatch(pattern, text), text
        assert choice["finish_reason"] == "stop"
        streamed = await chat(client, seed=seed, stream=True, **body)
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
        assert "".join(deltas) == text
        same = {"prompt": "<user>Where?<assistant>", "max_tokens": 60, "seed": seed, **body}
        completed = await client.post("/completions", json=same)
        assert completed.json()["choices"][0]["text"] == text


async def test_json_object_begins_and_goes_on_as_one(client: httpx.AsyncClient) -> None:
    for seed in range(4):
        response = await chat(client, seed=seed, response_format={"type": "json_object"})
        (choice,) = response.json()["choices"]
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
        else:
            assert choice["finish_reason"] == "length"


async def test_openais_client_parses_an_answer(client: httpx.AsyncClient) -> None:
    own = openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=client)
    answer = await own.chat.completions.create(
        model=(await own.models.list()).data[0].id,
        messages=[{"role": "user", "content": "Where?"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "way", "schema": ENUM, "strict": True},
        },
    )
    assert json.loads(answer.choices[0].message.content or "") in ("left", "right")


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD: list[dict[str, Any]] = [
    {"json": {"type": "integer", "multipleOf": 66_666_666}},
    {"json": nested(300)},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    {"json": {"enum": [f"value{i}" for i in range(100_000)]}},
    {"json": {"pattern": "(", "type": "string"}},
    {"regex": "["},
    {"regex": "("},
    {"regex": "(?<=x)a"},
    {"grammar": "start: foo"},
]


async def test_bad_forms_are_client_errors_while_another_answer_streams(client: httpx.AsyncClient) -> None:
    await chat(client, guided_choice=["a"])  # prepares the tokenizer
    body = {"prompt": "go on", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    streaming = asyncio.create_task(client.post("/completions", json=body))
    for form in BAD:
        began = time.monotonic()
        response = await chat(client, structured_outputs=form)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "structured_outputs"
        assert response.json()["error"]["message"].count("structured_outputs") == 1
        assert len(response.text) < 1000
        assert time.monotonic() - began < 5  # a busy machine's second
    answer = (await streaming).json()
    assert answer["usage"]["completion_tokens"] == 300
    assert (await chat(client, guided_choice=["ok"])).json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}),
        ("guided_json", {"type": "array", "uniqueItems": True}),
        ("guided_regex", "("),
        ("guided_choice", []),
        ("guided_grammar", "start: foo"),
        ("structured_outputs", {"json": "{"}),
    ],
)
async def test_a_bad_form_is_refused_under_the_clients_own_name(
    client: httpx.AsyncClient, field: str, value: Any
) -> None:
    for more in ({}, {"use_beam_search": True, "n": 2}, {"allowed_token_ids": [1]}):
        response = await chat(client, **{field: value}, **more)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] in (field, *more)
        assert field in error["message"]
        assert field == "structured_outputs" or "structured_outputs" not in error["message"]


async def test_a_body_nested_beyond_reason_is_a_client_error(client: httpx.AsyncClient) -> None:
    text = '{"a":' * 5000 + "1" + "}" * 5000
    content = f'{{"prompt": "a", "structured_outputs": {{"json": {text}}}}}'
    response = await client.post(
        "/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text


def test_a_form_that_fails_on_the_way_is_the_requests_fault() -> None:
    status, body = describe(FormFailedError("request 1 failed: the grammar of structured_outputs: too large"))
    assert status == 400
    assert body["error"]["param"] == "structured_outputs"
    assert body["error"]["type"] == "invalid_request_error"
