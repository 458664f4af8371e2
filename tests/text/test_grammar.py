"""Grammars: what is compiled, what is refused, and how fast."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from small_vocabularies import byte_fallback, byte_level

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.structured_outputs import structured_outputs
from mlx_paged_attention.text import grammar, grammar_checker
from mlx_paged_attention.text.grammar import Grammars, json_rule
from mlx_paged_attention.text.tokenizer import Tokenizer

END = "<end>"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    backend = byte_level(b"true", b'{"', special=(END,))
    return Tokenizer(backend, eos_token_ids=[backend.token_to_id(END)])


def accepts(tokenizer, asked, text):
    """Whether the whole text has the form."""
    source = tokenizer.grammars.compile(structured_outputs(asked))
    matcher = tokenizer.grammars.new_matcher(source)
    return matcher.consume_tokens(tokenizer.encode(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (
            {"json": SCHEMA},
            ['{"a":1}', '{ "a": -20 }'],
            ["{}", '{"a":"1"}', '{"a":1,"b":2}', "[1]", '{"a":1'],
        ),
        ({"json": '{"enum": ["x", 1]}'}, ['"x"', "1"], ["x", "2"]),
        ({"json": {}}, ["1", "null", '{"a":[]}'], ["x", "1 2"]),
        ({"json_object": True}, ["{}", '{"é": [1, {}]}'], ["[]", '"a"', "{"]),
        ({"regex": r"\d{3}/[a-z]+"}, ["123/ab"], ["12/ab", "123/", "123/a1", "12٣/ab"]),
        ({"regex": "^a\n?$"}, ["a", "a\n"], ["b", "aa"]),
        ({"choice": ["yes", 'n"o', "é/\\n", "yes!"]}, ["yes", "yes!", 'n"o', "é/\\n"], ["ye", "no", "n"]),
        ({"choice": ["\x7f\x00\t\u2028", "\\d"]}, ["\x7f\x00\t\u2028", "\\d"], ["1", "\\x7f"]),
        ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["(x", "()"]),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "null"}]}}, ["1", "null"], ['"a"']),
    ],
)
def test_texts_of_the_form_pass_and_no_others(tokenizer, asked, good, bad):
    for text in good:
        assert accepts(tokenizer, asked, text), text
    for text in bad:
        assert not accepts(tokenizer, asked, text), text


def test_a_pattern_with_a_needless_escape_is_enforced(tokenizer):
    """ggml-org/llama.cpp#19051"""
    asked = {"json": {"type": "string", "pattern": "^hello there indeed\\!$"}}
    assert accepts(tokenizer, asked, '"hello there indeed!"')
    assert not accepts(tokenizer, asked, '"hello"')


def test_a_rule_of_a_schema_fits_into_a_grammar(tokenizer):
    asked = {"grammar": f'start: "<call>" args "</call>"\nargs: {json_rule(SCHEMA)}'}
    assert accepts(tokenizer, asked, '<call>{"a":1}</call>')
    assert not accepts(tokenizer, asked, "<call>{}</call>")


def test_a_grammar_may_name_special_tokens(tokenizer):
    asked = structured_outputs({"grammar": f'start: "a" {END} "b"'})
    matcher = tokenizer.grammars.new_matcher(tokenizer.grammars.compile(asked))
    assert matcher.consume_tokens([ord("a"), *tokenizer.eos_token_ids, ord("b")])
    assert matcher.is_accepting()


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE = {
    "deep nesting": ({"json": deep(3000)}, "depth|deep|recursion"),
    "nesting that only the compiler refuses": ({"json": deep(400)}, "recursion"),
    "a reference to itself": ({"json": {"$ref": "#"}}, "no text can match"),
    "an unresolved reference": ({"json": {"$ref": "#/$defs/x"}}, "does not exist"),
    "a reference to the network": ({"json": {"$ref": "http://example.com/a"}}, "retrieving it failed"),
    "a huge enum": ({"json": {"enum": [f"value{i}" for i in range(100_000)]}}, "characters"),
    "as many states as a number": ({"json": {"type": "integer", "multipleOf": 99_999_999}}, "too complex"),
    "the same inside a grammar": ({"grammar": 'start: %json {"multipleOf": 99999998}'}, "too complex"),
    "a product of alternatives": (
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"{i}{j}": {"type": "string"}}} for j in range(4)]}
                    for i in range(10)
                ]
            }
        },
        "too large|too complex",
    ),
    "an unknown type": ({"json": {"type": "nonsense"}}, "nonsense"),
    "a keyword that is not enforced": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "checks turned off by the client": (
        {"json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}},
        "uniqueItems",
    ),
    "no value at all": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
    "an unclosed class": ({"regex": "["}, "unclosed"),
    "an unclosed group": ({"regex": "("}, "unclosed"),
    "look-behind": ({"regex": "(?<=x)a"}, "look"),
    "a back-reference": ({"regex": r"(a)\1"}, "backreference"),
    "an unknown rule": ({"grammar": "start: foo"}, "foo"),
    "no rule at all": ({"grammar": "so"}, "."),
    "a deeply nested grammar": ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
    "options of the compiler": ({"grammar": '%llguidance {"no_forcing": false}\nstart: "a"'}, "options"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_enforced_is_refused_soon_with_the_reason(tokenizer, name):
    asked, reason = HOSTILE[name]
    tokenizer.grammars.compile(structured_outputs({"choice": ["a"]}))  # the checker's process has started
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=f"(?is)structured_outputs: .*({reason})") as caught:
        tokenizer.grammars.compile(structured_outputs(asked))
    assert time.monotonic() - began < 5  # a busy machine's second
    assert len(str(caught.value)) < 600
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"json": {"type": "array", "uniqueItems": True}},
            'failed to compile JSON schema: Unimplemented keys: ["uniqueItems"]',
        ),
        ({"grammar": 'start: "a" b'}, 'line 1, column 8: unknown name: "b"'),
        ({"grammar": 'start: a\na: "x" b'}, 'line 2, column 4: unknown name: "b"'),
    ],
)
def test_a_refusal_quotes_nothing_that_the_caller_did_not_write(tokenizer, asked, message):
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.grammars.compile(structured_outputs(asked))
    assert str(caught.value) == f"structured_outputs: {message}"


@pytest.mark.parametrize("regex", ["a{99999999}", "(a+)+b", "(a|aa)+$", "((a{0,99}){0,99}){0,99}", ".*" * 99])
def test_a_regex_that_ruins_others_is_bounded_in_every_step(tokenizer, regex):
    source = tokenizer.grammars.compile(structured_outputs({"regex": regex}))
    matcher = tokenizer.grammars.new_matcher(source)
    for _ in range(5):
        began = time.monotonic()
        matcher.compute_bitmask()
        assert time.monotonic() - began < 1
        assert matcher.consume_token(ord("a"))


def test_good_grammars_are_compiled_after_a_bad_one_took_the_checker_down(tokenizer):
    with pytest.raises(InvalidRequestError, match="too complex"):
        tokenizer.grammars.compile(
            structured_outputs({"json": {"type": "integer", "multipleOf": 88_888_888}})
        )
    assert accepts(tokenizer, {"regex": "after"}, "after")


def test_a_grammar_is_checked_once_and_forgotten_when_many_others_came(monkeypatch):
    grammars = Grammars(byte_level(), [])
    checked = []
    monkeypatch.setattr(grammars._checker, "check", lambda source: checked.append(source))
    monkeypatch.setattr(grammar, "MAX_CACHED", 2)
    first, *others = [structured_outputs({"choice": [text]}) for text in "abc"]
    source = grammars.compile(first)
    assert grammars.compile(first) == source
    assert len(checked) == 1
    for other in others:
        grammars.compile(other)
    assert grammars.new_matcher(source).consume_token(ord("a"))  # all the same
    grammars.compile(first)
    assert len(checked) == 4


def test_whether_a_grammar_is_known_is_said_while_the_tokenizer_is_prepared(tokenizer, monkeypatch):
    """It is asked on an event loop, and preparing a large vocabulary takes seconds."""
    grammars, ready, begun = Grammars(tokenizer._backend, []), threading.Event(), threading.Event()
    asked, prepare = structured_outputs({"regex": "a+"}), grammars._prepare

    def slowly():
        begun.set()
        ready.wait(60)
        return prepare()

    monkeypatch.setattr(grammars, "_prepare", slowly)
    with ThreadPoolExecutor(2) as threads:
        compiled = threads.submit(grammars.compile, asked)
        try:
            assert begun.wait(60)
            assert threads.submit(grammars.is_known, asked).result(timeout=10) is False
        finally:
            ready.set()
        compiled.result(timeout=60)
    assert grammars.is_known(asked)


def test_matchers_of_one_grammar_do_not_share_their_place(tokenizer):
    source = tokenizer.grammars.compile(structured_outputs({"regex": "abc"}))
    one, other = tokenizer.grammars.new_matcher(source), tokenizer.grammars.new_matcher(source)
    assert one.consume_tokens([97, 98, 99])
    assert one.is_accepting()
    assert other.consume_token(97)
    assert not other.is_accepting()


def test_byte_fallback_vocabularies_are_read(tokenizer):
    other = Tokenizer(byte_fallback())
    matcher = other.grammars.new_matcher(other.grammars.compile(structured_outputs({"choice": ["a€"]})))
    ids = [i for i in other.encode("a€") if other.token_text(i) != " "]
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert np.unpackbits(mask, bitorder="little").sum() >= 1
    assert len(mask) == 4 * other.grammars.mask_words
    assert ids


def test_a_tokenizer_that_cannot_be_read_is_refused(monkeypatch):
    grammars = Grammars(byte_level(), [])

    def panic(*args, **kwargs):
        raise BaseException("no such decoder")

    monkeypatch.setattr(grammar, "LLTokenizer", panic)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"tokenizer is of a kind .* no such decoder"):
            grammars.compile(structured_outputs({"regex": "a"}))


def test_where_no_checker_starts_grammars_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(grammar_checker, "_WORKER", tmp_path / "missing.py")
    with pytest.raises(InvalidRequestError, match="does not start"):
        Grammars(byte_level(), []).compile(structured_outputs({"regex": "a"}))
