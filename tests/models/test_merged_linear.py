"""Layers with the same input are one product, and compute what they computed before."""

import gc

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from oracle import varied_prompt

from mlx_paged_attention.models import merged_linear
from mlx_paged_attention.models.flat_linear import flatten_rows
from mlx_paged_attention.models.merged_linear import MergedFlatLinear, MergedLinear, merge_products

TOKENS = mx.array([varied_prompt(7, 1), varied_prompt(7, 2)])


def parameters(model):
    return {name: np.array(array.astype(mx.float32)) for name, array in tree_flatten(model.parameters())}


# Qwen 2 has biases on some; Gemma 3 norms queries and keys.
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_model_computes_the_same_and_keeps_its_parameters(tiny_model, name, bits):
    model, _ = load_model(tiny_model(name))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        flatten_rows(model)
    expected, before = model(TOKENS), parameters(model)
    mx.eval(expected)
    merge_products(model)
    kind = MergedLinear if bits is None else MergedFlatLinear
    assert sum(type(module) is kind for module in model.modules()) >= 2 * 3
    for _ in range(2):
        logits = model(TOKENS)
        assert mx.abs(logits - expected).max() <= 1e-4 * mx.abs(expected).max()
    after = parameters(model)
    assert list(before) == list(after)
    assert all((before[key] == after[key]).all() for key in before)


def counted_products(monkeypatch, model):
    calls = []
    call = nn.Linear.__call__

    def counted(self, x):
        calls.append(self)
        return call(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", counted)
    mx.eval(model(TOKENS))
    return len(calls)


def test_seven_products_of_a_layer_become_four(tiny_model, monkeypatch):
    model, _ = load_model(tiny_model("llama"))
    merge_products(model)
    with_head = 1
    assert counted_products(monkeypatch, model) == 2 * 4 + with_head


def test_large_weights_are_left_alone(tiny_model, monkeypatch):
    model, _ = load_model(tiny_model("llama"))
    mlp = model.layers[0].mlp
    monkeypatch.setattr(merged_linear, "MOST_BYTES", 2 * mlp.up_proj.weight.nbytes - 1)
    merge_products(model)
    assert type(mlp.up_proj) is nn.Linear
    assert type(model.layers[0].self_attn.q_proj) is MergedLinear


def test_many_rows_are_multiplied_layer_by_layer(tiny_model, monkeypatch):
    model, _ = load_model(tiny_model("llama"))
    expected = model(TOKENS)
    mx.eval(expected)
    merge_products(model)
    # Queries, keys and values of 14 rows are few enough, a gate and what it gates are not.
    monkeypatch.setattr(
        merged_linear, "MOST_ELEMENTS", 14 * (model.layers[0].mlp.up_proj.weight.shape[0] * 2) - 1
    )
    assert counted_products(monkeypatch, model) == 2 * 5 + 1
    assert mx.allclose(model(TOKENS), expected, atol=1e-4)


def test_weights_are_not_held_twice(tiny_model):
    model, _ = load_model(tiny_model("llama"))
    mx.eval(model.parameters())
    gc.collect()
    before = mx.get_active_memory()
    merge_products(model)
    gc.collect()
    assert mx.get_active_memory() <= before * 1.01


class Apart(nn.Module):
    """Bears the names, but gives each layer an input of its own."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(16, 8)
        self.up_proj = nn.Linear(16, 24)

    def __call__(self, x):
        return self.gate_proj(x + 1), self.up_proj(x - 1)


def test_layers_with_inputs_of_their_own_go_on_alone():
    model = Apart()
    x = mx.random.normal((3, 16))
    expected = model(x)
    mx.eval(expected)
    merge_products(model)
    for _ in range(3):
        for got, wanted in zip(model(x), expected, strict=True):
            assert mx.allclose(got, wanted, atol=1e-6)
    assert model.gate_proj.product.apart


def test_a_forward_that_broke_off_leaves_nothing_to_the_next():
    model = Apart()
    model.__class__ = type(
        "Together", (Apart,), {"__call__": lambda self, x: (self.gate_proj(x), self.up_proj(x))}
    )
    x, other = mx.random.normal((3, 16)), mx.random.normal((2, 16))
    expected = model(other)
    mx.eval(expected)
    merge_products(model)
    model.gate_proj(x)  # and no call of up_proj
    for _ in range(2):
        for got, wanted in zip(model(other), expected, strict=True):
            assert mx.allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: nn.Linear(16, 24, bias=False),
        lambda layer: nn.Linear(8, 24),
        lambda layer: nn.QuantizedLinear(64, 24),
        lambda layer: type("Special", (nn.Linear,), {})(16, 24),
    ],
    ids=["without bias", "of another width", "quantised", "of another class"],
)
def test_layers_that_differ_are_left_alone(change):
    model = Apart()
    model.up_proj = change(model.up_proj)
    kinds = [type(model.gate_proj), type(model.up_proj)]
    merge_products(model)
    assert [type(model.gate_proj), type(model.up_proj)] == kinds
