"""Responses: a request's chunks as bytes, streamed as server-sent events or collected into one object.

A streaming response sends the chunks; any other response is the same chunks, collected. So the two cannot
drift apart. Protocols differ only in how an event is written.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_paged_attention.api.server.chunks import encode
from mlx_paged_attention.api.server.errors import ApiError, describe

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=msgspec.Struct)
T = TypeVar("T")


class EventFormat(Protocol):
    """How a protocol writes server-sent events.

    Attributes:
        end: sent last, whatever happened.
    """

    end: bytes

    def event(self, chunk: Any) -> bytes:
        """One chunk as an event."""

    def error(self, status: int, body: dict[str, Any]) -> bytes:
        """What :func:`describe` says of an error that came after the status had been sent, as an event."""


class DataEvents:
    """OpenAI's chat and completions: nameless events, ``[DONE]`` at the end."""

    end = b"data: [DONE]\n\n"

    def event(self, chunk: Any) -> bytes:
        return b"data: " + encode(chunk) + b"\n\n"

    def error(self, status: int, body: dict[str, Any]) -> bytes:
        return self.event(body)


async def respond(
    request: Request,
    chunks: AsyncGenerator[list[C], None],
    collect: Callable[[AsyncGenerator[list[C], None]], Awaitable[msgspec.Struct]],
    *,
    stream: bool,
    events: EventFormat,
) -> Response:
    """Answer with the chunks: as server-sent events, or collected into one object.

    Nothing is sent before the first chunk is there, so that a bad request gets its proper status.
    """
    if stream:
        first = await unless_gone(request, anext(chunks))
        return EventStream(first, chunks, events)
    whole = await unless_gone(request, _collected(chunks, collect))
    return Response(encode(whole), media_type="application/json")


class EventStream(StreamingResponse):
    """Chunks as server-sent events. They are closed when the response ends, however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self, first: list[Any], chunks: AsyncGenerator[list[Any], None], events: EventFormat
    ) -> None:
        self._chunks = chunks
        self._bytes = _written(first, chunks, events)
        # Proxies must not hold events back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._bytes, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks), aclosing(self._bytes):
            await super().__call__(scope, receive, send)


async def _written(
    first: list[Any], chunks: AsyncGenerator[list[Any], None], events: EventFormat
) -> AsyncGenerator[bytes, None]:
    yield b"".join(map(events.event, first))
    try:
        async for several in chunks:
            yield b"".join(map(events.event, several))
    except Exception as error:
        # The status has been sent; all that is left is to say so inside the stream.
        status, body = describe(error)
        if status >= 500:
            logger.exception("a stream failed")
        yield events.error(status, body)
    yield events.end


async def _collected(
    chunks: AsyncGenerator[list[C], None],
    collect: Callable[[AsyncGenerator[list[C], None]], Awaitable[msgspec.Struct]],
) -> msgspec.Struct:
    async with aclosing(chunks):
        return await collect(chunks)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client disconnects.

    Raises:
        ApiError: 499, the client has gone; nobody will read it.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "the client closed the connection")
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
