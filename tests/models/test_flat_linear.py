"""Flattened layers compute what they computed before, all rows in one product."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from oracle import varied_prompt

from mlx_paged_attention.models.flat_linear import FlatEmbedding, FlatLinear, flatten_rows
from mlx_paged_attention.models.forward import ForwardContext
from mlx_paged_attention.models.head import select_rows_in_head
from mlx_paged_attention.models.merged_linear import MergedFlatLinear, MergedLinear
from mlx_paged_attention.runner.model_host import ModelHost

TOKENS = mx.array([varied_prompt(7, 1), varied_prompt(7, 2)])


def quantised(tiny_model, name, bits=4):
    model, _ = load_model(tiny_model(name))
    nn.quantize(model, group_size=32, bits=bits)
    return model


def parameters(model):
    return {name: np.array(array) for name, array in tree_flatten(model.parameters())}


# Qwen 2 has biases; Gemma 3 ends in its embedding.
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_a_model_computes_the_same_and_keeps_its_parameters(tiny_model, name, bits):
    model = quantised(tiny_model, name, bits)
    expected, before = model(TOKENS), parameters(model)
    mx.eval(expected)
    flatten_rows(model)
    logits = model(TOKENS)
    assert logits.shape == expected.shape
    assert mx.abs(logits - expected).max() <= 1e-4 * mx.abs(expected).max()
    after = parameters(model)
    assert list(before) == list(after)
    assert all((before[key] == after[key]).all() for key in before)


def test_every_product_is_one_problem(tiny_model, monkeypatch):
    model = quantised(tiny_model, "llama")
    flatten_rows(model)
    select_rows_in_head(model, ForwardContext())
    ranks = []
    multiply = mx.quantized_matmul

    def counted(x, *args, **options):
        ranks.append(x.ndim)
        return multiply(x, *args, **options)

    monkeypatch.setattr(mx, "quantized_matmul", counted)
    model(TOKENS)
    assert ranks == [2] * (2 * 7 + 1)


def test_layers_of_other_classes_are_left_alone():
    class Special(nn.QuantizedLinear):
        pass

    layers = [Special(64, 32), nn.Linear(64, 32), nn.QuantizedLinear(64, 32)]
    flatten_rows(nn.Sequential(*layers))
    assert [type(layer) for layer in layers] == [Special, nn.Linear, FlatLinear]


def test_a_quantised_embedding_is_a_flat_head():
    embedding = nn.QuantizedEmbedding(96, 64)
    x = mx.random.normal((5, 1, 64))
    expected = embedding.as_linear(x)
    flatten_rows(nn.Sequential(embedding))
    assert type(embedding) is FlatEmbedding
    assert embedding.as_linear(x).shape == (5, 1, 96)
    assert mx.allclose(embedding.as_linear(x), expected, atol=1e-5)


@pytest.mark.skipif(mx.cuda.is_available(), reason="it helps here")
def test_nothing_changes_where_it_does_not_help(tiny_model):
    model = quantised(tiny_model, "llama")
    kinds = [type(module) for module in model.modules()]
    ModelHost(model)
    changed = {type(module) for module in model.modules()}.difference(kinds)
    assert not changed & {FlatLinear, FlatEmbedding, MergedLinear, MergedFlatLinear}
