"""ResponseAnswer: one request of the Responses API, from its items to the events of its response."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import Request
from msgspec import UNSET

from mlx_paged_attention.api.server.chunks import TokenLogprob, TopLogprob, Usage, encode
from mlx_paged_attention.api.server.conversation import Conversation
from mlx_paged_attention.api.server.errors import ApiError
from mlx_paged_attention.api.server.middleware import KEY_OWNER
from mlx_paged_attention.api.server.responses.events import (
    Completed,
    Created,
    Event,
    Failed,
    Incomplete,
    InProgress,
)
from mlx_paged_attention.api.server.responses.items import Item, item_list
from mlx_paged_attention.api.server.responses.objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    object_id,
)
from mlx_paged_attention.api.server.responses.request import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    ResponsesRequest,
)
from mlx_paged_attention.api.server.responses.store import ResponseStore, StoredResponse
from mlx_paged_attention.api.server.responses.text_logprobs import TextLogprobs
from mlx_paged_attention.api.server.responses.translation import Translation
from mlx_paged_attention.api.server.responses.writer import OutputWriter
from mlx_paged_attention.api.server.serving import Serving, with_owner
from mlx_paged_attention.engine.outputs import CompletionOutput
from mlx_paged_attention.errors import InvalidRequestError


class ResponseAnswer:
    """Answers one request; keeps the response, when it is whole, unless the client wants it forgotten.

    Raises:
        ApiError: 404, there is no such model or no such earlier response.
        InvalidRequestError: the request asks for what this model or engine cannot do.
        EngineDeadError: nothing can be served.
    """

    def __init__(
        self, serving: Serving, store: ResponseStore, body: ResponsesRequest, request: Request
    ) -> None:
        self._serving, self._store = serving, store
        self._owner: str | None = request.scope.get(KEY_OWNER)
        self._history = self._conversation_up_to(body.previous_response_id)
        self._found: dict[str, Item] = {}  # of earlier outputs, by id
        self._items = item_list(body.input, self._output_item)
        self._translation = Translation(body, self._history, self._items)
        self._begun = _begun(serving, body, self._translation)
        self._logprobs = TextLogprobs() if body.includes(LOGPROBS) else None
        self._top_logprobs = body.top_logprobs or 0
        self._writer = OutputWriter(summary=body.wants_summary, sealed=body.includes(ENCRYPTED_REASONING))
        try:
            self._conversation = Conversation(serving, with_owner(self._translation.chat, request))
        except InvalidRequestError as error:
            raise self._translation.reworded(error) from error.__cause__

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """The events, those of a step together."""
        events: list[Event] = [Created(response=self._begun), InProgress(response=self._begun)]
        try:
            async with aclosing(self._conversation.answers()) as outputs:
                async for _, answers in outputs:
                    for answer, parts in answers:
                        if self._logprobs is not None:
                            self._logprobs.add(self._token_logprobs(answer))
                        events += self._writer.write(parts, self._logprobs)
                        if answer.finish_reason is not None:
                            events += self._end(self._conversation.finish_reason(answer))
                    if events:
                        yield events
                        events = []
        except InvalidRequestError as error:
            raise self._translation.reworded(error) from error.__cause__

    async def prompt_tokens(self) -> int:
        """How many tokens the model would read; nothing is computed."""
        try:
            return len(await self._conversation.prompt_token_ids())
        except InvalidRequestError as error:
            raise self._translation.reworded(error) from error.__cause__

    def failed(self, code: str, message: str) -> ResponseObject:
        """The response as it is after an error."""
        error = ResponseError(code=code, message=message)
        return self._now(status="failed", error=error)

    def _end(self, reason: str | None) -> list[Event]:
        cut = reason in ("length", "abort")
        events = self._writer.finish("incomplete" if cut else "completed")
        if reason == "abort":
            return [*events, Failed(response=self.failed("server_error", "the server is stopping"))]
        if cut:
            details = IncompleteDetails(reason="max_output_tokens")
            response = self._kept(self._now(status="incomplete", incomplete_details=details))
            return [*events, Incomplete(response=response)]
        response = self._kept(self._now(status="completed", completed_at=int(time.time())))
        return [*events, Completed(response=response)]

    def _now(self, **changes: Any) -> ResponseObject:
        usage = _usage(self._conversation.usage)
        return msgspec.structs.replace(self._begun, output=self._writer.output, usage=usage, **changes)

    def _kept(self, response: ResponseObject) -> ResponseObject:
        """Put it into the store, if that is asked for and possible; the response says whether it is there."""
        if not response.store:
            return response
        stored = StoredResponse(
            encode(response),
            encode([*self._history, *self._items, *response.output]),
            tuple(item.id for item in response.output),
        )
        if not self._store.fits(stored):
            return msgspec.structs.replace(response, store=False)
        self._store.put(self._owner, response.id, stored)
        return response

    def _conversation_up_to(self, response_id: str | None) -> list[Item]:
        if response_id is None:
            return []
        stored = self._store.get(self._owner, response_id)
        if stored is None:
            raise ApiError(
                404,
                f"previous response with id {response_id!r} not found: it was not stored, or has made room "
                "for others; send the conversation's items as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        items: list[Item] = msgspec.json.decode(stored.conversation)
        return items

    def _output_item(self, item_id: str) -> Item | None:
        if item_id not in self._found:  # all items of a response are read at once
            stored = self._store.maker(self._owner, item_id)
            output = [] if stored is None else msgspec.json.decode(stored.response)["output"]
            self._found |= {item["id"]: item for item in output}
        return self._found.get(item_id)

    def _token_logprobs(self, answer: CompletionOutput) -> list[TokenLogprob]:
        assert answer.logprobs is not None
        positions = zip(answer.token_ids, answer.logprobs, strict=True)
        return [_with_bytes(self._serving.token_logprob(*p, top=self._top_logprobs)) for p in positions]


def _begun(serving: Serving, body: ResponsesRequest, translation: Translation) -> ResponseObject:
    """The response before there is an answer, with the settings that are in effect."""
    text, reasoning = body.text, body.reasoning
    text_format = text.format if text is not None and text.format is not None else {"type": "text"}
    defaults = {"temperature": 1.0, "top_p": 1.0} | serving.defaults
    return ResponseObject(
        id=object_id("resp"),
        created_at=int(time.time()),
        model=serving.model_name(body.model),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=defaults["temperature"] if body.temperature is None else body.temperature,
        text={"format": text_format, "verbosity": "medium"},
        tool_choice=body.tool_choice or "auto",
        tools=[{"parameters": None, "strict": False} | tool for tool in translation.tools],
        top_logprobs=body.top_logprobs or 0,
        top_p=defaults["top_p"] if body.top_p is None else body.top_p,
        user=UNSET if body.user is None else body.user,
    )


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=0 if details is UNSET else details.reasoning_tokens
        ),
        total_tokens=usage.total_tokens,
    )


def _with_bytes(token: TokenLogprob) -> TokenLogprob:
    """This API has no ``null`` for bytes that cannot be told."""
    top = [TopLogprob(other.token, other.logprob, other.bytes or []) for other in token.top_logprobs]
    return TokenLogprob(token.token, token.logprob, token.bytes or [], top)
