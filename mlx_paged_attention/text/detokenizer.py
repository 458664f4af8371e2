"""Detokenizer: one sequence's token ids in, the text that may be shown out.

Two things are decided before any text leaves: whether a character is complete, and whether the text may
be part of a stop string. What is held back for either reason comes out of :meth:`Detokenizer.flush`.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence

from mlx_paged_attention.errors import InvalidRequestError

# What decoders write for bytes that are no character (yet).
REPLACEMENT = "\ufffd"
# An incomplete character is at most 3 tokens long, so a longer tail of replacement characters is not waiting
# for anything; from this many undecided tokens on, the window is cut, to keep the cost per token constant.
_MAX_PENDING = 8


class Detokenizer:
    """Turns the token ids of one sequence into text, piece by piece.

    The text of an id depends on its neighbours (characters split over tokens, leading spaces that a decoder
    strips), so each id is decoded in a short window: the ids of the last piece of text, as context, and the
    ids since. ``tokenizers.decoders.DecodeStream`` works on the same window, but it holds invalid bytes for
    ever, has no flush, and raises where a byte-fallback decoder turns characters that are out already into
    replacement characters because an invalid byte follows them.

    The pieces from :meth:`push` and :meth:`flush` joined are the decoded text, cut at the first stop string.

    Which stop string wins does not depend on how the text is split into tokens: the match that *ends* first,
    and of several that end at the same character the one that stands first in ``stop``.

    Attributes:
        stopped: the stop string that ended the text, or ``None``.

    Args:
        decode: token ids to text; ids that show no text (skipped special tokens) decode to ``""``.
        stop: non-empty strings that end the text.
        include_stop: keep the matched stop string as the end of the text.
        min_tokens: a stop string that is complete within this many tokens is ordinary text, as in vLLM.
        silent_ids: ids that never produce text and do not interrupt their neighbours.

    Raises:
        InvalidRequestError: a stop string is empty.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        silent_ids: frozenset[int] = frozenset(),
    ) -> None:
        if any(not text for text in stop):
            raise InvalidRequestError("a stop string must not be empty", "stop")
        self.stopped: str | None = None
        self._decode = decode
        self._stop = _StopStrings(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._silent_ids = silent_ids
        self._num_tokens = 0
        # The window: ids whose text is out, ids whose text is not (fully) out, and its text that is out.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown = ""
        # Decoded text that may be the beginning of a stop string; none ends in it, or it was too early.
        self._held = ""

    def push(self, token_id: int) -> str:
        """Add the next token id; returns the text that may be shown now, often ``""``.

        After a stop string has matched every further id is ignored.
        """
        if self.stopped is not None:
            return ""
        self._num_tokens += 1
        text = "" if token_id in self._silent_ids else self._decode_next(token_id)
        return self._release(text, self._num_tokens > self._min_tokens)

    def flush(self) -> str:
        """End the sequence; returns the text held back so far (``""`` after a stop string).

        An incomplete character comes out as U+FFFD. That may complete a stop string too: read ``stopped``
        afterwards.
        """
        if self.stopped is not None:
            return ""
        tail = self._decode(self._context + self._pending)[len(self._shown) :]
        text = self._release(tail, self._num_tokens > self._min_tokens)
        self._context, self._pending, self._shown = [], [], ""
        if self.stopped is None:
            text += self._held
        self._held = ""
        return text

    def copy(self) -> "Detokenizer":
        """A detokenizer in the same state that goes its own way from here (fork of a sequence)."""
        other = copy.copy(self)
        other._context, other._pending = self._context.copy(), self._pending.copy()
        return other

    def _decode_next(self, token_id: int) -> str:
        """The text that has become certain with this id."""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if not text.startswith(self._shown):
            # A byte-fallback decoder takes back the characters of a run of byte tokens if an invalid byte
            # follows. They are out: go on without them.
            self._context, self._shown = [], ""
            text = self._decode(self._pending)
        if text.endswith(REPLACEMENT):
            return self._show_undecided(text)
        new = text[len(self._shown) :]
        if new:
            self._context, self._pending = self._pending, []
            self._shown = self._decode(self._context)
        elif len(self._pending) >= _MAX_PENDING:
            self._pending.clear()  # Ids without text, such as ones beyond the vocabulary.
        return new

    def _show_undecided(self, text: str) -> str:
        """The new part of the text that no further byte can change; its end may be half a character."""
        cut, certain = 0, len(text.rstrip(REPLACEMENT))
        if len(self._pending) >= _MAX_PENDING:
            cut, length = self._last_border(text)
            certain = max(certain, length)
        new = text[len(self._shown) : certain]
        self._shown += new
        if cut:
            self._context, self._pending = self._pending[:cut], self._pending[cut:]
            rest = self._decode(self._context + self._pending)
            self._shown = rest[: len(rest) - (len(text) - certain)]
        return new

    def _last_border(self, text: str) -> tuple[int, int]:
        """The last place between pending ids that lies within no character, and where it is in the text.

        A character that spans a place shows: its bytes make more replacement characters apart than together.
        Of four successive places one is a border, as a character has at most four bytes; (0, 0) if ids
        without text are among them.
        """
        for cut in range(len(self._pending) - 1, len(self._pending) - 5, -1):
            head = self._decode(self._context + self._pending[:cut])
            tail = self._decode(self._pending[cut:])
            if tail and head + tail == text:
                return cut, len(head)
        return 0, 0

    def _release(self, text: str, may_stop: bool) -> str:
        """Put new text behind the held text; returns what of both can no longer be part of a stop string."""
        if self._stop is None or not text:
            return text
        decided = len(self._held)
        text = self._held + text
        match = self._stop.first(text, decided) if may_stop else None
        if match is not None:
            start, self.stopped = match
            self._held = ""
            return text[: start + len(self.stopped)] if self._include_stop else text[:start]
        keep = self._stop.beginning(text)
        self._held = text[keep:]
        return text[:keep]


class _StopStrings:
    """Finds stop strings in a time that hardly depends on how many there are: a client may send many."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._places = {text: place for place, text in reversed(list(enumerate(stop)))}
        self._sorted = sorted(self._places)
        self._lengths = sorted({len(text) for text in stop})

    def first(self, text: str, decided: int) -> tuple[int, str] | None:
        """Start and string of the one that ends first behind ``decided`` characters.

        Of several that end there it is the one that stands first in the list.
        """
        for end in range(decided + 1, len(text) + 1):
            found = [
                (place, end - length)
                for length in self._lengths
                if length <= end and (place := self._places.get(text[end - length : end])) is not None
            ]
            if found:
                _, start = min(found)
                return start, text[start:end]
        return None

    def beginning(self, text: str) -> int:
        """Where the longest end of ``text`` begins that one of them goes on from; its length if none does."""
        for start in range(max(0, len(text) - self._lengths[-1] + 1), len(text)):
            begun = text[start:]
            at = bisect_left(self._sorted, begun)
            at += at < len(self._sorted) and self._sorted[at] == begun
            if at < len(self._sorted) and self._sorted[at].startswith(begun):
                return start
        return len(text)
