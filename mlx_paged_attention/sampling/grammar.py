"""Grammars while tokens are sampled: where a row stands in its own, and which tokens may come next."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

if TYPE_CHECKING:
    from mlx_paged_attention.sampling.row import SamplingRow

# What the eight tokens of a mask's byte may have at most: a minimum is faster than a selection.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_LIMITS = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)


class MatcherSource(Protocol):
    """Where matchers come from.

    Attributes:
        mask_words: how many 32-bit words a mask has.
    """

    @property
    def mask_words(self) -> int: ...

    def new_matcher(self, source: str) -> LLMatcher:
        """A matcher at the start of the grammar ``source``."""
        ...


class RowGrammar:
    """How far one answer has come in its grammar.

    Args:
        read: tokens of the answer that exist already.
        stop_ids: tokens that end the answer, and may do so where the grammar may end.

    Attributes:
        complete: nothing may follow what has been read.
        failure: why it cannot go on, if it cannot.
    """

    def __init__(self, matcher: LLMatcher, read: Iterable[int], stop_ids: Sequence[int]) -> None:
        self.matcher = matcher
        self.complete = False
        self.failure: str | None = None
        self._stop_ids = frozenset(stop_ids)
        for token_id in read:
            self.advance(token_id)

    def advance(self, token_id: int) -> None:
        """Read the answer's next token."""
        if token_id in self._stop_ids and self.matcher.is_accepting():
            self.complete = True
        elif not self.matcher.consume_token(token_id):
            self.failure = f"the grammar of structured_outputs: {self.matcher.get_error()}"
        else:
            self.complete = self.matcher.is_stopped()

    def finish_mask(
        self, words: npt.NDArray[np.uint32], banned: Sequence[int], forced: int | None = None
    ) -> None:
        """Complete the matcher's mask: stops where it may end, and without ``banned`` if that leaves any.

        Args:
            forced: the only token allowed, if the grammar allows it here: it may not within a character.
            words: ``[mask words]``, bit ``i % 32`` of word ``i // 32`` is token ``i``; changed in place.
        """
        if self.matcher.is_error():
            self.failure = f"the grammar of structured_outputs: {self.matcher.get_error()}"
        elif self.matcher.is_accepting():
            _set(words, self._stop_ids, True)
        kept = words.copy()
        if forced is not None and _has(words, forced):
            kept[:] = 0
            _set(kept, [forced], True)
        else:
            _set(kept, banned, False)
        if kept.any():
            words[:] = kept
        elif self.failure is None and not words.any():
            self.failure = "the grammar of structured_outputs allows no token of the vocabulary here"
        if self.failure is not None:
            words[:] = 0xFFFFFFFF  # something is sampled, and then thrown away


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Which tokens the rows that have a grammar may sample.

    Attributes:
        rows: positions in the batch, ascending, ``[masks]`` int32.
        words: ``[masks, mask words]`` uint32, bit ``i % 32`` of word ``i // 32`` is token ``i``.
    """

    rows: npt.NDArray[np.int32]
    words: npt.NDArray[np.uint32]

    def apply(self, logits: mx.array) -> mx.array:
        """``logits`` ``[rows, vocab]`` as float32, with -inf for every token that is masked or has no bit."""
        vocab = logits.shape[1]
        # As bytes: least significant first on every platform that MLX runs on.
        packed = mx.array(self.words.view(np.uint8))
        limits = mx.array(_LIMITS)[packed].reshape(len(self.rows), -1)[:, :vocab]
        if limits.shape[1] < vocab:
            limits = mx.pad(limits, [(0, 0), (0, vocab - limits.shape[1])], constant_values=-mx.inf)
        if len(self.rows) == logits.shape[0]:
            return mx.minimum(logits, limits)
        in_rows = mx.array(self.rows)
        result = logits.astype(mx.float32)
        result[in_rows] = mx.minimum(result[in_rows], limits)
        return result


class MaskFiller:
    """Fills the masks of a step's rows, several at a time."""

    def __init__(self, source: MatcherSource) -> None:
        self._source = source
        self._executor = LLExecutor()

    def fill(self, rows: Sequence["SamplingRow"]) -> GrammarMasks | None:
        """The masks of the rows that have a grammar; ``None`` if none has. Waits for no other work."""
        grammars = [(index, row.grammar) for index, row in enumerate(rows) if row.grammar is not None]
        if not grammars:
            return None
        words = np.zeros((len(grammars), self._source.mask_words), np.uint32)
        matchers = [(grammar.matcher, place) for place, (_, grammar) in enumerate(grammars)]
        self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.strides[0], len(words))
        for place, (index, grammar) in enumerate(grammars):
            grammar.finish_mask(words[place], rows[index].banned_ids(), rows[index].forced_id)
        return GrammarMasks(np.array([index for index, _ in grammars], np.int32), words)


def _has(words: npt.NDArray[np.uint32], token_id: int) -> bool:
    word, bit = divmod(token_id, 32)
    return word < len(words) and bool(words[word] >> np.uint32(bit) & np.uint32(1))


def _set(words: npt.NDArray[np.uint32], token_ids: Iterable[int], value: bool) -> None:
    for token_id in token_ids:
        word, bit = divmod(token_id, 32)
        if word < len(words):
            if value:
                words[word] |= np.uint32(1 << bit)
            else:
                words[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)
