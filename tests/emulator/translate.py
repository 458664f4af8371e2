"""Preprocessed Metal to C++ that means the same against ``metal_library/``.

What C++ has no word for is rewritten token by token: attributes, function constants, threadgroup variables,
half literals, swizzles, and members or overloads that differ in address spaces alone. Everything else stays,
and so does every line number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import CompileError
from .kernel_signature import Parameter, argument, kernel_signatures
from .literals import in_cxx
from .tokens import (
    ThreadgroupVariable,
    Token,
    Tokens,
    closing,
    code,
    following,
    lines_of,
    preceding,
    text_at,
    text_of,
    threadgroup_declarations,
    tokenize,
)

FunctionConstants = Mapping[int | str, int | bool]

_ADDRESS_SPACES = ("device", "constant", "threadgroup", "thread")
_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}
_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")


@dataclass(frozen=True)
class Translation:
    cxx: str
    kernels: dict[str, list[Parameter]]

    def with_entry(self, expression: str) -> str:
        """The translation unit whose ``emulator_entry`` runs one thread of the kernel."""
        name = re.split(r"\s*<", expression, maxsplit=1)[0].split("::")[-1]
        if name not in self.kernels:
            raise CompileError(
                f"no kernel is called '{name}'; there are: {', '.join(self.kernels) or 'none'}"
            )
        arguments = ", ".join(argument(parameter) for parameter in self.kernels[name])
        return (
            f'#include "emulator.h"\n{self.cxx}\n#line 1 "entry"\n'
            'extern "C" __attribute__((visibility("default"))) EMU_UNCHECKED\n'
            "void emulator_entry(void** b, const GpuThread* t) {\n"
            f"  auto run = &{expression};\n  run({arguments});\n}}\n"
        )


def translate(metal: str, function_constants: FunctionConstants) -> Translation:
    tokens = tokenize(metal)
    if Token("word", "double") in tokens:
        raise CompileError("error: 'double' is not supported in Metal")
    drop_address_space_members(tokens)
    _drop_address_space_overloads(tokens)
    kernels = kernel_signatures(tokens)
    tokens = _with_function_constants(tokens, function_constants)
    tokens = _with_threadgroup_variables(tokens)
    return Translation(_with_literals_and_swizzles(tokens), kernels)


def drop_address_space_members(tokens: Tokens) -> None:
    """Deletes members declared again for another address space, as in ``T get() const threadgroup``."""
    i = 0
    while i < len(tokens):
        if tokens[i].text in ("device", "constant", "threadgroup") and _qualifies_member(tokens, i):
            start = _start_of_declaration(tokens, preceding(tokens, i))
            del tokens[start : _end_of_function(tokens, i) + 1]
            i = start
        else:
            i += 1


def _qualifies_member(tokens: Tokens, index: int) -> bool:
    before = preceding(tokens, index)
    if text_at(tokens, before) == "const":
        before = preceding(tokens, before)
    after = text_at(tokens, following(tokens, index))
    return text_at(tokens, before) == ")" and after in ("{", ":", ";", "->", "noexcept")


def _start_of_declaration(tokens: Tokens, index: int) -> int:
    depth = 0
    while index >= 0:
        kind, text = tokens[index]
        if kind == "sign":
            depth += text.count(")") + text.count("]") - text.count("(") - text.count("[")
        after_access = text == ":" and text_at(tokens, preceding(tokens, index)) in (
            "public",
            "private",
            "protected",
        )
        if kind == "directive" or (depth == 0 and (text in (";", "{", "}") or after_access)):
            break
        index -= 1
    return index + 1


def _end_of_function(tokens: Tokens, index: int) -> int:
    while tokens[index].text not in ("{", ";"):
        index = closing(tokens, index) + 1 if tokens[index].text == "(" else index + 1
    if tokens[index].text == ";":
        return index
    end = closing(tokens, index)
    after = following(tokens, end)
    return after if text_at(tokens, after) == ";" else end


def _drop_address_space_overloads(tokens: Tokens) -> None:
    """Deletes functions and specialisations that C++ would take for a second definition; the first stays."""
    seen: dict[tuple[tuple[int, ...], str], str] = {}
    scope: list[int] = []
    i = 0
    while i < len(tokens):
        text = tokens[i].text if tokens[i].kind == "sign" else ""
        if text == "{":
            before = preceding(tokens, i)
            if text_at(tokens, before) in (")", ">"):
                start = _start_of_declaration(tokens, before)
                declaration = [token.text for token in tokens[start:i] if token.means_something]
                bare = " ".join(word for word in declaration if word not in _ADDRESS_SPACES)
                first = seen.setdefault((tuple(scope), bare), " ".join(declaration))
                if first != " ".join(declaration):
                    del tokens[start : _end_of_function(tokens, i) + 1]
                    i = start
                    continue
            scope.append(i)
        elif text == "}" and scope:
            scope.pop()
        i += 1


def _with_function_constants(tokens: Tokens, values: FunctionConstants) -> Tokens:
    """Function constants get their values, 0 where none is given; all other attributes go."""
    kept: Tokens = []
    numbers: dict[str, int] = {}
    i = 0
    while i < len(tokens):
        if tokens[i] != ("sign", "[["):
            kept.append(tokens[i])
            i += 1
            continue
        end = closing(tokens, i)
        constant = re.match(r"\s*function_constant\(\s*(\d+)\s*\)", text_of(tokens[i + 1 : end - 1]))
        if constant and text_at(tokens, following(tokens, end)) == ";":
            name = kept[preceding(kept, len(kept))].text
            numbers[name] = int(constant.group(1))
            kept.append(code(f" = {int(values.get(numbers[name], values.get(name, 0)))}"))
        i = end + 1
    for i, token in enumerate(kept):
        if token == ("word", "is_function_constant_defined"):
            opening = following(kept, i)
            name = text_at(kept, following(kept, opening))
            kept[i] = code("true" if name in values or numbers.get(name) in values else "false")
            kept[opening : closing(kept, opening) + 1] = []
    return kept


def _with_threadgroup_variables(tokens: Tokens) -> Tokens:
    kept: Tokens = []
    done = 0
    for start, end, variables in threadgroup_declarations(tokens):
        kept += tokens[done:start]
        kept += [code(_definition(variable, start + i)) for i, variable in enumerate(variables)]
        kept.append(lines_of(tokens[start:end]))
        done = end + 1
    return kept + tokens[done:]


def _definition(variable: ThreadgroupVariable, number: int) -> str:
    zeroed = re.fullmatch(r"=?\s*\{\s*0?\s*\}", variable.initialiser)
    if variable.initialiser and not zeroed:
        raise CompileError(f"error: threadgroup variable '{variable.name}' has an initialiser")
    name, type_ = variable.name, f"emu_type_of_{variable.name}"
    allocation = f'emu_threadgroup_variable({number}, sizeof({type_}), alignof({type_}), "{name}")'
    return (
        f"typedef {variable.type} {type_} {variable.dimensions}; {type_}& {name} = *({type_}*){allocation}; "
        + (f"emu_threadgroup_zero({number}); " if zeroed else "")
    )


def _with_literals_and_swizzles(tokens: Tokens) -> str:
    parts = []
    for i, (kind, text) in enumerate(tokens):
        if kind == "number":
            text = in_cxx(text)
        elif (
            kind == "word"
            and _SWIZZLE.fullmatch(text)
            and text_at(tokens, preceding(tokens, i)) in (".", "->")
        ):
            after = text_at(tokens, following(tokens, i))
            if after != "(":
                member = "swizzle_to" if after in _ASSIGNMENTS else "swizzle"
                order = "xyzw" if text[0] in "xyzw" else "rgba"
                text = f"template {member}<{', '.join(str(order.index(c)) for c in text)}>()"
        parts.append(text)
    return "".join(parts)
