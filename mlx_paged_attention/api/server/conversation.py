"""Conversation: one chat request, whichever protocol it came in, from its messages to its answers' parts.

Every protocol that chats turns what it is sent into a :class:`ChatRequest`, and writes the parts that come
out here in its own words. So none of them can read an answer differently, or know less than another.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from mlx_paged_attention.api.server.chunks import Usage
from mlx_paged_attention.api.server.protocol import ChatRequest
from mlx_paged_attention.api.server.serving import Serving, UsageCounter
from mlx_paged_attention.api.tools import tool_choice_of
from mlx_paged_attention.api.turn import Turn
from mlx_paged_attention.engine.outputs import CompletionOutput, RequestOutput
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.text.answer import Part
from mlx_paged_attention.text.messages import continued_text
from mlx_paged_attention.text.tokenizer import Tokenizer


class Rendered(NamedTuple):
    """What an engine would be asked: the prompt, as text and as token ids, and how to continue it."""

    text: str
    token_ids: list[int]
    params: SamplingParams


AnswerParts = list[tuple[CompletionOutput, list[Part]]]


class Conversation:
    """Answers one chat request.

    Attributes:
        names_the_call: the request says which function is called.

    Raises:
        InvalidRequestError: the request asks for what this model or engine cannot do.
        EngineDeadError: nothing can be served.
    """

    def __init__(self, serving: Serving, body: ChatRequest) -> None:
        serving.require_engine()
        self._serving = serving
        self._body = body
        tokenizer = serving.llm.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "chat needs a tokenizer, and the engine has none (skip_tokenizer_init)", "messages"
            )
        self._tokenizer = tokenizer
        choice = tool_choice_of(body.tools, body.tool_choice, tokenizer)
        self.names_the_call = choice.is_named
        self._template_kwargs = _template_kwargs(body, choice.offered, tokenizer)
        own: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
        if body.max_completion_tokens is not None:
            own["max_tokens"] = body.max_completion_tokens
        # Without a limit of the client's or the model's, an answer may fill the context.
        params = body.sampling_params({"max_tokens": None} | serving.defaults, **own)
        with body.own_names():
            self._turn = Turn(
                tokenizer,
                choice,
                params,
                parallel=body.parallel_tool_calls is not False,
                continued=continued_text(body.messages) if body.continue_final_message else None,
            )
        self._usage = UsageCounter()

    @property
    def usage(self) -> Usage:
        """The tokens read and written so far."""
        return self._usage.usage(self._turn.answers.reasoning_tokens)

    async def prompt_token_ids(self) -> list[int]:
        """What the model will read.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        return await asyncio.to_thread(
            self._tokenizer.chat_token_ids, self._body.messages, **self._template_kwargs
        )

    async def rendered(self) -> Rendered:
        """The prompt and the parameters, without answering; raises as :meth:`prompt_token_ids`."""
        text = await asyncio.to_thread(
            self._tokenizer.render_chat, self._body.messages, **self._template_kwargs
        )
        prompt = await self.prompt_token_ids()
        return Rendered(text, prompt, self._turn.params(prompt))

    async def answers(self) -> AsyncGenerator[tuple[RequestOutput, AnswerParts], None]:
        """Each output, with the parts that are new in every answer that it tells of."""
        prompt = await self.prompt_token_ids()
        outputs = self._serving.generate(prompt, self._turn.params(prompt))
        # A client that leaves frees its blocks now, not when this is collected.
        with self._body.own_names():
            async with aclosing(outputs):
                async for output in outputs:
                    self._usage.add(0, output)
                    yield (
                        output,
                        [(answer, self._turn.answers.read(output, answer)) for answer in output.outputs],
                    )

    def finish_reason(self, answer: CompletionOutput) -> str | None:
        """Why an answer ended, in the words of OpenAI's API."""
        return self._turn.answers.finish_reason(answer)


def _template_kwargs(body: ChatRequest, tools: list[dict[str, Any]], tokenizer: Tokenizer) -> dict[str, Any]:
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if tools:
        options["tools"] = tools
    for name in ("add_generation_prompt", "continue_final_message"):
        if getattr(body, name) is not None:
            options[name] = getattr(body, name)
    if body.reasoning_effort is not None:
        if not tokenizer.template_reads("reasoning_effort"):
            raise InvalidRequestError(
                "reasoning_effort: this model's chat template does not know it; leave it out. Some templates "
                "turn reasoning off with chat_template_kwargs {'enable_thinking': false}",
                "reasoning_effort",
            )
        options["reasoning_effort"] = body.reasoning_effort
    return options
