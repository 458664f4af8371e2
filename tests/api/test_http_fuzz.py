"""Any body gets an answer or a client's error, soon; and ``/openapi.json`` tells the truth."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from fake_llm import FakeLLM
from fuzz_bodies import FIELDS, bodies
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from tiny_text_model import write_tiny_text_model

from mlx_paged_attention.api.async_llm import AsyncLLM
from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.api.server.openapi import ANSWERS

DOCUMENT = create_app(FakeLLM()).openapi()
POSTS = sorted(path for path, operations in DOCUMENT["paths"].items() if "post" in operations)
SECONDS = 10.0  # for any answer, on a busy machine
# As a model with reasoning and tools writes.
TEMPLATE = (
    "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name ~ ' ' ~ c.function.arguments }}</tool_call>{% endfor %}{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path: Path = write_tiny_text_model(tmp_path_factory.mktemp("text-model"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    with_room = AsyncLLM(str(path), num_blocks=128, max_num_seqs=16, max_model_len=192)
    yield with_room
    with_room.close()


@pytest.fixture
def client(engine: AsyncLLM, serve: Callable[..., AbstractContextManager[str]]) -> Iterator[httpx.Client]:
    with serve(engine) as url, httpx.Client(base_url=url, timeout=SECONDS) as client:
        yield client
        assert engine.is_alive
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    assert b'"server_error"' not in response.content, "a stream that broke off"
    assert response.headers["content-type"].startswith(("application/json", "text/event-stream"))
    if response.status_code != 200:
        assert 400 <= response.status_code < 500
        assert response.json()["error"]["message"]


def fuzz(client: httpx.Client, path: str, examples: int, *, repeatable: bool) -> None:
    @given(body=bodies(path))
    @settings(
        max_examples=examples,
        derandomize=repeatable,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def post(body: Any) -> None:
        content = json.dumps(body).encode()
        check(client.post(path, content=content, headers={"content-type": "application/json"}))

    post()


def fuzz_by_document(client: httpx.Client, path: str, examples: int, *, repeatable: bool) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path]["POST"]
    good, bad = (operation.as_strategy(mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))

    @given(case=good | bad)
    @settings(
        max_examples=examples,
        derandomize=repeatable,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def post(case: schemathesis.Case) -> None:
        response = case.call(base_url=str(client.base_url), timeout=SECONDS)
        assert response.status_code < 500, response.text

    post()


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_no_body_is_a_fault_of_the_server(client: httpx.Client, path: str) -> None:
    fuzz(client, path, 60, repeatable=True)


@pytest.mark.parametrize("path", POSTS)
def test_no_body_that_the_document_allows_or_forbids_is_a_fault_of_the_server(
    client: httpx.Client, path: str
) -> None:
    fuzz_by_document(client, path, 15, repeatable=True)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_body_is_a_fault_of_the_server_for_long(client: httpx.Client) -> None:
    until = time.monotonic() + 600
    while time.monotonic() < until:
        for path in FIELDS:
            fuzz(client, path, 200, repeatable=False)
        for path in POSTS:
            fuzz_by_document(client, path, 50, repeatable=False)


def test_the_document_names_every_path_and_what_it_answers() -> None:
    assert set(DOCUMENT["paths"]) == {name.rpartition(" ")[2] for name in ANSWERS}
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            assert operation["description"] or operation["summary"]
            assert "default" in operation["responses"]
            media = ANSWERS.get(f"{method} {path}", ANSWERS[path])
            good = operation["responses"].get("200")
            assert (good is None) == (media == {})
            assert good is None or set(good.get("content", {})) == set(media or {})


REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True}),
    ("POST", "/v1/completions", {"prompt": "a", "stream": True, "prompt_logprobs": None}),
    ("POST", "/v1/completions", {"prompt": "a", "prompt_logprobs": 1}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    ("POST", "/v1/chat/completions/render", {"messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/completions/render", {"prompt": [1, 2], "logit_bias": {"3": 1}}),
    ("POST", "/v1/responses", {"input": "a"}),
    ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [1]}),
    *(("GET", path, None) for path in ("/v1/models", "/debug/blocks", "/version", "/load", "/is_sleeping")),
    ("GET", "/tokenizer_info", None),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_answers_and_errors_are_as_the_document_says(
    client: httpx.Client, method: str, path: str, body: dict[str, Any] | None
) -> None:
    responses = DOCUMENT["paths"][path][method.lower()]["responses"]

    def validate(value: Any, content: dict[str, Any]) -> None:
        schema = {**content["schema"], "components": DOCUMENT["components"]}
        jsonschema_rs.validator_for(schema).validate(value)

    response = client.request(method, path, json=body)
    assert response.status_code == 200
    kind = response.headers["content-type"].split(";")[0]
    content = responses["200"]["content"][kind]
    if kind == "application/json":
        validate(response.json(), content)
    else:
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        for event in events:
            validate(json.loads(event), content)
    if body is not None:
        wrong = client.request(method, path, json={**body, "unknown": 1})
        assert wrong.status_code == 400
        validate(wrong.json(), responses["default"]["content"]["application/json"])
