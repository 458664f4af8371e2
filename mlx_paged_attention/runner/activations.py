"""What a step takes beside weights and pool: measured on a small one, at load."""

import gc
from dataclasses import replace

import mlx.core as mx

from mlx_paged_attention.models.cache_spec import ModelCacheSpec
from mlx_paged_attention.runner.kv_pool import make_pool
from mlx_paged_attention.runner.layout import Layout
from mlx_paged_attention.runner.model_host import ModelHost
from mlx_paged_attention.runner.model_runner import ModelRunner
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.scheduler.step_plan import NewRow, PlannedRow, StepPlan

# On a CPU other threads free arrays sooner or later, so that the same step takes more or less at its peak.
_RUNS = 4


def measure_activations(
    host: ModelHost, spec: ModelCacheSpec, layout: Layout, *, max_tokens: int, on_host: bool
) -> tuple[int, int]:
    """Bytes that a step of ``max_tokens`` takes at its peak, and those that layers keep between steps.

    A full step may take seconds where it is rare; a smaller one is run, and its peak scaled by the number
    of tokens, to which all activations are proportional (attention's scores are bounded apart from it).
    """
    tokens = min(max_tokens, 32 if on_host else 256)
    blocks = -(-tokens // spec.block_size)
    pool = make_pool(spec, 1 + blocks, host=on_host)
    runner = ModelRunner(host, spec, pool, replace(layout, compiled=False))
    prompt = [0] * tokens
    peaks = []
    for step in range(_RUNS):
        new = NewRow(str(step), prompt, tokens, RowSampling(temperature=0.0))
        row = PlannedRow(new.request_id, prompt, 0, list(range(1, 1 + blocks)), 0, True, 0, 1)
        released = [str(step - 1)] if step else []
        gc.collect()  # what goes while the step runs would hide what it takes
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        runner.launch(StepPlan(step, [new], [row], released)).read()
        peaks.append(mx.get_peak_memory() - before)
    return max(peaks) * max_tokens // tokens, sum(layer.most_copied for layer in pool.layers)
