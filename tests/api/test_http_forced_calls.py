"""Tool calls that must be made, and arguments that must follow their schema, on the real engine."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from tiny_text_model import MARKERS, PIECES, VOCAB_SIZE, write_tiny_text_model

from mlx_paged_attention.api.async_llm import AsyncLLM
from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.sampling.params import SamplingParams

PARAMETERS = {
    "type": "object",
    "properties": {"way": {"enum": ["left", "right"]}},
    "required": ["way"],
    "additionalProperties": False,
}
IDS = {text: 256 + len(PIECES) + 1 + index for index, text in enumerate(MARKERS)}
# A random model writes white space for ever where it may.
NO_SPACE = dict.fromkeys([*b" \t\r\n", 256 + PIECES.index(b"  ")], -100)


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **function}}


TOOLS = [tool("go"), tool("look")]
NAMED = {"type": "function", "function": {"name": "look"}}
ALLOWED: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    assert max(IDS.values()) < VOCAB_SIZE
    path = write_tiny_text_model(tmp_path_factory.mktemp("calling-model"), calls=True)
    llm = AsyncLLM(str(path), num_blocks=256, max_num_seqs=16)
    assert llm.tokenizer is not None
    assert {text: llm.tokenizer.added_tokens[text] for text in MARKERS} == IDS
    yield llm
    llm.close()


@pytest.fixture
async def client(llm: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(llm), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server/v1", timeout=60) as client:
        yield client


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    bias = {str(token_id): value for token_id, value in {**NO_SPACE, **body.pop("bias", {})}.items()}
    request = {
        "messages": [{"role": "user", "content": "Where?"}],
        "max_tokens": 400,
        "tools": TOOLS,
        "logit_bias": bias,
        "chat_template_kwargs": {"enable_thinking": False},
        **body,
    }
    response = await client.post("/chat/completions", json=request)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        return {"events": [json.loads(event) for event in events]}
    answer: dict[str, Any] = response.json()
    return answer


def made(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls") or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
async def test_a_form_of_the_text_does_not_hinder_forced_calls(
    client: httpx.AsyncClient, tool_choice: Any
) -> None:
    """Both are sent by clients that describe one class as a tool and as the form of the answer."""
    described = {"type": "json_schema", "json_schema": {"name": "p", "schema": PARAMETERS}}
    both = {"tool_choice": tool_choice, "parallel_tool_calls": False, "seed": 1}
    (choice,) = (await chat(client, **both, response_format=described))["choices"]
    ((name, arguments),) = made(choice)
    assert name in ("go", "look")
    assert arguments["way"] in ("left", "right")
    assert not choice["message"]["content"]


@pytest.mark.parametrize(
    ("tool_choice", "reason"), [("required", "tool_calls"), (NAMED, "stop"), (ALLOWED, "tool_calls")]
)
async def test_a_forced_answer_is_one_valid_call_or_several(
    client: httpx.AsyncClient, tool_choice: Any, reason: str
) -> None:
    """ggml-org/llama.cpp#26849"""
    found = set()
    for seed in range(3):
        (choice,) = (await chat(client, tool_choice=tool_choice, seed=seed))["choices"]
        assert choice["finish_reason"] == reason
        assert choice["message"]["content"] is None
        calls = made(choice)
        assert len(calls) == 1 if tool_choice is NAMED else calls
        for name, arguments in calls:
            found.add(name)
            assert arguments in ({"way": "left"}, {"way": "right"})
        (choice,) = (await chat(client, tool_choice=tool_choice, seed=seed, parallel_tool_calls=False))[
            "choices"
        ]
        assert len(made(choice)) == 1
    assert found <= ({"go", "look"} if tool_choice == "required" else {"look"})


async def test_a_streamed_forced_call_equals_the_whole_one(client: httpx.AsyncClient) -> None:
    for seed in range(3):
        (choice,) = (await chat(client, tool_choice="required", seed=seed))["choices"]
        events = (await chat(client, tool_choice="required", seed=seed, stream=True))["events"]
        calls: list[list[str]] = []
        for event in events:
            for delta in event["choices"][0]["delta"].get("tool_calls") or []:
                if "id" in delta:
                    calls.append([delta["function"]["name"], ""])
                calls[delta["index"]][1] += delta["function"]["arguments"]
        assert [(name, json.loads(text)) for name, text in calls] == made(choice)
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_every_one_of_several_answers_makes_its_own_call(client: httpx.AsyncClient) -> None:
    choices = (await chat(client, tool_choice=NAMED, n=4, seed=1))["choices"]
    assert len(choices) == 4
    assert all(made(choice) for choice in choices)


@pytest.mark.parametrize("values", [{"min_tokens": 350}, {"ignore_eos": True}, {"temperature": 0}], ids=str)
async def test_a_forced_call_ends_the_answer_whatever_else_would_hold(
    client: httpx.AsyncClient, values: dict[str, Any]
) -> None:
    (choice,) = (await chat(client, tool_choice=NAMED, seed=1, parallel_tool_calls=False, **values))[
        "choices"
    ]
    assert choice["finish_reason"] == "stop"
    assert made(choice)


@pytest.mark.parametrize("opens", [True, False])
async def test_a_model_may_think_before_it_must_call(client: httpx.AsyncClient, opens: bool) -> None:
    bias = {IDS["</think>"]: 8} | ({} if opens else {IDS["<think>"]: 100})
    for seed in range(3):
        answer = await chat(
            client, tool_choice=NAMED, seed=seed, bias=bias, chat_template_kwargs={"open": opens}
        )
        (choice,) = answer["choices"]
        assert made(choice), choice
        details = answer["usage"]["completion_tokens_details"]
        reasoning = choice["message"].get("reasoning_content", "")
        assert bool(reasoning) == bool(details["reasoning_tokens"])


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_agrees_with_the_budget_for_the_reasoning(
    client: httpx.AsyncClient, stream: bool
) -> None:
    asked = {
        "tools": [],
        "thinking_token_budget": 7,
        "guided_choice": ["left"],
        "bias": {IDS["</think>"]: -100, **dict.fromkeys(range(0x80, 0x100), -100)},
        "chat_template_kwargs": {"open": True},
        "stream": stream,
        "n": 2,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    answer = await chat(client, **asked)
    usage = answer["events"][-1]["usage"] if stream else answer["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * 7
    assert usage["completion_tokens"] == 2 * (7 + len(["</think>", *"left"]))
    if not stream:
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["left", "left"]


@pytest.mark.parametrize("form", ["response_format", "guided_choice"])
async def test_a_form_begins_after_the_reasoning(client: httpx.AsyncClient, form: str) -> None:
    """jundot/omlx#2744"""
    schema = {"type": "json_schema", "json_schema": {"name": "way", "schema": {"enum": ["left"]}}}
    asked = {form: schema if form == "response_format" else ['"left"']}
    thoughts = []
    for kwargs in ({"open": True}, {"enable_thinking": False}, {}):
        for stream in (False, True):
            answer = await chat(
                client,
                tools=[],
                seed=3,
                stream=stream,
                bias={IDS["</think>"]: 5},
                chat_template_kwargs=kwargs,
                **asked,
            )
            if stream:
                deltas = [event["choices"][0]["delta"] for event in answer["events"]]
                content = "".join(delta.get("content") or "" for delta in deltas)
            else:
                (choice,) = answer["choices"]
                content = choice["message"]["content"]
                thoughts.append(choice["message"].get("reasoning_content"))
                assert choice["finish_reason"] == "stop"
            assert content == '"left"'
    assert thoughts[0]
    assert thoughts[1] is None


async def test_a_form_begins_after_the_reasoning_in_process_too(llm: AsyncLLM) -> None:
    asked = SamplingParams(
        thinking_token_budget=5,
        structured_outputs={"choice": ["left"]},
        max_tokens=30,
        seed=1,
        logit_bias=dict.fromkeys([IDS["</think>"], *range(0x80, 0x100)], -100),
    )
    outputs = llm.chat([{"role": "user", "content": "Where?"}], asked, output_kind="final", open=True)
    (output,) = [output async for output in outputs]
    assert re.fullmatch(r"(?s).{5}</think>\s*left", output.outputs[0].text)


async def test_strict_arguments_follow_the_schema_when_the_model_decides_to_call(
    client: httpx.AsyncClient,
) -> None:
    tools = [tool("go", strict=True)]
    for seed in range(2):
        eager = await chat(client, tools=tools, seed=seed, bias={IDS["<tool_call>"]: 8}, max_tokens=120)
        (choice,) = eager["choices"]
        calls = made(choice)
        assert calls
        assert all(arguments in ({"way": "left"}, {"way": "right"}) for _, arguments in calls)
    (free,) = (await chat(client, tools=tools, seed=1, bias={IDS["<tool_call>"]: -100}, max_tokens=20))[
        "choices"
    ]
    assert free["message"]["content"]
    assert "tool_calls" not in free["message"]


async def test_with_tools_an_answer_has_the_form_or_makes_calls(client: httpx.AsyncClient) -> None:
    asked = {"guided_choice": ["no", "nowhere"], "seed": 1}
    (said,) = (await chat(client, bias={IDS["<tool_call>"]: -100}, **asked))["choices"]
    assert said["message"]["content"] in ("no", "nowhere")
    (called,) = (await chat(client, bias={IDS["<tool_call>"]: 100, ord("}"): 5}, **asked))["choices"]
    assert called["message"].get("tool_calls") or called["finish_reason"] == "length"


async def test_forced_and_free_answers_do_not_touch_each_other(client: httpx.AsyncClient) -> None:
    """waybarrios/vllm-mlx#784, with calls"""
    free = {"tools": [], "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    forced = {"tool_choice": NAMED, "temperature": 0}
    alone = (await chat(client, **free))["choices"], (await chat(client, **forced))["choices"]
    together = await asyncio.gather(*[chat(client, **(forced if i % 2 else free)) for i in range(8)])
    for i, answer in enumerate(together):
        if i % 2:
            assert made(answer["choices"][0]) == made(alone[1][0])
        else:
            assert answer["choices"] == alone[0]


async def test_arguments_that_cannot_be_enforced_are_named(client: httpx.AsyncClient) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 55_555_555}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}
    response = await client.post("/chat/completions", json=body | {"tools": [tool("f", parameters=bad)]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert re.match("tools: .*too complex", response.json()["error"]["message"])
