"""AnswerFormat: how a model marks its reasoning and its tool calls, found from its template and vocabulary.

The rules are mlx-lm's (``_infer_tool_parser`` and ``_infer_thinking`` of ``mlx_lm.tokenizer_utils``), and
three formats more: Llama 3's bare JSON, DeepSeek's, and the channels of gpt-oss.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_paged_attention.text import call_layout
from mlx_paged_attention.text.call_layout import CallLayout, json_layout
from mlx_paged_attention.text.tool_parsers import (
    parse_deepseek,
    parse_harmony,
    parse_json,
    parse_llama3,
    parser_of_mlx_lm,
)

MarkerKind = Literal["text", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How calls are written.

    Attributes:
        starts: each begins a call, or several.
        end: ends it; ``""``: the answer's end does.
        parse: what stands between them to ``{"name", "arguments"[, "id"]}`` or a list of those; raises
            anything for what is no call.
        control_tokens: those that a call is written with, besides the markers.
        openings: an answer that begins so is a call, without a start.
        short_ids: the template refuses ids that are not nine letters and digits.
        layout: how a grammar has calls written; ``None`` if their arguments are no JSON.
    """

    starts: tuple[str, ...]
    end: str
    parse: Callable[[str, Any], Any]
    control_tokens: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    short_ids: bool = False
    layout: CallLayout | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How answers are written; the default is plain text.

    Attributes:
        reasoning: what begins it and what ends it.
        tool_calls: ``None`` if the template cannot offer tools, or calls are written in an unknown way.
        dropped: markers of the answer proper, which say nothing to a reader.
        resume: what follows the end of the reasoning, before whatever comes next.
        opening: what begins the answer proper.
    """

    reasoning: tuple[str, str] | None = None
    tool_calls: ToolCallFormat | None = None
    dropped: tuple[str, ...] = ()
    resume: str = ""
    opening: str = ""

    def with_json_calls(self) -> "AnswerFormat":
        """The format of calls that a grammar writes: the model's own if its arguments are JSON, else JSON
        between the model's markers."""
        calls = self.tool_calls
        if calls is None or calls.layout is not None:
            return self
        layout = json_layout(calls.starts[0], calls.end)
        return replace(self, tool_calls=replace(calls, parse=parse_json, layout=layout))

    def markers(self, state: str, *, tools: bool) -> dict[str, MarkerKind]:
        """The markers that count in ``"text"`` or ``"reasoning"``, with what follows each.

        A call may end the reasoning, as in mlx-lm: some models do not close it first.
        """
        found: dict[str, MarkerKind] = {}
        if state == "text":
            found.update(dict.fromkeys(self.dropped, "text"))
            if self.reasoning is not None:
                found[self.reasoning[0]] = "reasoning"
        elif self.reasoning is not None:
            found[self.reasoning[1]] = "text"
        if self.tool_calls is not None and tools:
            found.update(dict.fromkeys(self.tool_calls.starts, "call"))
        return found

    def shows(self, control_token: str, *, tools: bool) -> bool:
        """Whether this control token has to be in the text for the answer to be read."""
        markers = [*self.markers("text", tools=tools), *self.markers("reasoning", tools=tools)]
        if self.tool_calls is not None and tools:
            markers += [self.tool_calls.end, *self.tool_calls.control_tokens]
        return any(control_token in marker for marker in markers)


def find_format(template: str, vocabulary: Container[str], *, offers_tools: bool) -> AnswerFormat:
    """The format of a model's answers.

    Args:
        template: the source of its chat templates.
        vocabulary: the texts of its tokens.
        offers_tools: the template has a place for tools.
    """
    if "<|channel|>" in vocabulary and "<|message|>" in vocabulary:
        return AnswerFormat(
            ("<|channel|>analysis<|message|>", "<|end|>"),
            _HARMONY if offers_tools else None,
            (
                "<|channel|>final<|message|>",
                "<|channel|>commentary<|message|>",
                "<|start|>assistant",
                "<|end|>",
            ),
            resume="<|start|>assistant",
            opening="<|channel|>final<|message|>",
        )
    dropped = _XTML_FRAME if _is_xtml(vocabulary) else ()
    calls = _tool_call_format(template, vocabulary) if offers_tools else None
    return AnswerFormat(_reasoning(vocabulary), calls, dropped, opening=dropped[0] if dropped else "")


def _reasoning(vocabulary: Container[str]) -> tuple[str, str] | None:
    for start, end in _THINK_TOKENS:
        if start in vocabulary and end in vocabulary:
            return start, end
    if "<|channel>" in vocabulary and "<channel|>" in vocabulary:
        return "<|channel>thought", "<channel|>"
    if _is_xtml(vocabulary):
        return "<|open|>think<|sep|>", "<|close|>think<|sep|>"
    return None


def _tool_call_format(template: str, vocabulary: Container[str]) -> ToolCallFormat | None:
    for words, name in _SIGNS:
        if all(word in template for word in words):
            if name == "mistral":
                names = "[ARGS]" in vocabulary
                return _known(name, call_layout.MISTRAL_NAMES if names else call_layout.MISTRAL_LIST)
            return _known(name, call_layout.KIMI_K2 if name == "kimi_k2" else None)
    if _is_xtml(vocabulary):
        return _known("kimi_k3")
    if "<|tool_call_start|>" in vocabulary and "<|tool_call_end|>" in vocabulary:
        return _known("pythonic")
    if "<｜tool▁calls▁begin｜>" in vocabulary:
        fenced = "```json" in template
        return replace(_DEEPSEEK, layout=call_layout.DEEPSEEK_FENCED if fenced else call_layout.DEEPSEEK_BARE)
    if "<|python_tag|>" in vocabulary and '"parameters"' in template:
        return _LLAMA3
    if "<tool_call>" in template:
        return ToolCallFormat(("<tool_call>",), "</tool_call>", parse_json, layout=call_layout.HERMES)
    return None


def _known(name: str, layout: CallLayout | None = None) -> ToolCallFormat:
    parser = parser_of_mlx_lm(name)
    return ToolCallFormat(
        (parser.tool_call_start,),
        parser.tool_call_end,
        parser.parse_tool_call,
        _CONTROL_TOKENS.get(name, ()),
        short_ids=name == "mistral",
        layout=layout,
    )


def _is_xtml(vocabulary: Container[str]) -> bool:
    return all(token in vocabulary for token in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))


_THINK_TOKENS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
)

_XTML_FRAME = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")

# What a template must contain, and the parser that it means: the first that fits.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "function_gemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<arg_key>",), "glm47"),
    (("<|tool_list_start|>",), "pythonic"),
    (("<|tool_call_start|>",), "pythonic"),
    (("<tool_call>\\n<function=",), "qwen3_coder"),
    (("<tool_call>\n<function=",), "qwen3_coder"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<atem:function_calls>",), "muse_spark"),
)

_CONTROL_TOKENS: dict[str, tuple[str, ...]] = {
    "gemma4": ('<|"|>',),
    "function_gemma": ("<escape>",),
    "longcat": (
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
    ),
    "glm47": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "mistral": ("[ARGS]", "[CALL_ID]"),
    "minicpm5": ("<function", "</function>", "<param", "</param>"),
}

_DEEPSEEK = ToolCallFormat(
    ("<｜tool▁calls▁begin｜>",),
    "<｜tool▁calls▁end｜>",
    parse_deepseek,
    ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
_LLAMA3 = ToolCallFormat(
    ("<|python_tag|>",),
    "",
    parse_llama3,
    openings=('{"name"', '{"type"', '{"function"'),
    layout=call_layout.LLAMA3,
)
_HARMONY = ToolCallFormat(
    ("<|channel|>commentary to=functions.", "<|start|>assistant to=functions."),
    "",
    parse_harmony,
    ("<|constrain|>",),
    layout=call_layout.HARMONY,
)
