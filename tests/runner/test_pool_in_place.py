"""The pool is written in place: it never moves, and no step holds a second one."""

import mlx.core as mx
import numpy as np
import psutil
import pytest
from engine_hooks import kv_layers, wrapped_execute
from oracle import greedy, varied_prompt

from mlx_paged_attention import LLM

DECODE_STEPS = 500


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_500_decode_steps_never_copy_the_pool(tiny_model, name):
    # Gemma 2 attends over gathered keys and values, which is another path to the pool.
    with LLM(
        model=str(tiny_model(name)), skip_tokenizer_init=True, num_blocks=20_000, max_model_len=1024
    ) as llm:
        pool_bytes = llm.info.pool_bytes
        assert pool_bytes > 150e6
        planes = [plane for layer in kv_layers(llm) for plane in (layer.k, layer.v)]
        for plane in planes:  # commit every page, so that a copy would show
            if isinstance(plane, np.ndarray):
                plane[:] = 1
        largest = max(plane.nbytes for plane in planes)
        process = psutil.Process()
        addresses, resident = set(), []

        def observe(_plan):
            addresses.add(tuple(_address(plane) for layer in kv_layers(llm) for plane in (layer.k, layer.v)))
            resident.append(process.memory_info().rss)

        prompts = [varied_prompt(n, n) for n in (3, 17, 30)]
        llm.generate(prompts, greedy(4, logprobs=None))  # buffers and compiled loops are made once
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        with wrapped_execute(llm, observe):
            llm.generate(prompts, greedy(DECODE_STEPS, logprobs=None))
        assert len(resident) >= DECODE_STEPS
        assert len(addresses) == 1
        assert mx.get_peak_memory() - active < largest / 2
        assert max(resident) - resident[0] < largest / 2


def _address(plane):
    return plane.ctypes.data if isinstance(plane, np.ndarray) else id(plane)
