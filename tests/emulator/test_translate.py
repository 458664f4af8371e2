"""What is rewritten on the way from Metal to C++, and what stays."""

import pytest

from .address_spaces import address_space_errors
from .errors import CompileError
from .kernel_signature import Buffer, Position, ThreadgroupArgument, kernel_signatures
from .tokens import text_of, tokenize
from .translate import translate


def cxx(metal: str, **constants: int) -> str:
    return " ".join(translate(metal, constants).cxx.split())


def test_tokens_hold_every_character() -> None:
    source = (
        '#define A 1\nfloat f(float x) [[noinline]] { return x /* y */ + 1.5e-3h - 0x1p-3 - "a\\"b"[0]; }\n'
    )
    assert text_of(tokenize(source)) == source


def test_unsuffixed_numbers_become_float_and_half_ones_half() -> None:
    assert cxx("a = 1.5 + 2e3 + 1.0f + 3 + 0x1F + 2h + 1.5bf;") == (
        "a = 1.5f + 2e3f + 1.0f + 3 + 0x1F + ((half)2.f) + bfloat(1.5f);"
    )


def test_swizzles_become_calls_and_members_stay() -> None:
    assert cxx("a = v.xy; v.zx = b; c = v.x; d = p->rgb; e = s.xy(1);") == (
        "a = v.template swizzle<0, 1>(); v.template swizzle_to<2, 0>() = b; c = v.x; "
        "d = p->template swizzle<0, 1, 2>(); e = s.xy(1);"
    )


def test_function_constants_get_their_values() -> None:
    source = "constant bool a [[function_constant(3)]]; constant int b [[function_constant(4)]];"
    assert cxx(source, b=7) == "constant bool a = 0; constant int b = 7;"
    assert "f(false, true)" in cxx(
        f"{source} f(is_function_constant_defined(a), is_function_constant_defined(b));", b=7
    )


def test_threadgroup_variables_come_from_the_runtime() -> None:
    out = cxx("{ threadgroup float a[2][N], b; threadgroup float* p = a; }")
    assert "typedef float emu_type_of_a [2][N];" in out
    assert "emu_type_of_b& b = *(emu_type_of_b*)emu_threadgroup_variable(" in out
    assert out.endswith("threadgroup float* p = a; }")


def test_members_and_overloads_for_other_address_spaces_go() -> None:
    out = cxx(
        """
        struct S { float get() const { return 1; } float get() const threadgroup { return 1; } int n; };
        void f(thread float* p) { } void f(device float* p) { } void f(thread int* p) { }
        """
    )
    assert out == (
        "struct S { float get() const { return 1; } int n; }; "
        "void f(thread float* p) { } void f(thread int* p) { }"
    )


def test_lines_keep_their_numbers() -> None:
    source = "void f() {\n threadgroup float a[\n 4\n ];\n last; }"
    lines = translate(source, {}).cxx.split("\n")
    assert lines[4] == " last; }"


def test_parameters_are_found_with_their_attributes() -> None:
    (parameters,) = kernel_signatures(
        tokenize(
            "template <typename T> [[kernel]] void f(const device T* a [[buffer(2)]], constant int& n, "
            "threadgroup float* t [[threadgroup(1)]], uint3 g [[threadgroup_position_in_grid]]) {}"
        )
    ).values()
    assert parameters == [
        Buffer(2, by_reference=False),
        Buffer(3, by_reference=True),
        ThreadgroupArgument(1),
        Position("threadgroup_position_in_grid", "uint3"),
    ]


def test_an_unknown_attribute_is_named() -> None:
    with pytest.raises(CompileError, match=r"uint i.*\[\[thread_position_in_grids\]\]"):
        kernel_signatures(tokenize("kernel void f(uint i [[thread_position_in_grids]]) {}"))


def test_an_unknown_kernel_is_named_with_those_there_are() -> None:
    translation = translate("kernel void f(uint i [[thread_position_in_grid]]) {}", {})
    with pytest.raises(CompileError, match="no kernel is called 'g'; there are: f"):
        translation.with_entry("g<float>")


def test_a_kernel_without_mlx_s_header_compiles() -> None:
    source = "kernel void f(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) { a[i] = i; }"
    assert address_space_errors(source, "f") == []
