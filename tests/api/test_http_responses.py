"""``/v1/responses``: what is answered, whole and as events, read by the official ``openai`` client."""

import json
from typing import Any

import httpx
import openai
import pytest
from fake_llm import ANSWER, FakeLLM
from responses_client import client_of, client_on, said, stream, valid, whole
from scripted_llm import HERMES, ScriptedLLM

from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.text.answer_format import AnswerFormat

TEXT = "0" + ANSWER[1:]  # as FakeLLM writes its first answer


def tool(tool_name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": tool_name, "parameters": {"type": "object"}, **more}


TOOLS: list[Any] = [tool("f"), tool("g")]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name":"{name}","arguments":{arguments}}}\n</tool_call>'


SCRIPT = "<think>\nHm é.\n</think>\n\nLet me.\n" + call("f", '{"a":1, "b":"x y"}') + "\n" + call("g", "{}")


def prompt(llm: FakeLLM) -> str:
    return bytes(llm.prompts[-1]).decode()


async def test_a_text_is_answered() -> None:
    llm = FakeLLM()
    answer = await whole(llm)
    assert prompt(llm) == "<user>hi<assistant>"
    assert (answer.status, answer.output_text) == ("completed", TEXT)
    assert answer.completed_at is not None
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(prompt(llm))
    assert answer.usage.output_tokens == len(TEXT)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_an_answer_has_reasoning_text_and_calls() -> None:
    answer = await whole(ScriptedLLM([SCRIPT]), tools=TOOLS)
    assert said(answer) == [
        ("reasoning", "completed", "Hm é."),
        ("message", "completed", "Let me."),
        ("function_call", "completed", "f", '{"a": 1, "b": "x y"}'),
        ("function_call", "completed", "g", "{}"),
    ]
    assert answer.output_text == "Let me."
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len("\nHm é.\n".encode())


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_a_stream_says_the_same_wherever_it_is_cut(summary: str | None) -> None:
    body = {"tools": TOOLS, "reasoning": {"summary": summary}}
    expected = said(await whole(ScriptedLLM([SCRIPT]), **body))
    assert len(expected) == 4
    cuts = [list(SCRIPT), *([SCRIPT[:cut], SCRIPT[cut:]] for cut in range(1, len(SCRIPT), 7))]
    for pieces in cuts:
        events = await stream(ScriptedLLM(pieces), **body)
        assert said(events[-1].response) == said(await whole(ScriptedLLM(pieces), **body)) == expected


async def test_the_clients_own_accumulator_reads_a_stream() -> None:
    own = client_of(ScriptedLLM(list(SCRIPT)))
    async with own.responses.stream(model="fake/bytes", input="hi", tools=TOOLS) as events:
        kinds = {event.type async for event in events}
        final = await events.get_final_response()
    assert final.output_text == "Let me."
    assert kinds == {
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    }


async def test_events_are_named_and_nothing_follows_the_last() -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(FakeLLM())), base_url="http://server")
    response = await http.post("/v1/responses", json={"input": "hi", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert blocks[-1].startswith("event: response.completed\n")


async def test_reasoning_is_a_summary_for_those_who_want_one() -> None:
    llm = ScriptedLLM(["<think>Hm.</think>Yes"])
    (plain, _), (summed, _) = [
        (await whole(llm, reasoning=options)).output
        for options in (None, {"summary": "auto", "generate_summary": None})
    ]
    assert (plain.type, summed.type) == ("reasoning", "reasoning")
    assert plain.summary == []
    assert [part.text for part in plain.content or []] == ["Hm."]
    assert [part.text for part in summed.summary] == ["Hm."]
    assert plain.encrypted_content is summed.encrypted_content is None
    assert not summed.content


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    answer = await whole(FakeLLM(), max_output_tokens=5)
    assert (answer.status, answer.completed_at) == ("incomplete", None)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert said(answer) == [("message", "incomplete", TEXT[:5])]
    events = await stream(FakeLLM(), max_output_tokens=5)
    assert events[-1].type == "response.incomplete"
    assert said(events[-1].response) == said(answer)
    # What was whole before the cut is whole.
    script = ["<think>Hm.</think>", call("f", "{}")]
    answer = await whole(ScriptedLLM(script, finish_reason="length"), tools=TOOLS)
    assert [told[1] for told in said(answer)] == ["completed", "completed"]
    assert answer.status == "incomplete"


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    for text in ("", "<think>\n</think>\n"):
        llm = ScriptedLLM([text])
        assert said(await whole(llm)) == [("message", "completed", "")]
        assert said((await stream(llm))[-1].response) == [("message", "completed", "")]


async def test_at_most_one_call_without_parallel_calls() -> None:
    for ask in (whole, stream):
        told = await ask(ScriptedLLM(list(SCRIPT)), tools=TOOLS, parallel_tool_calls=False)
        response = told[-1].response if isinstance(told, list) else told
        assert [item[2] for item in said(response) if item[0] == "function_call"] == ["f"]
        assert response.parallel_tool_calls is False


async def test_the_tools_reach_the_template_as_the_choice_allows() -> None:
    llm = ScriptedLLM([call("f", "{}")])
    for choice, shown in (
        ("auto", "[tools=f,g]"),
        ("none", ""),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            "[tools=g]",
        ),
    ):
        answer = await whole(llm, tools=TOOLS, tool_choice=choice)
        assert prompt(llm) == "<user>hi<assistant>" + shown
        assert bool(answer.output_text) == (choice != "auto")


async def test_tools_of_other_kinds_are_left_out_and_the_response_says_so() -> None:
    """What coding agents offer: tools that OpenAI's servers run, and groups of tools."""
    others: list[Any] = [
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "agents", "description": "d", "tools": [tool("h")]},
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch"},
    ]
    llm = ScriptedLLM(["ok"])
    answer = await whole(llm, tools=[others[0], TOOLS[0], *others[1:]], tool_choice="auto")
    assert prompt(llm).endswith("[tools=f]")
    assert [t.type for t in answer.tools] == ["function"]
    assert (await whole(llm, tools=others, tool_choice="auto")).tools == []
    assert prompt(llm) == "<user>hi<assistant>"


async def test_instructions_and_what_follows_of_their_kind_are_one_message() -> None:
    llm = FakeLLM()
    messages = [
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "system", "content": "c"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "d"}, {"type": "input_text", "text": "e"}],
        },
        {"role": "developer", "content": "f"},
    ]
    answer = await whole(llm, instructions="a", input=messages)
    assert prompt(llm) == "<system>a\n\nb\n\nc<user>de<system>f<assistant>"
    assert answer.instructions == "a"


async def test_the_response_repeats_the_settings() -> None:
    schema = {"type": "object", "properties": {}}
    settings: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 30,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
        "temperature": 0.5,
        "top_p": 0.25,
        "top_logprobs": 2,
        "tool_choice": "none",
        "tools": [tool("f", strict=False, description="d")],
        "truncation": "disabled",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        "background": False,
    }
    more = {"include": ["message.output_text.logprobs"], "service_tier": "auto", "store": False}
    llm = LogprobsLLM(["{}"])
    response = (await whole(llm, **settings, **more)).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    expected = {**settings, "text": {**settings["text"], "verbosity": "medium"}, "service_tier": "default"}
    assert {name: response[name] for name in expected} == expected
    plain = (await whole(FakeLLM(generation_config={"temperature": 0.6}))).model_dump(mode="json")
    assert (plain["temperature"], plain["top_p"], plain["tools"]) == (0.6, 1.0, [])
    assert (plain["tool_choice"], plain["truncation"]) == ("auto", "disabled")
    assert plain["text"]["format"] == {"type": "text"}


async def test_the_settings_reach_the_engine() -> None:
    llm = FakeLLM()
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    extra = {"seed": 7, "top_k": 5, "min_p": 0.1, "stop": ["x"], "ignore_eos": True}
    await whole(llm, temperature=0.5, top_p=0.25, max_output_tokens=9, text=text, extra_body=extra)
    params = llm.params[-1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 9)
    assert (params.seed, params.top_k, params.min_p, params.ignore_eos) == (7, 5, 0.1, True)
    assert params.structured_outputs is not None
    assert params.structured_outputs.json == {"type": "object"}
    await whole(llm, text={"format": {"type": "json_object"}})
    assert llm.params[-1].structured_outputs is not None
    assert llm.params[-1].structured_outputs.json_object
    await whole(llm, text={"format": {"type": "text"}, "verbosity": "medium"})
    assert llm.params[-1].structured_outputs is None
    knows = ScriptedLLM(["x"], reads=("reasoning_effort",))
    await whole(knows, reasoning={"effort": "low"})
    assert prompt(knows).endswith("[reasoning_effort=low]")


class LogprobsLLM(ScriptedLLM):
    """With log-probabilities: every byte is as likely as it is."""

    def _shown(self, output: Any, kind: str) -> Any:
        from dataclasses import replace

        from fake_llm import _entries

        shown = super()._shown(output, kind)
        answers = [
            replace(answer, logprobs=[_entries(token, 3) for token in answer.token_ids])
            for answer in shown.outputs
        ]
        return replace(shown, outputs=answers)


@pytest.mark.parametrize("pieces", [["<think>", "Hm", "</think>", "\n", "Yes ", "</b", "> i", "."], None])
async def test_logprobs_are_those_of_the_text(pieces: list[str] | None) -> None:
    script = "<think>Hm</think>\nYes </b> i."
    llm = LogprobsLLM(pieces or list(script))
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = await whole(llm, **options)
    message = answer.output[-1]
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.text == "Yes </b> i."
    tokens = part.logprobs or []
    assert "".join(token.token for token in tokens) == part.text
    assert all(
        len(token.top_logprobs) == 2 and bytes(token.bytes).decode() == token.token for token in tokens
    )
    events = await stream(llm, **options)
    assert said(events[-1].response) == said(answer)
    assert (await whole(llm)).output[-1].content[0].logprobs == []  # type: ignore[union-attr]


async def test_an_engine_that_dies_fails_the_stream_and_stores_nothing() -> None:
    llm = FakeLLM(fail_after=4)
    app = create_app(llm)
    events = await stream(client_on(app))
    *_, error, last = events
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert (error.type, error.code, error.param) == ("error", "engine_dead", None)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error"
    assert "scripted failure" in last.response.error.message
    assert said(last.response) == [("message", "incomplete", TEXT[:4].rstrip())]
    assert len(app.state.response_store) == 0
    with pytest.raises(openai.InternalServerError):
        await whole(FakeLLM(fail_after=4))


async def test_a_server_that_stops_says_so() -> None:
    llm = FakeLLM()
    llm.ending = True
    app = create_app(llm)
    events = await stream(client_on(app))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the server is stopping"
    answer = await whole(client_on(app))
    assert (answer.status, said(answer)) == ("failed", [("message", "incomplete", "0")])
    assert len(app.state.response_store) == 0


def item(**content: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}, content]}


PICTURE = {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AAAA"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": ""}, "input", "not empty"),
    ({"input": []}, "input", "not empty"),
    ({"input": 5}, "input", "a text or a list"),
    ({"input": ["a"]}, "input", r"input\[0\] must be an object"),
    (item(role="user", content=[PICTURE]), "input", r"input\[1\]\.content\[0\] has type 'input_image'"),
    (item(role="user", content=[{"type": "input_file", "file_id": "f"}]), "input", "'input_file'.*text only"),
    (item(role="user", content=5), "input", r"input\[1\]\.content must be a string or a list"),
    (item(role="king", content="a"), "input", r"input\[1\]\.role must be one of"),
    (item(type="local_shell_call", id="x"), "input", r"input\[1\] has type 'local_shell_call'"),
    (item(type="item_reference", id="msg_1"), "input", r"input\[1\] refers to 'msg_1'"),
    (
        item(type="function_call", call_id="c", name="f", arguments="{"),
        "input",
        r"input\[1\]\.arguments must",
    ),
    (item(type="function_call", call_id="c", arguments="{}"), "input", r"input\[1\]\.name must"),
    (item(type="function_call_output", call_id="c", output=[PICTURE]), "input", r"\.output\[0\] has type"),
    ({"instructions": 5}, "instructions", "string"),
    ({"background": True}, "background", "leave it out"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "send instructions and input"),
    ({"truncation": "auto"}, "truncation", "'?fewer items"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "fewer items"),
    ({"moderation": {"model": "m"}}, "moderation", "leave it out"),
    ({"extra_body": {"n": 2}}, "n", "one answer"),
    ({"extra_body": {"return_token_ids": True}}, "return_token_ids", "no place for them"),
    ({"extra_body": {"max_tokens": 2}}, "max_tokens", "max_output_tokens"),
    ({"extra_body": {"messages": []}}, "messages", "send input"),
    ({"extra_body": {"response_format": {"type": "text"}}}, "response_format", "text.format"),
    ({"extra_body": {"seed": "a"}}, "seed", "valid integer"),
    ({"extra_body": {"colour": 1}}, "colour", "not a known field"),
    ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs", "must not set"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"top_logprobs": 3}, "top_logprobs", "needs include"),
    ({"include": ["everything"]}, "include", "'everything' is not known"),
    ({"metadata": {"a": "b" * 600}}, "metadata", "512"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format", "text.format: its type must be"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "under 'schema'"),
    ({"text": {"verbosity": "high"}}, "text", "text.verbosity"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "does not know it"),
    ({"reasoning": {"mode": "pro"}}, "reasoning", "reasoning.mode"),
    ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options", "obfuscation"),
    ({"tools": [tool("f"), tool("f")]}, "tools", r"tools\[1\]\.name 'f' is there twice"),
    ({"tools": [{"type": "local_shell"}, tool("")]}, "tools", r"tools\[1\]\.name must be"),
    ({"tools": [tool("f", parameters=[])]}, "tools", r"tools\[0\]\.parameters must be a JSON schema"),
    ({"tools": [tool("f", name=[1])]}, "tools", r"tools\[0\]\.name must be"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "must be"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "of functions"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "z"}}, "tool_choice", "'z', which is not"),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "z"}],
            },
        },
        "tool_choice",
        "'z', which is not",
    ),
    ({"input": "long " * 100}, "input", "the prompt is too long: it has"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD, ids=[f"{b}"[:50] for b, _, _ in BAD])
async def test_what_cannot_be_done_is_refused_by_the_clients_own_name(
    body: dict[str, Any], param: str, message: str
) -> None:
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match=message) as error:
            await client_of(ScriptedLLM(["x"])).responses.create(
                **({"model": "fake/bytes", "input": "hi"} | more | body)
            )
        assert error.value.param == param


async def test_what_the_model_cannot_do_is_refused() -> None:
    for llm, message in (
        (ScriptedLLM(["x"], reads=()), "no place for them"),
        (ScriptedLLM(["x"], answer_format=AnswerFormat()), "not known here"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as error:
            await whole(llm, tools=TOOLS)
        assert error.value.param == "tools"
    with pytest.raises(openai.NotFoundError) as missing:
        await whole(ScriptedLLM(["x"], answer_format=HERMES), model="gpt-5")
    assert missing.value.code == "model_not_found"
    assert valid(missing.value) is missing.value
