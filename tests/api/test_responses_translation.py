"""A request of the Responses API as the chat request that it is."""

from typing import Any

import pytest

from mlx_paged_attention.api.server.protocol import ChatRequest
from mlx_paged_attention.api.server.responses.items import item_list
from mlx_paged_attention.api.server.responses.request import ResponsesRequest
from mlx_paged_attention.api.server.responses.sealed_reasoning import seal, unseal
from mlx_paged_attention.api.server.responses.translation import Translation
from mlx_paged_attention.errors import InvalidRequestError, RequestTooLongError

F = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
G = {"type": "function", "name": "g", "parameters": {}}


def translation(**body: Any) -> Translation:
    request = ResponsesRequest.model_validate({"input": "hi", **body})
    return Translation(request, [], item_list(request.input, lambda item_id: None))


def chat(**body: Any) -> dict[str, Any]:
    return translation(**body).chat.model_dump(exclude_unset=True)


def test_a_text_is_a_users_message() -> None:
    assert chat() == {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", None),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "g"}, {"type": "function", "function": {"name": "g"}}),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "none"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}, G]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "g"}}],
                },
            },
        ),
    ],
)
def test_tools_and_their_choice(choice: Any, expected: Any) -> None:
    asked = chat(tools=[F, {"type": "web_search"}, G], tool_choice=choice)
    assert asked.get("tool_choice") == expected
    assert asked["tools"] == [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        for tool in (F, G)
    ]


def test_other_names_and_the_same() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    options: dict[str, Any] = {"temperature": 0.5, "seed": 3, "logit_bias": {"5": 1.0}, "guided_regex": "a"}
    assert chat(
        model="m",
        max_output_tokens=5,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": form},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": False},
        **options,
    ) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 5,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "logprobs": True,
        "top_logprobs": 2,
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        **options,
        "logit_bias": {5: 1.0},
    }


def test_every_field_of_chat_has_a_place_or_is_refused() -> None:
    translated = {"messages", "tools", "tool_choice", "max_completion_tokens", "logprobs", "response_format"}
    translated |= {"reasoning_effort", "top_logprobs", "parallel_tool_calls", "chat_template_kwargs"}
    for name in ChatRequest.model_fields.keys() - translated - {"stream_options"}:
        values = ("a", 1, 0.5, True, ["a"], {"a": 1}, [1], {"1": 1})
        accepted, errors = False, []
        for value in values:
            try:
                translation(**{name: value})
                accepted = True
            except ValueError as error:
                errors.append(str(error))
        assert accepted or name in errors[0], name
    with pytest.raises(ValueError, match="not permitted"):
        translation(add_generation_prompt=False)


def test_errors_have_the_names_that_the_client_knows() -> None:
    names = translation(tools=[{"type": "web_search"}, F, G])
    error = RequestTooLongError("the prompt is long; lower max_tokens (messages[0])", "max_tokens")
    assert names.reworded(error) is error
    assert (str(error), error.param) == (
        "the prompt is long; lower max_output_tokens (input[0])",
        "max_output_tokens",
    )
    assert str(names.reworded(InvalidRequestError("tools[1].function.name", "tools"))) == "tools[2].name"
    assert (
        str(names.reworded(InvalidRequestError("'tools[9]' is not in tools"))) == "'tools[9]' is not in tools"
    )
    assert names.reworded(InvalidRequestError("no", "prompt")).param == "input"
    assert names.reworded(InvalidRequestError("no")).param is None


def test_sealed_reasoning_is_read_here_only() -> None:
    for text in ("", "Hm é.", "a\nb" * 1000):
        assert unseal(seal(text)) == text
    for foreign in ("", "gAAAAAB", "mlx-paged-1:%", "mlx-paged-1:é", "mlx-paged-1:/w==", seal("a")[:-1]):
        assert unseal(foreign) is None
