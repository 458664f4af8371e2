"""A second, syntax-only compilation, as OpenCL C++, whose address spaces are Metal's.

It finds what the C++ translation cannot: pointers and references without an address space or into the wrong
one, threadgroup variables outside a kernel, addresses of vector elements, and C++ that is not Metal.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from .kernel_signature import is_kernel, parameter_list
from .literals import in_cxx
from .preprocess import preprocess
from .tokens import (
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
from .toolchain import HERE, cached, run
from .translate import drop_address_space_members

_VECTORS = {
    f"{scalar}{width}"
    for scalar in (
        "bool",
        "char",
        "uchar",
        "short",
        "ushort",
        "int",
        "uint",
        "long",
        "ulong",
        "half",
        "float",
    )
    for width in (2, 3, 4)
}
_NOT_METAL = (
    *("double", "goto", "new", "delete", "virtual", "dynamic_cast", "typeid", "thread_local", "throw", "try"),
)
_METAL_OF = {
    "__global": "device",
    "__local": "threadgroup",
    "__constant": "constant",
    "__private": "thread",
    "__generic": "(none)",
}
_OPENCL = re.compile("|".join(_METAL_OF))
_PLACE = re.compile(r"([^\s<,:]+):\d+:\d+")
_NEED_NO_CONSTANT = {
    *("constant", "using", "typedef", "template", "(", "struct", "enum", "class", "union", "static_assert"),
    *("namespace", "friend"),
}


def address_space_errors(metal: str, expression: str, defines: Iterable[str] = ()) -> list[str]:
    """What is wrong with the kernel that ``expression`` names, in the compiler's words."""
    defines = tuple(defines)

    def make(path: Path) -> None:
        path.write_text(json.dumps(_errors(preprocess(metal, defines), expression)))

    errors: list[str] = json.loads(
        cached(("address spaces", metal, expression, defines), ".json", make).read_text()
    )
    return errors


def _errors(preprocessed: str, expression: str) -> list[str]:
    tokens = tokenize(preprocessed)
    drop_address_space_members(tokens)
    errors = [*_words_that_are_not_metal(tokens), *_misplaced_threadgroup_variables(tokens)]
    tokens = _without_attributes(_with_threadgroup_variables(tokens))
    errors += _variables_that_must_be_constant(tokens)
    source = (
        f'#include "metal_declarations.h"\n{_with_constructors(tokens)}\n#line 1 "entry"\n'
        f"void emulator_entry() {{ auto kernel_ = &{expression}; (void)kernel_; }}\n"
    )
    arguments = [
        "-x",
        "clcpp",
        "-cl-std=CLC++2021",
        "-cl-no-stdinc",
        "--target=x86_64-linux-gnu",
        "-fsyntax-only",
    ]
    arguments += [
        "-w",
        "-ferror-limit=40",
        f"-I{HERE / 'opencl'}",
        "-Xclang",
        "-ast-dump",
        "-fno-color-diagnostics",
    ]
    result = run([*arguments, "-"], source)
    # Else it would be remembered as a fault of the kernel.
    assert "file not found" not in result.stderr, result.stderr
    errors += [line for line in result.stderr.splitlines() if re.search(r"\berror:", line)]
    errors += _pointers_without_address_space(result.stdout)
    return list(dict.fromkeys(_OPENCL.sub(lambda word: _METAL_OF[word[0]], error) for error in errors))


def _words_that_are_not_metal(tokens: Tokens) -> Iterator[str]:
    for i, (kind, text) in enumerate(tokens):
        if kind != "word" or text not in _NOT_METAL:
            continue
        before = text_at(tokens, preceding(tokens, i))
        if before != "operator" and (before, text) != ("=", "delete"):
            yield f"error: '{text}' is not supported in Metal"


def _misplaced_threadgroup_variables(tokens: Tokens) -> Iterator[str]:
    bodies = []
    for i in range(len(tokens)):
        if is_kernel(tokens, i):
            start = following(tokens, closing(tokens, parameter_list(tokens, i)))
            if text_at(tokens, start) == "{":
                bodies.append(range(start, closing(tokens, start)))
    for i, end, _ in threadgroup_declarations(tokens):
        if not any(i in body for body in bodies):
            declaration = " ".join(text_of(tokens[i:end]).split())
            yield f"error: threadgroup variable outside a kernel function: {declaration}"


def _with_threadgroup_variables(tokens: Tokens) -> Tokens:
    kept: Tokens = []
    done = 0
    for start, end, variables in threadgroup_declarations(tokens):
        kept += tokens[done:start]
        for variable in variables:
            name, type_ = variable.name, f"emu_type_of_{variable.name}"
            kept += tokenize(f"typedef {variable.type} {type_} {variable.dimensions}; ")
            kept.append(code(f"threadgroup {type_}& {name} = *(threadgroup {type_}*)0; "))
        kept.append(lines_of(tokens[start:end]))
        done = end + 1
    return kept + tokens[done:]


def _without_attributes(tokens: Tokens) -> Tokens:
    """Also without ``kernel``, and without ``thread`` after a member function: ``this`` is generic here."""
    kept: Tokens = []
    i = 0
    while i < len(tokens):
        token = tokens[i]
        if token == ("sign", "[["):
            end = closing(tokens, i)
            is_constant = text_at(tokens, following(tokens, i)) == "function_constant"
            if is_constant and text_at(tokens, following(tokens, end)) == ";":
                kept.append(code(" = {}"))
            i = end + 1
            continue
        dropped = token.text in ("kernel", "thread") and _says_nothing_here(tokens, i)
        kept.append(Token("space", " ") if dropped else token)
        i += 1
    return kept


def _says_nothing_here(tokens: Tokens, index: int) -> bool:
    after = text_at(tokens, following(tokens, index))
    if tokens[index].text == "kernel":
        return after == "void"
    before = preceding(tokens, index)
    if text_at(tokens, before) == "const":
        before = preceding(tokens, before)
    return text_at(tokens, before) == ")" and after in ("{", ":", ";", "->", "noexcept", "=")


def _variables_that_must_be_constant(tokens: Tokens) -> Iterator[str]:
    depth = 0
    statement: list[str] = []
    for token in tokens:
        depth += token.text == "{"
        if depth == 0 and token.text != ";" and (token.kind in ("word", "sign", "code")):
            statement.append(token.text)
        if token.text == "}":
            depth -= 1
            if depth or "=" not in statement:
                statement = statement if depth else []
        if token.text == ";" and depth == 0:
            if statement and not set(statement) & _NEED_NO_CONSTANT:
                words = " ".join(statement[:8])
                yield f"error: program-scope variable not in the constant address space: {words}"
            statement = []


def _with_constructors(tokens: Tokens) -> str:
    """``float4(…)`` builds a vector in Metal; to OpenCL it would be a cast of the last argument."""
    parts: list[str] = []
    i = 0
    while i < len(tokens):
        kind, text = tokens[i]
        after = following(tokens, i)
        if kind == "number":
            text = in_cxx(text)
        elif kind == "word" and text in _VECTORS and text_at(tokens, after) == "(":
            text = f"metal::emu_vector<{text}>::of"
        elif kind == "word" and text == "as_type":
            text = "metal::emu_as_type"
        elif kind == "word" and text == "vec" and text_at(tokens, after) == "<":
            end = _closing_angle(tokens, after)
            is_conversion = text_at(tokens, preceding(tokens, i)) == "operator"
            if text_at(tokens, following(tokens, end)) == "(" and not is_conversion:
                text = f"metal::emu_vector<{text_of(tokens[i : end + 1])}>::of"
                i = end
        parts.append(text)
        i += 1
    return "".join(parts)


def _closing_angle(tokens: Tokens, index: int) -> int:
    depth = 0
    while True:
        depth += (tokens[index].text == "<") - (tokens[index].text == ">")
        if depth == 0:
            return index
        index += 1


def _pointers_without_address_space(ast: str) -> Iterator[str]:
    """Declarations outside MLX's headers whose type clang had to call generic."""
    file = ""
    for line in ast.splitlines():
        for place in _PLACE.findall(line.split(" '", 1)[0]):
            if place != "line":
                file = place
        if "Decl" not in line or "__generic" not in line or "implicit" in line or "/" in file:
            continue
        found = re.search(r"(?:ParmVarDecl|VarDecl|FieldDecl).*?(\w+) '([^']*)'", line)
        if found:
            yield f"error: '{found[1]}': {found[2]} has no address space"
