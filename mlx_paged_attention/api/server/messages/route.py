"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_paged_attention.api.server.chunks import encode
from mlx_paged_attention.api.server.conversation import Conversation
from mlx_paged_attention.api.server.errors import ApiError, messages_error
from mlx_paged_attention.api.server.messages import events
from mlx_paged_attention.api.server.messages.request import CountTokensRequest, MessagesRequest
from mlx_paged_attention.api.server.messages.translation import chat_request, clients_words
from mlx_paged_attention.api.server.messages.writer import ContentWriter, usage_of
from mlx_paged_attention.api.server.respond import respond
from mlx_paged_attention.api.server.serving import Serving, with_owner
from mlx_paged_attention.engine.outputs import CompletionOutput

PING_SECONDS = 5.0  # a stream that has nothing to say for so long says that it is alive

router = APIRouter()


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer the conversation."""
    chunks = _MessageEvents(body, request).chunks()
    return await respond(request, chunks, _collect, stream=bool(body.stream), events=_NamedEvents())


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """How many tokens the prompt of the same conversation has."""
    serving: Serving = request.app.state.serving
    serving.model_name(body.model)
    with clients_words():
        conversation = Conversation(serving, chat_request(body, serving.llm.tokenizer))
        count = events.TokenCount(len(await conversation.prompt_token_ids()))
    return Response(encode(count), media_type="application/json")


@router.post("/api/event_logging/{path:path}", status_code=204, include_in_schema=False)
async def event_logging() -> None:
    """Claude Code reports its use here, too, and again and again if nobody takes the report."""


class _NamedEvents:
    """Events with a name, which is also in their data; nothing after the last one."""

    end = b""

    def event(self, chunk: events.Event) -> bytes:
        return b"event: " + str(chunk.__struct_config__.tag).encode() + b"\ndata: " + encode(chunk) + b"\n\n"

    def error(self, status: int, body: dict[str, Any]) -> bytes:
        return b"event: error\ndata: " + encode(messages_error(status, body)) + b"\n\n"


class _MessageEvents:
    """The events of one request: the message's beginning, its content blocks, its end."""

    def __init__(self, body: MessagesRequest, request: Request) -> None:
        serving: Serving = request.app.state.serving
        self._model = serving.model_name(body.model)
        self._max_tokens = body.max_tokens
        with clients_words():
            chat = with_owner(chat_request(body, serving.llm.tokenizer), request)
            self._conversation = Conversation(serving, chat)
        hides = body.thinking is not None and body.thinking.display == "omitted"
        self._content = ContentWriter(hides_thinking=hides)

    async def chunks(self) -> AsyncGenerator[list[events.Event], None]:
        begun, told = False, time.monotonic()
        with clients_words():
            async with aclosing(self._conversation.answers()) as outputs:
                async for _, answers in outputs:
                    several: list[events.Event] = []
                    if not begun:
                        begun = True
                        several += [self._start(), events.Ping()]
                    for answer, parts in answers:
                        for part in parts:
                            several += self._content.write(part)
                        if answer.finish_reason is not None:
                            several += [*self._content.close(), self._delta(answer), events.MessageStop()]
                    if several:
                        told = time.monotonic()
                    elif time.monotonic() - told >= PING_SECONDS:
                        several.append(events.Ping())
                        told = time.monotonic()
                    yield several

    def _start(self) -> events.MessageStart:
        return events.MessageStart(
            events.MessageObject(
                id=f"msg_{uuid.uuid4().hex}",
                model=self._model,
                content=[],
                usage=usage_of(self._conversation.usage),
            )
        )

    def _delta(self, answer: CompletionOutput) -> events.MessageDelta:
        usage = usage_of(self._conversation.usage)
        reason = self._conversation.finish_reason(answer)
        sequence = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        match reason:
            case "tool_calls":
                stopped = events.StopDelta("tool_use", None)
            case "stop" if sequence is not None:
                stopped = events.StopDelta("stop_sequence", sequence)
            case "stop":
                stopped = events.StopDelta("end_turn", None)
            case "length" if usage.output_tokens < self._max_tokens:
                stopped = events.StopDelta("model_context_window_exceeded", None)
            case "length":
                stopped = events.StopDelta("max_tokens", None)
            case _:
                raise ApiError(
                    503, f"the answer was cut off ({reason}): the server is stopping; send it again"
                )
        return events.MessageDelta(stopped, usage)


async def _collect(chunks: AsyncGenerator[list[events.Event], None]) -> events.MessageObject:
    """The events of a stream as the message that they tell of."""
    message: events.MessageObject | None = None
    pieces: list[str] = []
    async for several in chunks:
        for event in several:
            match event:
                case events.MessageStart(begun):
                    message = begun
                case events.ContentBlockStart(_, block):
                    assert message is not None
                    message.content.append(block)
                    pieces = []
                case events.ContentBlockDelta(_, events.SignatureDelta(signature)):
                    assert isinstance(block, events.ThinkingContent)
                    block.signature = signature
                case events.ContentBlockDelta(
                    _, events.TextDelta(piece) | events.ThinkingDelta(piece) | events.InputJsonDelta(piece)
                ):
                    pieces.append(piece)
                case events.ContentBlockStop():
                    _fill(block, "".join(pieces))
                case events.MessageDelta(stopped, usage):
                    assert message is not None
                    message.stop_reason, message.stop_sequence = stopped.stop_reason, stopped.stop_sequence
                    message.usage = usage
    assert message is not None
    return message


def _fill(block: events.Content, text: str) -> None:
    match block:
        case events.TextContent():
            block.text = text
        case events.ThinkingContent():
            block.thinking = text
        case events.ToolUseContent():
            block.input = msgspec.Raw(text)
