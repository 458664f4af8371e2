"""``/v1/messages``: what it answers, streamed and not, read by the official ``anthropic`` client."""

import asyncio
import json
from typing import Any

import anthropic
import pytest
from fake_llm import ANSWER, MAX_MODEL_LEN, FakeLLM
from messages_client import HI, client_of, filled, http_of, raw_events, said, streamed, whole
from pydantic import BaseModel
from scripted_llm import ScriptedLLM

from mlx_paged_attention.api.server.messages import route
from mlx_paged_attention.api.server.messages.request import MessagesRequest
from mlx_paged_attention.api.server.messages.translation import chat_request

FIRST = "0" + ANSWER[1:]
TOOLS: list[Any] = [
    {"name": name, "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}
    for name in ("Bash", "Read")
]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name":"{name}","arguments":{arguments}}}\n</tool_call>'


CALLS = call("Bash", '{"command":"ls -l"}') + "\n" + call("Read", "{}")
SCRIPT = "<think>\nHm é.\n</think>\n\nLet me.\n" + CALLS
SCRIPT_SAYS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "Hm é.", "signature": "mlx-paged:SG0gw6ku"},
    {"type": "text", "text": "Let me."},
    {"type": "tool_use", "name": "Bash", "input": {"command": "ls -l"}},
    {"type": "tool_use", "name": "Read", "input": {}},
]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The events' types; those of blocks and deltas are told, and what repeats is told once."""
    found: list[str] = []
    for event in events:
        what = event.get("content_block", event.get("delta", {})).get("type")
        kind = f"{event['type']} {what}" if what else event["type"]
        if not found or found[-1] != kind:
            found.append(kind)
    return found


async def test_an_answer_has_anthropics_shape() -> None:
    answer = await whole(FakeLLM(), max_tokens=5)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake/bytes")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": FIRST[:5]}]
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    prompt = len("<user>hi<assistant>")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (prompt, 5)
    assert (answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens) == (0, 0)


async def test_reasoning_text_and_calls_are_blocks_in_their_order() -> None:
    """suhaibbinyounis/github-copilot-api-vscode#79"""
    answer = await whole(ScriptedLLM([SCRIPT]), tools=TOOLS)
    assert said(answer)["content"] == SCRIPT_SAYS
    assert answer.stop_reason == "tool_use"
    ids = {block.id for block in answer.content if block.type == "tool_use"}
    assert len(ids) == 2
    assert answer.usage.output_tokens_details is not None
    assert answer.usage.output_tokens_details.thinking_tokens == len("\nHm é.\n".encode())
    assert answer.usage.output_tokens == len(SCRIPT.encode())


async def test_a_stream_says_the_same_wherever_it_is_cut() -> None:
    expected = said(await whole(ScriptedLLM([SCRIPT]), tools=TOOLS))
    assert said(await streamed(ScriptedLLM(list(SCRIPT)), tools=TOOLS)) == expected
    for cut in range(1, len(SCRIPT), 7):
        pieces = [SCRIPT[:cut], SCRIPT[cut:]]
        assert said(await streamed(ScriptedLLM(pieces), tools=TOOLS)) == expected, cut
        assert said(await whole(ScriptedLLM(pieces), tools=TOOLS)) == expected, cut


async def test_every_block_begins_once_and_ends_before_the_next() -> None:
    """ggml-org/llama.cpp#18551"""
    events = await raw_events(ScriptedLLM(list(SCRIPT)), tools=TOOLS)
    tool = ("content_block_start tool_use", "content_block_delta input_json_delta", "content_block_stop")
    assert kinds(events) == [
        *("message_start", "ping"),
        *("content_block_start thinking", "content_block_delta thinking_delta"),
        *("content_block_delta signature_delta", "content_block_stop"),
        *("content_block_start text", "content_block_delta text_delta", "content_block_stop"),
        *tool,
        *tool,
        *("message_delta", "message_stop"),
    ]
    indices = [event["index"] for event in events if "index" in event]
    assert indices == sorted(indices)
    assert set(indices) == {0, 1, 2, 3}
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert begun[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert begun[1] == {"type": "text", "text": ""}
    assert begun[2]["input"] == {}


async def test_a_stream_begins_with_the_prompts_tokens_and_ends_with_all() -> None:
    """jundot/omlx#912"""
    events = await raw_events(FakeLLM(cached=lambda ids: 16), max_tokens=3)
    start, delta = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 3)
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"] == {
        "input_tokens": 3,
        "cache_read_input_tokens": 16,
        "cache_creation_input_tokens": 0,
        "output_tokens": 3,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert start["usage"] | {"output_tokens": 3} == delta["usage"]


async def test_an_answer_without_a_word_is_a_whole_message() -> None:
    assert kinds(await raw_events(ScriptedLLM([""]))) == [
        *("message_start", "ping", "message_delta", "message_stop")
    ]
    answer = await whole(ScriptedLLM([""]))
    assert (answer.content, answer.stop_reason) == ([], "end_turn")


@pytest.mark.parametrize(
    ("llm", "body", "stop"),
    [
        (ScriptedLLM(["x"]), {}, ("end_turn", None)),
        (ScriptedLLM(["x"], stop_reason="END"), {"stop_sequences": ["END"]}, ("stop_sequence", "END")),
        (ScriptedLLM(["x"], finish_reason="length"), {"max_tokens": 1}, ("max_tokens", None)),
        (FakeLLM("x" * 300), {"max_tokens": 300}, ("model_context_window_exceeded", None)),
        (ScriptedLLM([CALLS]), {"tools": TOOLS}, ("tool_use", None)),
        (ScriptedLLM([CALLS]), {"tools": TOOLS, "tool_choice": {"type": "none"}}, ("end_turn", None)),
        (
            ScriptedLLM([CALLS], finish_reason="length"),
            {"tools": TOOLS, "max_tokens": len(CALLS)},
            ("max_tokens", None),
        ),
    ],
)
async def test_a_message_says_why_it_stopped(llm: FakeLLM, body: dict[str, Any], stop: Any) -> None:
    for ask in (whole, streamed):
        answer = await ask(llm, **body)
        assert (answer.stop_reason, answer.stop_sequence) == stop


async def test_the_parameters_reach_the_engine() -> None:
    llm = FakeLLM()
    await whole(llm, max_tokens=7, temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["a", "b"])
    (params,) = llm.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.25, 3)
    assert params.stop == ["a", "b"]


async def test_a_form_reaches_the_engine() -> None:
    llm, schema = FakeLLM(), {"type": "object", "properties": {"a": {"type": "integer"}}}
    await whole(llm, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert llm.params[0].structured_outputs is not None
    assert llm.params[0].structured_outputs.json == schema  # type: ignore[union-attr]


async def test_at_most_one_call_without_parallel_calls() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    for ask in (whole, streamed):
        answer = await ask(ScriptedLLM([SCRIPT]), tools=TOOLS, tool_choice=choice)
        assert [block.name for block in answer.content if block.type == "tool_use"] == ["Bash"]


async def test_an_input_keeps_the_numbers_that_the_model_wrote() -> None:
    number = 10**30
    for ask in (whole, streamed):
        (block,) = (await ask(ScriptedLLM([call("Bash", f'{{"n":{number}}}')]), tools=TOOLS)).content
        assert block.type == "tool_use"
        assert str(number) in json.dumps(block.input)


@pytest.mark.parametrize("written", ["[1, 2]", "ls -l", '"ls"', '{"a": NaN}', "{"])
async def test_an_input_that_is_no_object_is_put_into_one(written: str) -> None:
    answer = call("Bash", json.dumps(written))
    for ask in (whole, streamed):
        (block,) = (await ask(ScriptedLLM(list(answer)), tools=TOOLS)).content
        assert block.type == "tool_use"
        assert block.input == {"arguments": written}


async def test_an_answer_can_be_sent_back_with_what_the_tools_returned() -> None:
    """suhaibbinyounis/github-copilot-api-vscode#79, ggml-org/llama.cpp#18551"""
    llm = ScriptedLLM([SCRIPT])
    for ask in (whole, streamed):
        answer = await ask(llm, tools=TOOLS)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": content}
            for block, content in zip(
                answer.content[2:], ("42", [{"type": "text", "text": "43"}]), strict=True
            )
            if block.type == "tool_use"
        ]
        history = [*HI, answer.to_param(), {"role": "user", "content": results}]
        await whole(llm, messages=history, tools=TOOLS)
        assert bytes(llm.prompts[-1]).decode() == (
            "<user>hi<assistant>Let me.<tool>42<tool>43<assistant>[tools=Bash,Read]"
        )


async def test_reasoning_that_is_not_shown_comes_back_all_the_same() -> None:
    llm = ScriptedLLM(["<think>Hm é.", "</think>", "Yes"], reads=("enable_thinking",))
    thinking = {"type": "adaptive", "display": "omitted"}
    assert "content_block_delta thinking_delta" not in kinds(await raw_events(llm, thinking=thinking))
    for ask in (whole, streamed):
        answer = await ask(llm, thinking=thinking)
        assert answer.content[0].to_dict() == SCRIPT_SAYS[0] | {"thinking": ""}
        history = [*HI, {"role": "assistant", "content": answer.to_dict()["content"]}, *HI]
        request = MessagesRequest.model_validate({"max_tokens": 9, "messages": history})
        assert chat_request(request, None).messages[1] == {
            "role": "assistant",
            "content": "Yes",
            "reasoning_content": "Hm é.",
        }


async def test_a_stream_with_nothing_to_say_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = kinds(await raw_events(ScriptedLLM(list(CALLS)), tools=TOOLS))
    assert quiet.count("ping") == 1
    monkeypatch.setattr(route, "PING_SECONDS", 0.0)
    events = kinds(await raw_events(ScriptedLLM(list(CALLS)), tools=TOOLS))
    assert events[:3] == ["message_start", "ping", "content_block_start tool_use"]
    assert events.count("ping") == 2  # the second call is waited for, too
    assert [kind for kind in events if kind != "ping"] == [kind for kind in quiet if kind != "ping"]


async def test_the_beta_client_works_as_well() -> None:
    client = client_of(ScriptedLLM([SCRIPT]))
    answer = await client.beta.messages.create(
        **filled({"tools": TOOLS, "betas": ["context-management-2025-06-27"]})
    )
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    count = await client.beta.messages.count_tokens(model="fake/bytes", messages=HI)
    assert count.input_tokens == len("<user>hi<assistant>")


async def test_the_clients_own_runner_of_tools_works() -> None:
    """It asks the server to keep the conversation, and does without if it is told so in the right words."""
    llm, places = ScriptedLLM([call("look", '{"place":"here"}')]), []

    @anthropic.beta_async_tool
    async def look(place: str) -> str:
        """Look around."""
        places.append(place)
        return "sun"

    runner = client_of(llm).beta.messages.tool_runner(**filled({"tools": [look]}), max_iterations=3)
    assert [message.stop_reason async for message in runner] == ["tool_use"] * 3
    assert set(places) == {"here"}
    prompt = "<user>hi<assistant><tool>sun<assistant><tool>sun<assistant>[tools=look]"
    assert bytes(llm.prompts[-1]).decode() == prompt


async def test_the_clients_own_reader_of_forms_works() -> None:
    class City(BaseModel):
        name: str

    answer = await client_of(ScriptedLLM(['{"name":"Rome"}'])).messages.parse(
        **filled({}), output_format=City
    )
    assert answer.parsed_output == City(name="Rome")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"system": "You are."},
        {"system": [{"type": "text", "text": "You"}, {"type": "text", "text": "are."}], "tools": TOOLS},
        {"messages": [*HI, {"role": "assistant", "content": "An"}]},
    ],
)
async def test_the_tokens_counted_are_those_of_the_prompt(body: dict[str, Any]) -> None:
    llm = ScriptedLLM(["x"])
    answer = await whole(llm, **body)
    counted = await client_of(llm).messages.count_tokens(**{"model": "fake/bytes", "messages": HI} | body)
    assert counted.input_tokens == answer.usage.input_tokens == len(llm.prompts[0])
    assert len(llm.prompts) == 1, "counting computes nothing"


async def test_a_request_of_claude_codes_shape_is_answered() -> None:
    """What it sends: caches marked everywhere, thinking, its own labels, and a billing line in front."""
    ephemeral = {"type": "ephemeral", "ttl": "1h"}
    llm = ScriptedLLM(list(SCRIPT), reads=("tools", "enable_thinking"))
    prompts = []
    for hash_of_request in ("eb6c6", "74943"):
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1.107.3d9; cc_entrypoint=cli; cch={hash_of_request};"
        )
        answer = await streamed(
            llm,
            system=[
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are.", "cache_control": ephemeral},
            ],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": ephemeral}]}
            ],
            tools=[TOOLS[0], TOOLS[1] | {"cache_control": ephemeral, "eager_input_streaming": True}],
            thinking={"type": "adaptive", "display": "summarized"},
            output_config={"effort": "medium"},
            metadata={"user_id": "someone"},
            extra_headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b-2026-01-01"},
            extra_body={
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "diagnostics": {"previous_message_id": "msg_1"},
            },
        )
        assert answer.stop_reason == "tool_use"
        prompts.append(bytes(llm.prompts[-1]).decode())
    assert prompts[0] == prompts[1]
    assert prompts[0] == "<system>You are.<user>hi<assistant>[enable_thinking=True][tools=Bash,Read]"


async def test_reports_of_claude_codes_own_are_taken() -> None:
    async with http_of(FakeLLM()) as http:
        assert (await http.post("/api/event_logging/batch", json={"events": []})).status_code == 204


async def test_a_client_that_leaves_ends_its_request() -> None:
    llm = FakeLLM(step_time=0.01)
    async with client_of(llm).messages.stream(**filled({})) as stream:
        async for _ in stream:
            break
    for _ in range(100):
        if not llm.active:
            break
        await asyncio.sleep(0.01)
    assert not llm.active


async def test_models_are_listed_for_both_clients() -> None:
    client = client_of(FakeLLM(), served_model_names=["first", "org/second"])
    listed = [model async for model in client.models.list()]
    assert [model.id for model in listed] == ["first", "org/second"]
    one = await client.models.retrieve("first")
    assert (one.type, one.display_name, one.lifecycle) == ("model", "first", "active")
    assert one.max_input_tokens == MAX_MODEL_LEN
    assert one.created_at.tzinfo is not None
