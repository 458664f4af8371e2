"""Items of a conversation, as clients send them, to the messages that chat templates know."""

from collections.abc import Callable, Sequence
from typing import Any

from mlx_paged_attention.api.server.responses.sealed_reasoning import unseal
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.text.messages import normalize_messages

Item = dict[str, Any]
Message = dict[str, Any]

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def item_list(value: str | list[Any], find: Callable[[str], Item | None]) -> list[Item]:
    """The items of an ``input``: a text is a user's message, a reference is what it refers to.

    Args:
        find: an item of an earlier output, by its id.

    Raises:
        InvalidRequestError: something is no item, or refers to none.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    items: list[Item] = []
    referred: set[str] = set()
    for index, item in enumerate(value):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise _error(where, f"must be an object, not {type(item).__name__}")
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind != "item_reference":
            items.append({**item, "type": kind})
            continue
        item_id = str(item.get("id"))
        found = find(item_id)
        if found is None:
            raise _error(where, f"refers to {item_id!r}, which is not stored here; send the item itself")
        if item_id in referred:  # few bytes must not become a prompt of any length
            raise _error(where, f"refers to {item_id!r} a second time")
        referred.add(item_id)
        items.append(found)
    return items


def to_messages(history: Sequence[Item], items: Sequence[Item]) -> list[Message]:
    """The messages: what an assistant says in one turn, its reasoning, text and calls, is one of them.

    Args:
        history: what was read or written here before ``items``, those of the input.

    Raises:
        InvalidRequestError: an item cannot be read; the message says which and why.
    """
    messages: list[Message] = []
    for index, item in enumerate([*history, *items], -len(history)):
        where = f"input[{index}]"
        message = _message(item, where)
        if message is None:
            continue
        _check(message, where)
        if not messages or not _goes_on(messages[-1], message):
            messages.append(message)
        elif "tool_calls" in messages[-1]:
            messages[-1]["tool_calls"] += message["tool_calls"]
        else:
            messages[-1] |= message
    # A turn of nothing but reasoning or calls has no content of its own.
    return [{"content": ""} | message for message in messages]


def _check(message: Message, where: str) -> None:
    """Refuse what no template can be given, naming the item that it comes from."""
    try:
        normalize_messages([{"content": ""} | message])
    except InvalidRequestError as error:
        wrong = str(error).replace("messages[0].tool_calls[0].function", where)
        raise InvalidRequestError(wrong.replace("messages[0]", where), "input") from None


def _goes_on(turn: Message, message: Message) -> bool:
    """Whether the message belongs to the same turn: reasoning comes first, then text, then calls."""
    if turn["role"] != "assistant" or message["role"] != "assistant":
        return False
    if "tool_calls" in message:
        return True
    return "content" in message and "content" not in turn and "tool_calls" not in turn


def _message(item: Item, where: str) -> Message | None:
    match item["type"]:
        case "message":
            return {"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")}
        case "reasoning":
            return _reasoning(item, where)
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    raise _error(
        where,
        f"has type {item['type']!r}, which cannot be read here: send messages, reasoning, function_call and "
        "function_call_output",
    )


def _reasoning(item: Item, where: str) -> Message | None:
    """``None`` for reasoning that another server has encrypted: nobody here can read it."""
    sealed = item.get("encrypted_content")
    text = unseal(sealed) if isinstance(sealed, str) else None
    for name in ("content", "summary"):
        if text is None and item.get(name):
            text = _text(item[name], f"{where}.{name}")
    return None if text is None else {"role": "assistant", "reasoning_content": text}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(where, f"must be a string or a list of parts, not {type(content).__name__}")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise _error(where, f"must be an object with a type, not {type(part).__name__}")
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise _error(where, f"has type {kind!r}, but this engine reads text only: send parts of text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise _error(where, f"must have its text as a string, not {type(text).__name__}")
    return text


def _error(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {what}", "input")
