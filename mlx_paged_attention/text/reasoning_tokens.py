"""ReasoningTokens: how many of an answer's tokens are reasoning."""

from collections.abc import Sequence


class ReasoningTokens:
    """Counts the tokens between the start and the end of reasoning, without those of the markers.

    By token ids, so that it does not matter how many arrive at once.

    Args:
        start: the ids of what begins reasoning.
        ends: the ids of each marker that ends it.
        in_reasoning: the prompt ends inside the reasoning.

    Attributes:
        count: so far.
        inside: what comes next is reasoning.
    """

    def __init__(self, start: Sequence[int], ends: Sequence[Sequence[int]], *, in_reasoning: bool) -> None:
        self.count = 0
        self._start, self._ends = list(start), [list(end) for end in ends]
        self.inside = in_reasoning
        self._longest = max(map(len, [self._start, *self._ends]))
        self._recent: list[int] = []  # since the last marker

    def add(self, token_ids: Sequence[int]) -> None:
        """Count the answer's next tokens."""
        for token_id in token_ids:
            self._recent = [*self._recent[1 - self._longest :], token_id] if self._longest > 1 else [token_id]
            self.count += self.inside
            for marker in self._ends if self.inside else [self._start]:
                if self._recent[-len(marker) :] == marker:
                    if self.inside:
                        self.count -= len(marker)
                    self.inside = not self.inside
                    self._recent = []
                    break
