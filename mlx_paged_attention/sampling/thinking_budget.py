"""ThinkingBudget: ends an answer's reasoning once it has taken so many tokens."""

from collections.abc import Iterable

from mlx_paged_attention.sampling.params import RowThinking
from mlx_paged_attention.text.reasoning_tokens import ReasoningTokens


class ThinkingBudget:
    """How much of its budget one answer's reasoning has used.

    A function of the answer's tokens, so that one that is computed again stands where it stood.

    Args:
        read: tokens of the answer that exist already.
    """

    def __init__(self, thinking: RowThinking, read: Iterable[int]) -> None:
        self._tokens = ReasoningTokens(thinking.start, thinking.ends, in_reasoning=thinking.inside)
        self._budget = thinking.budget
        self._closing = thinking.closing
        self._closed = 0  # of the closing, tokens that have been forced
        for token_id in read:
            self.advance(token_id)

    @property
    def forced_id(self) -> int | None:
        """The token that must come next, or ``None``."""
        if not self._tokens.inside or self._tokens.count < self._budget:
            return None
        return self._closing[self._closed]

    def advance(self, token_id: int) -> None:
        """Read the answer's next token."""
        self._closed = self._closed + 1 if token_id == self.forced_id else 0
        self._tokens.add([token_id])
