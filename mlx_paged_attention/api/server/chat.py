"""``POST /v1/chat/completions``: answer a conversation."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from mlx_paged_attention.api.server.chunks import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from mlx_paged_attention.api.server.protocol import ChatRequest
from mlx_paged_attention.api.server.serving import (
    Serving,
    UsageCounter,
    finite,
    new_id,
    prompt_logprobs_json,
    ranked,
    respond,
    token_bytes,
    with_owner,
)
from mlx_paged_attention.engine.outputs import CompletionOutput, Logprob

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer the conversation."""
    serving: Serving = request.app.state.serving
    return await respond(request, body, _ChatChunks(serving, with_owner(body, request)).chunks(), _collect)


class _ChatChunks:
    """The chunks of one request: per choice a first one with the role, then its text."""

    def __init__(self, serving: Serving, body: ChatRequest) -> None:
        serving.require_engine()
        self._serving = serving
        self._body = body
        self._header: dict[str, Any] = {
            "id": new_id("chatcmpl"),
            "created": int(time.time()),
            "model": serving.model_name(body.model),
        }
        own: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
        if body.max_completion_tokens is not None:
            own["max_tokens"] = body.max_completion_tokens
        # Without a limit of the client's or the model's, an answer may fill the context.
        self._params = body.sampling_params({"max_tokens": None} | serving.defaults, **own)
        self._usage = UsageCounter()

    async def chunks(self) -> AsyncGenerator[list[ChatChunk], None]:
        options = self._body.stream_options
        usage_at_end = not self._body.stream or (options is not None and options.include_usage)
        continuous = options is not None and options.continuous_usage_stats
        template_kwargs = {
            "add_generation_prompt": self._body.add_generation_prompt,
            **(self._body.chat_template_kwargs or {}),
        }
        begun: set[int] = set()
        outputs = self._serving.chat(self._body.messages, self._params, template_kwargs)
        async with aclosing(outputs):  # a client that leaves frees its blocks now, not when this is collected
            async for output in outputs:
                self._usage.add(0, output)
                usage = self._usage.usage() if continuous else None if usage_at_end else UNSET
                choices = []
                for answer in output.outputs:
                    if answer.index not in begun:
                        begun.add(answer.index)
                        delta = Delta(role="assistant", content="")
                        choices.append(ChunkChoice(index=answer.index, delta=delta))
                    choices.append(self._choice(answer))
                chunks = [ChatChunk(**self._header, choices=[choice], usage=usage) for choice in choices]
                if output.prompt_logprobs is not None and chunks:
                    chunks[0].prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
                yield chunks
        if usage_at_end:
            yield [ChatChunk(**self._header, choices=[], usage=self._usage.usage())]

    def _choice(self, answer: CompletionOutput) -> ChunkChoice:
        return ChunkChoice(
            index=answer.index,
            delta=Delta(content=answer.text),
            logprobs=self._logprobs(answer) if self._body.logprobs else None,
            finish_reason=answer.finish_reason,
            stop_reason=UNSET if answer.finish_reason is None else answer.stop_reason,
        )

    def _logprobs(self, answer: CompletionOutput) -> ChatLogprobs:
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        return ChatLogprobs(
            [
                self._position(token_id, entries)
                for token_id, entries in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
        )

    def _position(self, token_id: int, entries: dict[int, Logprob]) -> TokenLogprob:
        def describe(token: int, entry: Logprob) -> tuple[str, float, list[int] | None]:
            text = self._serving.token_string(token, entry)
            return text, finite(entry.logprob), token_bytes(text)

        top = ranked(entries, self._body.top_logprobs or 0)
        return TokenLogprob(
            *describe(token_id, entries[token_id]), [TopLogprob(*describe(*item)) for item in top]
        )


async def _collect(chunks: AsyncGenerator[list[ChatChunk], None]) -> ChatCompletion:
    """The chunks of an answer as one: texts and lists joined, the last finish reason and the last usage."""
    choices: dict[int, ChatChoice] = {}
    texts: dict[int, list[str]] = {}
    prompt_logprobs: Any = UNSET
    last: ChatChunk | None = None
    async for several in chunks:
        for last in several:
            if last.prompt_logprobs is not UNSET:
                prompt_logprobs = last.prompt_logprobs
            for part in last.choices:
                whole = choices.setdefault(part.index, ChatChoice(index=part.index, message=AnswerMessage()))
                texts.setdefault(part.index, []).append(part.delta.content)
                _append(whole, part)
    assert last is not None
    assert isinstance(last.usage, Usage), "an answer ends with its usage"
    for index, whole in choices.items():
        whole.message.content = "".join(texts[index])
    return ChatCompletion(
        id=last.id,
        created=last.created,
        model=last.model,
        choices=[choices[index] for index in sorted(choices)],
        usage=last.usage,
        prompt_logprobs=prompt_logprobs,
    )


def _append(whole: ChatChoice, part: ChunkChoice) -> None:
    if part.finish_reason is not None:
        whole.finish_reason = part.finish_reason
        whole.stop_reason = None if part.stop_reason is UNSET else part.stop_reason
    if part.logprobs is not None:
        if whole.logprobs is None:
            whole.logprobs = ChatLogprobs([])
        whole.logprobs.content += part.logprobs.content
