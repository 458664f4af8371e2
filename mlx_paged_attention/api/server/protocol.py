"""What a client may send: OpenAI's fields, vLLM's extra ones, and nothing else.

A field that would change the answer and is not supported is refused by name; so is an unknown one. Fields
that say nothing about the answer (``NO_EFFECT``) are accepted and have no effect, here as at OpenAI.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from mlx_paged_attention.api.server.formats import GUIDED, requested_format
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import MAX_LOGPROBS, UNUSED_BY_BEAMS, SamplingParams
from mlx_paged_attention.text.nesting import MAX_DEPTH, is_nested_too_deeply

T = TypeVar("T")


class _OneComplaint(FailFast):
    """About a list, not one about each of its items: a million take half a minute."""

    def __hash__(self) -> int:  # parts of a union need one
        return hash(self.fail_fast)


ListOf = Annotated[list[T], _OneComplaint()]

NO_EFFECT = frozenset(
    {
        "user",  # who is asking
        "safety_identifier",
        "metadata",  # labels for OpenAI's own log
        "service_tier",  # price and queue, not the answer
        "prompt_cache_key",  # a routing hint: prefixes are shared here by their content
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",  # a guess at the answer, which would only be faster for it
        "parallel_tool_calls",  # says how to use tools, which only chat has
        "spaces_between_special_tokens",  # tokenizers written in Python put them there; none is here
    }
)

_NO_TOOLS = "tools are offered in /v1/chat/completions, as tools and tool_choice; use those"

# Field: why it is refused and what to do, and the values that ask for nothing and so pass.
UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (_NO_TOOLS, ([],)),
    "tool_choice": (_NO_TOOLS, ("none",)),
    "functions": (_NO_TOOLS, ([],)),
    "function_call": (_NO_TOOLS, ("none",)),
    "suffix": ("text cannot be inserted between a prompt and a suffix; put both into the prompt", ("",)),
    "audio": ("only text is generated; leave it out", ()),
    "verbosity": ("there is one length of answers; ask for another in a message", ("medium",)),
    "web_search_options": ("nothing is searched here; leave it out", ()),
    "moderation": ("nothing is moderated here; leave it out", ()),
    "modalities": ("only text is generated; leave it out or send ['text']", (["text"],)),
    "store": ("answers are not stored here; leave it out or send false", (False,)),
    "echo": ("messages are not repeated in the answer; put them before it yourself", (False,)),
    "add_special_tokens": (
        "the chat template writes a conversation's special tokens itself; leave it out or send false",
        (False,),
    ),
    "truncate_prompt_tokens": ("prompts are not cut; send a shorter one", ()),
    "documents": (
        "send them as chat_template_kwargs {'documents': [...]}, where the model's template knows them",
        ([],),
    ),
    "chat_template": (
        "templates from requests are not run; the model's own is used, and chat_template_kwargs steer it",
        (),
    ),
    "logits_processors": (
        "no code from requests is run; use logit_bias, bad_words, allowed_token_ids or structured_outputs",
        ([],),
    ),
    "mm_processor_kwargs": ("only text is read; leave it out", ({},)),
    "include_reasoning": ("reasoning is told apart in /v1/chat/completions only", (True,)),
    "continue_final_message": (
        "there are no messages here: end the prompt where the answer is to go on",
        (False,),
    ),
}


class StreamOptions(BaseModel):
    """When token counts are sent in a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class GenerationRequest(BaseModel):
    """The fields that completions and chat share. ``None`` is "not given" everywhere."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Annotated[
        bool | Literal["never"] | None, BeforeValidator(lambda value: _early_stopping(value))
    ] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Annotated[str | list[str] | None, BeforeValidator(lambda value: _text_or_texts(value))] = None
    stop_token_ids: ListOf[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(lambda value: _biases(value))] = None
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[str] | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    max_reasoning_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields.keys() | UNSUPPORTED.keys() | NO_EFFECT
        # As in lists, one complaint is enough.
        unknown = next((name for name in data if name not in known), None)
        kept = {}
        for name, value in data.items():
            if name not in known and name is not unknown:
                continue
            if is_nested_too_deeply(value):
                raise InvalidRequestError(f"{name} is nested more than {MAX_DEPTH} levels deep", name)
            if not _is_unicode(value):
                raise InvalidRequestError(f"{name} holds half of a surrogate pair: no Unicode text", name)
            if name in UNSUPPORTED and name not in cls.model_fields:
                reason, harmless = UNSUPPORTED[name]
                # `in` would take 0 for False.
                if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
                    raise InvalidRequestError(f"{name}: {reason}", name)
            elif name not in NO_EFFECT or name in cls.model_fields:
                kept[name] = value
        return kept

    @model_validator(mode="after")
    def _stream_fields_agree(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream=true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs is not available in a stream; send stream=false", "prompt_logprobs"
            )
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise InvalidRequestError(
                "best_of > n cannot be streamed: the best is known at the end", "best_of"
            )
        if self.stream and self.use_beam_search:
            raise InvalidRequestError(
                "use_beam_search cannot be streamed: its answers are known at the end; send stream=false",
                "use_beam_search",
            )
        return self

    def sampling_params(self, defaults: dict[str, Any], **own: Any) -> SamplingParams:
        """The model's ``defaults``, over them the request's values, over both ``own``.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        formats = ("structured_outputs", "response_format", *GUIDED)
        given["structured_outputs"] = requested_format({name: getattr(self, name) for name in formats})
        budgets = {name: getattr(self, name) for name in _BUDGETS if getattr(self, name) is not None}
        if len(budgets) > 1:
            first, second, *_ = budgets
            raise InvalidRequestError(f"{first} and {second} are names of one budget; send one", second)
        given["thinking_token_budget"] = next(iter(budgets.values()), None)
        given = {name: value for name, value in given.items() if value is not None}
        if self.use_beam_search:  # what the model's makers advise is for drawing tokens
            defaults = {name: value for name, value in defaults.items() if name not in UNUSED_BY_BEAMS}
            defaults["temperature"] = 0.0
        with self.own_names():
            return SamplingParams(**(defaults | given | own))

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors about the thinking budget call it what this request calls it."""
        try:
            yield
        except InvalidRequestError as error:
            sent = next((name for name in _BUDGETS if getattr(self, name) is not None), None)
            if error.param == _BUDGETS[0] and sent is not None:
                error.args = (str(error).replace(error.param, sent),)
                error.param = sent
            raise


# vLLM's name, and two that others use.
_BUDGETS = ("thinking_token_budget", "thinking_budget", "max_reasoning_tokens")
_SAMPLING_FIELDS = tuple(
    name for name in GenerationRequest.model_fields if name in SamplingParams.__dataclass_fields__
)


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Annotated[
        str | list[int] | list[str] | list[list[int]], BeforeValidator(lambda value: _prompts(value))
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def is_prompt_only(self) -> bool:
        """It asks for the prompt's log-probabilities alone: one token is computed and not shown."""
        return bool(self.echo) and self.max_tokens == 0

    def completion_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """As :meth:`sampling_params`, with what ``echo`` and ``logprobs`` mean."""
        own: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            own["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        if self.is_prompt_only:
            own["max_tokens"] = 1
        return self.sampling_params(defaults, **own)


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: ListOf[dict[str, Any]]  # checked where every path goes through, by text.messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequestError("give max_completion_tokens or max_tokens, not both", "max_tokens")
        for name in self.chat_template_kwargs or ():
            if name in _RESERVED_TEMPLATE_NAMES:
                raise InvalidRequestError(
                    f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs"
                )
        return self


_RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "self",
        "messages",
        "tools",
        "sampling_params",
        "request_id",
        "output_kind",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
    }
)


def _is_unicode(value: Any) -> bool:
    # JSON can spell lone surrogates ("\\ud800"), which no tokenizer can read.
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_or_texts(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise InvalidRequestError("stop must be a string or a list of strings", "stop")


def _early_stopping(value: Any) -> Any:
    if value is None or isinstance(value, bool) or value == "never":
        return value
    raise InvalidRequestError("early_stopping must be true, false or 'never'", "early_stopping")


def _biases(value: Any) -> Any:
    """JSON objects have text keys; token ids are numbers."""
    if not isinstance(value, dict):
        return value
    try:
        if not all(type(bias) in (int, float) and abs(bias) < math.inf for bias in value.values()):
            raise ValueError
        return {int(token_id): bias for token_id, bias in value.items()}
    except ValueError:
        raise InvalidRequestError("logit_bias must map token ids to finite numbers", "logit_bias") from None


def _prompts(value: Any) -> Any:
    """Refuse here what the union of types would refuse in four voices at once."""
    items = value if isinstance(value, list) else [value]
    if not items or any(item in ("", []) for item in items):
        raise InvalidRequestError("prompt must not be empty", "prompt")
    if all(isinstance(item, str) for item in items) or (isinstance(value, list) and _token_ids(value)):
        return value
    if all(isinstance(item, list) and _token_ids(item) for item in items):
        return value
    raise InvalidRequestError(
        "prompt must be a string, token ids, a list of strings or a list of those", "prompt"
    )


def _token_ids(value: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)
