"""What a body's validation complains of."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from mlx_paged_attention.api.server.messages.request import MessagesRequest
from mlx_paged_attention.api.server.protocol import ChatRequest, CompletionRequest
from mlx_paged_attention.api.server.responses.request import ResponsesRequest
from mlx_paged_attention.api.server.tokenize import DetokenizeRequest
from mlx_paged_attention.errors import InvalidRequestError

HI = [{"role": "user", "content": "Hi"}]
WRONG = [None] * 3
CASES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    *((CompletionRequest, {"prompt": "x", name: WRONG}) for name in ("stop_token_ids", "allowed_token_ids")),
    *((CompletionRequest, {"prompt": "x", name: WRONG}) for name in ("bad_words", "guided_choice")),
    (CompletionRequest, {"prompt": "x", "x": 1, "y": 2, "z": 3}),
    *((ChatRequest, {"messages": HI, name: WRONG}) for name in ("messages", "tools")),
    (ResponsesRequest, {"input": "x", "tools": WRONG}),
    (ResponsesRequest, {"input": "x", "include": WRONG}),
    (DetokenizeRequest, {"tokens": WRONG}),
    *(
        (MessagesRequest, {"max_tokens": 1, "messages": HI} | more)
        for more in (
            *({name: WRONG} for name in ("messages", "system", "tools", "stop_sequences")),
            {"messages": [{"role": "user", "content": WRONG}]},
            {"messages": [{"role": "user", "content": [{"type": "psalm"}] * 3}]},
        )
    ),
]


@pytest.mark.parametrize(("model", "body"), CASES)
def test_of_many_wrong_items_one_is_complained_of(model: type[BaseModel], body: dict[str, Any]) -> None:
    """A client may send a million; a complaint takes longer to write than an item to read."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() == 1


def test_of_many_wrong_biases_one_is_complained_of() -> None:
    body = {"prompt": "x", "logit_bias": {"1": None, "2": True, "3": float("nan")}}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    (error,) = caught.value.errors()
    assert isinstance(error["ctx"]["error"], InvalidRequestError)
