"""The events of a streamed response, in the order in which OpenAI's API sends them.

``created``, ``in_progress``; per item of the output ``output_item.added``, the events of its kind and
``output_item.done``; at last ``completed``, ``incomplete`` or ``failed``. Each has the number it was sent as.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from mlx_paged_attention.api.server.chunks import TokenLogprob, encode
from mlx_paged_attention.api.server.responses.objects import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseObject,
    SummaryText,
)


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int = -1  # given when it is written


class Created(Event, kw_only=True, tag="response.created"):
    response: ResponseObject


class InProgress(Event, kw_only=True, tag="response.in_progress"):
    response: ResponseObject


class Completed(Event, kw_only=True, tag="response.completed"):
    response: ResponseObject


class Incomplete(Event, kw_only=True, tag="response.incomplete"):
    response: ResponseObject


class Failed(Event, kw_only=True, tag="response.failed"):
    response: ResponseObject


class ErrorEvent(Event, kw_only=True, tag="error"):
    code: str | None
    message: str
    param: str | None


class ItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(Event, kw_only=True):
    item_id: str
    output_index: int


class ArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class ContentEvent(ItemEvent, kw_only=True):
    content_index: int = 0


class ContentPartAdded(ContentEvent, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(ContentEvent, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(ContentEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(ContentEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(ContentEvent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(ContentEvent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class SummaryEvent(ItemEvent, kw_only=True):
    summary_index: int = 0


class SummaryPartAdded(SummaryEvent, kw_only=True, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryPartDone(SummaryEvent, kw_only=True, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class SummaryTextDelta(SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryTextDone(SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.done"):
    text: str


@cache
def _name(kind: type[Event]) -> bytes:
    return str(kind.__struct_config__.tag).encode()


class ResponseEvents:
    """Named and numbered events; nothing after the last. One per response.

    Args:
        failed: gives the response as an error left it, from the error's code and message.
    """

    end = b""

    def __init__(self, failed: Callable[[str, str], ResponseObject]) -> None:
        self._failed = failed
        self._sent = 0

    def event(self, chunk: Event) -> bytes:
        chunk.sequence_number = self._sent
        self._sent += 1
        return b"event: %b\ndata: %b\n\n" % (_name(type(chunk)), encode(chunk))

    def error(self, status: int, body: dict[str, Any]) -> bytes:
        """What went wrong, and then the response as it failed, which ends every stream that fails."""
        error = body["error"]
        told = ErrorEvent(code=error["code"], message=error["message"], param=error["param"])
        code = "server_error" if status >= 500 else "invalid_prompt"
        return self.event(told) + self.event(Failed(response=self._failed(code, error["message"])))
