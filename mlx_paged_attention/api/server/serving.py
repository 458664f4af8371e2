"""Serving: the engine as the routes see it, and what they do alike with its outputs."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from msgspec import UNSET

from mlx_paged_attention.api.defaults import sampling_defaults
from mlx_paged_attention.api.metrics import Metrics
from mlx_paged_attention.api.server.chunks import (
    CompletionTokensDetails,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from mlx_paged_attention.api.server.errors import ApiError
from mlx_paged_attention.api.server.middleware import PREFIX_OWNER
from mlx_paged_attention.api.server.protocol import GenerationRequest
from mlx_paged_attention.engine.outputs import Logprob, RequestOutput
from mlx_paged_attention.errors import EngineDeadError, InvalidRequestError
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlx_paged_attention.api.async_llm import AsyncLLM

_LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI's API says this instead

Outputs = AsyncGenerator[RequestOutput, None]

B = TypeVar("B", bound=GenerationRequest)


def with_owner(body: B, request: Request) -> B:
    """The request with a salt of its own for each owner of prefixes, where there are owners."""
    owner = request.scope.get(PREFIX_OWNER)
    return (
        body if owner is None else body.model_copy(update={"cache_salt": f"{owner}/{body.cache_salt or ''}"})
    )


class Serving:
    """The engine as the routes see it. One per app.

    Attributes:
        names: the model names that requests may use; the first is the one answers carry by default.
        created: Unix time of the start, which the API reports as the model's creation.
    """

    def __init__(self, llm: "AsyncLLM", names: Sequence[str]) -> None:
        self.llm = llm
        self.names = list(names)
        self.created = int(time.time())
        self.metrics = Metrics(llm, self.names[0])
        self.defaults = sampling_defaults(llm.generation_config)

    def require_engine(self) -> None:
        """Raises EngineDeadError with the reason if no request can be served."""
        if not self.llm.is_alive:
            raise EngineDeadError(f"the engine has stopped: {self.llm.dead_reason}")

    def require_tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError if the engine has none."""
        if self.llm.tokenizer is None:
            raise InvalidRequestError("the engine has no tokenizer (skip_tokenizer_init): token ids only")
        return self.llm.tokenizer

    def model_name(self, asked: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: 404, the model is not served here.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(self.names)
            raise ApiError(
                404,
                f"the model {asked!r} does not exist here; served: {served}",
                param="model",
                code="model_not_found",
            )
        return asked

    def generate(self, prompt: str | list[int], params: SamplingParams) -> Outputs:
        """The outputs of a prompt, counted in the metrics."""
        outputs = self.llm.generate(prompt, params, output_kind=_output_kind(params))
        return self.metrics.observe(outputs, params)

    def token_string(self, token_id: int, entry: Logprob | None = None, *, as_id: bool | None = False) -> str:
        """A token's own text; its number if that is asked for, or where the model has no tokenizer."""
        if as_id:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        if self.llm.tokenizer is None:
            return f"token_id:{token_id}"
        return self.llm.tokenizer.token_text(token_id)

    def token_logprob(
        self, token_id: int, entries: dict[int, Logprob], *, top: int, as_ids: bool | None = False
    ) -> TokenLogprob:
        """A token that was drawn, with the ``top`` most likely in its place, as texts or as numbers."""

        def describe(token: int, entry: Logprob) -> tuple[str, float, list[int]]:
            text = self.token_string(token, entry, as_id=as_ids)
            return text, finite(entry.logprob), self._token_bytes(token, text)

        alternatives = [TopLogprob(*describe(*item)) for item in ranked(entries, top)]
        return TokenLogprob(*describe(token_id, entries[token_id]), alternatives)

    def _token_bytes(self, token_id: int, text: str) -> list[int]:
        """The bytes of a token with that text, also where they are only a part of a character."""
        if "\N{REPLACEMENT CHARACTER}" not in text or self.llm.tokenizer is None:
            return list(text.encode())
        return list(self.llm.tokenizer.token_bytes(token_id))


def _output_kind(params: SamplingParams) -> Any:
    # Which answers are the best is known only when all have ended.
    return "final" if params.num_sequences > params.n else "delta"


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


class UsageCounter:
    """Adds up a response's tokens while its outputs pass by."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # by prompt: tokens, and of those cached
        self._completion_tokens = 0

    def add(self, prompt_index: int, output: RequestOutput, *, completion: bool = True) -> None:
        """Count an output; ``completion=False`` leaves out its generated tokens."""
        self._prompts[prompt_index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if completion:
            self._completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)

    def usage(self, reasoning_tokens: int | None = None) -> Usage:
        """The sums, and the reasoning tokens where they are told from others."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(cached for _, cached in self._prompts.values())),
            completion_tokens_details=UNSET
            if reasoning_tokens is None
            else CompletionTokensDetails(reasoning_tokens),
        )


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, _LOWEST_LOGPROB)


def ranked(entries: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` most likely of a position's tokens, most likely first."""
    return sorted(entries.items(), key=lambda item: item[1].rank)[:count]


def prompt_logprobs_json(
    positions: list[dict[int, Logprob] | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: per prompt token an object by token id, ``null`` for the first."""
    if positions is None:
        return None
    return [
        None
        if entries is None
        else {
            str(token_id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in entries.items()
        }
        for entries in positions
    ]


async def merge(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several requests as they come, each with its request's position.

    The first error ends all of them; closing this closes them.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return

    ready: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: Outputs) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await ready.put((index, output))
            await ready.put(None)
        except Exception as error:
            await ready.put(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        unfinished = len(pumps)
        while unfinished:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
