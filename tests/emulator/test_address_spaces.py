"""The second compilation: what C++ would let pass and Metal does not."""

import re

import mlx.core as mx
import pytest

from .address_spaces import address_space_errors
from .mlx_source import generate

HELPER = "template <typename T> inline T first(const device T* p, uint i) { return p[i]; }\n"


def errors(body: str, header: str = "", elements: int = 64, atomic: bool = False) -> list[str]:
    source = "uint i = thread_position_in_grid.x; uint l = thread_position_in_threadgroup.x;\n" + body
    kernel = generate(
        "probe", source, header, [("x", mx.zeros((elements,)))], [("out", mx.float32)], [("D", 64)], atomic
    )
    return address_space_errors(kernel.metal, kernel.expression)


WRONG = {
    "a pointer without an address space": (
        "float* p = 0; out[i] = x[i]; (void)p;",
        "",
        "has no address space",
    ),
    "a parameter without an address space": (
        "float a[2]; a[0] = x[i]; out[i] = f(a);",
        "inline float f(const float* p) { return p[0]; }\n",
        "has no address space",
    ),
    "a reference without an address space": (
        "float a = x[i]; f(a); out[i] = a;",
        "inline void f(float& p) { p += 1; }\n",
        "has no address space",
    ),
    "a device pointer for a thread pointer": (
        "out[i] = f(x + i);",
        "inline float f(thread const float* p) { return p[0]; }\n",
        "no matching function",
    ),
    "a threadgroup array for a device pointer": (
        "threadgroup float t[4]; device float* p = t; out[i] = p[0];",
        "",
        "type 'device float .*type 'threadgroup ",
    ),
    "a device pointer for a threadgroup pointer": (
        "threadgroup float* p = out; p[0] = x[i];",
        "",
        "type 'threadgroup float .*type 'device ",
    ),
    "a write through a const input": ("x[i] = 1; out[i] = 0;", "", "read-only|const"),
    "a threadgroup variable in a helper": (
        "out[i] = f(x[i]);",
        "inline float f(float v) { threadgroup float t[1]; t[0] = v; return t[0]; }\n",
        "threadgroup variable outside a kernel",
    ),
    "a threadgroup variable at program scope": (
        "out[i] = x[i];",
        "threadgroup float t[4];\n",
        "threadgroup variable outside a kernel",
    ),
    "a program-scope variable that is not constant": ("out[i] = g;", "float g = 1;\n", "not in the constant"),
    "the address of a vector's element": (
        "float4 v = float4(x[i]); thread float* p = &v[1]; out[i] = *p;",
        "",
        "address of vector element",
    ),
    "a reference to a vector's element": (
        "float4 v = float4(x[i]); thread float& p = v.x; out[i] = p;",
        "",
        "vector element",
    ),
    "a swizzle that names an element twice, assigned to": (
        "float4 v = float4(x[i]); v.xx = float2(1.0f); out[i] = v.x;",
        "",
        "not assignable",
    ),
    "new": ("float* q = new float[2]; out[i] = q[0];", "", "'new' is not supported"),
    "double": ("double d = 2; out[i] = d;", "", "'double' is not supported"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_metal_refuses_is_an_error(name: str) -> None:
    body, header, error = WRONG[name]
    assert re.search(error, "\n".join(errors(body, header)))


RIGHT = {
    "threadgroup memory and simd operations": (
        "threadgroup float t[D]; t[l] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[i] = t[63 - l] + simd_sum(x[i]);",
        "",
    ),
    "vectors through a cast, and fast mathematics": (
        "const device half4* p = (const device half4*)(x); half4 v = p[0]; float4 f = float4(v);\n"
        "out[i] = fast::exp2(f.x) + f.yz.x + max(f.w, 0.0f);",
        "",
    ),
    "a store into a const input through a cast": ("((device float*)x)[i] = 1; out[i] = 0;", ""),
    "a helper that takes a device pointer": ("out[i] = first(x, i);", HELPER),
    "a helper that takes a thread array": (
        "float a[2]; a[0] = x[i]; out[i] = f(a);",
        "inline float f(const thread float* p) { return p[0]; }\n",
    ),
    "a threadgroup pointer": (
        "threadgroup float t[64]; threadgroup float* p = t + l; p[0] = x[i]; out[i] = p[0];",
        "",
    ),
    "a constant table": ("out[i] = table[i & 1];", "constant float table[2] = {1.0f, 2.0f};\n"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_metal_accepts_is_no_error(name: str) -> None:
    assert errors(*RIGHT[name]) == []


def test_atomic_outputs_are_no_error() -> None:
    assert errors("atomic_fetch_add_explicit(&out[0], x[i], memory_order_relaxed);", atomic=True) == []


def test_a_device_pointer_helper_fails_for_inputs_so_small_that_they_are_constant() -> None:
    assert errors("out[i] = first(x, i);", HELPER, elements=8) == []
    assert errors("out[i] = first(x, i);", HELPER, elements=7) != []
