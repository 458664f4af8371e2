"""Faults planted in small kernels: each is reported, and its repaired twin is not."""

import re
import time

import mlx.core as mx
import numpy as np
import pytest

from .conditions import Conditions
from .errors import CompileError, KernelError
from .one_kernel import FIRST_LINE, run

SHARE = "threadgroup float t[64]; t[l] = x[i];\n"
REVERSE = "out[i] = t[63 - l];"
NEIGHBOUR = "out[i] = t[l ^ 1];"

RACES_AND_BARRIERS = {
    "no barrier": (SHARE + REVERSE, "uninitialised threadgroup memory 't'"),
    "a barrier that orders nothing": (
        SHARE + "threadgroup_barrier(mem_flags::mem_none);" + REVERSE,
        "data race on threadgroup memory 't'.*read after write",
    ),
    "a barrier for the other kind of memory": (
        SHARE + "threadgroup_barrier(mem_flags::mem_device);" + REVERSE,
        "data race on threadgroup memory 't'",
    ),
    "a simdgroup's barrier where two simdgroups share": (
        SHARE + "simdgroup_barrier(mem_flags::mem_threadgroup);" + REVERSE,
        "uninitialised threadgroup memory 't'",
    ),
    "no barrier within a simdgroup": (SHARE + NEIGHBOUR, "uninitialised threadgroup memory 't'"),
    "a loop without its second barrier": (
        "threadgroup float t[64]; float s = 0; for (int k = 0; k < 3; k++) { t[l] = x[i] + k; "
        "threadgroup_barrier(mem_flags::mem_threadgroup); s += t[(l + 1) % 64]; } out[i] = s;",
        "data race on threadgroup memory 't'.*write after read",
    ),
    "device memory without its barrier": (
        "if (l == 0) out[0] = 5; threadgroup_barrier(mem_flags::mem_threadgroup); float r = out[0];\n"
        "threadgroup_barrier(mem_flags::mem_device); if (l > 0) out[l] = r;",
        "data race on buffer 'out' at byte 0",
    ),
    "two threads write one place": ("out[l / 2] = x[i];", "write after write, of another value"),
    "a barrier in a branch": (
        SHARE + "if (l < 40) threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = t[l];",
        "40 threads wait in a threadgroup_barrier that 24 threads never reach",
    ),
    "a return before a barrier": (
        "if (l >= 50) return; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = x[i];",
        "50 threads wait in a threadgroup_barrier that 14 threads never reach",
    ),
    "two barriers for one": (
        "if (l < 32) threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "else threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = x[i];",
        "thread 0 waits in one threadgroup_barrier, thread 32 in another",
    ),
    "one barrier passed more often by some": (
        "for (uint k = 0; k < 1 + sg; k++) threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = x[i];",
        "32 threads wait in a threadgroup_barrier that 32 threads never reach",
    ),
}

SIMD = {
    "a simd operation in a branch": (
        "float v = x[i]; if (lane < 16) v = simd_sum(v); out[i] = v;",
        "lane 0 waits in a simd operation that 16 lanes of its simdgroup never reach",
    ),
    "simd operations in both arms of a branch": (
        "float v; if (lane < 16) v = simd_sum(x[i]); else v = simd_max(x[i]); out[i] = v;",
        "waits in a simd operation while lane 16 of its simdgroup waits in a simd operation elsewhere",
    ),
    "a trip count that varies by lane": (
        "float v = x[i]; for (uint k = 0; k < lane; k++) v = simd_max(v); out[i] = v;",
        "never reach",
    ),
    "a lane that does not exist": ("out[i] = simd_shuffle(x[i], 32);", "simd lane index out of range"),
    "a mask past the simdgroup": ("out[i] = simd_shuffle_xor(x[i], 32);", "simd lane index out of range"),
}

BOUNDS = {
    "one past the end of an input": (
        "out[i] = x[i + 1];",
        r"out-of-bounds read of 4 bytes, 0 bytes past the end of 'x' \(256 bytes\)",
    ),
    "one past the end of an output": ("out[i + 1] = x[i];", "out-of-bounds write .* past the end of 'out'"),
    "before the start": ("out[i] = x[int(i) - 1];", "4 bytes before 'x'"),
    "one past the end of threadgroup memory": (
        "threadgroup float t[64]; t[l + 1] = x[i]; out[i] = x[i];",
        "index 64 out of bounds of a fixed-size array",
    ),
    "past a row of threadgroup memory": (
        "threadgroup float t[4][16]; t[0][l] = x[i]; out[i] = x[i];",
        "index 16 out of bounds",
    ),
    "past the end of threadgroup memory, by pointer": (
        "threadgroup float t[64]; threadgroup float* p = t; p[l + 1] = x[i]; out[i] = x[i];",
        "out-of-bounds write of 4 bytes, 0 bytes past the end of 't'",
    ),
    "past a thread's array": (
        "float a[4]; for (uint k = 0; k < 5 + x[0]; k++) a[k] = x[i]; out[i] = a[uint(x[i]) % 4];",
        "index 4 out of bounds",
    ),
    "a vector's fifth element": ("float4 v = x[i]; out[i] = v[4 + int(x[0])];", "vector index out of range"),
    "null": ("const device float* p = nullptr; out[i] = p[i];", "null pointer"),
    "misaligned": (
        "out[i] = i < 8 ? (*(const device float4*)(x + 1)).x : 0.f;",
        "misaligned address .needs 16 bytes",
    ),
    "an input that is not declared mutable": (
        "((device float*)x)[i] = 1; out[i] = 0;",
        "write to input 'x' at byte 0, which is not declared mutable",
    ),
    "an index that wraps at 32 bits": (
        "const int far = 65536 * (int(i) + 32768); out[i] = x[far];",
        "signed integer overflow in a multiplication",
    ),
    "an index that was cut to 32 bits": (
        "const size_t far = 0xfffffff0ul + size_t(x[0]); out[i] = x[int(far)];",
        "64 bytes before 'x'",
    ),
}

VALUES = {
    "threadgroup memory never written": (
        "threadgroup float t[64]; if (l < 32) t[l] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[i] = t[l];",
        "read of uninitialised threadgroup memory 't' at byte 128",
    ),
    "threadgroup memory added to before it is set": (
        "threadgroup float t[64]; t[l] += x[i]; out[i] = 0;",
        "read of uninitialised threadgroup memory 't'",
    ),
    "an output added to before it is set": ("out[i] += x[i];", "read of uninitialised output 'out'"),
    "a shift by the width": ("out[i] = float(1u << (32 + l));", "shift out of bounds"),
    "division by zero": ("out[i] = float(7 / int(x[i]));", "division by zero"),
    "more threadgroup memory than there is": (
        "threadgroup float t[8193]; t[l] = x[i]; out[i] = t[l];",
        "threadgroup memory of 32772 bytes exceeds the limit of 32768",
    ),
}


@pytest.mark.parametrize("name", RACES_AND_BARRIERS)
def test_a_missing_or_misplaced_barrier_is_a_fault(name: str) -> None:
    body, fault = RACES_AND_BARRIERS[name]
    with pytest.raises(KernelError, match=fault):
        run(body, check_address_spaces=False)


@pytest.mark.parametrize("name", SIMD)
def test_a_simd_operation_without_its_lanes_is_a_fault(name: str) -> None:
    body, fault = SIMD[name]
    with pytest.raises(KernelError, match=fault):
        run(body, check_address_spaces=False)


@pytest.mark.parametrize("name", BOUNDS)
def test_an_access_to_the_wrong_place_is_a_fault(name: str) -> None:
    body, fault = BOUNDS[name]
    with pytest.raises(KernelError, match=fault):
        run(body, check_address_spaces=False)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_means_nothing_is_a_fault(name: str) -> None:
    body, fault = VALUES[name]
    with pytest.raises(KernelError, match=fault):
        run(body, check_address_spaces=False)


def test_threadgroups_that_add_to_one_output_race() -> None:
    body = "out[0] = out[0] + x[i];"
    with pytest.raises(KernelError, match=r"data race on buffer 'out'.*threadgroup #0"):
        run(body, x=mx.ones((2,)), threads=2, threadgroup=1, output_shape=(1,), init_value=0.0)


@pytest.mark.parametrize(
    "body", ["while (x[0] < 1) { } out[i] = 0;", "uint k = 1; while (k < 9) k *= i; out[i] = k;"]
)
def test_an_endless_loop_ends_and_says_where(body: str) -> None:
    start = time.monotonic()
    with pytest.raises(KernelError, match=f"endless loop(.|\n)*at probe:{FIRST_LINE}"):
        run(body, conditions=Conditions(seconds=1))
    assert time.monotonic() - start < 60


def test_a_fault_names_the_thread_and_the_line() -> None:
    with pytest.raises(KernelError) as caught:
        run("float a = 1;\nif (i == 37)\n  a = x[i + 64];\nout[i] = a;")
    assert "thread (37,0,0) of threadgroup (0,0,0), simdgroup 1 lane 5" in str(caught.value)
    assert f"at probe:{FIRST_LINE + 2}" in str(caught.value)


REPAIRED = {
    "a threadgroup's barrier": (
        SHARE + "threadgroup_barrier(mem_flags::mem_threadgroup);" + REVERSE,
        np.arange(64)[::-1],
    ),
    "a simdgroup's barrier": (
        SHARE + "simdgroup_barrier(mem_flags::mem_threadgroup);" + NEIGHBOUR,
        np.arange(64) ^ 1,
    ),
    "device memory with its barrier": (
        "if (l == 0) out[0] = 5; threadgroup_barrier(mem_flags::mem_device); float r = out[0];\n"
        "threadgroup_barrier(mem_flags::mem_device); if (l > 0) out[l] = r;",
        np.full(64, 5),
    ),
    "a loop with both barriers": (
        "threadgroup float t[64]; float s = 0; for (int k = 0; k < 3; k++) { t[l] = k;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); s += t[(l + 1) % 64];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); } out[i] = s;",
        np.full(64, 3),
    ),
    "threadgroup memory that starts as zeros": (
        "threadgroup int t[64] = {}; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = t[63 - l];",
        np.zeros(64),
    ),
    "all of 32 KiB": ("threadgroup float t[8192]; t[l] = x[i]; out[i] = t[l];", np.arange(64)),
    "one value written by many": ("out[0] = 1.0f; out[i] = 1.0f;", np.ones(64)),
}


@pytest.mark.parametrize("name", REPAIRED)
def test_a_correct_kernel_is_no_fault(name: str) -> None:
    body, expected = REPAIRED[name]
    np.testing.assert_array_equal(run(body), expected)


def test_lanes_that_returned_may_be_missing_where_that_is_allowed() -> None:
    body = "if (lane >= 20) { out[i] = 0; return; } out[i] = simd_sum(1.0f);"
    with pytest.raises(KernelError, match="never reach"):
        run(body)
    out = run(body, conditions=Conditions(simd="converged lanes"))
    np.testing.assert_array_equal(out[:20], np.full(20, 20))


def test_a_shuffle_from_a_lane_that_returned_gives_no_number() -> None:
    body = "if (lane >= 20) { out[i] = 0; return; } out[i] = simd_shuffle(x[i], 25);"
    out = run(body, conditions=Conditions(simd="converged lanes"))
    assert np.isnan(out[:20]).all()


def test_lanes_of_a_branch_run_apart_where_that_is_allowed() -> None:
    body = "float v; if (lane < 16) v = simd_sum(x[i]); else v = simd_max(x[i]); out[i] = v;"
    out = run(body, threads=32, threadgroup=32, conditions=Conditions(simd="any lane"))
    np.testing.assert_array_equal(out, [120] * 16 + [31] * 16)


def test_what_a_kernel_never_set_is_no_number() -> None:
    assert np.isnan(run("if (i < 60) out[i] = x[i];")[60:]).all()
    assert np.isnan(run("float a[4]; a[0] = x[i]; out[i] = a[0] + a[1 + l % 3];")).all()
    assert np.isnan(run("half s; for (int k = 0; k < 3; k++) s += half(x[i]); out[i] = float(s);")).all()


NOT_METAL = {
    "a swizzle past the width": ("float2 v = float2(x[i]); out[i] = v.xyz.x;", "swizzle|vector component"),
    "max of float and int": ("out[i] = max(x[i], 0);", "call to 'max' is ambiguous"),
    "clamp of float and int": ("out[i] = clamp(x[i], 0, 1);", "call to 'clamp' is ambiguous"),
    "float to bfloat, implicitly": ("bfloat16_t b = x[i]; out[i] = float(b);", "bfloat"),
    "half plus bfloat": (
        "half h = x[i]; bfloat16_t b = bfloat16_t(x[i]); out[i] = float(h + b);",
        "'\\+'|operands",
    ),
    "half4 to float4, implicitly": ("half4 h = half4(1.0h); float4 f = h; out[i] = f.x;", "half"),
    "a C++ library's name": ("out[i] = std::max(x[i], 0.0f);", "'std'"),
    "a C library's name": ("out[i] = expf(x[i]);", "'expf'"),
    "a function that does not exist": ("out[i] = simd_shuffle_sideways(x[i], 1);", "simd_shuffle_sideways"),
    "a simd operation on 64 bits": ("long d = long(x[i]); out[i] = float(simd_sum(d));", "simd_sum"),
    "an initialiser in threadgroup memory": (
        "threadgroup float t[2] = {1, 2}; out[i] = t[0];",
        "initialiser",
    ),
    "double": ("double d = x[i]; out[i] = d;", "'double' is not supported"),
    "exceptions": ("try { out[i] = x[i]; } catch (...) {}", "'try' is not supported"),
}


@pytest.mark.parametrize("name", NOT_METAL)
def test_what_is_not_metal_does_not_compile(name: str) -> None:
    body, error = NOT_METAL[name]
    with pytest.raises(CompileError, match=error):
        run(body)


def test_a_compile_error_counts_lines_in_the_body() -> None:
    with pytest.raises(CompileError) as caught:
        run("float a = 1;\nout[i] = nonsense;")
    assert re.search(rf"probe:{FIRST_LINE + 1}:\d+: error: .*'nonsense'", str(caught.value))
