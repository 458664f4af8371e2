"""A prompt that ends inside the last message, so that the model goes on with it.

As ``continue_final_message`` of Hugging Face's ``apply_chat_template``: the message is marked, the
conversation rendered, and everything from the mark on left away.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_paged_attention.errors import InvalidRequestError


def render_unfinished(
    render: Callable[[Sequence[Mapping[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
) -> str:
    """The rendered conversation up to the end of its last message's text.

    Raises:
        InvalidRequestError: the last message makes tool calls, or the template does not show its text.
    """
    last = messages[-1]
    if last.get("tool_calls"):
        raise _error("the last message ends in tool calls, which cannot be continued")
    word = f"z{secrets.token_hex(16)}z"
    # The space behind the word tells whether the template strips the message.
    rendered = render([*messages[:-1], {**last, "content": last["content"] + word + " "}])
    end = rendered.rfind(word)
    if end < 0 or last["content"].strip() not in rendered:
        raise _error(
            "this model's chat template does not show the last message as it is; nothing to continue"
        )
    kept = rendered[:end]
    return kept if rendered[end:].startswith(word + " ") else kept.rstrip()


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"continue_final_message: {message}", "continue_final_message")
