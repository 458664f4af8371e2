"""What a request to ``/v1/messages`` means: the ``ChatRequest`` that it becomes."""

from typing import Any

import pytest
from fake_llm import ByteTokenizer
from scripted_llm import HERMES

from mlx_paged_attention.api.server.messages.request import MessagesRequest
from mlx_paged_attention.api.server.messages.translation import chat_request, clients_words, sign
from mlx_paged_attention.api.server.protocol import ChatRequest
from mlx_paged_attention.errors import InvalidRequestError, RequestTooLongError

HI: list[Any] = [{"role": "user", "content": "hi"}]
THINKS = ByteTokenizer(HERMES, ("tools", "enable_thinking"))
BILLING = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"


def chat(tokenizer: Any = THINKS, **body: Any) -> ChatRequest:
    request = MessagesRequest.model_validate({"max_tokens": 5, "messages": HI} | body)
    return chat_request(request, tokenizer)


def messages(*turns: tuple[str, Any], **body: Any) -> list[dict[str, Any]]:
    sent = [{"role": role, "content": content} for role, content in turns]
    return chat(messages=sent or HI, **body).messages


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def use(call_id: str, name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content: Any = "", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def test_nothing_is_said_that_was_not_asked() -> None:
    said = chat().model_dump(exclude_none=True)
    assert said == {"messages": HI, "max_tokens": 5}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("You are.", "You are."),
        ([text("You", cache_control={"type": "ephemeral"}), text("are.")], "You\nare."),
        (f"{BILLING}\nYou are.", "You are."),
        ([text(BILLING), text("You are.")], "You are."),
        ([text(f"{BILLING}\n\nYou are.")], "\nYou are."),
        ("Send an x-anthropic-billing-header: x", "Send an x-anthropic-billing-header: x"),
        (f"One\n{BILLING}", f"One\n{BILLING}"),
    ],
)
def test_the_system_text_comes_first_without_a_billing_line(system: Any, expected: str) -> None:
    assert messages(system=system) == [{"role": "system", "content": expected}, *HI]


@pytest.mark.parametrize("system", ["", [], [text(BILLING)], BILLING])
def test_no_system_text_is_no_system_message(system: Any) -> None:
    assert messages(system=system) == HI


def test_instructions_among_the_messages_are_part_of_the_turn_they_stand_in() -> None:
    assert messages(("system", "Be brief."), ("user", "hi"), system="You are.") == [
        {"role": "system", "content": "You are.\nBe brief."},
        *HI,
    ]
    assert messages(("user", "hi"), ("system", "Be brief."), ("assistant", "yes"), ("user", "so")) == [
        {"role": "user", "content": "hi\n<system-reminder>\nBe brief.\n</system-reminder>"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "so"},
    ]


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    assert messages(
        ("user", "a"), ("user", [text("b"), text("c")]), ("assistant", "d"), ("assistant", "e")
    ) == [
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d\ne"},
    ]


def test_a_turn_of_the_models_has_reasoning_text_and_calls() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "of another server"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "thinking", "thinking": "", "signature": "of another server"},
        {"type": "thinking", "thinking": "", "signature": sign("Só.")},
        text("Let me."),
        use("1", a=1) | {"caller": {"type": "direct"}},
    ]
    turns = messages(("user", "hi"), ("assistant", blocks), ("user", [result("1", "42")]))
    assert turns[1] == {
        "role": "assistant",
        "content": "Let me.",
        "reasoning_content": "Hm.\nSó.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }


def test_what_tools_return_and_what_users_say_keep_their_order() -> None:
    turns = messages(
        ("user", "hi"),
        ("assistant", [use("1"), use("2", "g")]),
        (
            "user",
            [result("2", [text("a"), text("b")]), result("1", "no", is_error=True), text("c"), text("d")],
        ),
    )
    assert turns[2:] == [
        {"role": "tool", "tool_call_id": "2", "name": "g", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "Error: no"},
        {"role": "user", "content": "c\nd"},
    ]
    assert messages(("user", "hi"), ("assistant", [use("1")]), ("user", [{**result("1"), "content": None}]))[
        2
    ] == {
        "role": "tool",
        "tool_call_id": "1",
        "name": "f",
        "content": "",
    }


def test_an_empty_turn_is_still_a_turn() -> None:
    assert messages(("user", []), ("assistant", []), ("user", "")) == [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_an_answer_that_was_begun_is_continued() -> None:
    begun = [*HI, {"role": "assistant", "content": "The best answer is ("}]
    assert chat(messages=begun).continue_final_message is True
    assert chat(messages=[*begun, *HI]).continue_final_message is None


def test_tools_are_functions() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"name": "f", "description": "Does.", "input_schema": schema, "type": "custom", "strict": True}
    assert chat(tools=[tool, {"name": "g", "input_schema": {}, "defer_loading": False}]).tools == [
        {
            "type": "function",
            "function": {"name": "f", "description": "Does.", "parameters": schema, "strict": True},
        },
        {"type": "function", "function": {"name": "g", "parameters": {}}},
    ]


def test_examples_of_a_tools_input_are_shown_in_its_schema() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "input_examples": [{"a": 1}]}
    (shown,) = chat(tools=[tool]).tools or []
    assert shown["function"]["parameters"] == {"type": "object", "examples": [{"a": 1}]}


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "none"}, "none", None),
        ({"type": "any"}, "required", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "auto", "disable_parallel_tool_use": False}, "auto", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
    ],
)
def test_the_choice_of_tools_is_translated(choice: Any, expected: Any, parallel: bool | None) -> None:
    body = chat(tools=[{"name": "f", "input_schema": {}}], tool_choice=choice)
    assert (body.tool_choice, body.parallel_tool_calls) == (expected, parallel)


@pytest.mark.parametrize(
    ("thinking", "switch"),
    [
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive", "display": "omitted"}, True),
    ],
)
def test_thinking_is_switched_as_the_template_does_it(thinking: Any, switch: bool) -> None:
    assert chat(thinking=thinking).chat_template_kwargs == {"enable_thinking": switch}
    other = ByteTokenizer(HERMES, ("thinking",))
    assert chat(other, thinking=thinking).chat_template_kwargs == {"thinking": switch}


def test_a_model_without_a_switch_may_not_think_unless_its_answer_has_begun() -> None:
    begun = [*HI, {"role": "assistant", "content": "The best answer is ("}]
    plain, off = ByteTokenizer(HERMES), {"type": "disabled"}
    assert chat(plain, thinking=off).thinking_token_budget == 0
    assert chat(plain, thinking=off, messages=begun).thinking_token_budget is None


@pytest.mark.parametrize(
    "thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}, None]
)
def test_a_model_that_does_not_think_needs_no_telling(thinking: Any) -> None:
    assert chat(ByteTokenizer(), thinking=thinking) == chat()


def test_effort_is_for_templates_that_know_it() -> None:
    knows = ByteTokenizer(HERMES, ("reasoning_effort",))
    efforts = [
        chat(knows, output_config={"effort": effort}).reasoning_effort for effort in ("low", "high", "max")
    ]
    assert efforts == ["low", "high", "high"]
    assert chat(output_config={"effort": "low"}) == chat()


def test_fields_that_change_no_answer_may_come_along() -> None:
    extra = {
        "metadata": {"user_id": "x"},
        "workspace_id": "w",
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "speed": "standard",
        "mcp_servers": [],
        "container": None,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    assert chat(**extra) == chat()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidRequestError("stop must be short", "stop"), "stop_sequences must be short"),
        (InvalidRequestError("structured_outputs: no", "structured_outputs"), "output_config.format: no"),
        (
            InvalidRequestError("it cannot be", "thinking_token_budget"),
            "thinking.budget_tokens: it cannot be",
        ),
        (InvalidRequestError("top_k must be", "top_k"), "top_k must be"),
        (InvalidRequestError("tools[0].function.parameters: no", "tools"), "tools[0].input_schema: no"),
        (InvalidRequestError("tools[1].function.name 'f' is", "tools"), "tools[1].name 'f' is"),
        (InvalidRequestError("the template refuses", "messages"), "messages: the template refuses"),
        (InvalidRequestError("no reason to stop"), "no reason to stop"),
        (RequestTooLongError("it has 9 tokens", "prompt"), "it has 9 tokens"),
        (RequestTooLongError("9 tokens", "max_tokens"), "9 tokens"),
    ],
)
def test_errors_name_what_the_client_has_sent(error: InvalidRequestError, message: str) -> None:
    with pytest.raises(type(error)) as raised, clients_words():
        raise error
    assert str(raised.value) == message
