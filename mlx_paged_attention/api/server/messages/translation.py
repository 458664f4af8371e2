"""A request to ``/v1/messages`` as the :class:`ChatRequest` that it means, and errors back in its words."""

import base64
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError

from mlx_paged_attention.api.server.messages.request import (
    Block,
    CountTokensRequest,
    Message,
    MessagesRequest,
    OutputConfig,
    RedactedThinkingBlock,
    TextBlock,
    Thinking,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from mlx_paged_attention.api.server.protocol import ChatRequest
from mlx_paged_attention.errors import InvalidRequestError, RequestTooLongError

if TYPE_CHECKING:
    from mlx_paged_attention.text.tokenizer import Tokenizer

# Claude Code begins its system prompt with a line that is another one in every request, so that no two of
# them would share a prefix.
_BILLING_LINE = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")

_SIGNED = "mlx-paged:"

# What templates call the switch of a model's reasoning.
_THINKING_SWITCHES = ("enable_thinking", "thinking")

# Fields of ChatRequest by the names that they come from.
_CLIENT_FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
}

# Those names where errors have them: "stop" is also a word of plain English.
_LONG_NAMES = "|".join(name for name in _CLIENT_FIELDS if name != "stop")
_IN_ERRORS = re.compile(rf"\Astop\b|\b(?:{_LONG_NAMES})\b")


def chat_request(body: CountTokensRequest, tokenizer: "Tokenizer | None") -> ChatRequest:
    """What the body means.

    Args:
        tokenizer: of the model that will answer: how its reasoning is turned on or off depends on it.

    Raises:
        InvalidRequestError: a message is not of the shape that its role has.
    """
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "continue_final_message": body.messages[-1].role == "assistant" or None,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        **_tool_choice(body.tool_choice),
    }
    if tokenizer is not None:
        continues = body.messages[-1].role == "assistant"
        fields |= _thinking(body.thinking, tokenizer, continues=continues)
        fields |= _output(body.output_config, tokenizer)
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stream": body.stream,
        }
    try:
        return ChatRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        problem = error.errors()[0]
        if isinstance(cause := problem.get("ctx", {}).get("error"), InvalidRequestError):
            raise cause from None
        raise


@contextmanager
def clients_words() -> Iterator[None]:
    """Errors that name a field of ChatRequest name the client's own instead."""
    try:
        yield
    except RequestTooLongError:
        raise
    except InvalidRequestError as error:
        message = _IN_ERRORS.sub(lambda found: _CLIENT_FIELDS[found[0]], str(error))
        message = message.replace("].function.parameters", "].input_schema").replace("].function.", "].")
        name = _CLIENT_FIELDS.get(error.param or "", error.param)
        if name is not None and name not in message:
            message = f"{name}: {message}"
        raise InvalidRequestError(message, name) from error


def sign(thinking: str) -> str:
    """The signature of reasoning: its text, so that clients that are not shown it still send it back."""
    return _SIGNED + base64.b64encode(thinking.encode()).decode()


def _thinking_text(block: ThinkingBlock) -> str:
    """What was thought. Of reasoning that another server keeps to itself nothing is known: ``""``."""
    if block.thinking or not block.signature.startswith(_SIGNED):
        return block.thinking
    try:
        return base64.b64decode(block.signature.removeprefix(_SIGNED), validate=True).decode()
    except ValueError:  # no base64, no ASCII, no UTF-8
        raise InvalidRequestError(
            "a thinking block's signature has been changed; send it as it came"
        ) from None


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    leading = list(takewhile(lambda message: message.role == "system", body.messages))
    blocks = [*(body.system or ()), *(block for message in leading for block in _instructions(message))]
    texts = [_BILLING_LINE.sub("", block.text) for block in blocks]
    messages: list[dict[str, Any]] = []
    if any(texts):
        messages.append({"role": "system", "content": "\n".join(filter(None, texts))})
    names: dict[str, str] = {}  # of the tools called, by the calls' ids
    # Several messages of one role in a row are one turn.
    for is_answer, turn in groupby(
        body.messages[len(leading) :], lambda message: message.role == "assistant"
    ):
        if is_answer:
            messages.append(_answer([block for message in turn for block in message.content], names))
        else:
            messages += _question([block for message in turn for block in _said_to_model(message)], names)
    return messages


def _said_to_model(message: Message) -> Sequence[Block]:
    """Instructions between two turns, which few templates have a place for, become a part of the user's."""
    if message.role == "user":
        return message.content
    return [
        TextBlock(type="text", text=f"<system-reminder>\n{block.text}\n</system-reminder>")
        for block in _instructions(message)
    ]


def _instructions(message: Message) -> list[TextBlock]:
    return [
        block if isinstance(block, TextBlock) else _misplaced(block, "system") for block in message.content
    ]


def _question(blocks: Sequence[Block], names: dict[str, str]) -> list[dict[str, Any]]:
    """A turn of the user's: texts and what tools have returned, in their order."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            messages.append(_tool_result(block, names))
        elif not isinstance(block, TextBlock):
            _misplaced(block, "user")
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n{block.text}"
        else:
            messages.append({"role": "user", "content": block.text})
    return messages or [{"role": "user", "content": ""}]


def _tool_result(block: ToolResultBlock, names: dict[str, str]) -> dict[str, Any]:
    if block.tool_use_id not in names:
        raise InvalidRequestError(
            f"messages: no tool_use before the tool_result has its tool_use_id {block.tool_use_id!r}",
            "messages",
        )
    text = "\n".join(part.text for part in block.content or ())
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "name": names[block.tool_use_id],
        "content": f"Error: {text}" if block.is_error else text,
    }


def _answer(blocks: Sequence[Block], names: dict[str, str]) -> dict[str, Any]:
    """A turn of the model's."""
    thoughts, texts, calls = [], [], []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(_thinking_text(block))
            case RedactedThinkingBlock():
                pass  # nothing is known of it but that it was there
            case ToolUseBlock():
                names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                _misplaced(block, "assistant")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = calls
    return message


def _misplaced(block: Block, role: str) -> NoReturn:
    raise InvalidRequestError(
        f"messages: a message of the role {role!r} has no {block.type} blocks", "messages"
    )


def _tool(tool: Tool) -> dict[str, Any]:
    examples = {"examples": tool.input_examples} if tool.input_examples else {}
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema | examples}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kinds = {"auto": "auto", "none": "none", "any": "required"}
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": kinds.get(choice.type, named),
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _thinking(thinking: Thinking | None, tokenizer: "Tokenizer", *, continues: bool) -> dict[str, Any]:
    """How the model is told to think; nothing for one that does not: it keeps any budget."""
    if thinking is None or tokenizer.answer_format.reasoning is None:
        return {}
    switch = next((name for name in _THINKING_SWITCHES if tokenizer.template_reads(name)), None)
    thinks = thinking.type != "disabled"
    # A model that has no switch thinks unless it may not, or its answer has begun.
    budget = thinking.budget_tokens if thinks else 0 if switch is None and not continues else None
    return {
        "chat_template_kwargs": None if switch is None else {switch: thinks},
        "thinking_token_budget": budget,
    }


def _output(config: OutputConfig | None, tokenizer: "Tokenizer") -> dict[str, Any]:
    """The form of the answer, and how much effort to make, where the model knows more than one measure."""
    fields: dict[str, Any] = {}
    if config is not None and config.format is not None:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": config.format.json_schema},
        }
    if config is not None and config.effort is not None and tokenizer.template_reads("reasoning_effort"):
        # Templates know three levels.
        fields["reasoning_effort"] = "high" if config.effort in ("xhigh", "max") else config.effort
    return fields
