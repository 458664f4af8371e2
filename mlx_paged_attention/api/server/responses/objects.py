"""What a client gets: the response object and the items of its output, as OpenAI's API writes them.

``UNSET`` fields are left out of the JSON; ``None`` is written as ``null``.
"""

import uuid
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from mlx_paged_attention.api.server.chunks import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


def object_id(kind: str) -> str:
    """A new id, such as ``msg_…`` for a message."""
    return f"{kind}_{uuid.uuid4().hex}"


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: tuple[()] = ()
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    text: str = ""


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: str = "assistant"
    content: list[OutputText] = []


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """``summary`` has the reasoning if the request wants a summary, else ``content`` has it."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET
    status: ItemStatus


OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in the prefix cache; nothing is written into it on request, or charged for."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response at one moment; what comes after ``output`` repeats the request's settings."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | UnsetType = UNSET
    background: bool = False
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    user: str | UnsetType = UNSET


class InputTokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a prompt has."""

    input_tokens: int
    object: str = "response.input_tokens"


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True
