"""The format of a model's answers is found from its template and vocabulary."""

import subprocess
import sys

import pytest
from answer_corpus import SOURCES
from small_vocabularies import byte_level

from mlx_paged_attention.text.answer_format import AnswerFormat, find_format
from mlx_paged_attention.text.chat_template import ChatTemplate
from mlx_paged_attention.text.tokenizer import Tokenizer

TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}[TOOL_CALLS]"
SPECIAL = ("<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[IMG]")


def tokenizer(template=TOOLS_TEMPLATE, special=SPECIAL):
    eos = [256 + special.index("</s>")]
    return Tokenizer(
        byte_level(special=special),
        eos_token_ids=eos,
        chat_template=ChatTemplate(template) if template else None,
    )


@pytest.mark.parametrize("name", SOURCES)
def test_without_a_place_for_tools_no_calls_are_expected(name):
    template, vocabulary = SOURCES[name]
    assert find_format(template, vocabulary, offers_tools=False).tool_calls is None
    assert find_format(template, vocabulary, offers_tools=True).tool_calls is not None


def test_a_plain_model_has_the_default_format():
    assert find_format("{{ messages }}", {"a"}, offers_tools=False) == AnswerFormat()
    assert find_format("{{ tools }}", {"a"}, offers_tools=True) == AnswerFormat()
    assert tokenizer(None, ("</s>",)).answer_format == AnswerFormat()


def test_a_tokenizer_knows_its_format():
    found = tokenizer().answer_format
    assert found.reasoning == ("[THINK]", "[/THINK]")
    assert found.tool_calls is not None
    assert found.tool_calls.starts == ("[TOOL_CALLS]",)
    assert tokenizer("[TOOL_CALLS]").answer_format.tool_calls is None, "the template reads no tools"


def test_the_control_tokens_of_the_format_stay_in_the_text_and_no_others():
    one = tokenizer()
    ids = {text: 256 + index for index, text in enumerate(SPECIAL)}
    shown = one.answer_special_ids(tools=True)
    assert set(shown) == {ids[text] for text in ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")}
    assert set(one.answer_special_ids(tools=False)) == {ids["[THINK]"], ids["[/THINK]"]}
    detokenizer = one.detokenizer(shown_special_ids=shown)
    answer = [ids["[IMG]"], *b"a", ids["[TOOL_CALLS]"], *b"f", ids["[ARGS]"], *"{é}".encode(), ids["</s>"]]
    assert "".join(map(detokenizer.push, answer)) + detokenizer.flush() == "a[TOOL_CALLS]f[ARGS]{é}"


def test_all_control_tokens_can_be_kept_but_those_that_end_an_answer():
    one = tokenizer()
    detokenizer = one.detokenizer(skip_special_tokens=False)
    answer = [256 + SPECIAL.index("[IMG]"), *b"a", 256 + SPECIAL.index("</s>")]
    assert "".join(map(detokenizer.push, answer)) + detokenizer.flush() == "[IMG]a"


def test_finding_a_format_imports_no_mlx():
    code = (
        "import sys\n"
        "from mlx_paged_attention.text.tool_parsers import parser_of_mlx_lm\n"
        "assert parser_of_mlx_lm('laguna').parse_tool_call is parser_of_mlx_lm('glm47').parse_tool_call\n"
        "assert not {'mlx', 'mlx_lm', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{{ tools }}", True),
        ("{% if tools is defined and tools %}x{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{% set tools = 1 %}", False),
        ("{{ messages }} tools", False),
    ],
)
def test_a_template_tells_what_it_reads(source, reads):
    assert ("tools" in ChatTemplate(source).variables) == reads
    named = ChatTemplate({"default": "{{ messages }}", "tool_use": source})
    assert ("tools" in named.variables) == reads


@pytest.mark.model
def test_the_default_model_offers_no_tools_and_does_not_reason(smollm2):
    assert smollm2.answer_format.tool_calls is None
    assert smollm2.answer_format.reasoning is None
    assert smollm2.answer_special_ids(tools=False) == ()
