"""Messages of a conversation: checked once, and brought into the shape that chat templates expect."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.text.nesting import MAX_DEPTH, is_nested_too_deeply

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ToolArguments(dict[str, Any]):
    """Arguments of a tool call, a mapping that prints as JSON.

    Some templates iterate over the arguments, others concatenate them as text; both find what they expect.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Checked copies of chat messages, ready for a template.

    ``content`` becomes a string: parts of type ``text`` are joined without a separator, as templates that
    iterate over parts do; ``None`` beside tool calls is ``""``. ``arguments`` of tool calls become
    :class:`ToolArguments`, ``""`` counting as no arguments. An empty ``tool_calls`` is left out. The role
    ``developer`` becomes ``system``. An assistant's reasoning, under any of the names in use, is found by
    templates under those they read.

    Raises:
        InvalidRequestError: a message is not of this shape; the message says which and why.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _error("messages", f"must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise _error("messages", "must not be empty")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def continued_text(messages: Any) -> str:
    """The text of the last message, which an answer goes on with; raises as :func:`normalize_messages`."""
    text: str = normalize_messages(messages)[-1]["content"]
    return text


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data (or of a normalised message) with ``change`` applied to every string, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        items = {change(key): map_strings(item, change) for key, item in value.items()}
        return ToolArguments(items, change(str(value))) if isinstance(value, ToolArguments) else items
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def _normalize(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _error(where, f"must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise _error(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    result = dict(message)
    if role == "developer":  # OpenAI's newer word; templates know the older one
        result["role"] = "system"
    if role == "assistant":
        result.update(_reasoning(message, where))
    calls = result.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise _error(f"{where}.tool_calls", f"belong to the assistant, not to the role {role}")
        if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
            raise _error(f"{where}.tool_calls", f"must be a list, not {type(calls).__name__}")
        result["tool_calls"] = [
            _normalize_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    result["content"] = _content(message.get("content"), f"{where}.content", optional=bool(calls))
    return result


def _reasoning(message: Mapping[str, Any], where: str) -> dict[str, str]:
    """As Hugging Face does: under the common name, and under that of gpt-oss's template."""
    for name in _REASONING_NAMES:
        text = message.get(name)
        if text is not None:
            if not isinstance(text, str):
                raise _error(f"{where}.{name}", f"must be a string, not {type(text).__name__}")
            return {"thinking": message.get("thinking") or text, "reasoning_content": text}
    return {}


def _content(content: Any, where: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if optional:
            return ""
        raise _error(where, "is missing; only an assistant message with tool_calls may leave it out")
    if isinstance(content, bytes | Mapping) or not isinstance(content, Sequence):
        raise _error(where, f"must be a string or a list of text parts, not {type(content).__name__}")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _error(where, f"must be an object with a type, not {type(part).__name__}")
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise _error(where, f"has type {kind!r}, but this engine reads text only: send parts of type 'text'")
    if not isinstance(text, str):
        raise _error(f"{where}.text", f"must be a string, not {type(text).__name__}")
    return text


def _normalize_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _error(where, "must be an object with a function")
    if not isinstance(function.get("name"), str):
        raise _error(f"{where}.function.name", "must be a string")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> ToolArguments:
    if isinstance(arguments, Mapping):
        return ToolArguments(arguments, json.dumps(arguments, ensure_ascii=False))
    if arguments is None or arguments == "":
        return ToolArguments({}, "{}")
    if not isinstance(arguments, str):
        raise _error(where, f"must be the text of a JSON object, not {type(arguments).__name__}")
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise _error(where, f"must be the text of a JSON object: {error}") from error
    if is_nested_too_deeply(values):
        raise _error(where, f"is nested more than {MAX_DEPTH} levels deep")
    if not isinstance(values, dict):
        raise _error(where, f"must be the text of a JSON object, not of a {type(values).__name__}")
    return ToolArguments(values, arguments)


def _error(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {what}", "messages")
