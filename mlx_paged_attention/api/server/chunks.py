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


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Of the tokens written, those of reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens read and written, summed over a request's prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


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
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Both a chunk of a stream and a whole answer: the older API uses one shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class TopLogprob(msgspec.Struct, frozen=True):
    """``bytes`` of several tokens join to a character where each is only a part of it."""

    token: str
    logprob: float
    bytes: Sequence[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: Sequence[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The first one of a call has its id, type and name; further ones more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: str = "chat.completion.chunk"


class Function(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: Function


class AnswerMessage(msgspec.Struct, kw_only=True):
    """``content`` is ``null`` if there is nothing but tool calls."""

    role: str = "assistant"
    content: str | None = ""
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: str = "chat.completion"


class Model(msgspec.Struct, kw_only=True):
    """OpenAI's fields and vLLM's, then those of Anthropic's API (from ``type`` on)."""

    id: str
    created: int
    root: str
    max_model_len: int
    owned_by: str = "mlx-paged-attention"
    object: str = "model"
    type: str = "model"
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: str = "active"


class ModelList(msgspec.Struct, kw_only=True):
    """All there are: Anthropic's clients, who would ask for the next page, are told that there is none."""

    data: list[Model]
    object: str = "list"
    has_more: bool = False
    first_id: str
    last_id: str


class TokenizedPrompt(msgspec.Struct, kw_only=True):
    """``token_strs`` are the vocabulary's own entries, where a space may be written as another character."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Of ``tokenizer_config.json``, what clients build prompts with."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class TokensText(msgspec.Struct):
    prompt: str


class RenderedRequest(msgspec.Struct, kw_only=True):
    """``prompt`` is ``null`` where it was given as token ids."""

    request_id: str
    model: str
    prompt: str | None
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
