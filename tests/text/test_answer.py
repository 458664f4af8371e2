"""Answers are read the same however they are cut into pieces, and nothing of them is lost."""

import json
import time

import pytest
from answer_corpus import ANSWERS, FORMATS, NEWS, PARIS, TOOLS, hermes
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabularies import byte_level

from mlx_paged_attention.text.answer import (
    AnswerParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from mlx_paged_attention.text.answer_format import AnswerFormat
from mlx_paged_attention.text.tokenizer import Tokenizer

TWO_CALLS = hermes("get_weather", '{"city": "Paris"}') + hermes("get_news", "{}") + "more"


def read(answer_format, pieces, **options):
    options.setdefault("tools", TOOLS)
    parser = AnswerParser(answer_format, **options)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    return said(parts), parser


def said(parts):
    """Texts of one kind joined, each call as one; the order of a call's parts is checked on the way."""
    result, ids = [], set()
    for part in parts:
        match part:
            case TextDelta(text) | ReasoningDelta(text):
                assert text, "an empty delta says nothing"
                kind = "text" if isinstance(part, TextDelta) else "reasoning"
                if result and result[-1][0] == kind:
                    text = result.pop()[1] + text
                result.append((kind, text))
            case ToolCallBegin(index, call_id, name):
                assert index == sum(kind == "call" for kind, *_ in result)
                assert call_id not in ids
                ids.add(call_id)
                result.append(("call", name, ""))
            case ToolCallArguments(_, text):
                kind, name, before = result.pop()
                result.append((kind, name, before + text))
            case ToolCallEnd():
                assert result[-1][0] == "call"
    return result


@pytest.mark.parametrize(("name", "answer", "expected"), ANSWERS)
def test_an_answer_says_what_it_says(name, answer, expected):
    assert read(FORMATS[name], [answer])[0] == expected


@pytest.mark.parametrize(("name", "answer", "expected"), ANSWERS)
def test_where_an_answer_is_cut_changes_nothing(name, answer, expected):
    """vllm-project/vllm#48852"""
    assert read(FORMATS[name], answer)[0] == expected, "character by character"
    for cut in range(min(len(answer), 600) + 1):
        assert read(FORMATS[name], [answer[:cut], answer[cut:]])[0] == expected, cut


@pytest.mark.parametrize("stop", [None, "Paris", "é", "\n"])
@pytest.mark.parametrize(("name", "answer", "expected"), ANSWERS)
def test_half_characters_and_stop_strings_before_it_change_nothing(name, answer, expected, stop):
    detokenizer = Tokenizer(byte_level()).detokenizer(stop=[stop] if stop else [])
    pieces = [detokenizer.push(byte) for byte in answer.encode()]
    pieces.append(detokenizer.flush())
    if stop and stop in answer:
        expected = read(FORMATS[name], [answer[: answer.index(stop)]])[0]
    assert read(FORMATS[name], pieces)[0] == expected


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_text_reads_the_same_in_any_pieces(data):
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    answer_format = FORMATS[name]
    markers = [*answer_format.markers("text", tools=True), *answer_format.markers("reasoning", tools=True)]
    assert answer_format.tool_calls is not None
    words = [*markers, answer_format.tool_calls.end, *(m[:-1] for m in markers), '{"name": "get_news"}']
    answer = "".join(
        data.draw(st.lists(st.sampled_from([*words, " ", "\n", "x", "é", "<", "["]), max_size=14))
    )
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=8)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    options = {
        "tools": data.draw(st.sampled_from([TOOLS, []])),
        "in_reasoning": data.draw(st.booleans()) and answer_format.reasoning is not None,
        "parallel": data.draw(st.booleans()),
    }
    assert read(answer_format, pieces, **options)[0] == read(answer_format, [answer], **options)[0]


@settings(max_examples=200, deadline=None)
@given(st.text(), st.lists(st.integers(0, 50), max_size=4))
def test_text_without_markers_comes_out_unchanged(text, cuts):
    text = text.replace("<", "").replace("[", "").replace("{", "")
    pieces = [text[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True)]
    for answer_format in (AnswerFormat(), *FORMATS.values()):
        parts, _ = read(answer_format, pieces)
        assert parts == ([("text", text)] if text else [])


def test_what_is_certain_is_not_held_back():
    parser = AnswerParser(FORMATS["hermes"], tools=TOOLS)
    assert parser.push("Hello") == [TextDelta("Hello")]
    assert parser.push(" wor <") == [TextDelta(" wor")]
    assert parser.push("b") == [TextDelta(" <b")]
    assert parser.push("\n<think>so") == [ReasoningDelta("so")]
    assert parser.push("</think") == []
    assert parser.finish() == [ReasoningDelta("</think")]


def test_a_format_without_markers_holds_nothing_back():
    parser = AnswerParser(AnswerFormat())
    assert parser.push("a") == [TextDelta("a")]
    assert parser.push("b<think>") == [TextDelta("b<think>")]


def test_a_call_comes_whole_with_its_end():
    parser = AnswerParser(FORMATS["hermes"], tools=TOOLS)
    assert parser.push(hermes("get_weather", '{"city": "Paris"}')[:-1]) == []
    begin, arguments, end = parser.push(">")
    assert begin.call_id.startswith("call_")
    assert (begin.index, begin.name) == (0, "get_weather")
    assert (arguments, end) == (ToolCallArguments(0, '{"city": "Paris"}'), ToolCallEnd(0))
    assert parser.num_calls == 1


def test_without_tools_calls_are_text():
    text = hermes("get_weather", '{"city": "Paris"}')
    assert read(FORMATS["hermes"], [text], tools=[])[0] == [("text", text)]
    assert read(FORMATS["llama3"], ['{"name": "get_news"}'], tools=[])[0] == [
        ("text", '{"name": "get_news"}')
    ]


def test_without_parallel_calls_an_answer_ends_with_its_first():
    for pieces in ([TWO_CALLS], TWO_CALLS):
        assert read(FORMATS["hermes"], pieces, parallel=False)[0] == [PARIS]
    assert read(FORMATS["hermes"], TWO_CALLS)[0] == [PARIS, NEWS, ("text", "more")]
    both = '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_news[ARGS]{}'
    assert read(FORMATS["mistral"], both, parallel=False)[0] == [PARIS]


def test_a_prompt_that_ends_in_reasoning_starts_there():
    for pieces in (["\nWell.\n</think>\n\nYes"], "\nWell.\n</think>\n\nYes"):
        parts, _ = read(FORMATS["hermes"], pieces, in_reasoning=True)
        assert parts == [("reasoning", "Well."), ("text", "Yes")]


def test_models_own_call_ids_are_kept_and_mistrals_are_short():
    def ids(name, text):
        parser = AnswerParser(FORMATS[name], tools=TOOLS)
        return [
            part.call_id for part in [*parser.push(text), *parser.finish()] if isinstance(part, ToolCallBegin)
        ]

    kimi = next(answer for name, answer, _ in ANSWERS if name == "kimi_k2")
    assert ids("kimi_k2", kimi) == ["functions.get_weather:0", "functions.get_news:1"]
    (short,) = ids("mistral", "[TOOL_CALLS]get_news[ARGS]{}")
    assert len(short) == 9
    assert short.isalnum()


def test_arguments_that_are_an_object_are_json_that_utf8_can_carry():
    text = hermes("get_news", '{"a": "\\ud83d", "b": "é"}')
    ((_, _, arguments),) = read(FORMATS["hermes"], [text])[0]
    arguments.encode()
    assert json.loads(arguments) == {"a": "\ud83d", "b": "é"}


def test_a_long_call_is_read_in_linear_time():
    parser = AnswerParser(FORMATS["hermes"], tools=TOOLS)
    for _ in range(20_000):
        assert parser.push("<tool_call>" if parser._state != "call" else "abcde") == []
    assert len(parser.finish()[0].text) > 99_000


def test_end_markers_inside_arguments_cost_what_other_text_costs():
    """Where a quotation begins is not looked for again from the beginning at each of them."""
    parser = AnswerParser(FORMATS["hermes"], tools=TOOLS)
    text = "\\\\ </tool_call>" * 20_000
    begun = time.perf_counter()
    parser.push('<tool_call>{"name": "get_news", "arguments": {"a": "')
    for start in range(0, len(text), 17):
        assert parser.push(text[start : start + 17]) == []
    _, arguments, _ = parser.push('"}}</tool_call>')
    assert json.loads(arguments.text) == {"a": "\\ </tool_call>" * 20_000}
    assert time.perf_counter() - begun < 3  # some 20 s when it was
