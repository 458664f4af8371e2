"""OutputWriter: the parts of an answer as items, and the events that tell of them."""

from typing import Any, Protocol

from msgspec import UNSET

from mlx_paged_attention.api.server.chunks import TokenLogprob
from mlx_paged_attention.api.server.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    Event,
    ItemAdded,
    ItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryTextDelta,
    SummaryTextDone,
)
from mlx_paged_attention.api.server.responses.objects import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
    object_id,
)
from mlx_paged_attention.api.server.responses.sealed_reasoning import seal
from mlx_paged_attention.api.server.responses.text_logprobs import TextLogprobs
from mlx_paged_attention.text.answer import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)


class OutputWriter:
    """Writes one answer.

    Args:
        summary: reasoning is told as its own summary.
        sealed: reasoning comes as ``encrypted_content``, too.
    """

    def __init__(self, *, summary: bool, sealed: bool) -> None:
        self._summary, self._sealed = summary, sealed
        self._done: list[OutputItem] = []
        self._open: _Open | None = None

    @property
    def output(self) -> list[OutputItem]:
        """The items; one that is being written counts as cut off."""
        return self._done if self._open is None else [*self._done, self._open.item("incomplete")]

    def write(self, parts: list[Part], logprobs: TextLogprobs | None) -> list[Event]:
        """The events of the next parts."""
        events: list[Event] = []
        for part in parts:
            match part:
                case TextDelta(text):
                    if not isinstance(self._open, _OpenMessage):
                        events += self._begin(_OpenMessage())
                    assert isinstance(self._open, _OpenMessage)
                    events += self._open.add(text, [] if logprobs is None else logprobs.take(text))
                case ReasoningDelta(text):
                    if not isinstance(self._open, _OpenReasoning):
                        events += self._begin(_OpenReasoning(self._summary, self._sealed))
                    assert isinstance(self._open, _OpenReasoning)
                    events += self._open.add(text)
                case ToolCallBegin(_, call_id, name):
                    events += self._begin(_OpenCall(call_id, name))
                case ToolCallArguments(_, text):
                    assert isinstance(self._open, _OpenCall)
                    events += self._open.add(text)
                case ToolCallEnd():
                    events += self._end("completed")
        return events

    def finish(self, status: ItemStatus) -> list[Event]:
        """The answer has ended. One that says nothing is an empty message: a turn all the same."""
        events = [] if self.output else self._begin(_OpenMessage())
        return events + self._end(status)

    def _begin(self, item: "_Open") -> list[Event]:
        events = self._end("completed")
        item.where["output_index"] = len(self._done)
        self._open = item
        return events + item.begin()

    def _end(self, status: ItemStatus) -> list[Event]:
        ended, self._open = self._open, None
        if ended is None:
            return []
        self._done.append(ended.item(status))
        return [*ended.end(), ItemDone(output_index=ended.where["output_index"], item=self._done[-1])]


class _Open(Protocol):
    """An item that is being written.

    Attributes:
        where: its id and its place in the output, as its events name them.
    """

    where: dict[str, Any]

    def begin(self) -> list[Event]: ...

    def end(self) -> list[Event]: ...

    def item(self, status: ItemStatus) -> OutputItem: ...


class _OpenMessage:
    def __init__(self) -> None:
        self.where: dict[str, Any] = {"item_id": object_id("msg")}
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[Event]:
        empty = MessageItem(id=self.where["item_id"], status="in_progress")
        added = ItemAdded(output_index=self.where["output_index"], item=empty)
        return [added, ContentPartAdded(**self.where, part=OutputText())]

    def add(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [OutputTextDelta(**self.where, delta=text, logprobs=logprobs)]

    def end(self) -> list[Event]:
        part = self._part()
        return [
            OutputTextDone(**self.where, text=part.text, logprobs=part.logprobs),
            ContentPartDone(**self.where, part=part),
        ]

    def item(self, status: ItemStatus) -> MessageItem:
        return MessageItem(id=self.where["item_id"], status=status, content=[self._part()])

    def _part(self) -> OutputText:
        return OutputText(text="".join(self._texts), logprobs=self._logprobs)


class _OpenReasoning:
    def __init__(self, summary: bool, sealed: bool) -> None:
        self.where: dict[str, Any] = {"item_id": object_id("rs")}
        self._summary, self._sealed = summary, sealed
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        empty = ReasoningItem(id=self.where["item_id"], status="in_progress")
        added = ItemAdded(output_index=self.where["output_index"], item=empty)
        if self._summary:
            return [added, SummaryPartAdded(**self.where, part=SummaryText())]
        return [added, ContentPartAdded(**self.where, part=ReasoningText())]

    def add(self, text: str) -> list[Event]:
        self._texts.append(text)
        if self._summary:
            return [SummaryTextDelta(**self.where, delta=text)]
        return [ReasoningTextDelta(**self.where, delta=text)]

    def end(self) -> list[Event]:
        text = "".join(self._texts)
        if self._summary:
            part = SummaryPartDone(**self.where, part=SummaryText(text=text))
            return [SummaryTextDone(**self.where, text=text), part]
        return [
            ReasoningTextDone(**self.where, text=text),
            ContentPartDone(**self.where, part=ReasoningText(text=text)),
        ]

    def item(self, status: ItemStatus) -> ReasoningItem:
        text = "".join(self._texts)
        return ReasoningItem(
            id=self.where["item_id"],
            summary=[SummaryText(text=text)] if self._summary else [],
            content=[] if self._summary else [ReasoningText(text=text)],
            encrypted_content=seal(text) if self._sealed else UNSET,
            status=status,
        )


class _OpenCall:
    def __init__(self, call_id: str, name: str) -> None:
        self.where: dict[str, Any] = {"item_id": object_id("fc")}
        self._call_id, self._name = call_id, name
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return [ItemAdded(output_index=self.where["output_index"], item=self.item("in_progress"))]

    def add(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [ArgumentsDelta(**self.where, delta=text)]

    def end(self) -> list[Event]:
        return [ArgumentsDone(**self.where, name=self._name, arguments="".join(self._texts))]

    def item(self, status: ItemStatus) -> FunctionCallItem:
        return FunctionCallItem(
            id=self.where["item_id"],
            call_id=self._call_id,
            name=self._name,
            arguments="".join(self._texts),
            status=status,
        )
