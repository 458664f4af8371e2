"""Tool calls and reasoning in ``/v1/chat/completions``, read by the official ``openai`` client."""

import json
from typing import Any

import httpx
import openai
import pytest
from fake_llm import FakeLLM
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from scripted_llm import HERMES, ScriptedLLM

from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.text.answer_format import AnswerFormat

HI: list[Any] = [{"role": "user", "content": "hi"}]


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **function}}


TOOLS: list[Any] = [tool("f"), tool("g")]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name":"{name}","arguments":{arguments}}}\n</tool_call>'


ANSWER = "<think>\nHm é.\n</think>\n\nLet me.\n" + call("f", '{"a":1, "b":"x y"}') + "\n" + call("g", "{}")


def client_of(llm: FakeLLM) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(create_app(llm), raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport, base_url="http://server")
    return openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http, max_retries=0)


async def whole(llm: FakeLLM, **body: Any) -> ChatCompletion:
    body = {"model": "fake/bytes", "messages": HI, "tools": TOOLS} | body
    answer = await client_of(llm).chat.completions.create(**body)
    assert isinstance(answer, ChatCompletion)
    return answer


async def stream(llm: FakeLLM, **body: Any) -> list[ChatCompletionChunk]:
    body = {"model": "fake/bytes", "messages": HI, "tools": TOOLS} | body
    chunks = await client_of(llm).chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **body
    )
    return [chunk async for chunk in chunks]


def joined(chunks: list[ChatCompletionChunk], index: int = 0) -> dict[str, Any]:
    """A streamed answer as clients put it together."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or []:
                assert part.function is not None
                if part.id is not None:
                    assert part.index == len(message["calls"])
                    assert part.type == "function"
                    message["calls"].append([part.function.name, ""])
                else:
                    assert part.function.name is None
                message["calls"][part.index][1] += part.function.arguments or ""
            if choice.finish_reason is not None:
                assert message["finish_reason"] is None
                message["finish_reason"] = choice.finish_reason
    return message


def as_joined(answer: ChatCompletion, index: int = 0) -> dict[str, Any]:
    choice = answer.choices[index]
    return {
        "content": choice.message.content or "",
        "reasoning": getattr(choice.message, "reasoning_content", None) or "",
        "calls": [[c.function.name, c.function.arguments] for c in choice.message.tool_calls or []],
        "finish_reason": choice.finish_reason,
    }


async def test_an_answer_has_reasoning_text_and_calls() -> None:
    answer = await whole(ScriptedLLM([ANSWER]))
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me."
    assert choice.message.reasoning_content == "Hm é."  # type: ignore[attr-defined]
    first, second = choice.message.tool_calls or []
    assert (first.type, first.function.name) == ("function", "f")
    assert json.loads(first.function.arguments) == {"a": 1, "b": "x y"}
    assert (second.function.name, second.function.arguments) == ("g", "{}")
    assert first.id != second.id


async def test_a_stream_says_the_same_wherever_it_is_cut() -> None:
    """vllm-project/vllm#48852, sgl-project/sglang#6310"""
    expected = as_joined(await whole(ScriptedLLM([ANSWER])))
    assert len(expected["calls"]) == 2
    assert joined(await stream(ScriptedLLM(list(ANSWER)))) == expected
    for cut in range(1, len(ANSWER), 7):
        pieces = [ANSWER[:cut], ANSWER[cut:]]
        assert joined(await stream(ScriptedLLM(pieces))) == expected, cut
        assert as_joined(await whole(ScriptedLLM(pieces))) == expected, cut


async def test_every_answer_of_a_request_is_read_by_itself() -> None:
    answer = await whole(ScriptedLLM(list(ANSWER)), n=2)
    chunks = await stream(ScriptedLLM(list(ANSWER)), n=2)
    for index in range(2):
        assert joined(chunks, index) == as_joined(answer, index) == as_joined(answer)
    ids = {c.id for choice in answer.choices for c in choice.message.tool_calls or []}
    assert len(ids) == 4


async def test_an_answer_of_calls_alone_has_no_content() -> None:
    answer = await whole(ScriptedLLM([call("f", "{}")]))
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("text", ['<tool_call>{"name":', call("f", "{oops}"), call("h", "{}")])
async def test_what_is_no_call_is_content(text: str) -> None:
    """ollama/ollama#17284"""
    answer = await whole(ScriptedLLM(list(text)))
    assert as_joined(answer) == {"content": text, "reasoning": "", "calls": [], "finish_reason": "stop"}
    assert answer.choices[0].message.tool_calls is None
    assert joined(await stream(ScriptedLLM(list(text)))) == as_joined(answer)


async def test_an_answer_that_is_cut_is_no_finished_tool_call() -> None:
    answer = await whole(ScriptedLLM([call("f", "{}"), " and"], finish_reason="length"))
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].message.tool_calls or []) == 1


async def test_reasoning_is_apart_without_tools_too_and_counted() -> None:
    llm = ScriptedLLM(["<think>", "abcd", "</think>", "xy"])
    answer = await whole(llm, tools=[])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("xy", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    assert answer.usage.completion_tokens == len("<think>abcd</think>xy")
    last = (await stream(llm, tools=[], n=2))[-1]
    assert last.usage is not None
    assert last.usage.completion_tokens_details is not None
    assert last.usage.completion_tokens_details.reasoning_tokens == 8


async def test_a_prompt_may_end_in_reasoning() -> None:
    llm = ScriptedLLM(["Hm.", "</think>", "Yes"])
    options = {"extra_body": {"continue_final_message": True}}
    begun = [*HI, {"role": "assistant", "content": "<think>"}]
    expected = {"content": "Yes", "reasoning": "Hm.", "calls": [], "finish_reason": "stop"}
    assert as_joined(await whole(llm, messages=begun, **options)) == expected
    # A user who writes the marker has not begun the model's reasoning.
    mine = [{"role": "user", "content": "<think>"}]
    assert as_joined(await whole(llm, messages=mine))["content"] == "Hm.</think>Yes"


async def test_a_template_may_open_the_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["Hm.", "</think>", "Yes"])
    assert llm.tokenizer is not None
    plain = llm.tokenizer.chat_token_ids
    monkeypatch.setattr(
        llm.tokenizer,
        "chat_token_ids",
        lambda messages, **options: plain(messages, **options) + list(b"<think>\n"),
    )
    assert as_joined(await whole(llm))["reasoning"] == "Hm."


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_the_tools_reach_the_template_unless_they_may_not_be_called() -> None:
    llm = ScriptedLLM([call("f", "{}")])
    for choice, prompt in (
        ("auto", "<user>hi<assistant>[tools=f,g]"),
        (allowed("auto", "g", "f"), "<user>hi<assistant>[tools=f,g]"),
        ("none", "<user>hi<assistant>"),
        (allowed("auto", "g"), "<user>hi<assistant>[tools=g]"),
    ):
        answer = await whole(llm, tool_choice=choice)
        assert bytes(llm.prompts[-1]).decode() == prompt
        assert bool(answer.choices[0].message.tool_calls) == ("tools=f" in prompt)
        assert answer.choices[0].finish_reason == ("tool_calls" if "tools=f" in prompt else "stop")
    assert answer.choices[0].message.content == call("f", "{}")


async def test_at_most_one_call_without_parallel_calls() -> None:
    answer = await whole(ScriptedLLM(list(ANSWER)), parallel_tool_calls=False)
    assert [c.function.name for c in answer.choices[0].message.tool_calls or []] == ["f"]
    assert joined(await stream(ScriptedLLM(list(ANSWER)), parallel_tool_calls=False)) == as_joined(answer)


@pytest.mark.parametrize(("parallel", "reason"), [(True, "length"), (False, "tool_calls")])
async def test_an_answer_of_one_call_is_not_cut_by_what_would_follow(parallel: bool, reason: str) -> None:
    llm = ScriptedLLM([call("f", "{}"), " and the"], finish_reason="length")
    answer = await whole(llm, parallel_tool_calls=parallel)
    assert answer.choices[0].finish_reason == reason
    assert joined(await stream(llm, parallel_tool_calls=parallel)) == as_joined(answer)


async def test_an_answer_can_be_sent_back() -> None:
    llm = ScriptedLLM([ANSWER])
    message = (await whole(llm)).choices[0].message
    history = [*HI, message.model_dump(exclude_none=True)]
    history += [{"role": "tool", "tool_call_id": c.id, "content": "42"} for c in message.tool_calls or []]
    await whole(llm, messages=history)
    assert bytes(llm.prompts[-1]).decode() == (
        "<user>hi<assistant>Let me.<tool>42<tool>42<assistant>[tools=f,g]"
    )


async def test_reasoning_effort_is_for_templates_that_know_it() -> None:
    llm = ScriptedLLM(["x"], reads=("tools", "reasoning_effort"))
    await whole(llm, reasoning_effort="low", tools=[])
    assert bytes(llm.prompts[-1]).decode() == "<user>hi<assistant>[reasoning_effort=low]"


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "max_reasoning_tokens"])
async def test_a_budget_for_the_reasoning_has_three_names(name: str) -> None:
    llm = ScriptedLLM(["x"])
    await whole(llm, extra_body={name: 0})
    assert llm.params[-1].thinking_token_budget == 0


NO_TOOLS = ScriptedLLM(["x"], reads=())
NO_FORMAT = ScriptedLLM(["x"], answer_format=AnswerFormat())
BAD: list[tuple[FakeLLM, dict[str, Any], str, str]] = [
    (NO_TOOLS, {}, "tools", "no place for them"),
    (NO_FORMAT, {}, "tools", "not known here"),
    *(
        (ScriptedLLM(["x"], answer_format=HERMES), change, param, message)
        for change, param, message in (
            (
                {"tool_choice": "required", "extra_body": {"allowed_token_ids": [1]}},
                "allowed_token_ids",
                "enforced",
            ),
            ({"tool_choice": "required", "tools": [tool("f g")]}, "tools", "letters, digits"),
            (
                {"tool_choice": {"type": "function", "function": {"name": "z"}}},
                "tool_choice",
                "'z', which is not",
            ),
            ({"tool_choice": "sometimes"}, "tool_choice", "must be"),
            ({"tool_choice": {"type": "function", "function": {"name": [1]}}}, "tool_choice", "must be"),
            ({"tool_choice": allowed("auto", "f", "z")}, "tool_choice", "'z', which is not"),
            ({"tool_choice": allowed("sometimes", "f")}, "tool_choice", "must be"),
            ({"tool_choice": allowed("required")}, "tool_choice", "must be"),
            ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be"),
            ({"tool_choice": "auto", "tools": []}, "tool_choice", "only allowed with tools"),
            ({"tools": [tool("f"), tool("f")]}, "tools", "twice"),
            ({"tools": [tool("")]}, "tools", r"tools\[0\].function.name"),
            ({"tools": [{"type": "web_search"}]}, "tools", r"tools\[0\] must be"),
            ({"tools": [tool("f", parameters=[])]}, "tools", "parameters must be a JSON schema object"),
            ({"tools": [tool("f", description=1)]}, "tools", "description must be a string"),
            ({"tools": [tool("f", strict=1)]}, "tools", "strict must be true or false"),
            (
                {"extra_body": {"thinking_budget": -1}},
                "thinking_budget",
                "thinking_budget must be .* at least 0",
            ),
            (
                {"extra_body": {"thinking_budget": 5, "max_reasoning_tokens": 5}},
                "max_reasoning_tokens",
                "names of one budget",
            ),
            (
                {"extra_body": {"thinking_budget": 5, "continue_final_message": True}},
                "thinking_budget",
                "continue_final_message",
            ),
            ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs", "tools"),
        )
    ),
]


@pytest.mark.parametrize(("llm", "change", "param", "message"), BAD)
async def test_what_cannot_be_promised_is_refused(
    llm: FakeLLM, change: dict[str, Any], param: str, message: str
) -> None:
    """ggml-org/llama.cpp#26849"""
    for ask in (whole, stream):
        with pytest.raises(openai.BadRequestError, match=message) as error:
            await ask(llm, **change)
        assert error.value.param == param
