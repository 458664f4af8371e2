"""What a client may send to ``/v1/messages``: the fields of Anthropic's Messages API.

A field that would change the answer and is not supported is refused by name; so is an unknown one. Fields
that say nothing about the answer (``NO_EFFECT``) are accepted and have no effect.
https://docs.anthropic.com/en/api/messages
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

from mlx_paged_attention.api.server.errors import ApiError
from mlx_paged_attention.api.server.protocol import ListOf
from mlx_paged_attention.errors import InvalidRequestError

NO_EFFECT = frozenset(
    {
        "metadata",  # who is asking
        "user_profile_id",
        "workspace_id",
        "billing_policy",
        "service_tier",  # price and queue, not the answer
        "cache_control",  # every prefix is cached, marked or not
        "diagnostics",  # asks for a report on the cache, which a server need not have
    }
)

_KEEP_ALL: dict[str, Any] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_OWN_TOOLS = "tools run at the client here: describe them in tools, with an input_schema"

# Field: why it is refused and what to do, and the values that ask for nothing and so pass.
UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "container": (f"there is no place to run code; {_OWN_TOOLS}", ()),
    "mcp_servers": (f"no servers are called from here; {_OWN_TOOLS}", ([],)),
    "context_management": (
        "messages are read as they come: leave out what is to be forgotten",
        ({}, {"edits": []}, _KEEP_ALL),
    ),
    "compaction": ("messages are not summarised here; ask for a summary in a message", ()),
    "thread": ("nothing is stored here: send the whole conversation each time", ()),
    "fallbacks": ("one model is served here; leave it out", ()),
    "inference_geo": ("requests are answered where this server runs; leave it out", ()),
    "speed": ("there is one speed; leave it out or send 'standard'", ("standard",)),
    "output_format": ("send it as output_config {'format': ...}", ()),
}

# By these clients know what to do without being told by a person: here, to send the whole conversation.
_CODES = {"thread": "thread_unsupported_request"}

# Content blocks of Anthropic's API that hold no text, or are made by tools that run at Anthropic.
_OTHER_BLOCKS = frozenset(
    {
        *("image", "document", "search_result", "tool_reference", "container_upload", "server_tool_use"),
        *("web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "mcp_tool_use"),
        *("mcp_tool_result", "tool_search_tool_result", "browser_state", "compaction"),
    }
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Block(_Model):
    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: ListOf[dict[str, Any]] | None = None  # of an answer: about its text, no part of it


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block):
    """Reasoning that only the server that wrote it can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None  # of an answer: who may have written it; here only the model


def _as_blocks(content: Any) -> Any:
    """A text is one block; what cannot be read is refused by name."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for index, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in _OTHER_BLOCKS:
            raise PydanticCustomError(
                "other_block",
                "block {index} has type '{kind}', but this server reads text only: say it in a block of type "
                "'text', or leave it out",
                {"index": index, "kind": kind},
            )
    return content


TextBlocks = Annotated[
    ListOf[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Discriminator("type")
]


class Message(_Model):
    role: Literal["user", "assistant", "system"]
    content: Annotated[ListOf[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]


class Tool(_Model):
    """One that the client runs."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # in which pieces the input comes, not what it says
    defer_loading: Literal[False] | None = None
    allowed_callers: ListOf[Literal["direct"]] | None = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_kinds(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind not in (None, "custom"):
            raise InvalidRequestError(f"tools: type {kind!r} is not known here; {_OWN_TOOLS}", "tools")
        return data


class ToolChoice(_Model):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool_or_not(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise InvalidRequestError(
                "tool_choice has a name if, and only if, its type is 'tool'", "tool_choice"
            )
        return self


class Thinking(_Model):
    """``display="omitted"`` keeps the reasoning's text out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_a_budget_or_not(self) -> "Thinking":
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise InvalidRequestError(
                "thinking has budget_tokens if, and only if, its type is 'enabled'", "thinking"
            )
        return self


class OutputFormat(_Model):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Model):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(_Model):
    """``POST /v1/messages/count_tokens``: what the prompt is made of. ``None`` is "not given" everywhere."""

    model: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)]
    system: TextBlocks | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (reason, harmless) in UNSUPPORTED.items():
            value = data.get(name)
            if value is not None and value not in harmless:
                raise ApiError(400, f"{name}: {reason}", param=name, code=_CODES.get(name))
        return {
            name: value for name, value in data.items() if name not in NO_EFFECT and name not in UNSUPPORTED
        }


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: ListOf[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
