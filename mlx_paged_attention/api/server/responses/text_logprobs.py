"""TextLogprobs: which of an answer's tokens stand for which of its text."""

from mlx_paged_attention.api.server.chunks import TokenLogprob


class TextLogprobs:
    """Tokens come when they are drawn, text when it is certain.

    Markers, reasoning, calls and the token that ends the answer are tokens without text of the answer proper.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenLogprob] = []

    def add(self, tokens: list[TokenLogprob]) -> None:
        """The tokens of a step, before the text that they may give is taken."""
        self._waiting += tokens

    def take(self, text: str) -> list[TokenLogprob]:
        """The tokens of the next text; those before it stand for no text."""
        start = "".join(token.token for token in self._waiting).rfind(text)
        first, last, at = 0, len(self._waiting), 0
        # Characters that are spread over several tokens are in no token's own text: then all of them count.
        if start >= 0:
            last = 0
            for count, token in enumerate(self._waiting, 1):
                last = count if at < start + len(text) else last
                at += len(token.token)
                first = count if at <= start else first
        taken, self._waiting = self._waiting[first:last], self._waiting[last:]
        return taken
