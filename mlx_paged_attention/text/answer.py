"""AnswerParser: an answer's text in, piece by piece; text, reasoning and tool calls out.

It stands between the detokenizer and every API, streamed or not, so that these cannot read an answer
differently. What it says does not depend on how the text is cut into pieces: a marker that may be beginning
is held back until it is one or is not, and so is white space, which belongs to the marker beside it.

Nothing the model has said is lost: an unfinished or malformed tool call comes out as the text it is.
"""

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_paged_attention.text.answer_format import AnswerFormat
from mlx_paged_attention.text.tool_parsers import read_calls


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of a tool that was offered; its arguments follow.

    Attributes:
        index: 0 for the answer's first call.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments; joined, the text of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


Part = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments | ToolCallEnd

_State = Literal["text", "reasoning", "call", "done"]

_QUOTE_OR_ESCAPED = re.compile(r'"|\\.', re.DOTALL)


class AnswerParser:
    """Reads one answer.

    The parts from :meth:`push` and :meth:`finish`, with neighbouring texts joined, are the same for every way
    to cut the answer into pieces.

    Args:
        answer_format: of the model's answers.
        tools: what the request offers, as OpenAI's API writes it; without any, calls are ordinary text.
        in_reasoning: the prompt ends inside the model's reasoning.
        parallel: several calls may be made; if not, the answer ends with its first one.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        in_reasoning: bool = False,
        parallel: bool = True,
    ) -> None:
        self.num_calls = 0
        self._tools = tools
        self._parallel = parallel
        self._calls = answer_format.tool_calls if tools else None
        self._state: _State = "reasoning" if in_reasoning else "text"
        self._markers = {s: answer_format.markers(s, tools=bool(tools)) for s in ("text", "reasoning")}
        self._search = {state: _any_of(tuple(markers)) for state, markers in self._markers.items()}
        self._beginnings = {
            state: {marker[:size] for marker in markers for size in range(1, len(marker))}
            for state, markers in self._markers.items()
        }
        self._longest = {state: max(map(len, found), default=0) for state, found in self._beginnings.items()}
        self._buffer = ""  # not decided yet
        self._trims = in_reasoning  # leading white space belongs to the marker before it
        self._at_start = True  # no text of the answer proper yet
        # Of a call that is being read: its start as written, where it began, how much has been searched.
        self._start = ""
        self._begun_in: _State = "text"
        self._searched = 0
        self._first_end = -1  # inside a JSON text of the call, where it may be no end
        self._quotes, self._counted = 0, 0  # those that begin or end a JSON text, up to there
        self._scanned = 0  # of the buffer outside of calls: no marker begins before

    def push(self, text: str) -> list[Part]:
        """Take more of the answer; returns what is certain now."""
        return self._read(text, last=False)

    def finish(self) -> list[Part]:
        """The answer has ended; returns what was held back."""
        return self._read("", last=True)

    def _read(self, text: str, *, last: bool) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts, last):
            pass
        return _joined(parts)

    def _step(self, parts: list[Part], last: bool) -> bool:
        """Read on to the next marker; False if there is none (yet)."""
        if self._state == "call":
            return self._step_in_call(parts, last)
        if self._state == "done":
            self._buffer = ""
            return False
        if self._state == "text" and self._at_start and self._calls and self._calls.openings:
            bare = self._buffer.lstrip()
            if any(bare.startswith(opening) for opening in self._calls.openings):
                self._begin_call(self._buffer[: len(self._buffer) - len(bare)], len(self._buffer) - len(bare))
                return True
            if not last and any(opening.startswith(bare) for opening in self._calls.openings):
                return False
        found = self._search[self._state].search(self._buffer, self._scanned)
        held = len(self._buffer) if last else self._begun_marker()
        if found is not None and found.start() < held:
            self._pass_marker(parts, found)
            return True
        text = self._buffer[:held]
        if not last:
            text = text.rstrip()
        self._say(parts, text)
        self._buffer = self._buffer[len(text) :]
        self._scanned = max(0, len(self._buffer) - self._longest[self._state])
        return False

    def _begun_marker(self) -> int:
        """Where the first marker begins that is complete but for what has yet to come; else the end."""
        buffer, beginnings = self._buffer, self._beginnings[self._state]
        for size in range(min(self._longest[self._state], len(buffer)), 0, -1):
            if buffer[-size:] in beginnings:
                return len(buffer) - size
        return len(buffer)

    def _pass_marker(self, parts: list[Part], found: re.Match[str]) -> None:
        before = self._buffer[: found.start()]
        text = before.rstrip()
        space = "" if self._trims and not text else before[len(text) :]
        self._say(parts, text)
        kind = self._markers[self._state][found[0]]
        if kind == "call":
            self._begin_call(space + found[0], found.end())
            return
        self._buffer = self._buffer[found.end() :]
        self._state, self._scanned = kind, 0
        self._trims = True

    def _begin_call(self, start: str, length: int) -> None:
        self._start, self._begun_in, self._searched, self._first_end = start, self._state, 0, -1
        self._quotes, self._counted = 0, 0
        self._buffer = self._buffer[length:]
        self._state = "call"

    def _step_in_call(self, parts: list[Part], last: bool) -> bool:
        assert self._calls is not None
        end = self._calls.end
        at = self._find_end()
        if at < 0 and not last:
            self._searched = max(0, len(self._buffer) - len(end) + 1)
            return False
        if at < 0:
            body, whole, rest = self._buffer, self._buffer, ""
        else:
            body, whole, rest = (
                self._buffer[:at],
                self._buffer[: at + len(end)],
                self._buffer[at + len(end) :],
            )
        calls = None if end and at < 0 else read_calls(self._calls.parse, body, self._tools)
        if calls is None and self._first_end >= 0:  # then it was the end
            cut = self._first_end + len(end)
            whole, rest = self._buffer[:cut], self._buffer[cut:]
        self._buffer, self._scanned = rest, 0
        if calls is None:
            self._state, self._trims = self._begun_in, False
            self._say(parts, self._start + whole)
            return bool(rest)
        for call in calls if self._parallel else calls[:1]:
            call_id = call.call_id or _new_id(short=self._calls.short_ids)
            parts.append(ToolCallBegin(self.num_calls, call_id, call.name))
            parts.append(ToolCallArguments(self.num_calls, call.arguments))
            parts.append(ToolCallEnd(self.num_calls))
            self.num_calls += 1
        self._state, self._trims, self._at_start = "text" if self._parallel else "done", True, False
        return bool(rest)

    def _find_end(self) -> int:
        """Where the call's end marker is, if it is there; one inside a text of its JSON arguments is none."""
        assert self._calls is not None
        end = self._calls.end
        at = self._buffer.find(end, self._searched) if end else -1
        while at >= 0 and self._calls.layout is not None and self._is_in_text(at):
            self._first_end = at if self._first_end < 0 else self._first_end
            at = self._buffer.find(end, at + len(end))
        return at

    def _is_in_text(self, at: int) -> bool:
        """Whether this place of the call is inside a text of its JSON; asked for from left to right."""
        for found in _QUOTE_OR_ESCAPED.finditer(self._buffer, self._counted, at):
            self._quotes += found[0] == '"'
            self._counted = found.end()
        self._counted = max(self._counted, at - 1)  # what is there may be the beginning of an escape
        return self._quotes % 2 == 1

    def _say(self, parts: list[Part], text: str) -> None:
        if self._trims:
            text = text.lstrip()
        if not text:
            return
        self._trims = False
        if self._state == "reasoning":
            parts.append(ReasoningDelta(text))
        else:
            self._at_start = False
            parts.append(TextDelta(text))


def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    # Of markers that begin alike the longest is meant.
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)")


def _joined(parts: list[Part]) -> list[Part]:
    """The parts with neighbouring texts of one kind as one."""
    result: list[Part] = []
    for part in parts:
        if result and isinstance(part, TextDelta | ReasoningDelta) and type(result[-1]) is type(part):
            previous = result.pop()
            assert isinstance(previous, TextDelta | ReasoningDelta)
            part = type(part)(previous.text + part.text)
        result.append(part)
    return result


def _new_id(*, short: bool) -> str:
    if short:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
