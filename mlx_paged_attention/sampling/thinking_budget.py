"""ThinkingBudget: ends an answer's reasoning once it has taken so many tokens."""

from collections.abc import Iterable

from mlx_paged_attention.sampling.params import RowThinking
from mlx_paged_attention.text.reasoning_tokens import ReasoningTokens

_LONGEST_REST = 3  # bytes of a character after its first, and so tokens


class ThinkingBudget:
    """How much of its budget one answer's reasoning has used.

    A character that has begun is completed first. All is a function of the answer's tokens, so that one that
    is computed again stands where it stood.

    Args:
        read: tokens of the answer that exist already.
    """

    def __init__(self, thinking: RowThinking, read: Iterable[int]) -> None:
        self._tokens = ReasoningTokens(thinking.start, thinking.ends, in_reasoning=thinking.inside)
        self._budget = thinking.budget
        self._closing = thinking.closing
        self._closed = 0  # of the closing, tokens that have been forced
        self._fragments = thinking.fragments
        self._missing = 0  # bytes of a character that has begun
        for token_id in read:
            self.advance(token_id)

    @property
    def forced_id(self) -> int | None:
        """The token that must come next, or ``None``."""
        used = self._tokens.count - self._budget
        if not self._tokens.inside or used < (_LONGEST_REST if self._missing else 0):
            return None
        return self._closing[self._closed]

    def advance(self, token_id: int) -> None:
        """Read the answer's next token."""
        self._closed = self._closed + 1 if token_id == self.forced_id else 0
        self._tokens.add([token_id])
        fragment = self._fragments.get(token_id)
        self._missing = 0 if fragment is None else _missing_after(fragment, self._missing)


def _missing_after(fragment: bytes, missing: int) -> int:
    """Bytes that the last character lacks, of which ``missing`` were lacking before."""
    for byte in fragment:
        if byte < 0xC0:
            missing = max(0, missing - 1) if byte >= 0x80 else 0
        else:
            missing = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
    return missing
