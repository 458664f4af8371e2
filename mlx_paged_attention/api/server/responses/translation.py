"""Translation: a request as the chat request that it is, and errors about that in this API's words."""

import logging
import re
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from mlx_paged_attention.api.server.protocol import ChatRequest, GenerationRequest
from mlx_paged_attention.api.server.responses.items import Item, Message, to_messages
from mlx_paged_attention.api.server.responses.request import LOGPROBS, UNSUPPORTED, ResponsesRequest
from mlx_paged_attention.errors import InvalidRequestError

logger = logging.getLogger(__name__)

# Fields that have the same name there.
_SAME = tuple(
    name
    for name in (*GenerationRequest.model_fields, "parallel_tool_calls", "chat_template_kwargs")
    if name not in {"stream", "stream_options", *UNSUPPORTED}
)

_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")


class Translation:
    """Of one request.

    Args:
        history: the items of the conversation that it goes on from.
        items: those of its input.

    Attributes:
        tools: those that are functions. Tools that a server would have to run, or whose calls are no calls of
            functions, are not offered to the model.
        chat: the chat request.

    Raises:
        InvalidRequestError: something in it cannot be understood or done.
    """

    def __init__(self, body: ResponsesRequest, history: list[Item], items: list[Item]) -> None:
        given = body.tools or []
        self.tools = [tool for tool in given if tool.get("type") == "function"]
        if dropped := sorted({str(tool.get("type")) for tool in given} - {"function"}):
            logger.info("not offered to the model: tools of the types %.200s", dropped)
        # Their places among those that were given.
        self._places = [index for index, tool in enumerate(given) if tool.get("type") == "function"]
        fields = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
        fields["messages"] = _messages(body.instructions, to_messages(history, items))
        if self.tools:
            fields["tools"] = [_function(tool) for tool in self.tools]
        if (choice := _tool_choice(body.tool_choice)) != "auto":
            fields["tool_choice"] = choice
        if body.max_output_tokens is not None:
            fields["max_completion_tokens"] = body.max_output_tokens
        if body.includes(LOGPROBS):
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
        if body.text is not None and body.text.format is not None:
            fields["response_format"] = _response_format(body.text.format)
        if body.reasoning is not None and body.reasoning.effort is not None:
            fields["reasoning_effort"] = body.reasoning.effort
        try:
            self.chat = ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None

    def reworded(self, error: InvalidRequestError) -> InvalidRequestError:
        """The error, with the names that the client knows."""
        names = _NAMES if self.chat.structured_outputs else _NAMES | {"structured_outputs": "text.format"}
        # "prompt" is also a word of plain English.
        in_text = re.compile(rf"\b({'|'.join(name for name in names if name != 'prompt')})\b")
        message = re.sub(r"\Atools\[(\d+)\](\.function)?", self._tool, str(error))
        error.args = (in_text.sub(lambda found: names[found[0]], message),)
        error.param = names.get(error.param or "", error.param)
        return error

    def _tool(self, found: re.Match[str]) -> str:
        return f"tools[{self._places[int(found[1])]}]"


def _messages(instructions: str | None, messages: list[Message]) -> list[Message]:
    """With the instructions, and what follows of their kind, as one: many templates know no second one."""
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    count = next(
        (n for n, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages)
    )
    if count < 2:
        return messages
    first = {"role": "system", "content": "\n\n".join(message["content"] for message in messages[:count])}
    return [first, *messages[count:]]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {key: tool[key] for key in _FUNCTION_KEYS if key in tool}}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    """The same with names one level further down; of allowed tools those that are functions."""
    if choice in (None, "auto", "none", "required"):
        return choice or "auto"
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "function":
        return _named(choice)
    if isinstance(choice, dict) and kind == "allowed_tools" and choice.get("mode") in ("auto", "required"):
        tools = choice.get("tools")
        if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
            allowed = [_named(tool) for tool in tools if tool.get("type") == "function"]
            if not allowed and choice["mode"] == "auto":
                return "none"
            return {"type": kind, kind: {"mode": choice["mode"], "tools": allowed}}
    raise InvalidRequestError(
        "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'name': ...} or "
        "{'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': [...]}, of functions",
        "tool_choice",
    )


def _named(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": str(function.get("name"))}}


def _response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    """The same with a schema's name and schema one level further down."""
    if text_format.get("type") != "json_schema":
        return text_format
    described = {key: value for key, value in text_format.items() if key != "type"}
    return {"type": "json_schema", "json_schema": described}
