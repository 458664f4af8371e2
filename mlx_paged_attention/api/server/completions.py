"""``POST /v1/completions``: continue one or several prompts, as text or token ids."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from mlx_paged_attention.api.server.chunks import Completion, CompletionChoice, CompletionLogprobs
from mlx_paged_attention.api.server.protocol import CompletionRequest
from mlx_paged_attention.api.server.respond import DataEvents, respond
from mlx_paged_attention.api.server.serving import (
    Serving,
    UsageCounter,
    finite,
    merge,
    new_id,
    prompt_logprobs_json,
    ranked,
    with_owner,
)
from mlx_paged_attention.engine.outputs import CompletionOutput, Logprob, RequestOutput
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.text.tokenizer import Tokenizer

MAX_CHOICES = 4096

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue the prompts."""
    serving: Serving = request.app.state.serving
    chunks = _CompletionChunks(serving, with_owner(body, request)).chunks()
    return await respond(request, chunks, _collect, stream=bool(body.stream), events=DataEvents())


class _CompletionChunks:
    """The chunks of one request; choice ``i`` of prompt ``p`` has index ``p * n + i``."""

    def __init__(self, serving: Serving, body: CompletionRequest) -> None:
        serving.require_engine()
        self._serving = serving
        self._body = body
        self._echo = bool(body.echo)
        self._prompt_only = body.is_prompt_only
        self._header: dict[str, Any] = {
            "id": new_id("cmpl"),
            "created": int(time.time()),
            "model": serving.model_name(body.model),
        }
        self._params = body.completion_params(serving.defaults)
        choices = len(prompt_list(body.prompt)) * self._params.num_sequences
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"{choices} answers asked for in one request, {MAX_CHOICES} are allowed; send fewer prompts",
                "prompt",
            )
        if self._echo and serving.llm.tokenizer is None:
            raise InvalidRequestError("echo needs a tokenizer, and this model was loaded without", "echo")
        self._usage = UsageCounter()
        self._writers: dict[int, _ChoiceWriter] = {}

    async def chunks(self) -> AsyncGenerator[list[Completion], None]:
        options = self._body.stream_options
        usage_at_end = not self._body.stream or (options is not None and options.include_usage)
        continuous = options is not None and options.continuous_usage_stats
        prompts = await prompts_to_run(self._body, self._serving.llm.tokenizer)
        outputs = merge([self._serving.generate(prompt, self._params) for prompt in prompts])
        # A client that leaves frees its blocks now, not when this is collected.
        with self._body.own_names():
            async with aclosing(outputs):
                async for prompt_index, output in outputs:
                    self._usage.add(prompt_index, output, completion=not self._prompt_only)
                    usage = self._usage.usage() if continuous else None if usage_at_end else UNSET
                    choices = [self._choice(prompt_index, output, answer) for answer in output.outputs]
                    yield [Completion(**self._header, choices=[choice], usage=usage) for choice in choices]
        if usage_at_end:
            yield [Completion(**self._header, choices=[], usage=self._usage.usage())]

    def _choice(self, prompt_index: int, output: RequestOutput, answer: CompletionOutput) -> CompletionChoice:
        index = prompt_index * self._params.n + answer.index
        writer = self._writers.get(index)
        first = writer is None
        if writer is None:
            writer = self._writers[index] = _ChoiceWriter(
                self._serving, self._body.logprobs, as_ids=self._body.return_tokens_as_token_ids
            )
        if first and self._echo:
            writer.add(self._prompt_text(output), output.prompt_token_ids, output.prompt_logprobs)
        if not self._prompt_only:
            writer.add(answer.text, answer.token_ids, answer.logprobs)
        text, logprobs = writer.take()
        show_prompt = first and self._body.prompt_logprobs is not None
        ids = self._body.return_token_ids
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason="length" if self._prompt_only and answer.finish_reason else answer.finish_reason,
            stop_reason=None if self._prompt_only else answer.stop_reason,
            prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs) if show_prompt else UNSET,
            token_ids=([] if self._prompt_only else list(answer.token_ids)) if ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if ids and first else UNSET,
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._serving.llm.tokenizer
        assert tokenizer is not None, "echo without a tokenizer was refused"
        return tokenizer.decode(output.prompt_token_ids)


class _ChoiceWriter:
    """Builds one choice's next chunk and remembers how far its text has come."""

    def __init__(self, serving: Serving, logprobs: int | None, *, as_ids: bool | None) -> None:
        self._serving = serving
        self._as_ids = as_ids
        self._alternatives = logprobs
        self._offset = 0
        self._text = ""
        self._logprobs = CompletionLogprobs()

    def add(
        self, text: str, token_ids: list[int], positions: list[dict[int, Logprob]] | list[Any] | None
    ) -> None:
        self._text += text
        if self._alternatives is None:
            return
        assert positions is not None
        assert len(positions) == len(token_ids)
        for token_id, entries in zip(token_ids, positions, strict=True):
            self._add_position(token_id, entries)

    def _add_position(self, token_id: int, entries: dict[int, Logprob] | None) -> None:
        assert self._alternatives is not None
        sampled = None if entries is None else entries[token_id]
        token = self._serving.token_string(token_id, sampled, as_id=self._as_ids)
        result = self._logprobs
        result.tokens.append(token)
        result.text_offset.append(self._offset)
        self._offset += len(token)
        if entries is None or sampled is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            return
        result.token_logprobs.append(finite(sampled.logprob))
        top = {
            self._serving.token_string(other, entry, as_id=self._as_ids): finite(entry.logprob)
            for other, entry in reversed(ranked(entries, self._alternatives))
        }
        result.top_logprobs.append({token: finite(sampled.logprob)} | top)

    def take(self) -> tuple[str, CompletionLogprobs | None]:
        """What was added since the last call."""
        text, logprobs = self._text, self._logprobs
        self._text, self._logprobs = "", CompletionLogprobs()
        return text, None if self._alternatives is None else logprobs


async def _collect(chunks: AsyncGenerator[list[Completion], None]) -> Completion:
    """The chunks of an answer as one: texts and lists joined, the last finish reason and the last usage."""
    choices: dict[int, CompletionChoice] = {}
    texts: dict[int, list[str]] = {}
    last: Completion | None = None
    async for several in chunks:
        for last in several:
            for part in last.choices:
                texts.setdefault(part.index, []).append(part.text)
                whole = choices.setdefault(part.index, part)
                if whole is not part:
                    _append(whole, part)
    assert last is not None, "an answer ends with its usage"
    for index, whole in choices.items():
        whole.text = "".join(texts[index])
    last.choices = [choices[index] for index in sorted(choices)]
    return last


def _append(whole: CompletionChoice, part: CompletionChoice) -> None:
    whole.finish_reason = part.finish_reason or whole.finish_reason
    whole.stop_reason = whole.stop_reason if part.stop_reason is None else part.stop_reason
    if whole.token_ids is not UNSET and part.token_ids is not UNSET:
        whole.token_ids += part.token_ids
    if whole.logprobs is not None and part.logprobs is not None:
        whole.logprobs.tokens += part.logprobs.tokens
        whole.logprobs.token_logprobs += part.logprobs.token_logprobs
        whole.logprobs.top_logprobs += part.logprobs.top_logprobs
        whole.logprobs.text_offset += part.logprobs.text_offset


def prompt_list(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, as several."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


async def prompts_to_run(body: CompletionRequest, tokenizer: Tokenizer | None) -> list[str | list[int]]:
    """The prompts; as token ids where none of those that a bare prompt begins with are wanted."""
    prompts = prompt_list(body.prompt)
    if body.add_special_tokens is not False or tokenizer is None:
        return prompts

    def encoded(prompt: str | list[int]) -> list[int]:
        return tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt

    return [await asyncio.to_thread(encoded, prompt) for prompt in prompts]
