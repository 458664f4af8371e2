"""The text that ``mx.fast.metal_kernel`` would hand to the driver."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

# Inputs this small lie in the constant address space.
_CONSTANT_BELOW = 8

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}

_POSITIONS = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

TemplateArguments = Sequence[tuple[str, Any]]
Part = Literal["data", "shape", "strides", "ndim", "output"]


@dataclass(frozen=True)
class Argument:
    """One buffer of the generated signature: an input's data or layout, or an output."""

    part: Part
    name: str


@dataclass(frozen=True)
class GeneratedKernel:
    metal: str
    expression: str
    arguments: list[Argument]


def generate(
    name: str,
    source: str,
    header: str,
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[tuple[str, Any]],
    template: TemplateArguments,
    atomic_outputs: bool,
) -> GeneratedKernel:
    """``inputs`` are names and arrays (only ``dtype``, ``ndim`` and ``size`` count), ``outputs`` names
    and dtypes.

    Lines are numbered within ``source``, and within ``header`` as ``name.header``.
    """
    function = f"custom_kernel_{name}"
    arguments: list[Argument] = []
    parameters: list[str] = []

    def add(part: Part, of: str, declaration: str) -> None:
        parameters.append(f"  {declaration} [[buffer({len(arguments)})]]")
        arguments.append(Argument(part, of))

    for of, array in inputs:
        space = "constant" if array.size < _CONSTANT_BELOW else "device"
        add("data", of, f"const {space} {TYPES[array.dtype]}{'&' if array.ndim == 0 else '*'} {of}")
        if array.ndim == 0:
            continue
        if f"{of}_shape" in source:
            add("shape", of, f"const constant int* {of}_shape")
        if f"{of}_strides" in source:
            add("strides", of, f"const constant int64_t* {of}_strides")
        if f"{of}_ndim" in source:
            add("ndim", of, f"const constant int& {of}_ndim")
    for of, dtype in outputs:
        type_ = f"atomic<{TYPES[dtype]}>" if atomic_outputs else TYPES[dtype]
        add("output", of, f"device {type_}* {of}")
    parameters += [f"  {type_} {word} [[{word}]]" for word, type_ in _POSITIONS.items() if word in source]

    lines = ['#include "mlx/backend/metal/kernels/utils.h"', f'#line 1 "{name}.header"', header]
    lines.append(f'#line 1 "{name}.signature"')
    if template:
        lines.append(f"template <{', '.join(f'{_kind(value)} {of}' for of, value in template)}>")
    lines.append(f"[[kernel]] void {function}(")
    lines.append(",\n".join(parameters) + ") {")
    lines += [f'#line 1 "{name}"', source, "}\n"]
    expression = function
    if template:
        expression += f"<{', '.join(_value(value) for _, value in template)}>"
    return GeneratedKernel("\n".join(lines), expression, arguments)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int"
    return "typename"


def _value(value: Any) -> str:
    return TYPES[value] if isinstance(value, mx.Dtype) else str(int(value))
