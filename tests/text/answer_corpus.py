"""Answers as models write them, by format, and what they say."""

from typing import Any

from mlx_paged_attention.text.answer_format import AnswerFormat, find_format

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("get_weather", "get_news")
]

GREATEST = "1.7976931348623157e+308"  # that a double holds

# What find_format looks at: a phrase of the template, and the tokens of the vocabulary.
SOURCES: dict[str, tuple[str, set[str]]] = {
    "hermes": ('<tool_call>{"name"', {"<think>", "</think>"}),
    "qwen3_coder": ("<tool_call>\n<function=", set()),
    "glm47": ("<arg_key>", {"<think>", "</think>"}),
    "mistral": ("[TOOL_CALLS]", {"[THINK]", "[/THINK]"}),
    "kimi_k2": ("<|tool_calls_section_begin|>", set()),
    "kimi_k3": ("", {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}),
    "pythonic": ("<|tool_call_start|>", set()),
    "pythonic_by_vocabulary": ("", {"<|tool_call_start|>", "<|tool_call_end|>"}),
    "gemma4": ("<|tool_call>call<tool_call|>", {"<|channel>", "<channel|>"}),
    "function_gemma": ("<start_function_call>", set()),
    "longcat": ("<longcat_tool_call>", {"<longcat_think>", "</longcat_think>"}),
    "minimax_m2": ("<minimax:tool_call>", {"<think>", "</think>"}),
    "minicpm5": ('<function name="f"><param name="p">', set()),
    "muse_spark": ("<atem:function_calls>", set()),
    "deepseek": ("", {"<｜tool▁calls▁begin｜>", "<think>", "</think>"}),
    "llama3": ('{"name": f, "parameters": p}', {"<|python_tag|>"}),
    "harmony": ("", {"<|channel|>", "<|message|>"}),
}
FORMATS: dict[str, AnswerFormat] = {
    name: find_format(template, vocabulary, offers_tools=True)
    for name, (template, vocabulary) in SOURCES.items()
}

PARIS = ("call", "get_weather", '{"city": "Paris"}')
PARIS_3 = ("call", "get_weather", '{"city": "Paris", "days": 3}')
NEWS = ("call", "get_news", "{}")


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# Format, answer, what it says.
Case = tuple[str, str, list[tuple[str, ...]]]
ANSWERS: list[Case] = [
    ("hermes", "", []),
    ("hermes", "Just text, é and 🙂.", [("text", "Just text, é and 🙂.")]),
    ("hermes", "  kept  \n", [("text", "  kept  \n")]),
    ("hermes", "a < b <t <thin <tool <tool_cal", [("text", "a < b <t <thin <tool <tool_cal")]),
    ("hermes", "<<think>x</think>y", [("text", "<"), ("reasoning", "x"), ("text", "y")]),
    ("hermes", "<think>\nWell é…\n</think>\n\nYes.\n", [("reasoning", "Well é…"), ("text", "Yes.\n")]),
    ("hermes", "<think>\n\n</think>\n\nYes", [("text", "Yes")]),
    ("hermes", "<think>cut in the mid", [("reasoning", "cut in the mid")]),
    ("hermes", "<think>a</thin", [("reasoning", "a</thin")]),
    ("hermes", "no start</think> here", [("text", "no start</think> here")]),
    ("hermes", hermes("get_weather", '{"city": "Paris"}'), [PARIS]),
    (
        "hermes",
        "<think>ok</think>Let me look.\n" + hermes("get_weather", '{"city":"Paris", "days": 3}') + "\n",
        [("reasoning", "ok"), ("text", "Let me look."), PARIS_3],
    ),
    (
        "hermes",
        hermes("get_weather", '{"city": "Paris"}') + "\n" + hermes("get_news", "{}") + " Done.",
        [PARIS, NEWS, ("text", "Done.")],
    ),
    (
        "hermes",
        "<think>I call " + hermes("get_news", "{}") + " it",
        [("reasoning", "I call"), NEWS, ("text", "it")],
    ),
    (
        "hermes",
        hermes("get_weather", '{"city": "Zürich 🙂 \\"<tool_call>\\""}'),
        [("call", "get_weather", '{"city": "Zürich 🙂 \\"<tool_call>\\""}')],
    ),
    # The end marker inside an argument is no end; inside what is no call, it is.
    (
        "hermes",
        hermes("get_weather", '{"city": "a\\\\</tool_call>\\"</tool_call> b"}') + " Done.",
        [("call", "get_weather", '{"city": "a\\\\</tool_call>\\"</tool_call> b"}'), ("text", "Done.")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "oops}</tool_call>\n' + hermes("get_news", "{}"),
        [("text", '<tool_call>{"name": "oops}</tool_call>'), NEWS],
    ),
    (
        "hermes",
        '<tool_call>"a</tool_call> b </tool_call>\n' + hermes("get_news", '{"a": "b'),
        [("text", '<tool_call>"a</tool_call> b </tool_call>\n' + hermes("get_news", '{"a": "b'))],
    ),
    # Arguments as text: of an object, or put into one.
    ("hermes", hermes("get_news", '"{\\"a\\": 1}"'), [("call", "get_news", '{"a": 1}')]),
    ("hermes", hermes("get_news", '" "'), [("call", "get_news", "{}")]),
    ("hermes", hermes("get_news", '"not JSON"'), [("call", "get_news", '{"arguments": "not JSON"}')]),
    ("hermes", hermes("get_news", '"[1]"'), [("call", "get_news", '{"arguments": "[1]"}')]),
    # Numbers that are JSON, but too large for clients.
    *(
        ("hermes", hermes("get_news", text), [("call", "get_news", f'{{"a": [{GREATEST}, -{GREATEST}]}}')])
        for text in ('{"a": [1e999, -2E400]}', '"{\\"a\\": [1e999, -2E400]}"')
    ),
    ("hermes", hermes("get_news", "null"), [NEWS]),
    ("hermes", hermes("get_news", '{"a": "\\ud83d"}'), [("call", "get_news", '{"a": "\\ud83d"}')]),
    # What is no call is text, as it was written.
    *(
        ("hermes", text, [("text", text)])
        for text in (
            '<tool_call>{"name":',
            " say \n<tool_call>\n{}\n</tool_cal",
            "<tool_call></tool_call>",
            "<tool_call>\n{not json}\n</tool_call>\n tail ",
            hermes("get_news", '{"a": }'),
            hermes("get_news", "[1]"),
            hermes("get_news", '{"a": NaN}'),
            hermes("unknown", "{}"),
            "<tool_call>[1, 2]</tool_call>",
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            "<tool_call>" + "[" * 3000 + "</tool_call>",
        )
    ),
    (
        "hermes",
        "<tool_call>bad</tool_call>\n" + hermes("get_news", "{}"),
        [("text", "<tool_call>bad</tool_call>"), NEWS],
    ),
    ("hermes", "<think>a <tool_call>b", [("reasoning", "a <tool_call>b")]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [PARIS_3],
    ),
    (
        "glm47",
        "<think>hm</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        [("reasoning", "hm"), PARIS_3],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
    (
        "mistral",
        '[THINK]hm[/THINK]See: [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_news[ARGS]{}',
        [("reasoning", "hm"), ("text", "See:"), PARIS, NEWS],
    ),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"ci', [("text", '[TOOL_CALLS]get_weather[ARGS]{"ci')]),
    (
        "kimi_k2",
        "On it. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.get_news:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [("text", "On it."), PARIS, NEWS],
    ),
    (
        "kimi_k3",
        "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
        'type="string"<|sep|>Paris<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
        [("reasoning", "hm"), ("text", "Yes."), PARIS],
    ),
    (
        "pythonic",
        '<|tool_call_start|>[get_weather(city="Paris"), get_news()]<|tool_call_end|>Wait.',
        [PARIS, NEWS, ("text", "Wait.")],
    ),
    (
        "pythonic_by_vocabulary",
        '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>',
        [PARIS_3],
    ),
    (
        "gemma4",
        '<|channel>thought\nhm\n<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        [("reasoning", "hm"), PARIS_3],
    ),
    (
        "function_gemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        [PARIS_3],
    ),
    (
        "longcat",
        "<longcat_think>hm</longcat_think><longcat_tool_call>get_weather<longcat_arg_key>city</longcat_arg_key>"
        "<longcat_arg_value>Paris</longcat_arg_value></longcat_tool_call>",
        [("reasoning", "hm"), PARIS],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_news">\n</invoke>\n'
        "</minimax:tool_call>",
        [PARIS_3, NEWS],
    ),
    ("minicpm5", '<function name="get_weather"><param name="city">Paris</param></function>', [PARIS]),
    (
        "muse_spark",
        '<atem:function_calls><atem:invoke name="get_weather"><atem:parameter name="city">Paris'
        "</atem:parameter></atem:invoke></atem:function_calls>",
        [PARIS],
    ),
    (
        "deepseek",
        "hm</think>Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_news\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("text", "hm</think>Yes."), PARIS, NEWS],
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_news<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, NEWS],
    ),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    (
        "llama3",
        '\n<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"type": "function", "function": "get_news", "parameters": {}}',
        [PARIS, NEWS],
    ),
    ("llama3", '{"name": "nobody"} said', [("text", '{"name": "nobody"} said')]),
    ("llama3", ' {"na', [("text", ' {"na')]),
    ("llama3", 'The JSON {"name": "get_news"}', [("text", 'The JSON {"name": "get_news"}')]),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}',
        [("reasoning", "hm"), PARIS],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>First<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.",
        [("reasoning", "hm"), ("text", "FirstYes.")],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>Look<|end|><|start|>assistant to=functions.get_weather<|channel|>"
        'commentary json<|message|>{"city": "Paris"}',
        [("text", "Look"), PARIS],
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"ci',
        [("text", '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"ci')],
    ),
]
