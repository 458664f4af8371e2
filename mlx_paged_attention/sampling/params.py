"""SamplingParams: how a caller wants tokens chosen. RowSampling: the same, resolved for one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.structured_outputs import StructuredOutputsParams, structured_outputs

MAX_LOGPROBS = 20
# Strings that are looked for in every token's text, and their characters in all.
MAX_STOPS = 256
MAX_BAD_WORDS = 1024
MAX_CHARACTERS = 64 * 1024
MAX_STOP_IDS = 1024
MAX_INT = 2**31 - 1

# Parameters that choose or end in ways that beam search does not, and what they must be with it.
UNUSED_BY_BEAMS: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "stop": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
}


_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "use_beam_search",
)


class RowThinking(msgspec.Struct, frozen=True, kw_only=True):
    """When a row's reasoning has to end.

    Attributes:
        budget: tokens that it may take from here on.
        start: token ids of the marker that begins it.
        ends: those of each marker that ends it.
        closing: of these, the one that is forced when the budget is used up.
        inside: the prompt ends inside it.
        fragments: bytes of the tokens that are only parts of characters, by id.
    """

    budget: int
    start: list[int]
    ends: list[list[int]]
    closing: list[int]
    inside: bool
    fragments: dict[int, bytes] = {}


class RowSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Plain data from which the sampler turns one row's logits into tokens.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        seed: key of the row's random numbers; output ``i`` uses number ``i`` of that stream.
        min_tokens: outputs before which every id of ``stop_ids`` is forbidden.
        stop_ids: ids that would end the sequence.
        logprobs: how many alternatives to report per output token; ``None`` reports nothing.
        prompt_logprobs: the same for prompt positions.
        bad_words: token sequences that must not be completed.
        grammar: source of the grammar that the output must follow.
        num_grammar_tokens: how many of the prompt's last tokens that grammar has read already.
        thinking: when the reasoning has to end, if it has to.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []
    grammar: str | None = None
    num_grammar_tokens: int = 0
    thinking: RowThinking | None = None

    @property
    def runs_ahead(self) -> bool:
        """Whether a token can be sampled while the one before it is still on its way to the host.

        Penalties, bad words, grammars and budgets look at it; top-p alone may find only once it is there that
        its set was larger than the candidates.
        """
        penalised = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        top_p_alone = self.temperature > 0.0 and self.top_p < 1.0 and self.top_k == 0
        steered = self.grammar is not None or self.thinking is not None
        return not (penalised or self.bad_words or top_p_alone or steered)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names and defaults are vLLM's.

    Attributes:
        n: how many answers to return.
        best_of: how many to generate, of which the ``n`` with the highest cumulative
            log-probability are returned; ``None`` is ``n``.
        use_beam_search: return, once and at the end, the ``n`` likeliest answers that beam search of width
            ``best_of`` finds. Nothing is drawn or penalised: ``temperature`` must be 0.
        length_penalty: of beam search: answers compare by log-probability over length to this, [-10, 10].
        early_stopping: of beam search: end as soon as ``best_of`` answers have (``True``), when a better one
            is unlikely to come (``False``), or when none goes on (``"never"``).
        temperature: 0 is greedy; at most 100.
        top_p: keep the smallest set of tokens with at least this probability, (0, 1].
        top_k: keep this many most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest, [0, 1].
        repetition_penalty: > 1 discourages tokens of the prompt and the output, [0.001, 100].
        presence_penalty: subtracted once from every token already in the output, [-2, 2].
        frequency_penalty: subtracted per occurrence in the output, [-2, 2].
        seed: makes the request repeatable whatever else is in the batch; ``None`` draws one.
        max_tokens: most tokens to generate; ``None`` is as many as the context allows. An answer that
            reaches ``max_model_len`` first ends there, with finish reason ``"length"``.
        min_tokens: no end-of-sequence or stop token id before this many.
        stop: string or strings that end the answer, at most 256 of 65,536 characters in all; not part of the
            text unless ``include_stop_str_in_output``.
        stop_token_ids: token ids that end the answer, at most 1,024; shown like ``stop``.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: report the log-probability of each token and of this many alternatives.
        prompt_logprobs: the same for the prompt; such a request reads no cached prefix.
        logit_bias: added to the logits of token ids, [-100, 100].
        allowed_token_ids: only these may be sampled.
        bad_words: words that must not be generated, at most 1,024 of 65,536 characters in all.
        structured_outputs: the form that the answer must have, as :class:`StructuredOutputsParams` or a
            dict of the same names; the answer ends where nothing more is allowed.
        thinking_token_budget: after so many tokens of reasoning, in each answer, the marker that ends it is
            forced; a character that has begun is completed first. For models whose answers mark their
            reasoning.
        priority: lower is served first; refused unless the engine has the priority policy.
        cache_salt: only requests with the same salt share cached prefixes.
        detokenize: produce text as well as token ids.
        skip_special_tokens: leave control tokens out of the text; those that end an answer always are.
        shown_special_ids: control tokens that the text keeps all the same.

    Raises:
        InvalidRequestError: a value is out of range; ``param`` names the field.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown_special_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, 128)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, 128)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, MAX_INT)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.001, 100.0)  # logits must stay finite
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_INT)
        _integer("min_tokens", self.min_tokens, 0, MAX_INT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, 0, MAX_INT)
        self._check_stops()
        self._check_token_lists()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false", name)
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", structured_outputs(self.structured_outputs))
        self._check_beam_search()
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise InvalidRequestError("cache_salt must be a non-empty string", "cache_salt")
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            named = structured_outputs(self.structured_outputs).named
            raise InvalidRequestError(
                f"allowed_token_ids cannot be combined with {named}; leave it out", "allowed_token_ids"
            )

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str):
            _sequence("stop", self.stop)
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError("stop must be a non-empty string or a list of them", "stop")
        _few("stop", self.stop_strings, MAX_STOPS)
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", "stop")

    def _check_beam_search(self) -> None:
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            shown = _shown(self.early_stopping)
            raise InvalidRequestError(
                f"early_stopping must be true, false or 'never', not {shown}", "early_stopping"
            )
        if not self.use_beam_search:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise InvalidRequestError(f"{name} is of beam search: set use_beam_search", name)
            return
        for name, needed in UNUSED_BY_BEAMS.items():
            value = getattr(self, name)
            asked = value is not None if name == "thinking_token_budget" else bool(value)
            if isinstance(value, StructuredOutputsParams):
                name = value.named
            if asked and value != needed and not (name == "top_k" and value == -1):
                change = (
                    f"leave {name} out"
                    if needed is None
                    else f"{name} must be {needed!r}, not {_shown(value)}"
                )
                raise InvalidRequestError(
                    f"beam search takes the likeliest tokens as they are: {change}", name
                )
        if self.logprobs is not None or self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "beam search reports the cumulative_logprob of each answer alone: leave logprobs and "
                "prompt_logprobs out",
                "logprobs" if self.logprobs is not None else "prompt_logprobs",
            )

    def _check_token_lists(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words", "shown_special_ids"):
            if getattr(self, name) is not None:
                _sequence(name, getattr(self, name))
        for name in ("stop_token_ids", "allowed_token_ids", "shown_special_ids"):
            for token_id in getattr(self, name) or ():
                _integer(name, token_id, 0, MAX_INT)
        if self.stop_token_ids is not None and len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_IDS} are looked for",
                "stop_token_ids",
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise InvalidRequestError("logit_bias must map token ids to numbers", "logit_bias")
        for token_id, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token_id, 0, MAX_INT)
            _number("logit_bias", bias, -100.0, 100.0)
        for word in self.bad_words or ():
            if not isinstance(word, str) or not word:
                raise InvalidRequestError("bad_words must be non-empty strings", "bad_words")
        _few("bad_words", self.bad_words or (), MAX_BAD_WORDS)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty when not set."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated."""
        return self.best_of if self.best_of is not None else self.n


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        limits = f"of at least {low}" if high == MAX_INT else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} must be an integer {limits}, not {_shown(value)}", name)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison, so it is refused like any value outside.
    if not good or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be in {bracket}{low:g}, {high:g}], not {_shown(value)}", name)


def _sequence(name: str, value: Any) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequestError(f"{name} must be a list, not {_shown(value)}", name)


def _few(name: str, texts: Sequence[str], most: int) -> None:
    characters = sum(map(len, texts))
    if len(texts) > most or characters > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"{name} has {len(texts)} strings of {characters} characters in all; at most {most} of "
            f"{MAX_CHARACTERS} are looked for",
            name,
        )


def _shown(value: Any) -> str:
    """The value for a message, bounded: a client may send anything."""
    text = "a huge integer" if isinstance(value, int) and value.bit_length() > 128 else repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
