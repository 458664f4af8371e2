"""The pool is written in place: it never moves, and no step holds a second one."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import psutil
import pytest
from engine_hooks import between_steps, kv_layers, wrapped_launch
from oracle import greedy, varied_prompt

from mlx_paged_attention import LLM
from mlx_paged_attention.engine import loading

DECODE_STEPS = 500


@pytest.mark.parametrize(
    ("name", "compiled"),
    # Gemma 2 attends over gathered keys and values; without numba the pool is MLX's own arrays.
    [("llama", True), ("gemma2", True), ("llama", False)],
)
def test_500_decode_steps_never_copy_the_pool(tiny_model, monkeypatch, name, compiled):
    if not compiled:
        missing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
        monkeypatch.setattr(loading, "importlib", missing)
    with LLM(
        model=str(tiny_model(name)), skip_tokenizer_init=True, num_blocks=20_000, max_model_len=1024
    ) as llm:
        assert llm.info.pool_bytes > 150e6
        largest = max(plane.nbytes for plane in planes(llm))
        between_steps(llm, lambda: commit_pages(llm))
        process = psutil.Process()
        addresses, resident = set(), []

        def observe(_plan):
            addresses.add(tuple(np.array(plane, copy=False).ctypes.data for plane in planes(llm)))
            resident.append(process.memory_info().rss)

        prompts = [varied_prompt(n, n) for n in (3, 17)]
        llm.generate(prompts, greedy(4, logprobs=None))  # buffers and compiled loops are made once
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        with wrapped_launch(llm, observe):
            llm.generate(prompts, greedy(DECODE_STEPS, logprobs=None))
        assert len(resident) >= DECODE_STEPS
        assert len(addresses) == 1
        assert mx.get_peak_memory() - active < largest / 2
        assert max(resident) - resident[0] < largest / 2


def planes(llm):
    return [plane for layer in kv_layers(llm) for plane in (layer.k, layer.v)]


def commit_pages(llm):
    """Write the whole pool, so that a copy of it would show in the process's size."""
    for plane in planes(llm):
        np.array(plane, copy=False)[:] = 1
