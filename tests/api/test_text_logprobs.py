"""Which tokens stand for which text: several cuts of answers into tokens, and of texts into deltas."""

import pytest

from mlx_paged_attention.api.server.chunks import TokenLogprob
from mlx_paged_attention.api.server.responses.text_logprobs import TextLogprobs

# Per step the tokens that come, and the text that is certain then; and the numbers of the text's tokens.
STEPS: list[tuple[list[tuple[list[str], str]], list[list[int]]]] = [
    ([(["Hi"], "Hi"), ([" you"], " you"), (["<end>"], "")], [[0], [1]]),
    # What was held back comes with what follows; a marker that was none is text.
    ([(["a"], "a"), ([" "], ""), (["<", "b"], ""), (["c"], " <bc")], [[0], [1, 2, 3, 4]]),
    # Tokens before the text are no text, even if they read the same.
    ([(["hi", "</think>"], ""), (["\n"], ""), (["hi"], "hi"), (["hi"], "hi")], [[3], [4]]),
    # A token that is in two texts belongs to the first.
    ([(["ab "], "ab"), (["c"], " c")], [[0], [1]]),
    ([(["x", "ab", "<to"], "ab"), (["p"], "<top")], [[1], [2, 3]]),
    # A character in two tokens is in neither's text.
    ([(["\ufffd"], ""), (["\ufffd"], "é"), (["!"], "!")], [[0, 1], [2]]),
]


@pytest.mark.parametrize(("steps", "expected"), STEPS)
def test_each_text_gets_its_own_tokens(steps: list[tuple[list[str], str]], expected: list[list[int]]) -> None:
    logprobs, taken, number = TextLogprobs(), [], 0
    for tokens, text in steps:
        logprobs.add([TokenLogprob(token, -float(number + n), [], []) for n, token in enumerate(tokens)])
        number += len(tokens)
        if text:
            taken.append([round(-token.logprob) for token in logprobs.take(text)])
    assert taken == expected
