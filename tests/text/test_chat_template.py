"""Templates render as Hugging Face renders them; malformed conversations are refused in one line."""

import re

import pytest

from mlx_paged_attention.errors import InvalidRequestError, ModelLoadError
from mlx_paged_attention.text.chat_template import ChatTemplate
from mlx_paged_attention.text.messages import normalize_messages

CALL = {"id": "call_1", "type": "function", "function": {"name": "exec", "arguments": '{"command":"ls"}'}}
TOOL_HISTORY = [
    {"role": "user", "content": "list"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "a.txt", "tool_call_id": "call_1"},
]


def render(source, messages=({"role": "user", "content": "hi"},), **options):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(normalize_messages(list(messages)), **options)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in messages %}\n    {% if m.role %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n",
            "hi\n",
        ),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ bos_token }}{{ missing }}{{ tools is none }}", "<s>True"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{{ add_generation_prompt }}{{ enable_thinking is defined }}", "TrueFalse"),
    ],
)
def test_templates_render_as_hugging_face_renders_them(source, text):
    assert render(source) == text


def test_variables_reach_the_template():
    assert render("{{ tools is none }}", tools=[]) == "True"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))


def test_a_template_that_refuses_the_system_role_is_quoted():
    """EricLBuehler/mistral.rs#506"""
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    with pytest.raises(InvalidRequestError, match="System role not supported"):
        render(source, [{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ 1 + messages[0].content }}", "{{ messages[7].content }}", "{{ 1 / 0 }}"]
)
def test_an_error_inside_the_template_is_the_requests(source):
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(source)


def test_a_template_cannot_change_the_conversation_or_reach_python():
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}"):
        with pytest.raises(InvalidRequestError):
            render(source)


def test_a_template_that_does_not_compile_fails_at_load():
    with pytest.raises(ModelLoadError, match="compile"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    "arguments",
    [
        "{% for k, v in c.function.arguments | items %}{{ k }}: {{ v }}{% endfor %}",
        "{{ 'args ' + c.function.arguments }}",
        "{{ c.function.arguments + ' args' }}",
        "{{ 'args ' ~ c.function.arguments }}",
        "{{ c.function.arguments | tojson }}",
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
    ],
)
def test_tool_call_arguments_serve_as_mapping_and_as_text(arguments):
    """ml-explore/mlx-lm#1065"""
    source = (
        "{% for m in messages %}{{ '[' + m.content + ']' }}"
        "{% for c in m.tool_calls %}@{% endfor %}{% endfor %}"
    )
    text = render(source.replace("@", arguments), TOOL_HISTORY)
    assert "command" in text
    assert "ls" in text
    assert "'" not in text
    assert text.startswith("[list][]")


@pytest.mark.parametrize("name", ["m.content", "m['content']"])
def test_a_template_that_asks_for_no_content_beside_tool_calls_gets_none(name):
    """DeepSeek's does, and left the calls out."""
    source = "{% for m in messages %}[{{ 'calls' if @ is none else @ }}]{% endfor %}"
    assert render(source.replace("@", name), TOOL_HISTORY) == "[list][calls][a.txt]"


def test_no_arguments_are_an_empty_mapping():
    """ml-explore/mlx-lm#1065"""
    for arguments in ("", None, {}, "{}"):
        call = {"function": {"name": "f", "arguments": arguments}}
        source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
        assert render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == "{}"


def test_an_empty_list_of_tool_calls_is_no_tool_call():
    """vllm-project/vllm#13978"""
    plain = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    with_field = [{"role": "assistant", "content": "ok", "tool_calls": []}, plain[1]]
    assert normalize_messages(with_field) == normalize_messages(plain)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_found_under_the_names_that_templates_read(name):
    message = {"role": "assistant", "content": "Yes", name: "Hm"}
    (normal,) = normalize_messages([message])
    assert (normal["reasoning_content"], normal["thinking"]) == ("Hm", "Hm")
    (plain,) = normalize_messages([{"role": "user", "content": "Yes"}])
    assert set(plain) == {"role", "content"}
    with pytest.raises(InvalidRequestError, match=name):
        normalize_messages([message | {name: 5}])


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    assert normalize_messages([{"role": "user", "content": parts}])[0]["content"] == "a b"


def test_normalising_leaves_the_callers_messages_alone():
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL], "extra": 1}]
    normal = normalize_messages(messages)
    assert messages[0]["content"] is None
    assert CALL["function"]["arguments"] == '{"command":"ls"}'
    assert normal[0]["extra"] == 1


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list"),
        (None, "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        ([], "messages must not be empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\]\.role must be one of .*not None"),
        ([{"role": "usr", "content": "hi"}], r"messages\[0\]\.role must be one of .*not 'usr'"),
        ([{"role": ["user"], "content": "hi"}], r"messages\[0\]\.role must be one of"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] must be an object"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\] has type 'image_url'.*text only",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], r"content\[0\] has type 'input_audio'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be a string"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "belong to the assistant"),
        ([{"role": "assistant", "tool_calls": "x"}], r"tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\] must be an object with a function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"function\.name must be a string"),
    ],
)
def test_a_malformed_conversation_is_refused_by_name(messages, message):
    with pytest.raises(InvalidRequestError, match=message):
        normalize_messages(messages)


@pytest.mark.parametrize("depth", [300, 5000])
def test_arguments_nested_too_deeply_are_refused(depth):
    call = {"function": {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}}
    with pytest.raises(InvalidRequestError, match=r"tool_calls\[0\]\.function\.arguments"):
        normalize_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("arguments", ["[1]", "{", "ls", 5])
def test_arguments_that_are_no_json_object_are_refused(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequestError, match=r"tool_calls\[0\]\.function\.arguments must be the text"):
        normalize_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
