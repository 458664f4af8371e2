"""``POST /v1/chat/completions``: answer a conversation."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from mlx_paged_attention.api.server.chunks import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    Function,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from mlx_paged_attention.api.server.conversation import Conversation
from mlx_paged_attention.api.server.protocol import ChatRequest
from mlx_paged_attention.api.server.respond import DataEvents, respond
from mlx_paged_attention.api.server.serving import (
    Serving,
    new_id,
    prompt_logprobs_json,
    with_owner,
)
from mlx_paged_attention.engine.outputs import CompletionOutput
from mlx_paged_attention.text.answer import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer the conversation."""
    serving: Serving = request.app.state.serving
    chunks = _ChatChunks(serving, with_owner(body, request)).chunks()
    return await respond(request, chunks, _collect, stream=bool(body.stream), events=DataEvents())


class _ChatChunks:
    """The chunks of one request: per choice a first one with the role, then one per part of its answer."""

    def __init__(self, serving: Serving, body: ChatRequest) -> None:
        self._serving = serving
        self._body = body
        self._conversation = Conversation(serving, body)
        self._header: dict[str, Any] = {
            "id": new_id("chatcmpl"),
            "created": int(time.time()),
            "model": serving.model_name(body.model),
        }

    async def chunks(self) -> AsyncGenerator[list[ChatChunk], None]:
        options = self._body.stream_options
        usage_at_end = not self._body.stream or (options is not None and options.include_usage)
        continuous = options is not None and options.continuous_usage_stats
        begun: set[int] = set()
        async with aclosing(self._conversation.answers()) as outputs:
            async for output, answers in outputs:
                choices: list[ChunkChoice] = []
                first = not begun
                for answer, parts in answers:
                    if answer.index not in begun:
                        begun.add(answer.index)
                        delta = Delta(role="assistant", content="")
                        choices.append(ChunkChoice(index=answer.index, delta=delta))
                    choices += self._choices(answer, parts)
                usage = self._conversation.usage if continuous else None if usage_at_end else UNSET
                chunks = [ChatChunk(**self._header, choices=[choice], usage=usage) for choice in choices]
                if output.prompt_logprobs is not None and chunks:
                    chunks[0].prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
                if self._body.return_token_ids and first and chunks:
                    chunks[0].prompt_token_ids = output.prompt_token_ids
                yield chunks
        if usage_at_end:
            yield [ChatChunk(**self._header, choices=[], usage=self._conversation.usage)]

    def _choices(self, answer: CompletionOutput, parts: list[Part]) -> list[ChunkChoice]:
        """One per part that is new; the last one has what goes with the tokens."""
        left_out = (ToolCallEnd, ReasoningDelta) if self._body.include_reasoning is False else (ToolCallEnd,)
        deltas = [_delta(part) for part in parts if not isinstance(part, left_out)] or [Delta(content="")]
        choices = [ChunkChoice(index=answer.index, delta=delta) for delta in deltas]
        if self._body.logprobs:
            choices[-1].logprobs = self._logprobs(answer)
        if self._body.return_token_ids:
            choices[-1].token_ids = list(answer.token_ids)
        if answer.finish_reason is not None:
            reason = self._conversation.finish_reason(answer)
            # A call of a function that the request named is no decision of the model's: as at OpenAI.
            named = reason == "tool_calls" and self._conversation.names_the_call
            choices[-1].finish_reason = "stop" if named else reason
            choices[-1].stop_reason = answer.stop_reason
        return choices

    def _logprobs(self, answer: CompletionOutput) -> ChatLogprobs:
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        return ChatLogprobs(
            [
                self._serving.token_logprob(
                    token_id,
                    entries,
                    top=self._body.top_logprobs or 0,
                    as_ids=self._body.return_tokens_as_token_ids,
                )
                for token_id, entries in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
        )


def _delta(part: Part) -> Delta:
    match part:
        case TextDelta(text):
            return Delta(content=text)
        case ReasoningDelta(text):
            return Delta(reasoning_content=text)
        case ToolCallBegin(index, call_id, name):
            function = FunctionDelta(name=name, arguments="")
            return Delta(
                tool_calls=[ToolCallDelta(index=index, id=call_id, type="function", function=function)]
            )
        case ToolCallArguments(index, text):
            return Delta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])
        case ToolCallEnd():
            raise AssertionError("the end of a call is not sent")


class _Collected:
    """One choice of a whole answer in the making."""

    def __init__(self, index: int) -> None:
        self.choice = ChatChoice(index=index, message=AnswerMessage())
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, part: ChunkChoice) -> None:
        choice, delta = self.choice, part.delta
        if delta.content is not UNSET:
            self._content.append(delta.content)
        if delta.reasoning_content is not UNSET:
            self._reasoning.append(delta.reasoning_content)
        for call in [] if delta.tool_calls is UNSET else delta.tool_calls:
            self._add_call(call)
        if part.finish_reason is not None:
            choice.finish_reason = part.finish_reason
            choice.stop_reason = None if part.stop_reason is UNSET else part.stop_reason
        if part.token_ids is not UNSET:
            if choice.token_ids is UNSET:
                choice.token_ids = []
            choice.token_ids += part.token_ids
        if part.logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs = ChatLogprobs([])
            choice.logprobs.content += part.logprobs.content

    def _add_call(self, delta: ToolCallDelta) -> None:
        name, text = delta.function.name, delta.function.arguments
        if delta.id is not UNSET and name is not UNSET:
            assert delta.index == len(self._calls), "calls begin in order"
            self._calls.append(ToolCall(id=delta.id, function=Function(name=name, arguments="")))
        if text is not UNSET:
            self._calls[delta.index].function.arguments += text

    def finish(self) -> ChatChoice:
        message = self.choice.message
        message.content = "".join(self._content) or (None if self._calls else "")
        if self._reasoning:
            message.reasoning_content = "".join(self._reasoning)
        if self._calls:
            message.tool_calls = self._calls
        return self.choice


async def _collect(chunks: AsyncGenerator[list[ChatChunk], None]) -> ChatCompletion:
    """The chunks of an answer as one: texts and lists joined, the last finish reason and the last usage."""
    choices: dict[int, _Collected] = {}
    prompt_logprobs: Any = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    last: ChatChunk | None = None
    async for several in chunks:
        for last in several:
            if last.prompt_logprobs is not UNSET:
                prompt_logprobs = last.prompt_logprobs
            if last.prompt_token_ids is not UNSET:
                prompt_token_ids = last.prompt_token_ids
            for part in last.choices:
                choices.setdefault(part.index, _Collected(part.index)).add(part)
    assert last is not None
    assert isinstance(last.usage, Usage), "an answer ends with its usage"
    return ChatCompletion(
        id=last.id,
        created=last.created,
        model=last.model,
        choices=[choices[index].finish() for index in sorted(choices)],
        usage=last.usage,
        prompt_logprobs=prompt_logprobs,
        prompt_token_ids=prompt_token_ids,
    )
