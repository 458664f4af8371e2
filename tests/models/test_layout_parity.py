"""Every way of running a step, on every kind of pool, computes what mlx-lm computes.

What a machine chooses by itself is only one of them: the others are forced here.
"""

import itertools
from types import SimpleNamespace

import pytest
from engine_hooks import (
    check_books,
    poison_free_blocks,
    preempt_everything,
    recorded_plans,
    settled_stats,
    shuffle_free_blocks,
    wrapped_launch,
)
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention import LLM
from mlx_paged_attention.engine import loading
from mlx_paged_attention.runner.layout import LAYOUTS

PROMPTS = [varied_prompt(length, seed) for seed, length in enumerate((33, 1, 16, 50, 5, 17, 110))]


@pytest.fixture(params=["host pool", "device pool"])
def pool_kind(request, monkeypatch):
    """Without numba, a CPU runs the plain MLX operations of a GPU's pool."""
    if request.param == "device pool":
        missing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
        monkeypatch.setattr(loading, "importlib", missing)
    return request.param


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.name.replace(" ", "-"))
def layout(request, monkeypatch):
    monkeypatch.setattr(loading, "choose_layout", lambda *args, **options: request.param)
    return request.param


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_chunks_hits_and_preemption(tiny_model, oracle, name, layout, pool_kind):
    with LLM(
        model=str(tiny_model(name)),
        skip_tokenizer_init=True,
        num_blocks=40,
        max_num_batched_tokens=64,
        max_num_seqs=6,
    ) as llm:
        assert llm.info.forward == layout.name
        cached = []
        for seed in range(3):
            shuffle_free_blocks(llm, seed)
            poison_free_blocks(llm)
            steps = itertools.count(1)

            def preempt_after_five_steps(_plan, steps=steps, last=seed == 2):
                if last and next(steps) == 5:
                    preempt_everything(llm)

            with recorded_plans(llm) as plans, wrapped_launch(llm, preempt_after_five_steps):
                outputs = llm.generate(PROMPTS, greedy(10))
            for output, prompt in zip(outputs, PROMPTS, strict=True):
                assert_matches(output.outputs[0], oracle(name).greedy(prompt, 10))
            cached.append(sum(output.num_cached_tokens for output in outputs))
            check_books(llm)
        assert cached[0] == 0 < cached[1]
        assert settled_stats(llm).preemptions > 0
        assert any(row.start > 0 and len(row.token_ids) > 32 for plan in plans for row in plan.rows)
