"""Thinking: whether an answer begins inside the model's reasoning, may begin it, or comes after it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mlx_paged_attention.text.tokenizer import Tokenizer

Thinking = Literal["open", "possible", "over"]


def thinking_of(
    tokenizer: "Tokenizer", prompt_token_ids: Sequence[int], continued: str | None = None
) -> Thinking:
    """What a prompt's end says of the reasoning in its answer.

    Args:
        continued: the text of the assistant's that the prompt ends in, if it does not begin a turn.
    """
    if tokenizer.answer_format.reasoning is None:
        return "over"
    start, end = tokenizer.answer_format.reasoning
    if continued is not None:
        return "open" if continued.rfind(start) > continued.rfind(end) else "over"
    # Only its very end: what a user has written about reasoning is no beginning of it.
    tail = prompt_token_ids[-max(len(start), len(end)) - 8 :]
    text = tokenizer.decode(tail, skip_special_tokens=False).rstrip()
    if text.endswith(start):
        return "open"
    return "over" if text.endswith(end) else "possible"
