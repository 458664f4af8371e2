"""Conversation: one chat request, whichever protocol it came in, from its messages to its answers' parts.

Every protocol that chats turns what it is sent into a :class:`ChatRequest`, and writes the parts that come
out here in its own words. So none of them can read an answer differently, or know less than another.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from mlx_paged_attention.api.server.answers import Answers
from mlx_paged_attention.api.server.chunks import Usage
from mlx_paged_attention.api.server.protocol import ChatRequest
from mlx_paged_attention.api.server.serving import Serving, UsageCounter
from mlx_paged_attention.api.server.tools import ToolChoice, tool_choice_of
from mlx_paged_attention.engine.outputs import CompletionOutput, RequestOutput
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.sampling.structured_outputs import structured_outputs
from mlx_paged_attention.text.answer import Part
from mlx_paged_attention.text.answer_grammar import AnswerGrammar
from mlx_paged_attention.text.messages import normalize_messages
from mlx_paged_attention.text.thinking import thinking_of
from mlx_paged_attention.text.tokenizer import Tokenizer

AnswerParts = list[tuple[CompletionOutput, list[Part]]]


class Conversation:
    """Answers one chat request.

    Raises:
        InvalidRequestError: the request asks for what this model or engine cannot do.
        EngineDeadError: nothing can be served.
    """

    def __init__(self, serving: Serving, body: ChatRequest) -> None:
        serving.require_engine()
        self._serving = serving
        self._messages = body.messages
        tokenizer = serving.llm.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "chat needs a tokenizer, and the engine has none (skip_tokenizer_init)", "messages"
            )
        self._tokenizer = tokenizer
        self._choice = choice = tool_choice_of(body.tools, body.tool_choice, tokenizer)
        self._template_kwargs = _template_kwargs(body, choice.offered, tokenizer)
        self._parallel = body.parallel_tool_calls is not False
        continues = body.continue_final_message
        self._continued = normalize_messages(body.messages)[-1]["content"] if continues else None
        own: dict[str, Any] = {
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "shown_special_ids": tokenizer.answer_special_ids(tools=bool(choice.offered)),
        }
        if body.max_completion_tokens is not None:
            own["max_tokens"] = body.max_completion_tokens
        # Without a limit of the client's or the model's, an answer may fill the context.
        self._params = body.sampling_params({"max_tokens": None} | serving.defaults, **own)
        if continues and self._params.thinking_token_budget is not None:
            raise InvalidRequestError(
                "thinking_token_budget: does not go with continue_final_message, as what has been thought "
                "before is not counted; leave one of them out",
                "thinking_token_budget",
            )
        self._usage = UsageCounter()
        self._enforced = _enforces_calls(choice, self._params)
        self._format = tokenizer.answer_format
        if self._enforced:
            self._format = self._format.with_json_calls()
        self._answers = Answers(
            tokenizer,
            self._format,
            tools=choice.offered,
            parallel=self._parallel,
            continued=self._continued,
        )

    @property
    def usage(self) -> Usage:
        """The tokens read and written so far."""
        return self._usage.usage(self._answers.reasoning_tokens)

    async def prompt_token_ids(self) -> list[int]:
        """What the model will read.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        return await asyncio.to_thread(
            self._tokenizer.chat_token_ids, self._messages, **self._template_kwargs
        )

    async def answers(self) -> AsyncGenerator[tuple[RequestOutput, AnswerParts], None]:
        """Each output, with the parts that are new in every answer that it tells of."""
        prompt = await self.prompt_token_ids()
        outputs = self._serving.generate(prompt, self._in_form(prompt))
        async with aclosing(outputs):  # a client that leaves frees its blocks now, not when this is collected
            async for output in outputs:
                self._usage.add(0, output)
                yield output, [(answer, self._answers.read(output, answer)) for answer in output.outputs]

    def finish_reason(self, answer: CompletionOutput) -> str | None:
        """Why an answer ended, in the words of OpenAI's API."""
        return self._answers.finish_reason(answer)

    def _in_form(self, prompt: list[int]) -> SamplingParams:
        """The parameters, with the grammar of what an answer to this prompt must look like, if it must."""
        form = self._params.structured_outputs
        if form is None and not self._enforced:
            return self._params
        choice = self._choice
        thinking = thinking_of(self._tokenizer, prompt, self._continued)
        grammar = AnswerGrammar(
            self._format,
            self._tokenizer.added_tokens,
            thinking,
            begun=self._continued is not None and thinking == "over",
            tools=choice.forced or choice.offered,
            parallel=self._parallel,
        )
        if not self._enforced:
            whole = grammar.of_form(structured_outputs(form))
        elif choice.forced:
            whole = grammar.of_calls()
        elif form is not None:
            whole = grammar.of_form_or_calls(structured_outputs(form))
        else:
            whole = grammar.of_text_and_calls()
        return replace(self._params, structured_outputs=whole)


def _enforces_calls(choice: ToolChoice, params: SamplingParams) -> bool:
    """Whether a grammar has to write the calls.

    Raises:
        InvalidRequestError: something else decides what is written, too.
    """
    form = params.structured_outputs
    if not (choice.forced or choice.is_strict or (choice.offered and form is not None)):
        return False
    if choice.forced and form is not None:
        named = structured_outputs(form).named
        raise InvalidRequestError(
            f"tool_choice asks for nothing but a call, {named} for text of a form; send one of them", named
        )
    for name, given in (
        ("use_beam_search", params.use_beam_search),
        ("allowed_token_ids", params.allowed_token_ids is not None),
    ):
        if given:
            raise InvalidRequestError(f"{name}: does not go with tool calls that are enforced", name)
    return True


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
