"""What a client gets: one Struct per JSON object of the answer, streamed or whole.

``UNSET`` fields are left out of the JSON; ``None`` is written as ``null``, which OpenAI's clients expect for
``finish_reason`` and ``logprobs``.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens read and written, summed over a request's prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token; a prompt's first token has no log-probability."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType | None = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Both a chunk of a stream and a whole answer: the older API uses one shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class TopLogprob(msgspec.Struct, frozen=True):
    """``bytes`` are the token's UTF-8, ``null`` where it is only a part of a character."""

    token: str
    logprob: float
    bytes: Sequence[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: Sequence[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class Delta(msgspec.Struct, kw_only=True):
    content: str
    role: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType | None = UNSET
    object: str = "chat.completion"


class Model(msgspec.Struct, kw_only=True):
    id: str
    created: int
    root: str
    max_model_len: int
    owned_by: str = "mlx-paged-attention"
    object: str = "model"


class ModelList(msgspec.Struct, kw_only=True):
    data: list[Model]
    object: str = "list"
