"""``LLM.chat`` reads its answers as the server does."""

import json

import pytest
from tiny_text_model import MARKERS, PIECES, write_tiny_text_model

from mlx_paged_attention import LLM, SamplingParams
from mlx_paged_attention.errors import InvalidRequestError

IDS = {text: 256 + len(PIECES) + 1 + index for index, text in enumerate(MARKERS)}
NO_SPACE = dict.fromkeys([*b" \t\r\n", 256 + PIECES.index(b"  "), *range(0x80, 0x100)], -100)
HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_tiny_text_model(tmp_path_factory.mktemp("calling-model"), calls=True)
    with LLM(str(path), num_blocks=128, block_size=16, max_num_seqs=16) as llm:
        yield llm


def params(**values):
    bias = NO_SPACE | {ord("}"): 20, IDS["</think>"]: -100} | values.pop("bias", {})
    return SamplingParams(**{"seed": 1, "max_tokens": 100, "logit_bias": bias, **values})


def test_reasoning_and_calls_are_apart_from_the_content(llm):
    asked = params(n=2, thinking_token_budget=5)
    (output,) = llm.chat(HI, asked, tools=TOOLS, tool_choice="required", open=True, use_tqdm=False)
    for answer in output.outputs:
        assert answer.chat.content == ""
        assert len(answer.chat.reasoning) <= 5
        assert answer.chat.tool_calls
        for call in answer.chat.tool_calls:
            assert (call.name, json.loads(call.arguments)["a"] in (1, 2)) == ("f", True)
        assert answer.text.startswith(answer.chat.reasoning)
        assert "</think>" in answer.text


def test_a_form_begins_after_the_reasoning(llm):
    asked = params(thinking_token_budget=5, structured_outputs={"choice": ["yes"]})
    outputs = llm.chat([HI, HI], [asked, params(max_tokens=9)], open=True, use_tqdm=False)
    first, second = (output.outputs[0].chat for output in outputs)
    assert first.content == "yes"
    assert first.reasoning
    assert (second.content, second.tool_calls) == ("", [])
    assert second.reasoning


def test_answers_of_generate_are_not_read(llm):
    (output,) = llm.generate("hi", params(max_tokens=2), use_tqdm=False)
    assert output.outputs[0].chat is None


def test_tools_that_cannot_be_offered_are_refused(llm):
    with pytest.raises(InvalidRequestError, match="names 'g'"):
        llm.chat(HI, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}})
