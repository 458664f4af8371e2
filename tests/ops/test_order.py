"""Order: everything that touches the same slots of a pool happens in the order in which it was stated.

MLX does not know that kernels write into the pool, so nothing but the tokens orders them. These tests
record what layers on kernels dispatch and check it with the rules by which MLX orders kernels on Metal
(``order_checker``); ``tests/runner/test_order_of_steps.py`` does so for whole steps. CUDA cannot show such
hazards: there kernels run in the order of one stream.
"""

import io

import mlx.core as mx
import numpy as np
import pytest
from order_checker import Dispatch, finished_before, hazards, recording, unnoticed

from mlx_paged_attention.cache.spec import LayerKVSpec, Plane
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels.order import Order, no_token

BLOCK_SIZE = 8


class Model:
    """Two layers on kernels, one with a window, and nothing else."""

    kv_heads = 2
    names = ("k", "v")

    def __init__(self, layers=2):
        self.order = Order()
        planes = tuple(Plane(name, "float32", (self.kv_heads, BLOCK_SIZE, 16)) for name in self.names)
        self.layers = [
            KernelLayer(LayerKVSpec(planes, 9 if i % 2 else None), 20, self.order) for i in range(layers)
        ]

    def forward(self, starts, queries, tables):
        """Tokens at ``starts .. starts + queries - 1`` of sequences with these blocks."""
        starts = np.array(starts, np.int32)
        width = max(map(len, tables))
        tables = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
        at = starts[:, None] + np.arange(queries)
        slots = np.take_along_axis(tables, at // BLOCK_SIZE, axis=1) * BLOCK_SIZE + at % BLOCK_SIZE
        batch = AttentionBatch(starts, queries, slots.reshape(-1).astype(np.int64), tables, BLOCK_SIZE)
        q, kv = (mx.zeros((len(starts), heads, queries, 16)) for heads in (4, self.kv_heads))
        for layer in self.layers:
            self.attend(layer, q, kv, batch)

    def attend(self, layer, q, kv, batch):
        layer.attend(q, kv, kv, batch, scale=1.0)

    def copy(self, source, target):
        for layer in self.layers:
            layer.copy([source], [target])


class LatentModel(Model):
    """The same on latents; a run of tokens is gathered, for the model's own attention."""

    kv_heads = 1
    names = ("latent", "rope")

    def attend(self, layer, q, kv, batch):
        if batch.queries == 1:
            layer.attend_latents(q, q, kv, kv, batch, scale=1.0)
        else:
            layer.write(kv, kv, batch)
            layer.gather_rows(batch)


def decode_steps(model):
    for step in range(10):
        model.forward([5 + step, 11 + step], 1, [[1, 2], [3, 4, 5]])


def recycled_blocks(model):
    model.forward([6], 1, [[1]])
    model.forward([0], 8, [[1]])  # the first sequence has ended, its block is another's


def copy_on_write(model):
    model.forward([0], 5, [[1]])
    model.copy(1, 2)  # a fork: both go on, each in a block of its own
    model.forward([5, 5], 1, [[1], [2]])


def a_prompt_in_chunks(model):
    model.forward([0], 24, [[1, 2, 3, 4, 5]])
    model.forward([24], 16 + 1, [[1, 2, 3, 4, 5, 6]])


def shared_prefix_in_one_step(model):
    model.forward([0], 16, [[1, 2]])  # a step of two forwards: the second reads what the first writes
    model.forward([16], 1, [[1, 2, 3]])


def test_after_a_failure_nothing_waits_for_what_cannot_be_computed():
    model = Model()
    with recording():
        model.forward([5], 1, [[1]])
        assert model.order.token is not no_token()
        model.layers[0].discard()
    assert model.order.token is no_token()


PROGRAMS = [decode_steps, recycled_blocks, copy_on_write, a_prompt_in_chunks, shared_prefix_in_one_step]


MODELS = pytest.mark.parametrize("model", [Model, LatentModel])


def record(program, forgetful=(), model=Model):
    """What a program dispatches; kernels named ``forgetful`` are not given their token."""
    with recording() as dispatches:
        program(model())
    return [d.without_token() if d.kernel in forgetful else d for d in dispatches]


@MODELS
@pytest.mark.parametrize("program", PROGRAMS)
def test_accesses_to_the_same_slots_never_overlap(program, model):
    assert hazards(record(program, model=model)) == []


@pytest.mark.parametrize(
    ("program", "kernel"),
    [
        (decode_steps, "paged_decode"),
        (recycled_blocks, "write_kv"),
        (copy_on_write, "copy_blocks"),
        (copy_on_write, "write_kv"),
        (a_prompt_in_chunks, "gather_kv"),
        (shared_prefix_in_one_step, "paged_decode"),
    ],
)
def test_a_token_that_a_kernel_never_takes_is_found(program, kernel):
    found = hazards(record(program, [kernel]))
    assert any(kernel in pair for pair in found)


@pytest.mark.parametrize("program", [decode_steps, shared_prefix_in_one_step])
def test_a_token_that_latents_are_read_without_is_found(program):
    found = hazards(record(program, ["latent_decode"], LatentModel))
    assert any("latent_decode" in pair for pair in found)


@MODELS
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_token_left_out_once_is_found(program, model):
    silent, tried = unnoticed(record(program, model=model))
    assert silent == []
    assert tried >= 3


def test_a_token_lost_between_two_forwards_is_found():
    def program(model):
        model.forward([0], 8, [[1]])
        model.order.token = no_token()
        model.forward([8], 1, [[1, 2]])

    assert hazards(record(program))


def test_evaluating_the_state_runs_what_the_last_token_stands_for():
    """mlx-lm's prefill evaluates nothing else of a forward."""
    layer = Model(layers=1).layers[0]
    layer.order.token = mx.ones((1,)) * 2
    graph = io.StringIO()
    mx.export_to_dot(graph, *layer.state, token=layer.order.token)
    lines = graph.getvalue().splitlines()
    (depends,) = (line.split()[1] for line in lines if 'label ="Depends"' in line)
    assert f'"token" -> {depends}' in lines
    assert sum(line.startswith(f"{depends} -> ") for line in lines) == len(layer.state)


def test_a_barrier_orders_only_what_was_made_in_the_encoder():
    first, second, third = (
        Dispatch("a", frozenset(), frozenset({1})),
        Dispatch("b", frozenset({1}), frozenset({2})),
        Dispatch("c", frozenset(), frozenset({3})),
    )
    assert finished_before([first, second, third], []) == [0, 0b1, 0b1]
    assert finished_before([first, third, second], []) == [0, 0, 0b11]
    assert finished_before([first, third, second], [1, 2]) == [0, 0, 0b1]
    assert finished_before([first, third, second], [2]) == [0, 0, 0b11]
