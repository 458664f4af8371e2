"""Custom kernels that mlx-lm makes with ``mx.fast.metal_kernel``, against its own or plain MLX operations.

Nobody wrote them for the emulator: they must run, agree, and raise no alarm.
"""

import importlib
import importlib.util
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from .conditions import STRICT, Conditions
from .custom_kernel import emulate

OTHERWISE = Conditions(shuffle_order=3, fuse_multiply_add=True, flush_subnormals=True, fast_math_ulps=2)


def emulated(name: str, monkeypatch: pytest.MonkeyPatch, conditions: Conditions = STRICT) -> ModuleType:
    """A second copy of an mlx-lm module, whose kernels the emulator runs."""
    importlib.import_module(name)  # what it imports must not see the patches
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(mx.fast, "metal_kernel", emulate(conditions=conditions))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)).astype(dtype)


def assert_close(result: mx.array, expected: mx.array, tolerance: float = 1e-5) -> None:
    assert result.shape == expected.shape
    scale = mx.abs(expected.astype(mx.float32)).max().item()
    assert mx.abs(result.astype(mx.float32) - expected.astype(mx.float32)).max().item() <= tolerance * scale


@pytest.mark.parametrize("conditions", [STRICT, pytest.param(OTHERWISE, marks=pytest.mark.slow)])
def test_norms_of_query_and_key_heads(conditions: Conditions, monkeypatch: pytest.MonkeyPatch) -> None:
    module = emulated("mlx_lm.kernels.qk_norm", monkeypatch, conditions)
    heads, kv_heads, dim, eps = 3, 2, 80, 1e-6
    qkvg = random(1, 5, 2 * (heads + kv_heads) * dim, dtype=mx.float16)
    q, k = module.qk_norm(qkvg, n_heads=heads, n_kv_heads=kv_heads, head_dim=dim, eps=eps, query_scale=0.5)
    rows = qkvg[..., : (heads + kv_heads) * dim].reshape(1, 5, heads + kv_heads, dim)
    normed = mx.fast.rms_norm(rows, None, eps)
    assert_close(q, normed[:, :, :heads] * 0.5, 2e-3)
    assert_close(k, normed[:, :, heads:], 2e-3)


def test_a_norm_and_a_gate_over_strided_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = emulated("mlx_lm.kernels.rms_norm_sigmoid_gate", monkeypatch)
    x, gate = random(1, 5, 3, 64).swapaxes(1, 2), random(1, 5, 3 * 64)
    result = module.rms_norm_sigmoid_gate(x, gate, eps=1e-6)
    expected = mx.fast.rms_norm(x, None, 1e-6).swapaxes(1, 2).reshape(1, 5, -1) * mx.sigmoid(gate)
    assert_close(result, expected)


def test_the_routing_to_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = emulated("mlx_lm.kernels.expert_routing", monkeypatch)
    logits, bias = random(7, 40), random(40) * 0.1
    experts, weights = module.expert_routing(
        logits, bias, top_k=4, multiplier=1.5, score_eps=1e-20, route_scale=2.0
    )
    scores = mx.sigmoid(logits * 1.5)
    expected = mx.argsort(-(scores + bias), axis=-1)[:, :4]
    chosen = mx.take_along_axis(scores, expected, axis=-1)
    assert mx.array_equal(experts, expected)
    assert_close(weights, chosen / chosen.sum(axis=-1, keepdims=True) * 2)


GATED_DELTA = {
    "packed lanes": (128, False, False),
    "one row a simdgroup": (64, False, False),
    "a gate per element": (64, True, False),
    "padding": (64, False, True),
}


@pytest.mark.parametrize("name", GATED_DELTA)
def test_the_gated_delta_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = emulated("mlx_lm.models.gated_delta", monkeypatch)
    key_dim, gate_per_element, padded = GATED_DELTA[name]
    batch, length, key_heads, value_heads, value_dim = 2, 3, 1, 2, 8
    q, k = (random(batch, length, key_heads, key_dim) * s for s in (0.1, 0.2))
    v, beta = random(batch, length, value_heads, value_dim), mx.sigmoid(random(batch, length, value_heads))
    gate = mx.sigmoid(random(batch, length, value_heads, *([key_dim] if gate_per_element else [])))
    state = random(batch, value_heads, value_dim, key_dim)
    mask = mx.array([[False, True, True], [True, True, True]]) if padded else None
    result, new_state = module.gated_delta_kernel(q, k, v, gate, beta, state, mask)
    expected, expected_state = module.gated_delta_ops(q, k, v, gate, beta, state, mask)
    if mask is not None:  # what padding yields means nothing
        result, expected = (mx.where(mask[..., None, None], y, 0) for y in (result, expected))
    assert_close(result, expected, 1e-4)
    assert_close(new_state, expected_state, 1e-4)


@pytest.mark.parametrize("conditions", [STRICT, pytest.param(OTHERWISE, marks=pytest.mark.slow)])
def test_a_state_space_step(conditions: Conditions, monkeypatch: pytest.MonkeyPatch) -> None:
    module = emulated("mlx_lm.models.ssm", monkeypatch, conditions)
    heads, dim, groups, state_dim = 4, 8, 2, 64
    arguments = (
        *(random(2, 1, heads, dim), random(heads), random(2, 1, groups, state_dim)),
        *(random(2, 1, groups, state_dim) * 0.5, random(heads), random(2, 1, heads), random(heads)),
        *(random(2, heads, dim, state_dim), (0.001, 100.0)),
    )
    result, state = module.ssm_update_kernel(*arguments)
    expected, expected_state = module.ssm_attn(*arguments)
    assert_close(result, expected, 1e-4)
    assert_close(state, expected_state, 1e-4)


def test_a_time_mixing_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module = emulated("mlx_lm.models.rwkv7", monkeypatch)
    length, heads, dim = 3, 2, 64
    r, w, k, v, a, b = (random(1, length, heads, dim) * s for s in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    state = random(1, heads, dim, dim)
    result, new_state = module.wkv7_kernel(r, w, k, v, a, b, state)
    expected = []
    for t in range(length):
        y, state = module._wkv7_step_ops(*(x[:, t] for x in (r, w, k, v, a, b)), state)
        expected.append(y.reshape(1, heads, dim))
    assert_close(result, mx.stack(expected, axis=1), 1e-4)
    assert_close(new_state, state, 1e-4)


def test_ternary_weights_times_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    module = emulated("mlx_lm.models.bitlinear_layers", monkeypatch)
    inputs, outputs = 256, 32
    digits = np.random.default_rng(0).integers(0, 3, (4, outputs // 4, inputs)).astype(np.uint8)
    layer = module.BitLinear(inputs, outputs, bias=False)
    layer.weight_scale = mx.array([0.5])
    packed = sum(digits[i] << (2 * i) for i in range(4))
    x = random(3, inputs)
    expected = x @ mx.array(digits.reshape(outputs, inputs).astype(np.float32) - 1).T * 0.5
    assert_close(layer.execute_matmul_kernel(x, mx.array(packed)), expected)
