"""CallLayout: how a model writes calls whose arguments are JSON, for grammars that have it call tools."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallLayout:
    """What stands around the names and the arguments of an answer's calls, markers included.

    Attributes:
        before: a call's name.
        between: its name and its arguments.
        after: its arguments.
        opening: before the first call.
        closing: after the last one.
        separator: between two calls; ``None`` if an answer makes only one.
    """

    before: str
    between: str
    after: str
    opening: str = ""
    closing: str = ""
    separator: str | None = ""


def json_layout(start: str, end: str, *, separator: str = "") -> CallLayout:
    """Calls as ``{"name": ..., "arguments": ...}`` between markers."""
    return CallLayout(f'{start}{{"name": "', '", "arguments": ', "}" + end, separator=separator)


HERMES = json_layout("<tool_call>\n", "\n</tool_call>", separator="\n")
LLAMA3 = CallLayout('{"name": "', '", "parameters": ', "}", separator="; ")
MISTRAL_LIST = CallLayout(
    '{"name": "', '", "arguments": ', "}", opening="[TOOL_CALLS] [", closing="]", separator=", "
)
MISTRAL_NAMES = CallLayout("[TOOL_CALLS]", "[ARGS]", "")
DEEPSEEK_FENCED = CallLayout(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    separator="\n",
)
DEEPSEEK_BARE = CallLayout(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
)
# Its ids hold the call's number, which a grammar would have to count.
KIMI_K2 = CallLayout(
    "<|tool_call_begin|>functions.",
    ":0<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    separator=None,
)
HARMONY = CallLayout(
    "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", separator=None
)
