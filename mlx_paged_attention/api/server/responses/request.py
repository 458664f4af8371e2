"""ResponsesRequest: what a client may send.

A field that would change the answer and is not supported is refused by name; so is an unknown one.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from mlx_paged_attention.api.server.protocol import GenerationRequest, ListOf
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"

# What may be asked for besides: of tools that are never called here.
_OF_TOOLS = {
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}

_NO_EFFECT = {"client_metadata", "prompt_cache_options"}

_ONE_ANSWER = "a response is one answer; send several requests, or use /v1/chat/completions"
_NO_PLACE = "a response has no place for them; use /v1/chat/completions or /v1/completions"
_ALL_ITEMS = "nothing is left out of a conversation here; send fewer items"

# Field: why it is refused and what to do, and the values that ask for nothing and so pass.
UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "background": ("answers are given while the client waits; leave it out and stream", (False,)),
    "conversation": ("conversations are not kept here; send previous_response_id, or the items", ()),
    "prompt": ("prompt templates are not kept here; send instructions and input", ()),
    "context_management": (_ALL_ITEMS, ([],)),
    "truncation": (_ALL_ITEMS, ("disabled",)),
    "moderation": ("nothing is moderated here; leave it out", ()),
    "n": (_ONE_ANSWER, (1,)),
    "best_of": (_ONE_ANSWER, (1,)),
    "use_beam_search": (_ONE_ANSWER, (False,)),
    "length_penalty": (_ONE_ANSWER, ()),
    "early_stopping": (_ONE_ANSWER, ()),
    "prompt_logprobs": (_NO_PLACE, ()),
    "return_token_ids": (_NO_PLACE, (False,)),
    "return_tokens_as_token_ids": (_NO_PLACE, (False,)),
    "messages": ("send input, or use /v1/chat/completions", ()),
    "max_tokens": ("the name here is max_output_tokens", ()),
    "max_completion_tokens": ("the name here is max_output_tokens", ()),
    "response_format": ("the name here is text.format", ()),
    "reasoning_effort": ("the name here is reasoning.effort", ()),
    "continue_final_message": ("a response is a turn of its own; use /v1/chat/completions", (False,)),
}


_Key = Annotated[str, StringConstraints(max_length=64)]
_Label = Annotated[str, StringConstraints(max_length=512)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ResponsesStreamOptions(_Options):
    """Padding against listeners on the network is not sent."""

    include_obfuscation: Literal[False] = False


class ReasoningOptions(_Options):
    """``summary``, of any kind, gets the reasoning itself as its summary."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the older name
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextOptions(_Options):
    """The form of the answer; how wordy it is can only be said in words."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(GenerationRequest):
    """``POST /v1/responses``. ``None`` is "not given" everywhere."""

    input: Annotated[str | list[Any], BeforeValidator(lambda value: _text_or_items(value))]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream_options: ResponsesStreamOptions | None = None  # type: ignore[assignment]
    include: ListOf[str] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=0)] | None = None  # of tools that a server calls: none are here
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Annotated[dict[_Key, _Label], Field(max_length=16)] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (reason, harmless) in UNSUPPORTED.items():
            value = data.get(name)
            # `in` would take 0 for False.
            if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
                raise InvalidRequestError(f"{name}: {reason}", name)
        return {name: value for name, value in data.items() if name not in {*UNSUPPORTED, *_NO_EFFECT}}

    @model_validator(mode="after")
    def _fields_agree(self) -> "ResponsesRequest":
        for name in self.include or ():
            if name not in {LOGPROBS, ENCRYPTED_REASONING} | _OF_TOOLS:
                raise InvalidRequestError(f"include: {name[:100]!r} is not known", "include")
        if self.top_logprobs and not self.includes(LOGPROBS):
            raise InvalidRequestError(f"top_logprobs needs include [{LOGPROBS!r}]", "top_logprobs")
        return self

    def includes(self, name: str) -> bool:
        """Whether the client asks for this."""
        return name in (self.include or ())

    @property
    def wants_summary(self) -> bool:
        """Whether reasoning is to be told as a summary."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)


def _text_or_items(value: Any) -> Any:
    if not isinstance(value, str | list) or not value:
        raise InvalidRequestError("input must be a text or a list of items, and not empty", "input")
    return value
