"""The output head computes the selected rows, and the model is otherwise as it was."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_paged_attention.models.forward import ForwardContext
from mlx_paged_attention.models.head import select_rows_in_head, selected_logits

WIDTH, VOCAB = 32, 50


class Untied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=True)

    def __call__(self, x):
        return self.lm_head(self.norm(self.embed_tokens(x)))


class Tied(Untied):
    def __init__(self):
        super().__init__()
        del self.lm_head

    def __call__(self, x):
        return self.embed_tokens.as_linear(self.norm(self.embed_tokens(x)))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.language_model = Untied()

    def __call__(self, x):
        return self.language_model(x) * 2


class Elsewhere(Untied):
    """A head under a name of its own, which is not found."""

    def __init__(self):
        super().__init__()
        self.out = self.lm_head
        del self.lm_head

    def __call__(self, x):
        return self.out(self.norm(self.embed_tokens(x)))


TOKENS = mx.array([[3, 1, 4], [1, 5, 9]])


def quantised(kind):
    model = kind()
    nn.quantize(model, group_size=32, bits=8)
    return model


MODELS = {
    "untied": Untied,
    "tied": Tied,
    "nested": Nested,
    "elsewhere": Elsewhere,
    "quantised untied": lambda: quantised(Untied),
    "quantised tied": lambda: quantised(Tied),
}


@pytest.fixture(params=MODELS)
def made(request):
    """(model, context, all its logits)"""
    mx.random.seed(0)
    model = MODELS[request.param]()
    expected = np.array(model(TOKENS)).reshape(-1, VOCAB)
    context = ForwardContext()
    select_rows_in_head(model, context)
    return model, context, expected


def logits(model, context, rows):
    context.selected = None if rows is None else mx.array(rows, mx.int32)
    context.head_selected = False
    return selected_logits(model(TOKENS), context)


@pytest.mark.parametrize("rows", [[0], [5], [2, 4], [4, 2], [0, 1, 2, 3, 4, 5], [5, 4, 0, 0, 1, 2]], ids=str)
def test_the_logits_are_those_of_the_selected_rows_in_their_order(made, rows):
    model, context, expected = made
    assert logits(model, context, rows).shape == (len(rows), VOCAB)
    np.testing.assert_allclose(np.array(logits(model, context, rows)), expected[rows], atol=1e-5)


def test_nothing_selected_gives_no_rows(made):
    """Never evaluated: of a chunk that samples nothing no logits are needed."""
    model, context, _ = made
    assert logits(model, context, []).shape == (0, VOCAB)


def test_without_a_selection_all_rows_come_in_the_models_own_shape(made):
    model, context, expected = made
    assert model(TOKENS).shape == (2, 3, VOCAB)
    np.testing.assert_allclose(np.array(logits(model, context, None)), expected, atol=1e-6)


@pytest.mark.parametrize("kind", [Untied, Tied, Nested])
def test_the_head_multiplies_no_more_rows_than_selected(kind):
    model = kind()
    context = ForwardContext(selected=mx.array([1, 4], mx.int32))
    select_rows_in_head(model, context)
    assert model(TOKENS).size == 2 * VOCAB


def test_parameters_names_and_other_instances_stay_as_they_were():
    model, other = Untied(), Untied()
    before = tree_flatten(model.parameters())
    context = ForwardContext(selected=mx.array([0], mx.int32))
    select_rows_in_head(model, context)
    assert [name for name, _ in tree_flatten(model.parameters())] == [name for name, _ in before]
    assert all(x is y for (_, x), (_, y) in zip(tree_flatten(model.parameters()), before, strict=True))
    assert isinstance(model.lm_head, nn.Linear)
    assert type(model.lm_head).__name__ == "Linear"
    assert other(TOKENS).shape == (2, 3, VOCAB)
    assert model.embed_tokens(TOKENS).shape == (2, 3, WIDTH)
