"""Request bodies as strangers may send them: mostly right, with something odd in a place or two."""

from typing import Any

from hypothesis import strategies as st

# Written with json.dumps: halves of surrogate pairs, NaN and infinities get through.
ODD = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63) - 1, 10**40),
            *(0.0, -0.0, 0.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
            *("", " ", "x", "auto", "none", "\0", "\ud800", "\N{GRINNING FACE}", "<end>", "{{ x }}"),
            *([], {}, [None], [[]], [{}], {"": None}, {"type": None}, {"a": {"b": [1]}}, ["x"] * 50),
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-2, 300), max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
)
TEXT = st.text(min_size=1, max_size=30) | st.sampled_from(
    ["Where?", "a " * 40, "x" * 500, "é\N{GRINNING FACE}", "<end>"]
)
TOKEN_IDS = st.lists(st.integers(0, 255), min_size=1, max_size=6)
NAMES = st.sampled_from(["look", "f", "g", "", "a b", "\u00e9", "x" * 100])

SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(
        [
            *({}, True, False, {"type": "string"}, {"type": "integer"}, {"type": "null"}, {"enum": ["a", 1]}),
            *({"const": "x"}, {"type": ["string", "null"]}, {"type": "nothing"}),
            *({"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "http://localhost/a"}, {"format": "date"}),
            *({"type": "string", "pattern": "^a+$"}, {"type": "string", "pattern": "("}, {"not": {}}),
            *({"type": "integer", "minimum": 0, "maximum": 10**30}, {"type": "number", "multipleOf": 0}),
            *({"type": "string", "maxLength": -1}, {"type": "string", "minLength": 10**9}),
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item}, inner),
        st.builds(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
            st.dictionaries(st.text(max_size=4), inner, max_size=3),
        ),
        st.builds(lambda several: {"anyOf": several}, st.lists(inner, max_size=3)),
        st.builds(lambda several: {"allOf": several}, st.lists(inner, max_size=2)),
        st.builds(lambda one: {"$ref": "#/$defs/a", "$defs": {"a": one}}, inner),
    ),
    max_leaves=5,
)
REGEXES = st.text(alphabet="ab01()[]{}|*+?.\\^$,-dw<!=:\u00e9", max_size=14)
GRAMMARS = st.sampled_from(
    ['start: "a"', "start: start", 'start: /a+/ "b" | start start', "start:", ""]
) | st.text(alphabet='ast:rt"/|()[]*+?\n ', max_size=25)
CHOICES = st.lists(st.text(max_size=4), max_size=4)
FORMS = st.one_of(
    st.fixed_dictionaries({"json": SCHEMAS}),
    st.fixed_dictionaries({"regex": REGEXES}),
    st.fixed_dictionaries({"grammar": GRAMMARS}),
    st.fixed_dictionaries({"choice": CHOICES}),
    st.just({"json_object": True}),
)
RESPONSE_FORMATS = st.one_of(
    st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}]),
    st.builds(
        lambda name, schema: {"type": "json_schema", "json_schema": {"name": name, "schema": schema}},
        NAMES,
        SCHEMAS,
    ),
)
GOOD_TOOLS = st.builds(
    lambda schemas: [
        {"type": "function", "function": {"name": f"tool{i}", "description": "x", "parameters": schema}}
        for i, schema in enumerate(schemas)
    ],
    st.lists(SCHEMAS.filter(lambda schema: isinstance(schema, dict)), max_size=3),
)
TOOLS = GOOD_TOOLS | st.lists(
    st.builds(
        lambda name, schema, more: {
            "type": "function",
            "function": {"name": name, "parameters": schema, **more},
        },
        NAMES,
        SCHEMAS,
        st.dictionaries(st.sampled_from(["description", "strict", "x"]), ODD, max_size=1),
    ),
    max_size=3,
)
ARGUMENTS = st.sampled_from(["{}", "", '{"a": [1, null]}', "[", "1", "null", '{"a":' * 300])
CALLS = st.lists(
    st.builds(
        lambda name, arguments: {
            "id": "call_1",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        NAMES,
        ARGUMENTS | ODD,
    ),
    max_size=2,
)
PARTS = st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, TEXT)
    | st.sampled_from([{"type": "image_url", "image_url": {"url": "file:///x"}}, {}, None, {"type": "text"}]),
    max_size=3,
)
GOOD_MESSAGES = st.lists(
    st.one_of(
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.sampled_from(["user", "system", "developer", "assistant"]),
            TEXT,
        ),
        st.builds(
            lambda text, arguments: {
                "role": "assistant",
                "content": text,
                "reasoning_content": text,
                "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": arguments}}],
            },
            TEXT,
            st.sampled_from(["{}", "", '{"a": [1, null]}', {"a": "<end>"}]),
        ),
        st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, TEXT),
    ),
    min_size=1,
    max_size=4,
)
MESSAGES = (
    GOOD_MESSAGES
    | GOOD_MESSAGES
    | st.lists(
        st.one_of(
            st.builds(
                lambda role, content: {"role": role, "content": content},
                st.sampled_from(["user", "system", "developer", "assistant", "tool", "nobody"]),
                TEXT | PARTS | ODD,
            ),
            st.builds(
                lambda calls, more: {"role": "assistant", "content": None, "tool_calls": calls, **more},
                CALLS,
                st.dictionaries(st.sampled_from(["reasoning_content", "thinking", "name"]), ODD, max_size=2),
            ),
            st.builds(lambda text: {"role": "user", "content": text}, TEXT),
            st.builds(lambda text: {"role": "tool", "tool_call_id": "call_1", "content": text}, TEXT),
        ),
        min_size=1,
        max_size=4,
    )
)

SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 12),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(1, 3),
    "best_of": st.integers(3, 4),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 287), max_size=3),
    "min_tokens": st.integers(0, 1),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "prompt_logprobs": st.integers(0, 20),
    "logit_bias": st.dictionaries(st.integers(0, 287).map(str), st.floats(-100, 100), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, 287), min_size=1, max_size=5),
    "bad_words": st.lists(st.text(min_size=1, max_size=4), max_size=3),
    "priority": st.just(0),
    "cache_salt": st.text(min_size=1, max_size=3),
    "use_beam_search": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.dictionaries(
        st.sampled_from(["include_usage", "continuous_usage_stats", "x"]), st.booleans(), max_size=2
    ),
    "structured_outputs": FORMS,
    "response_format": RESPONSE_FORMATS,
    "guided_json": SCHEMAS,
    "guided_regex": REGEXES,
    "guided_choice": CHOICES,
    "guided_grammar": GRAMMARS,
    "user": st.text(max_size=3),
    "suffix": st.just(""),
    "store": st.just(False),
}
COMPLETION = {
    "prompt": TEXT | TOKEN_IDS | st.lists(TEXT | TOKEN_IDS, min_size=1, max_size=3),
    **SAMPLING,
    "logprobs": st.integers(0, 20),
    "echo": st.booleans(),
}
CHAT = {
    "messages": MESSAGES,
    **SAMPLING,
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "max_completion_tokens": st.integers(0, 12),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["none", "auto", "required"])
    | st.builds(lambda name: {"type": "function", "function": {"name": name}}, NAMES),
    "parallel_tool_calls": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["enable_thinking", "documents", "x", "self"]), ODD, max_size=2
    ),
}
TOKENIZE = {
    "messages": MESSAGES,
    "add_special_tokens": st.just(False),
    "return_token_strs": st.booleans(),
    "tools": TOOLS,
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "continue_final_message": st.booleans(),
}
FIELDS: dict[str, tuple[dict[str, st.SearchStrategy[Any]], tuple[str, ...]]] = {
    "/v1/completions": (COMPLETION, ("prompt",)),
    "/v1/completions/render": (COMPLETION, ("prompt",)),
    "/v1/chat/completions": (CHAT, ("messages",)),
    "/v1/chat/completions/render": (CHAT, ("messages",)),
    "/tokenize": (TOKENIZE, ("messages",)),
    "/detokenize": ({"tokens": st.lists(st.integers(0, 287))}, ("tokens",)),
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """A body for a path: what it needs and some more fields, now and then one of them odd."""
    fields, needed = FIELDS[path]
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True))
    body = {name: draw(fields[name]) for name in dict.fromkeys((*needed, *names))}
    if "top_logprobs" in body:
        body["logprobs"] = True
    if "stream_options" in body:
        body["stream"] = True
    if draw(st.integers(0, 3)) == 3:
        body[draw(st.sampled_from([*fields, "unknown", "model", "", "\ud800"]))] = draw(ODD)
    # Most answers should be short; the context ends the others.
    if "max_tokens" in fields and "max_completion_tokens" not in body and draw(st.integers(0, 9)):
        body.setdefault("max_tokens", draw(fields["max_tokens"]))
    return body
