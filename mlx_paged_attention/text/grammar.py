"""Grammars: from the form that a caller asks for to matchers that say which tokens may come next.

The work is done by llguidance (https://github.com/guidance-ai/llguidance), in its dialect of Lark.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.structured_outputs import FIELD, StructuredOutputsParams, refused
from mlx_paged_attention.text.grammar_checker import GrammarChecker

# Of a grammar's text. Schemas of real programs have up to some tens of kilobytes.
MAX_CHARACTERS = 256 * 1024
# Grammars remembered, those that were refused included; a large one holds some megabytes.
MAX_CACHED = 32
# Bound the work of a step to some 20 ms, and a matcher's memory to some 40 MB.
LIMITS: dict[str, Any] = {"max_lexer_states": 20_000, "verbose_errors": False}

# Without forced tokens: finding them in a grammar like a{1000000} takes seconds in the middle of an answer.
_HEADER = '%llguidance {"no_forcing": true}\n'
_POSITION, _QUOTED = re.compile(r"(?:at )?(\d+)\((\d+)\): "), re.compile(r"\n +\d+ \| .*", re.DOTALL)
_PROBE = '{"a": [1, "é"]}'


def json_rule(schema: Mapping[str, Any], *, lenient: bool = False, named: str = FIELD) -> str:
    """What stands for a JSON value of this schema on the right-hand side of a rule in a Lark grammar.

    Args:
        lenient: leave out what cannot be enforced, in place of refusing it.
        named: what the caller calls it, for the message.

    Raises:
        InvalidRequestError: the schema is nested too deeply, or is not JSON.
    """
    # Ours replaces the schema's own options, which could turn checks off.
    try:
        return "%json " + json.dumps({**schema, "x-guidance": {"coerce_one_of": True, "lenient": lenient}})
    except (RecursionError, TypeError, ValueError) as error:
        raise refused(f"the JSON schema cannot be written as JSON: {error}", named) from None


def lark_string(text: str) -> str:
    """A text, not empty, as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def form_grammar(asked: StructuredOutputsParams) -> str:
    """The Lark grammar of what is asked for, as text, without options of the compiler; not checked yet.

    Raises:
        InvalidRequestError: it is too long, or sets options of the compiler.
    """
    if asked.json is not None:
        body = "start: " + json_rule(asked.schema, named=asked.named)
    elif asked.json_object:
        body = "start: " + json_rule({"type": "object"})
    elif asked.regex is not None:
        try:
            body = "start: /" + regex_to_lark(asked.regex, "dw") + "/"
        except ValueError as error:
            raise refused(f"regex: {error}", asked.named) from None
    elif asked.choice is not None:
        body = "start: " + " | ".join(map(lark_string, asked.choice))
    else:
        assert asked.grammar is not None
        if "%llguidance" in asked.grammar:
            raise refused("grammar must not set options of the compiler (%llguidance)", asked.named)
        body = asked.grammar
    if len(body) > MAX_CHARACTERS:
        raise refused(
            f"the grammar has {len(body)} characters; at most {MAX_CHARACTERS} are compiled", asked.named
        )
    return body


class Grammars:
    """The grammars of one tokenizer, compiled once each. Any thread may use it.

    The tokenizer is prepared by the first grammar: 0.3 s for 49,000 tokens, 3 s for 262,000.

    Args:
        eos_token_ids: may be empty; answers then end where nothing more is allowed.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._backend = backend
        self._eos_token_ids = list(eos_token_ids)
        added = backend.get_added_tokens_decoder()
        self._checker = GrammarChecker({i: token.content for i, token in added.items()}, LIMITS)
        self._lock = threading.Lock()
        self._preparing = threading.Lock()  # of its own: it is held for seconds, and event loops ask is_known
        self._tokenizer: LLTokenizer | str | None = None
        # By source: what is copied for each answer, or why there is none.
        self._compiled: OrderedDict[str, LLMatcher | str] = OrderedDict()

    def compile(self, asked: StructuredOutputsParams) -> str:
        """Check and compile, in a bounded time that may be a second; the grammar's source.

        Raises:
            InvalidRequestError: it cannot be enforced; the message says why.
        """
        source = _HEADER + form_grammar(asked)
        known = self._recall(source)
        if known is None:
            try:
                known = self._remember(source, self._compile(source))
            except InvalidRequestError as error:
                raise refused(str(error).removeprefix(f"{FIELD}: "), asked.named) from None
        if isinstance(known, str):
            raise refused(
                _without_our_lines(known, told=asked.grammar is not None and not asked.composed), asked.named
            )
        return source

    def is_known(self, asked: StructuredOutputsParams) -> bool:
        """Whether :meth:`compile` will answer at once.

        Raises:
            InvalidRequestError: as :meth:`compile`.
        """
        return self._recall(_HEADER + form_grammar(asked)) is not None

    def new_matcher(self, source: str) -> LLMatcher:
        """A matcher at its start, for a source that :meth:`compile` returned."""
        known = self._recall(source)
        if isinstance(known, LLMatcher):
            return known.deep_copy()
        return self._matcher(source)  # forgotten since

    @property
    def mask_words(self) -> int:
        """How many 32-bit words a matcher's mask has."""
        return (self._prepared().vocab_size + 31) // 32

    def _compile(self, source: str) -> LLMatcher | str:
        self._prepared()
        if problem := self._checker.check(source):
            return _first_lines(problem)
        matcher = self._matcher(source)
        if not matcher.is_error():
            matcher.compute_bitmask()  # each copy begins with what this has found out
        if matcher.is_error():
            return _first_lines(matcher.get_error())
        if matcher.is_stopped() and not matcher.is_accepting():
            return "no text can match it"
        return matcher

    def _matcher(self, source: str) -> LLMatcher:
        return LLMatcher(self._prepared(), source, log_level=0, limits=LLParserLimits(**LIMITS))

    def _prepared(self) -> LLTokenizer:
        with self._preparing:
            if self._tokenizer is None:
                self._tokenizer = self._prepare()
            if isinstance(self._tokenizer, str):
                raise refused(self._tokenizer)
            return self._tokenizer

    def _prepare(self) -> LLTokenizer | str:
        reason = "this model's tokenizer is of a kind that llguidance cannot read"
        try:
            tokenizer = LLTokenizer(self._backend.to_str(), eos_token=self._eos_token_ids or None)
            ids = self._backend.encode(_PROBE, add_special_tokens=False).ids
            if tokenizer.decode_bytes(ids).lstrip(b" ") != _PROBE.encode():
                return reason
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            return f"{reason}: {_first_lines(str(error))}"
        return tokenizer

    def _recall(self, source: str) -> LLMatcher | str | None:
        with self._lock:
            if source in self._compiled:
                self._compiled.move_to_end(source)
            return self._compiled.get(source)

    def _remember(self, source: str, result: LLMatcher | str) -> LLMatcher | str:
        with self._lock:
            self._compiled[source] = result
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return result


def _without_our_lines(message: str, *, told: bool) -> str:
    """A message of the compiler without the source that it quotes, whose first line is ours.

    Args:
        told: name the line and the column; the caller has written those below ours.
    """
    text = _QUOTED.sub("", message)
    at = _POSITION.match(text)
    if at is None:
        return text
    place = f"line {int(at[1]) - 1}, column {at[2]}: " if told else ""
    return place + text[at.end() :]


def _first_lines(message: str) -> str:
    """A message of the compiler, which may quote the whole grammar, at a length that one reads."""
    text = message.split("\n<")[0].strip()
    if text.startswith("NoExtension"):
        return "no text can match it"
    return text if len(text) <= 400 else text[:400] + "..."
