import numpy as np
import pytest

pytest.importorskip("numba", reason="comes with the extra for Linux's CPU build")

import mlx.core as mx
from mlx_lm.models import llama, switch_layers
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention.models.host_activations import host_activations, rebind_swiglu
from mlx_paged_attention.ops import host_swiglu


@pytest.fixture
def loops(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes that the compiled loop was called with."""
    calls = []
    original = host_swiglu.swiglu

    def counted(gate, x):
        calls.append(gate.shape)
        return original(gate, x)

    monkeypatch.setattr(host_swiglu, "swiglu", counted)
    rebind_swiglu()
    return calls


@pytest.mark.parametrize("module", [llama, switch_layers])
def test_models_use_the_loop_within_our_forward_passes_only(loops, module):
    gate, x = mx.random.normal((2, 8, 1536)), mx.random.normal((2, 8, 1536))
    theirs = np.array(module.swiglu(gate, x))
    assert loops == []
    with host_activations():
        ours = np.array(module.swiglu(gate, x))
        small = module.swiglu(gate[:, :1, :4], x[:, :1, :4])
    assert loops == [(2, 8, 1536)]
    assert small.shape == (2, 1, 4)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    module.swiglu(gate, x)
    assert len(loops) == 1


def test_a_pass_that_fails_leaves_nothing_switched_on(loops):
    with pytest.raises(ZeroDivisionError), host_activations():
        raise ZeroDivisionError
    llama.swiglu(mx.zeros((1, 1, host_swiglu.LEAST)), mx.zeros((1, 1, host_swiglu.LEAST)))
    assert loops == []


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_an_engine_answers_with_the_loop_what_mlx_lm_answers_without(
    engine, oracle, loops, monkeypatch, name
):
    monkeypatch.setattr(host_swiglu, "LEAST", 1)
    prompts = [varied_prompt(length, 5) for length in (30, 1, 12)]
    outputs = engine(name).generate(prompts, greedy(8, cache_salt="host activations"))
    assert loops
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_matches(output.outputs[0], oracle(name).greedy(prompt, 8))
