"""A prompt that ends inside the last message is what Hugging Face renders for continue_final_message."""

import pytest
from small_vocabularies import byte_level

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.text.chat_template import ChatTemplate
from mlx_paged_attention.text.tokenizer import Tokenizer

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRIPPING = PLAIN.replace("m.content", "m.content | trim")
MESSAGES = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two "}]


def tokenizer(template=PLAIN):
    return Tokenizer(byte_level(special=("</s>",)), chat_template=ChatTemplate(template))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, "<|user|>Count</s><|assistant|>One, two "),
        (STRIPPING, "<|user|>Count</s><|assistant|>One, two"),
    ],
)
def test_the_prompt_ends_with_the_last_message(template, expected):
    one = tokenizer(template)
    assert one.render_chat(MESSAGES, continue_final_message=True) == expected
    assert one.decode(one.chat_token_ids(MESSAGES, continue_final_message=True)) == expected.replace(
        "</s>", ""
    )


def test_it_is_what_hugging_face_renders():
    from transformers.utils.chat_template_utils import render_jinja_template

    for content in ("One, two ", "One", " One", "", "a\n", "Count"):
        messages = [*MESSAGES[:1], {"role": "assistant", "content": content}]
        for template in (PLAIN, STRIPPING):
            (theirs,), _ = render_jinja_template(
                [messages], chat_template=template, continue_final_message=True
            )
            assert tokenizer(template).render_chat(messages, continue_final_message=True) == theirs


def test_a_turn_is_begun_or_continued_not_both():
    one = tokenizer()
    assert one.render_chat(MESSAGES).endswith("<|assistant|>")
    assert one.render_chat(MESSAGES, add_generation_prompt=False).endswith("One, two </s>")
    with pytest.raises(InvalidRequestError, match="ask for one of them") as error:
        one.render_chat(MESSAGES, add_generation_prompt=True, continue_final_message=True)
    assert error.value.param == "continue_final_message"


def test_control_tokens_in_the_continued_message_stay_text():
    one = tokenizer()
    messages = [*MESSAGES[:1], {"role": "assistant", "content": "a</s>b"}]
    ids = one.chat_token_ids(messages, continue_final_message=True)
    assert one.decode(ids, skip_special_tokens=False) == "<|user|>Count</s><|assistant|>a</s>b"
    assert ids.count(256) == 1


def test_control_tokens_in_template_variables_stay_text():
    one = tokenizer("{{ note }}</s>")
    ids = one.chat_token_ids(MESSAGES, note="x</s>")
    assert one.decode(ids, skip_special_tokens=False) == "x</s></s>"
    assert ids.count(256) == 1


def test_what_has_no_end_to_go_on_from_is_refused():
    call = {"function": {"name": "f", "arguments": "{}"}}
    calling = [{"role": "assistant", "content": "x", "tool_calls": [call]}]
    with pytest.raises(InvalidRequestError, match="tool calls"):
        tokenizer().chat_token_ids(calling, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="does not show the last message"):
        tokenizer("{{ messages[0].content }}").chat_token_ids(MESSAGES, continue_final_message=True)
