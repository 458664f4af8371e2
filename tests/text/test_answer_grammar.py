"""Grammars of whole answers: what they let through is read back as what was asked for."""

import json
import random

import numpy as np
import pytest
from answer_corpus import FORMATS, SOURCES
from small_vocabularies import byte_level

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.structured_outputs import structured_outputs
from mlx_paged_attention.text.answer import (
    AnswerParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from mlx_paged_attention.text.answer_format import AnswerFormat, find_format
from mlx_paged_attention.text.answer_grammar import AnswerGrammar
from mlx_paged_attention.text.tokenizer import Tokenizer

END = "<end>"
# Every marker of any format is a token.
OTHER_MARKERS = {"<tool_call>", "[ARGS]", "<|end|>", "<|start|>", "<|constrain|>"}
MARKERS = sorted({token for _, tokens in SOURCES.values() for token in tokens} | OTHER_MARKERS)
PARAMETERS = {
    "type": "object",
    "properties": {"way": {"enum": ["left", "right"]}},
    "required": ["way"],
    "additionalProperties": False,
}


def tool(name, **function):
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **function}}


TOOLS = [tool("go"), tool("look-at.it")]


@pytest.fixture(scope="module", params=["tokens", "text"])
def tokenizer(request):
    """Of a vocabulary whose markers are tokens, or are written as text."""
    backend = byte_level(b'{"', special=(END, *(MARKERS if request.param == "tokens" else ())))
    return Tokenizer(backend, eos_token_ids=[backend.token_to_id(END)])


def grammar(tokenizer, answer_format, thinking="over", tools=TOOLS, **options):
    return AnswerGrammar(
        answer_format.with_json_calls(), tokenizer.added_tokens, thinking, tools=tools, **options
    )


def drawn(tokenizer, asked, seed, steps=2000):
    """An answer that the grammar allows, drawn at random but for white space."""
    draw = random.Random(seed)
    matcher = tokenizer.grammars.new_matcher(tokenizer.grammars.compile(asked))
    ids = []
    for _ in range(steps):
        if matcher.is_stopped() or (matcher.is_accepting() and draw.random() < 0.5):
            return tokenizer.decode(ids, skip_special_tokens=False)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [i for i in np.nonzero(bits)[0].tolist() if i not in tokenizer.eos_token_ids]
        # Of ordinary text ASCII; and markers, where they may stand, come soon.
        allowed = [i for i in allowed if 32 < i < 127 or i >= 256] or allowed
        marks = [i for i in allowed if i > 256]
        token_id = draw.choice(marks if marks and draw.random() < 0.3 else allowed)
        assert matcher.consume_token(token_id), matcher.get_error()
        ids.append(token_id)
    raise AssertionError(f"no end in {steps} steps")


def read(answer_format, text, tools=TOOLS, *, in_reasoning=False):
    parser = AnswerParser(answer_format.with_json_calls(), tools=tools, in_reasoning=in_reasoning)
    return parser.push(text) + parser.finish()


def calls_in(parts):
    return [part.name for part in parts if isinstance(part, ToolCallBegin)]


def text_in(parts):
    return "".join(part.text for part in parts if isinstance(part, TextDelta))


def accepts(tokenizer, asked, text):
    matcher = tokenizer.grammars.new_matcher(tokenizer.grammars.compile(asked))
    return matcher.consume_tokens(tokenizer.encode(text)) and matcher.is_accepting()


@pytest.mark.parametrize("name", FORMATS)
def test_forced_answers_are_calls_in_every_format(tokenizer, name):
    asked = grammar(tokenizer, FORMATS[name]).of_calls()
    found = set()
    for seed in range(12):
        text = drawn(tokenizer, asked, seed)
        parts = read(FORMATS[name], text)
        assert calls_in(parts), text
        assert not text_in(parts), text
        for part in parts:
            if isinstance(part, ToolCallArguments):
                assert json.loads(part.text) in ({"way": "left"}, {"way": "right"}), text
        found.update(calls_in(parts))
    assert found == {"go", "look-at.it"}


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_forced_where_several_must_not_be_made(tokenizer, name):
    asked = grammar(tokenizer, FORMATS[name], tools=TOOLS[:1], parallel=False).of_calls()
    for seed in range(4):
        assert calls_in(read(FORMATS[name], drawn(tokenizer, asked, seed))) == ["go"]


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].reasoning is not None])
@pytest.mark.parametrize("thinking", ["open", "possible", "over"])
def test_calls_and_forms_begin_after_the_reasoning(tokenizer, name, thinking):
    answer_format = FORMATS[name]
    start, end = answer_format.reasoning
    form = structured_outputs({"choice": ["yes", "no"]})
    for asked in (
        grammar(tokenizer, answer_format, thinking).of_calls(),
        grammar(tokenizer, answer_format, thinking).of_form(form),
    ):
        # At random, nobody ends a thought whose end is several letters.
        for seed in range(4 if tokenizer.added_tokens.get(end) or thinking == "over" else 0):
            text = drawn(tokenizer, asked, seed)
            parts = read(answer_format, text, in_reasoning=thinking == "open")
            assert calls_in(parts) or text_in(parts) in ("yes", "no"), text
            if thinking == "over":
                assert not any(isinstance(part, ReasoningDelta) for part in parts)
    asked = grammar(tokenizer, answer_format, thinking).of_form(form)
    thought = {"open": "", "possible": start}.get(thinking)
    answer = f"{answer_format.opening}yes"
    if thought is not None:
        assert accepts(tokenizer, asked, f"{thought}I say no, é{end}{answer_format.resume}\n\n{answer}")
        assert not accepts(tokenizer, asked, f"{thought}yes")
    if thinking != "open":
        assert accepts(tokenizer, asked, answer)
    assert not accepts(tokenizer, asked, answer + "no")


def test_a_form_of_a_model_that_does_not_think_is_left_as_it_is(tokenizer):
    form = structured_outputs({"regex": "a+"})
    assert grammar(tokenizer, AnswerFormat(), tools=[]).of_form(form) is form


FORMS = [{"json": PARAMETERS}, {"regex": "[{]+"}, {"grammar": 'start: "(" start ")" | "}"'}]


@pytest.mark.parametrize("form", FORMS, ids=["json", "regex", "grammar"])
def test_every_kind_of_form_can_follow_the_reasoning(tokenizer, form):
    asked = grammar(tokenizer, FORMATS["hermes"], "possible").of_form(structured_outputs(form))
    good = {"json": '{"way":"left"}', "regex": "{{", "grammar": "((}))"}[next(iter(form))]
    assert accepts(tokenizer, asked, "<think>a {</think>\n" + good)
    assert accepts(tokenizer, asked, good)
    assert not accepts(tokenizer, asked, "<think>a</think>" + good + ")")


@pytest.mark.parametrize("name", [name for name in FORMATS if not FORMATS[name].opening])
def test_strict_arguments_follow_the_schema_beside_free_text(tokenizer, name):
    answer_format = FORMATS[name]
    tools = [tool("go", strict=True), tool("free")]
    asked = grammar(tokenizer, answer_format, tools=tools).of_text_and_calls()
    layout = answer_format.with_json_calls().tool_calls.layout

    def call(function, arguments):
        one = f"{layout.before}{function}{layout.between}{arguments}{layout.after}"
        return layout.opening + one + layout.closing

    good, other = call("go", '{"way": "left"}'), call("free", '{"any": [1]}')
    said = "" if answer_format.tool_calls.openings else "Hm é <5 \n"
    assert accepts(tokenizer, asked, "Just text, é <tool_c")
    for text in (good, said + good, other):
        assert accepts(tokenizer, asked, text), text
        parts = read(answer_format, text, tools)
        assert len(calls_in(parts)) == 1
        assert text_in(parts) == (said.rstrip() if text.startswith("Hm") else "")
    for text in (call("go", '{"way": "up"}'), call("unknown", "{}"), said + call("go", "{}")):
        assert not accepts(tokenizer, asked, text), text


def test_text_of_a_form_or_calls(tokenizer):
    form = structured_outputs({"json": PARAMETERS})
    asked = grammar(tokenizer, FORMATS["hermes"]).of_form_or_calls(form)
    assert accepts(tokenizer, asked, '{"way":"left"}')
    assert accepts(tokenizer, asked, '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>')
    assert not accepts(tokenizer, asked, "<tool_call>\n{}\n</tool_call>")
    assert not accepts(tokenizer, asked, "text")


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (None, "{}", '{"a": 1}'),
        ({}, '{"a": 1}', "[]"),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', '{"a": ""}'),
        # What cannot be enforced is left out, unless the function is strict.
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, '{"a": []}', '{"a": 1}'),
    ],
)
def test_arguments_are_an_object_of_the_schema(tokenizer, parameters, good, bad):
    asked = grammar(tokenizer, FORMATS["llama3"], tools=[tool("f", parameters=parameters)]).of_calls()
    for arguments in (good, bad):
        text = f'{{"name": "f", "parameters": {arguments}}}'
        assert accepts(tokenizer, asked, text) == (arguments == good)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (tool('say "hi"'), "letters, digits"),
        (tool("f", parameters={"type": "string"}), "type 'object'"),
        (tool("f", strict=True, parameters={"properties": {"a": {"uniqueItems": True}}}), "uniqueItems"),
    ],
)
def test_what_cannot_be_enforced_is_refused_as_tools(tokenizer, one, message):
    with pytest.raises(InvalidRequestError, match=f"^tools: .*{message}") as error:
        tokenizer.grammars.compile(grammar(tokenizer, FORMATS["hermes"], tools=[one]).of_calls())
    assert error.value.param == "tools"


def test_a_refusal_quotes_no_lines_that_the_client_has_not_written(tokenizer):
    form = structured_outputs({"grammar": 'start: "a"\n  b'})
    for asked, line in (
        (form, "line 2"),
        (grammar(tokenizer, FORMATS["hermes"], "open").of_form(form), None),
    ):
        with pytest.raises(InvalidRequestError) as error:
            tokenizer.grammars.compile(asked)
        assert ("line" in str(error.value)) == (line is not None)
        assert "TEXT" not in str(error.value)


@pytest.mark.parametrize("name", ["harmony", "kimi_k3"])
def test_strict_arguments_beside_free_text_are_refused_where_text_has_markers(tokenizer, name):
    with pytest.raises(InvalidRequestError, match="tool_choice 'required'"):
        grammar(tokenizer, FORMATS[name], tools=[tool("f", strict=True)]).of_text_and_calls()


def test_an_answer_that_is_continued_has_its_form_but_no_opening(tokenizer):
    form = structured_outputs({"choice": ["yes"]})
    assert grammar(tokenizer, FORMATS["harmony"], begun=True).of_form(form) is form
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        grammar(tokenizer, FORMATS["harmony"], begun=True).of_calls()


def test_mistral_and_deepseek_write_as_their_templates_do():
    names = find_format("[TOOL_CALLS]", {"[ARGS]"}, offers_tools=True).tool_calls
    lists = find_format("[TOOL_CALLS]", set(), offers_tools=True).tool_calls
    assert (names.layout.between, lists.layout.opening) == ("[ARGS]", "[TOOL_CALLS] [")
    tokens = {"<｜tool▁calls▁begin｜>"}
    fenced = find_format("```json", tokens, offers_tools=True).tool_calls
    bare = find_format("", tokens, offers_tools=True).tool_calls
    assert "```json" in fenced.layout.between
    assert bare.layout.between == "<｜tool▁sep｜>"
