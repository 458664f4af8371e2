"""Answers: the outputs of a chat as parts (text, reasoning, tool calls), for every way in alike."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlx_paged_attention.engine.outputs import ChatAnswer, CompletionOutput, RequestOutput, ToolCall
from mlx_paged_attention.text.answer import (
    AnswerParser,
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from mlx_paged_attention.text.answer_format import AnswerFormat
from mlx_paged_attention.text.reasoning_tokens import ReasoningTokens
from mlx_paged_attention.text.thinking import thinking_of

if TYPE_CHECKING:
    from mlx_paged_attention.text.tokenizer import Tokenizer


class Answers:
    """Reads the answers of one request.

    Args:
        answer_format: the model's, or another if the answers are made to be written so.
        tools: what the request offers, as OpenAI's API writes it.
        parallel: an answer may make several calls.
        continued: the text that the answers continue, if they do not begin a turn.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        answer_format: AnswerFormat,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        parallel: bool = True,
        continued: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = answer_format
        self._tools = tools
        self._parallel = parallel
        self._continued = continued
        self._parsers: dict[int, AnswerParser] = {}
        self._counters: dict[int, ReasoningTokens] = {}

    @property
    def reasoning_tokens(self) -> int:
        """Of all answers, so far."""
        return sum(counter.count for counter in self._counters.values())

    def read(self, output: RequestOutput, answer: CompletionOutput) -> list[Part]:
        """The parts of one answer of a delta output, or of a final one."""
        index = answer.index
        if index not in self._parsers:
            self._begin(index, output.prompt_token_ids)
        parser = self._parsers[index]
        if index in self._counters:
            self._counters[index].add(answer.token_ids)
        parts = parser.push(answer.text)
        if answer.finish_reason is not None:
            parts += parser.finish()
        return parts

    def whole(self, output: RequestOutput, answer: CompletionOutput) -> ChatAnswer:
        """One answer of a final output."""
        content, reasoning, begun, arguments = "", "", list[ToolCallBegin](), list[str]()
        for part in self.read(output, answer):
            match part:
                case TextDelta(text):
                    content += text
                case ReasoningDelta(text):
                    reasoning += text
                case ToolCallBegin():
                    begun.append(part)
                case ToolCallArguments(_, text):
                    arguments.append(text)
        calls = [ToolCall(c.call_id, c.name, text) for c, text in zip(begun, arguments, strict=True)]
        return ChatAnswer(content, reasoning, calls)

    def finish_reason(self, answer: CompletionOutput) -> str | None:
        """Why it ended, in the words of OpenAI's API."""
        if self._parsers[answer.index].num_calls == 0:
            return answer.finish_reason
        # An answer of one call is complete with it, whatever the model would have said after it.
        complete = answer.finish_reason == "stop" or (answer.finish_reason == "length" and not self._parallel)
        return "tool_calls" if complete else answer.finish_reason

    def _begin(self, index: int, prompt_token_ids: list[int]) -> None:
        answer_format, in_reasoning = self._format, False
        if answer_format.reasoning is not None:
            in_reasoning = thinking_of(self._tokenizer, prompt_token_ids, self._continued) == "open"
            ends = answer_format.markers("reasoning", tools=bool(self._tools))
            self._counters[index] = ReasoningTokens(
                self._ids(answer_format.reasoning[0]), list(map(self._ids, ends)), in_reasoning=in_reasoning
            )
        self._parsers[index] = AnswerParser(
            answer_format, tools=self._tools, in_reasoning=in_reasoning, parallel=self._parallel
        )

    def _ids(self, marker: str) -> list[int]:
        return self._tokenizer.encode(marker, add_special_tokens=False)
