"""What a step takes beside weights and pool."""

import mlx.core as mx
import numpy as np
import pytest
from step_driver import LAYOUTS, PACKED, load_host
from tiny_models import VOCAB_SIZE

from mlx_paged_attention.ops.host import MOST_COPIED
from mlx_paged_attention.runner.activations import measure_activations
from mlx_paged_attention.runner.kv_pool import make_pool
from mlx_paged_attention.runner.model_runner import ModelRunner
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.scheduler.step_plan import NewRow, PlannedRow, StepPlan


def full_step(host, spec, tokens):
    """Peak bytes of a step of so many tokens, run in full."""
    blocks = -(-tokens // spec.block_size)
    prompt = (np.arange(tokens) % VOCAB_SIZE).tolist()
    peaks = []
    for _ in range(4):  # how soon other threads free arrays differs
        runner = ModelRunner(host, spec, make_pool(spec, 1 + blocks, host=True), PACKED)
        new = NewRow("a", prompt, tokens, RowSampling(temperature=0.0))
        row = PlannedRow("a", prompt, 0, list(range(1, 1 + blocks)), 0, True)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        runner.launch(StepPlan(0, [new], [row], [])).read()
        peaks.append(mx.get_peak_memory() - before)
    return max(peaks)


@pytest.mark.parametrize("tokens", [8, 32, 256])
def test_the_estimate_of_a_full_step_is_what_a_full_step_takes(tiny_model, tokens):
    host, spec = load_host(tiny_model("llama"))
    estimate, _ = measure_activations(host, spec, PACKED, max_tokens=tokens, on_host=True)
    taken = full_step(host, spec, tokens)
    assert 0.5 * taken < estimate < 1.5 * taken


def test_more_tokens_take_more(tiny_model):
    host, spec = load_host(tiny_model("llama"))
    small, _ = measure_activations(host, spec, PACKED, max_tokens=256, on_host=True)
    large, _ = measure_activations(host, spec, PACKED, max_tokens=2048, on_host=True)
    assert large == pytest.approx(8 * small, rel=0.25)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("on_host", [True, False])
def test_every_layout_can_be_measured(tiny_model, layout, on_host):
    host, spec = load_host(tiny_model("gemma3"))
    activations, copies = measure_activations(host, spec, layout, max_tokens=64, on_host=on_host)
    assert activations > 0
    assert copies == (len(spec.layers) * MOST_COPIED if on_host else 0)
