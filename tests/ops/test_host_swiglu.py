import numpy as np
import pytest

pytest.importorskip("numba", reason="comes with the extra for Linux's CPU build")

import mlx.core as mx
from mlx_lm.models import activations

from mlx_paged_attention.ops import host_swiglu
from mlx_paged_attention.ops.host_swiglu import swiglu, takes


def exact(gate: np.ndarray, x: np.ndarray) -> np.ndarray:
    gate = gate.astype(np.float64)
    return gate / (1 + np.exp(-gate)) * x


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (1, 8, 1536), (2, 33, 4097)])
def test_each_number_is_right_to_float32s_precision(shape):
    rng = np.random.default_rng(0)
    gate, x = (rng.standard_normal(shape).astype(np.float32) * 6 for _ in range(2))
    out = np.array(swiglu(mx.array(gate), mx.array(x)))
    np.testing.assert_allclose(out, exact(gate, x), rtol=3e-6, atol=1e-30)


def test_the_ends_of_the_range_give_what_mlx_gives():
    gate = mx.array([np.nan, np.inf, 0.0, 3e38, 200.0, -200.0, -3e38, -1e-40])
    ones = mx.ones(gate.shape)
    np.testing.assert_allclose(
        np.array(swiglu(gate, ones)), np.array(activations.swiglu(gate, ones)), rtol=3e-6, atol=1.0
    )


def test_arrays_may_lie_as_they_like():
    gate = mx.random.normal((6, 40))
    x = mx.random.normal((40, 6)).T
    half = gate[:, ::2], x[:, ::2]
    expected = exact(*(np.array(a) for a in half))
    np.testing.assert_allclose(np.array(swiglu(*half)), expected, rtol=3e-6, atol=1e-30)


def test_other_types_other_shapes_and_few_elements_are_left_to_mlx():
    many = mx.zeros((host_swiglu.LEAST,))
    assert takes(many, many)
    assert not takes(many[1:], many[1:])
    assert not takes(many.astype(mx.bfloat16), many.astype(mx.bfloat16))
    assert not takes(many, many.astype(mx.float16))
    assert not takes(many, many[:1])
