"""A kernel's parameters, and the expression that passes each of them."""

import re
from dataclasses import dataclass

from .errors import CompileError
from .tokens import Token, Tokens, closing, following, preceding, split_at_commas, text_at, without_attributes

_POSITIONS = {
    "thread_position_in_grid": "t->position_in_grid",
    "thread_position_in_threadgroup": "t->position_in_threadgroup",
    "thread_index_in_threadgroup": "t->index_in_threadgroup",
    "thread_index_in_simdgroup": "t->lane",
    "thread_index_in_quadgroup": "(t->lane % 4u)",
    "threadgroup_position_in_grid": "t->threadgroup_position",
    "threadgroups_per_grid": "t->threadgroups_per_grid",
    "threads_per_grid": "t->threads_per_grid",
    "grid_size": "t->threads_per_grid",
    "grid_origin": "emu::origin",
    "threads_per_threadgroup": "t->threads_per_threadgroup",
    "dispatch_threads_per_threadgroup": "t->dispatched_threads_per_threadgroup",
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
    "simdgroup_index_in_threadgroup": "t->simdgroup",
    "simdgroups_per_threadgroup": "t->simdgroups",
    "dispatch_simdgroups_per_threadgroup": "t->dispatched_simdgroups",
    "quadgroup_index_in_threadgroup": "(t->index_in_threadgroup / 4u)",
    "quadgroups_per_threadgroup": "(t->simdgroups * 8u)",
    "dispatch_quadgroups_per_threadgroup": "(t->dispatched_simdgroups * 8u)",
}


@dataclass(frozen=True)
class Buffer:
    index: int
    by_reference: bool


@dataclass(frozen=True)
class ThreadgroupArgument:
    index: int


@dataclass(frozen=True)
class Position:
    attribute: str
    type: str


Parameter = Buffer | ThreadgroupArgument | Position


def is_kernel(tokens: Tokens, index: int) -> bool:
    """Whether ``[[kernel]]`` or ``kernel void`` stands at ``index``."""
    if tokens[index] == ("sign", "[["):
        return Token("word", "kernel") in tokens[index + 1 : closing(tokens, index) - 1]
    return tokens[index] == ("word", "kernel") and text_at(tokens, following(tokens, index)) == "void"


def parameter_list(tokens: Tokens, index: int) -> int:
    """The index of the parenthesis that opens the parameters of the kernel at ``index``."""
    while tokens[index].text != "(":
        index = closing(tokens, index) + 1 if tokens[index].text == "[[" else index + 1
    return index


def kernel_signatures(tokens: Tokens) -> dict[str, list[Parameter]]:
    """The parameters of each kernel, by its name."""
    signatures = {}
    i = 0
    while i < len(tokens):
        if is_kernel(tokens, i):
            start = parameter_list(tokens, i)
            i = closing(tokens, start)
            signatures[tokens[preceding(tokens, start)].text] = _parameters(tokens[start + 1 : i])
        i += 1
    return signatures


def _parameters(tokens: Tokens) -> list[Parameter]:
    parameters: list[Parameter] = []
    next_buffer = 0
    for part in split_at_commas(tokens):
        parameter = _parameter(part, next_buffer)
        if isinstance(parameter, Buffer):
            next_buffer = parameter.index + 1
        parameters.append(parameter)
    return parameters


def _parameter(tokens: Tokens, next_buffer: int) -> Parameter:
    kept, attributes = without_attributes(tokens)
    words = [token.text for token in kept if token.means_something]
    attribute = ",".join(attributes)
    if {"*", "&", "&&", "["} & set(words):
        in_threadgroup = re.search(r"threadgroup\(\s*(\d+)\s*\)", attribute)
        if in_threadgroup or "threadgroup" in words[:2]:
            return ThreadgroupArgument(int(in_threadgroup.group(1)) if in_threadgroup else 0)
        numbered = re.search(r"buffer\(\s*(\d+)\s*\)", attribute)
        by_reference = not {"*", "["} & set(words)
        return Buffer(int(numbered.group(1)) if numbered else next_buffer, by_reference)
    position = next((name for name in re.findall(r"\w+", attribute) if name in _POSITIONS), None)
    if position is None:
        raise CompileError(
            f"parameter '{' '.join(words)}' has no attribute that the emulator knows: [[{attribute}]]"
        )
    type_ = " ".join(word for word in words[:-1] if word not in ("const", "thread"))
    return Position(position, type_)


def argument(parameter: Parameter) -> str:
    """The C++ expression for a parameter, given ``void** b`` and ``const GpuThread* t``."""
    match parameter:
        case Buffer(index, by_reference):
            return f"emu::{'Reference' if by_reference else 'Pointer'}{{b[{index}]}}"
        case ThreadgroupArgument(index):
            return f"emu::Pointer{{emu_threadgroup_argument({index})}}"
        case Position(attribute, type_):
            return f"emu::Position<{type_}>::of({_POSITIONS[attribute]})"
