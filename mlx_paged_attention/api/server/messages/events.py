"""What a client of ``/v1/messages`` gets: a message, and the events of its stream, one Struct per object.

Every object says what it is in ``type``.
"""

from typing import Any

import msgspec


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Of the tokens written, those of reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """The prompt's tokens are the first three together: computed now, written to the cache, found in it.

    Caching is automatic and costs nothing, so that nothing is ever counted as written.
    """

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    cache_creation_input_tokens: int = 0


class TextContent(msgspec.Struct, tag="text"):
    text: str = ""


class ThinkingContent(msgspec.Struct, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseContent(msgspec.Struct, tag="tool_use"):
    """``input`` is an object, in the end as the JSON that the model wrote (``msgspec.Raw``)."""

    id: str
    name: str
    input: Any


Content = TextContent | ThinkingContent | ToolUseContent


class MessageObject(msgspec.Struct, tag="message", kw_only=True):
    """``stop_reason`` is ``null`` only in the beginning of a stream."""

    id: str
    model: str
    content: list[Content]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    role: str = "assistant"


class TextDelta(msgspec.Struct, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, tag="message_start"):
    message: MessageObject


class ContentBlockStart(msgspec.Struct, tag="content_block_start"):
    index: int
    content_block: Content


class ContentBlockDelta(msgspec.Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag="message_stop"):
    pass


class Ping(msgspec.Struct, tag="ping"):
    """Says nothing, but that the stream is alive."""


Event = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
)


class TokenCount(msgspec.Struct):
    input_tokens: int
