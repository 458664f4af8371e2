"""AnswerGrammar: a grammar of whole answers, from the reasoning on, in the model's own format.

What is asked for, a form or tool calls, begins where the reasoning ends; the reasoning itself is free.
Markers that are tokens of the vocabulary are tokens in the grammar, too; llguidance takes none for text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.structured_outputs import StructuredOutputsParams
from mlx_paged_attention.text.answer_format import AnswerFormat
from mlx_paged_attention.text.grammar import form_grammar, json_rule, lark_string
from mlx_paged_attention.text.thinking import Thinking

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TERMINALS = ("TEXT: /(?s:.*)/", r"GAP: /[ \n]{1,8}/", r"PLAIN: /\s*[^{\s](?s:.*)/")


class AnswerGrammar:
    """The grammar of one request's answers; asked for once.

    Args:
        answer_format: whose calls, if there are tools, have a layout.
        tokens: ids of the vocabulary's control tokens and other added ones, by text.
        thinking: where the prompt ends.
        begun: it ends inside the answer proper, which is continued.
        tools: that may be called, as OpenAI's API writes them.
        parallel: an answer may make several calls.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        tokens: Mapping[str, int],
        thinking: Thinking,
        *,
        begun: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        parallel: bool = True,
    ) -> None:
        self._format = answer_format
        self._tokens = tokens
        self._marker = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
        self._thinking = thinking
        self._opening = "" if begun else answer_format.opening
        self._tools = [tool["function"] for tool in tools]
        self._parallel = parallel
        self._rules: list[str] = []

    def of_form(self, form: StructuredOutputsParams) -> StructuredOutputsParams:
        """Answers whose text has this form."""
        if self._thinking == "over" and not self._opening:
            return form
        return self._whole(self._form(form), form.named)

    def of_calls(self) -> StructuredOutputsParams:
        """Answers that call one of the tools, or several, and do nothing else."""
        return self._whole(self._calls(all_strict=True), "tools")

    def of_form_or_calls(self, form: StructuredOutputsParams) -> StructuredOutputsParams:
        """Answers whose text has this form, or that call tools and do nothing else."""
        return self._whole(f"{self._form(form)} | {self._calls(all_strict=False)}", form.named)

    def of_text_and_calls(self) -> StructuredOutputsParams:
        """Answers of any text and any calls of the tools; a strict tool's arguments follow its schema.

        Raises:
            InvalidRequestError: text and calls are not told apart so simply in this model's format.
        """
        calls = self._format.tool_calls
        assert calls is not None
        if self._format.opening:
            raise InvalidRequestError(
                "tools: strict cannot be enforced beside free text in this model's format; send tool_choice "
                "'required', or leave strict out and check the arguments",
                "tools",
            )
        if calls.openings:  # text that begins otherwise
            return self._whole(f"PLAIN? | {self._calls(all_strict=False)}", "tools")
        begin = self._text_until(calls.starts[0])
        rest = self._calls(all_strict=False, begun=calls.starts[0])
        assert calls.layout is not None
        several = self._parallel and calls.layout.separator is not None
        return self._whole(f"({begin} {rest}){'*' if several else '?'} TEXT", "tools")

    def _whole(self, answer: str, named: str) -> StructuredOutputsParams:
        before = ""
        if self._thinking != "over":
            assert self._format.reasoning is not None
            start, end = self._format.reasoning
            before = f"{self._text_until(end)} {self._written(self._format.resume)}"
            if self._thinking == "possible":
                before = f"({self._written(start)} {before})?"
            before += " GAP?"
        rules = [f"start: {before} answer", f"answer: {answer}", *self._rules, *_TERMINALS]
        return StructuredOutputsParams(grammar="\n".join(rules), named=named, composed=True)

    def _form(self, form: StructuredOutputsParams) -> str:
        self._rules.append(f"form: %lark {{\n{form_grammar(form)}\n}}")
        return f"{self._written(self._opening)} form"

    def _calls(self, *, all_strict: bool, begun: str = "") -> str:
        """What calls are written as: all of an answer's, or those that follow the marker ``begun``."""
        assert self._format.tool_calls is not None
        layout = self._format.tool_calls.layout
        assert layout is not None
        if self._format.opening and not self._opening:
            raise InvalidRequestError(
                "continue_final_message: in this model's format no call can be enforced in an answer that "
                "has begun; leave it out",
                "continue_final_message",
            )
        opening, before = layout.opening, layout.before
        if begun:
            opening, before = opening.removeprefix(begun), before if opening else before.removeprefix(begun)
        names = []
        for index, function in enumerate(self._tools):
            name = function["name"]
            if not _NAME.fullmatch(name):
                raise InvalidRequestError(
                    f"tools: calls of {name!r} cannot be enforced; use letters, digits, '_', '-' and '.' in "
                    "names",
                    "tools",
                )
            strict = bool(function.get("strict"))
            schema = _schema(function) if strict or all_strict else {"type": "object"}
            written = self._written(f"{before}{name}{layout.between}")
            self._rules.append(f"call_{index}: {written} arguments_{index} {self._written(layout.after)}")
            self._rules.append(f"arguments_{index}: {json_rule(schema, lenient=not strict, named='tools')}")
            names.append(f"call_{index}")
        self._rules.append("call: " + " | ".join(names))
        several = self._parallel and layout.separator is not None and (layout.opening or not begun)
        more = f"({self._written(layout.separator or '')} call)*" if several else ""
        return f"{self._written(opening)} call {more} {self._written(layout.closing)}"

    def _text_until(self, marker: str) -> str:
        """Any text and, after it, the marker, which is not in it."""
        written = self._written(marker)
        if written.startswith("<["):
            return f"TEXT {written}"
        name = f"until_{len(self._rules)}"
        escaped = re.escape(marker).replace("/", "\\/")
        self._rules.append(f"{name}[lazy]: /(?s:.*){escaped}/")
        return name

    def _written(self, text: str) -> str:
        """A text that is part of a rule: its tokens as such, what stands between them as strings."""
        items, at = [], 0
        for found in self._marker.finditer(text):
            items += [text[at : found.start()], found[0]]
            at = found.end()
        items.append(text[at:])
        return " ".join(
            f"<[{self._tokens[item]}]>" if item in self._tokens else lark_string(item)
            for item in items
            if item
        )


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Of a function's arguments, which are an object; without ``parameters`` there are none."""
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(
            f"tools: the parameters of {function['name']!r} must be a schema of the type 'object'", "tools"
        )
    return {"type": "object", **schema}
