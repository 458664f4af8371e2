"""Runs a compiled kernel over a grid."""

import ctypes
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .buffers import Buffer, BufferDescription
from .conditions import SIMD_RULES, STRICT, Conditions
from .errors import EmulatorError, KernelError
from .program import Program, runtime

_ERROR_BYTES = 4096
_one_launch_at_a_time = threading.Lock()


class _Options(ctypes.Structure):
    """As in runtime/launch.h."""

    _fields_ = [
        ("simd_rule", ctypes.c_int),
        ("shuffle_order", ctypes.c_int),
        ("flush_subnormals", ctypes.c_int),
        ("fast_math_ulps", ctypes.c_int),
        ("threadgroup_memory_limit", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("threadgroup_argument_bytes", ctypes.c_long * 4),
    ]


class _Counts(ctypes.Structure):
    """As in runtime/launch.h."""

    _fields_ = [
        ("threads", ctypes.c_long),
        ("simd_operations", ctypes.c_long),
        ("partial_simd_operations", ctypes.c_long),
        ("barriers", ctypes.c_long),
        ("memory_accesses", ctypes.c_long),
        ("threadgroup_bytes", ctypes.c_long),
        ("writes_of_the_same_value", ctypes.c_long),
    ]


@dataclass(frozen=True)
class Statistics:
    """What a launch did. ``threadgroup_bytes`` is per threadgroup."""

    threads: int
    simd_operations: int
    partial_simd_operations: int
    barriers: int
    memory_accesses: int
    threadgroup_bytes: int
    writes_of_the_same_value: int


def launch(
    program: Program,
    buffers: Mapping[int, Buffer],
    *,
    grid: Sequence[int],
    threadgroup: Sequence[int],
    conditions: Conditions = STRICT,
    threadgroup_argument_bytes: Mapping[int, int] | None = None,
) -> Statistics:
    """Runs every thread of ``grid`` (counted in threads) and copies back what was written.

    Raises:
        KernelError: what the kernel did, by which thread, in which line. Nothing is copied back.
    """
    sizes = threadgroup_argument_bytes or {}
    options = _Options(
        SIMD_RULES.index(conditions.simd),
        conditions.shuffle_order,
        conditions.flush_subnormals,
        conditions.fast_math_ulps,
        conditions.threadgroup_memory,
        conditions.seconds,
        (ctypes.c_long * 4)(*(sizes.get(i, 0) for i in range(4))),
    )
    absent = BufferDescription(None, -1, 0, 1, False, True, b"an argument that was not passed")
    count = max(buffers, default=-1) + 1
    descriptions = [buffers[i].description() if i in buffers else absent for i in range(count)]
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    counts = _Counts()
    with _one_launch_at_a_time:
        failed = runtime().emulator_launch(
            program.entry,
            (BufferDescription * count)(*descriptions),
            count,
            (ctypes.c_uint * 3)(*_three(grid)),
            (ctypes.c_uint * 3)(*_three(threadgroup)),
            ctypes.byref(options),
            error,
            ctypes.c_size_t(_ERROR_BYTES),
            ctypes.byref(counts),
        )
    if failed:
        text = error.value.decode(errors="replace")
        raise KernelError(re.sub(r"pc=\+0x([0-9a-f]+)", lambda found: "at " + program.line(found[1]), text))
    return Statistics(**{name: getattr(counts, name) for name in Statistics.__dataclass_fields__})


def _three(sizes: Sequence[int]) -> Sequence[int]:
    if len(sizes) != 3 or min(sizes) < 0:
        raise EmulatorError(f"grid and threadgroup are three sizes each, not {tuple(sizes)}")
    return sizes
