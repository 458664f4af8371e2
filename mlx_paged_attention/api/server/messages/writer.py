"""Writer: the parts of an answer as content blocks, and its tokens as Anthropic's API counts them."""

from typing import Any

from msgspec import UNSET

from mlx_paged_attention.api.server.chunks import Usage
from mlx_paged_attention.api.server.messages import events
from mlx_paged_attention.api.server.messages.translation import sign
from mlx_paged_attention.text.answer import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)


def usage_of(usage: Usage) -> events.MessageUsage:
    """The prompt's tokens apart: those that were in the cache, and the others."""
    cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    assert details is not UNSET, "conversations count the tokens of reasoning"
    return events.MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=events.OutputTokensDetails(details.reasoning_tokens),
    )


class ContentWriter:
    """Writes an answer's parts as content blocks, of which one at a time is open."""

    def __init__(self, *, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking
        self._index = -1
        self._open: events.Content | None = None
        self._thinking: list[str] = []

    def write(self, part: Part) -> list[events.Event]:
        match part:
            case TextDelta(text):
                return [*self._enter(events.TextContent()), self._delta(events.TextDelta(text))]
            case ReasoningDelta(text):
                entering = self._enter(events.ThinkingContent())
                self._thinking.append(text)
                shown = [] if self._hides_thinking else [self._delta(events.ThinkingDelta(text))]
                return [*entering, *shown]
            case ToolCallBegin(_, call_id, name):
                return self._enter(events.ToolUseContent(call_id, name, {}))
            case ToolCallArguments(_, text):
                return [self._delta(events.InputJsonDelta(text))]
            case ToolCallEnd():
                return self.close()

    def close(self) -> list[events.Event]:
        """End the block that is open."""
        ending: list[events.Event] = []
        if isinstance(self._open, events.ThinkingContent):
            ending.append(self._delta(events.SignatureDelta(sign("".join(self._thinking)))))
            self._thinking = []
        if self._open is not None:
            ending.append(events.ContentBlockStop(self._index))
        self._open = None
        return ending

    def _enter(self, block: events.Content) -> list[events.Event]:
        """Begin a block, unless one of its kind is open."""
        if type(self._open) is type(block):
            return []
        ending = self.close()
        self._open = block
        self._index += 1
        return [*ending, events.ContentBlockStart(self._index, block)]

    def _delta(self, delta: Any) -> events.ContentBlockDelta:
        return events.ContentBlockDelta(self._index, delta)
