"""What a model keeps, told layer by layer."""

import json

import pytest

from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.loading import inspect_model
from mlx_paged_attention.models.source import resolve


@pytest.fixture
def inspected(tiny_model):
    def inspect(name):
        source = resolve(str(tiny_model(name)), progress=False)
        return inspect_model(EngineConfig(model=str(source.path), device="cpu"), source, lambda _: None)

    return inspect


def test_layers_that_are_alike_are_counted_together(inspected):
    inspection = inspected("gemma3")
    assert inspection.refusal is None
    assert inspection.forward == "packed rows"
    groups = [(count, layer.kind) for count, layer in inspection.groups()]
    assert groups == [(2, "sliding window of 8"), (2, "full attention")]
    (layer,) = {layer for layer in inspection.layers if layer.kind == "full attention"}
    assert layer.shape == "2 heads, keys 16, values 16"
    assert layer.bytes_per_token == 4 * 2 * (16 + 16)


def test_bytes_are_those_that_an_engine_allocates(inspected, engine):
    inspection = inspected("gemma3")
    assert inspection.bytes_per_token == engine("gemma3").info.bytes_per_token
    assert inspection.bytes_per_sequence == 0


def test_the_context_that_a_gib_holds_counts_windows_once(inspected):
    inspection = inspected("gemma3")
    assert inspection.windows == (None, 8)
    assert inspection.bytes_beyond_windows == inspection.bytes_per_token // 2
    # 34 blocks hold the window and two steps of 256 tokens; the others are the two full layers'.
    assert inspection.tokens_per_gib == ((1 << 30) // (2 * 256 * 16) - 34) * 16
    llama = inspected("llama")
    assert llama.windows == (None,)
    assert llama.tokens_per_gib == (1 << 30) // llama.bytes_per_token


def test_as_json_it_is_plain_data(inspected):
    inspection = inspected("llama")
    data = json.loads(json.dumps(inspection.as_json()))
    assert data["forward"] == "packed rows"
    assert data["refusal"] is None
    assert len(data["layers"]) == len(inspection.layers)
    assert sum(layer["bytes_per_token"] for layer in data["layers"]) == data["bytes_per_token"]
