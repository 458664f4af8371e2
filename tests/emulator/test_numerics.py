"""half and bfloat: for all 65,536 values, conversions and operations round as numpy's and MLX's do."""

import mlx.core as mx
import numpy as np
import pytest

from .conditions import Conditions
from .custom_kernel import metal_kernel
from .one_kernel import run

ALL = np.arange(65536, dtype=np.uint16)
SHUFFLED = np.random.default_rng(0).permutation(ALL)


def compute(expressions: dict[str, str], dtype: mx.Dtype, x: mx.array, y: mx.array) -> dict[str, mx.array]:
    """Each expression of ``x`` and ``y`` for all elements, as ``dtype``."""
    body = "const uint i = thread_position_in_grid.x; const auto a = x[i]; const auto b = y[i];\n"
    names = list(expressions)
    body += "\n".join(
        f"{{ {expressions[name].replace('RESULT', f'o{k}[i]')} }}" for k, name in enumerate(names)
    )
    kernel = metal_kernel("numerics", ["x", "y"], [f"o{k}" for k in range(len(names))], body)
    results = kernel(
        inputs=[x, y],
        output_shapes=[x.shape] * len(names),
        output_dtypes=[dtype] * len(names),
        grid=(x.size, 1, 1),
        threadgroup=(min(x.size, 256), 1, 1),
    )
    return dict(zip(names, results, strict=True))


def assert_same(results: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    """Bit by bit, except that any NaN is as good as another."""
    bits = {2: mx.uint16, 4: mx.uint32}
    for name, result in results.items():
        want = expected[name]
        assert result.dtype == want.dtype
        kind = bits[want.dtype.size]
        both_nan = np.isnan(np.array(result.astype(mx.float32))) & np.isnan(np.array(want.astype(mx.float32)))
        differ = (np.array(result.view(kind)) != np.array(want.view(kind))) & ~both_nan
        assert not differ.any(), f"{name}: {differ.sum()} of {differ.size}"


def test_half_rounds_after_every_operation() -> None:
    a, b = ALL.view(np.float16), SHUFFLED.view(np.float16)
    results = compute(
        {
            "sum": "RESULT = a + b;",
            "difference": "RESULT = a - b;",
            "product": "RESULT = a * b;",
            "quotient": "RESULT = a / b;",
            "product and sum": "RESULT = a * b + a;",
            "sum of three": "half s = a; s += b; s += a; RESULT = s;",
            "of an integer": "RESULT = half(int(i) - 32768);",
        },
        *(mx.float16, mx.array(a), mx.array(b)),
    )
    with np.errstate(all="ignore"):
        expected = {
            "sum": a + b,
            "difference": a - b,
            "product": a * b,
            "quotient": a / b,
            "product and sum": a * b + a,
            "sum of three": (a + b) + a,
            "of an integer": (np.arange(a.size) - 32768).astype(np.float16),
        }
    assert_same(results, {name: mx.array(value) for name, value in expected.items()})


def test_bfloat_rounds_after_every_operation() -> None:
    a, b = mx.array(ALL).view(mx.bfloat16), mx.array(SHUFFLED).view(mx.bfloat16)
    wide_a, wide_b = a.astype(mx.float32), b.astype(mx.float32)
    results = compute(
        {"sum": "RESULT = a + b;", "product": "RESULT = a * b;", "product and sum": "RESULT = a * b + a;"},
        *(mx.bfloat16, a, b),
    )
    product = (wide_a * wide_b).astype(mx.bfloat16)
    expected = {
        "sum": (wide_a + wide_b).astype(mx.bfloat16),
        "product": product,
        "product and sum": (product.astype(mx.float32) + wide_a).astype(mx.bfloat16),
    }
    assert_same(results, expected)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_widening_is_exact(dtype: mx.Dtype) -> None:
    a = mx.array(ALL).view(dtype)
    results = compute(
        {"float": "RESULT = float(a);", "times a float": "RESULT = a * 3.7f;"}, mx.float32, a, a
    )
    wide = a.astype(mx.float32)
    assert_same(results, {"float": wide, "times a float": wide * np.float32(3.7)})


@pytest.mark.parametrize(("dtype", "name"), [(mx.float16, "half"), (mx.bfloat16, "bfloat16_t")])
def test_narrowing_rounds_to_nearest_even(dtype: mx.Dtype, name: str) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[::5] = bits[::5] & 0xFFFF0000 | 0x8000  # ties of bfloat
    bits[1::5] = bits[1::5] & 0xFFFFE000 | 0x1000  # ties of half
    bits[2::5] = bits[2::5] & 0x0FFFFFFF | 0x30000000  # half's small numbers
    wide = mx.array(bits).view(mx.float32)
    with np.errstate(over="ignore"):
        narrow = mx.array(np.array(wide).astype(np.float16)) if dtype == mx.float16 else wide.astype(dtype)
    assert_same(compute({"narrow": f"RESULT = {name}(a);"}, dtype, wide, wide), {"narrow": narrow})


def test_unsuffixed_literals_are_float() -> None:
    assert run("out[i] = 0.1 + 0.2 == 0.1f + 0.2f ? 1.0 : 0.0;")[0] == 1


def test_a_product_and_a_sum_round_once_only_where_fusing_is_asked_for() -> None:
    # 1 + 2⁻¹² squared is 1 + 2⁻¹¹ + 2⁻²⁴; the last term is lost when the product is rounded
    body = "const float a = 1.0f + 0x1p-12f * (x[0] + 1.0f); out[i] = a * a - (1.0f + 0x1p-11f);"
    assert run(body)[0] == 0
    assert run(body, conditions=Conditions(fuse_multiply_add=True))[0] == 2.0**-24


def test_subnormals_are_zero_only_where_flushing_is_asked_for() -> None:
    body = "out[i] = (0x1p-126f + x[0]) * 0.5f * 0x1p100f;"
    assert run(body)[0] == 2.0**-27
    assert run(body, conditions=Conditions(flush_subnormals=True))[0] == 0


def test_fast_functions_are_wrong_by_as_much_as_is_asked_for() -> None:
    exact = np.exp2(np.arange(64) / 64).astype(np.float32)
    body = "out[i] = fast::exp2(x[i] / 64.0f);"
    np.testing.assert_array_max_ulp(run(body), exact, 0)
    wrong = run(body, conditions=Conditions(fast_math_ulps=4))
    np.testing.assert_array_max_ulp(wrong, exact, 4)
    assert (wrong != exact).mean() > 0.5
    np.testing.assert_array_equal(
        run(body.replace("fast", "precise"), conditions=Conditions(fast_math_ulps=4)), exact
    )


def test_a_reduction_in_another_order_rounds_differently() -> None:
    body = "out[i] = simd_sum(1.0f / (x[i] + 1.0f));"
    sums = {float(run(body, conditions=Conditions(shuffle_order=seed))[0]) for seed in range(8)}
    assert 1 < len(sums) <= 8
    assert max(sums) - min(sums) < 1e-5
