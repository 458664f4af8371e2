"""Metal source as a list of tokens, and how to move about in it."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from .errors import CompileError

_TOKEN = re.compile(
    r"""
      (?P<directive>^[ \t]*\#[^\n]*)
    | (?P<space>\s+)
    | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<sign>\[\[|->|\+\+|--|<<=|>>=|[-+*/%&|^!=<>]=|&&|\|\||::|.)
    """,
    re.MULTILINE | re.VERBOSE | re.DOTALL,
)
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class Token(NamedTuple):
    kind: str
    text: str

    @property
    def means_something(self) -> bool:
        return self.kind not in ("space", "directive")


Tokens = list[Token]


def tokenize(source: str) -> Tokens:
    return [Token(match.lastgroup or "", match.group()) for match in _TOKEN.finditer(source)]


def text_of(tokens: Tokens) -> str:
    return "".join(token.text for token in tokens)


def code(text: str) -> Token:
    """Finished C++ that no later step shall look into."""
    return Token("code", text)


def lines_of(tokens: Tokens) -> Token:
    """As many line breaks as ``tokens`` has, so that what follows keeps its line number."""
    return Token("space", "\n" * text_of(tokens).count("\n"))


def following(tokens: Tokens, index: int) -> int:
    """The index of the next token that means something; ``len(tokens)`` at the end."""
    index += 1
    while index < len(tokens) and not tokens[index].means_something:
        index += 1
    return index


def preceding(tokens: Tokens, index: int) -> int:
    """The index of the token before that means something; -1 at the start."""
    index -= 1
    while index >= 0 and not tokens[index].means_something:
        index -= 1
    return index


def text_at(tokens: Tokens, index: int) -> str:
    return tokens[index].text if 0 <= index < len(tokens) else ""


def closing(tokens: Tokens, index: int) -> int:
    """The index of the bracket that closes the one at ``index``; for ``[[``, of the second ``]``."""
    depth = 0
    for i in range(index, len(tokens)):
        kind, text = tokens[i]
        if kind != "sign":
            continue
        if text == "[[":
            depth += 2
        elif text in _CLOSING:
            depth += 1
        elif text in ")}]":
            depth -= 1
            if depth == 0:
                return i
    raise CompileError(f"'{tokens[index].text}' is never closed")


def end_of_statement(tokens: Tokens, index: int) -> int:
    """The index of the semicolon that ends the statement in which ``index`` lies."""
    while tokens[index].text != ";":
        opens = tokens[index].text in _CLOSING or tokens[index].text == "[["
        index = closing(tokens, index) + 1 if opens else index + 1
        if index >= len(tokens):
            raise CompileError("a statement has no end")
    return index


def split_at_commas(tokens: Tokens) -> list[Tokens]:
    """The parts between commas that stand inside no bracket."""
    parts: list[Tokens] = []
    part: Tokens = []
    depth = 0
    for token in tokens:
        if token.kind == "sign":
            if token.text == "[[":
                depth += 2
            elif token.text in ("(", "[", "{", "<"):
                depth += 1
            elif token.text in (")", "]", "}", ">"):
                depth -= 1
            elif token.text == "," and depth == 0:
                parts.append(part)
                part = []
                continue
        part.append(token)
    if any(token.means_something for token in part):
        parts.append(part)
    return parts


def without_attributes(tokens: Tokens) -> tuple[Tokens, list[str]]:
    """``tokens`` without ``[[…]]``, and the text of what stood in them."""
    kept: Tokens = []
    attributes: list[str] = []
    i = 0
    while i < len(tokens):
        if tokens[i] == ("sign", "[["):
            end = closing(tokens, i)
            attributes.append(text_of(tokens[i + 1 : end - 1]).strip())
            i = end
        else:
            kept.append(tokens[i])
        i += 1
    return kept, attributes


class ThreadgroupVariable(NamedTuple):
    type: str
    name: str
    dimensions: str
    initialiser: str


def threadgroup_declarations(tokens: Tokens) -> Iterator[tuple[int, int, list[ThreadgroupVariable]]]:
    """The declarations of threadgroup variables, not of pointers: first and last index, and the variables."""
    for i, token in enumerate(tokens):
        if token != ("word", "threadgroup") or text_at(tokens, preceding(tokens, i)) not in (
            "",
            "{",
            "}",
            ";",
        ):
            continue
        end = end_of_statement(tokens, i)
        declaration = tokens[i + 1 : end]
        if not _declares_pointer(declaration):
            yield i, end, list(_variables(declaration))


def _declares_pointer(declaration: Tokens) -> bool:
    depth = 0
    for kind, text in declaration:
        if kind != "sign":
            continue
        depth += (text == "<") - (text == ">")
        if depth == 0 and text in ("*", "&"):
            return True
        if depth == 0 and text in ("=", "[", ","):
            return False
    return False


def _variables(declaration: Tokens) -> Iterator[ThreadgroupVariable]:
    type_ = ""
    for part in split_at_commas(declaration):
        start = next((i for i, token in enumerate(part) if token.text in ("=", "{")), len(part))
        initialiser = _on_one_line(part[start:])
        part = part[:start]
        bracket = next((i for i, token in enumerate(part) if token.text == "["), len(part))
        name = preceding(part, bracket)
        type_ = type_ or _on_one_line(part[:name])
        yield ThreadgroupVariable(type_, part[name].text, _on_one_line(part[bracket:]), initialiser)


def _on_one_line(tokens: Tokens) -> str:
    return " ".join(text_of(tokens).split())
