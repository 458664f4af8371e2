"""Nothing grows, whatever comes and goes: objects, containers, arrays, memory of the process."""

import gc
import random
from collections import Counter, deque

import mlx.core as mx
import psutil
import pytest
from engine_hooks import check_books, engine_of, preempt_everything, settled_stats, submit, wrapped_launch
from oracle import varied_prompt
from scripted_engine import ScriptedEngine, letters

from mlx_paged_attention import SamplingParams
from mlx_paged_attention.cache.hit_rate import HitRateWindow
from mlx_paged_attention.errors import RequestFailedError

SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


def own_objects():
    """How many objects of this package's types there are."""
    gc.collect()
    return sum(is_ours(type(thing)) for thing in gc.get_objects())


def is_ours(kind):
    return str(kind.__module__).startswith("mlx_paged_attention")


def elements(root):
    """All that the containers hold that can be reached from ``root`` through objects of this package."""
    seen, todo, total = set(), [root], 0
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | list | set | deque | tuple | frozenset):
            total += len(thing)
        elif not is_ours(type(thing)):
            continue
        todo += gc.get_referents(thing)
    return total


def no_growth(samples):
    """The second half of a run holds no more than the first did, give or take what a full pool holds.

    A thing that each request left behind would show: there are more requests than that.
    """
    half = len(samples) // 2
    return max(samples[half:]) <= 1.05 * max(samples[:half]) + 100


@pytest.mark.parametrize("steps", [2000, pytest.param(20_000, marks=SLOW)])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_engines_books_do_not_grow(steps, ahead):
    """Requests that end, stop, are aborted, preempted, refused, fail alone, and lose whole steps."""
    rng = random.Random(1)
    scripted = ScriptedEngine(
        tokenizer=letters(),
        num_blocks=28,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        num_states=20 if ahead else 0,
        config={"scheduling_policy": "longest_prefix", "max_overtaken_seconds": 0.01},
    )
    scripted.runner.runs_ahead = ahead
    engine, runner = scripted.engine, scripted.runner
    containers, objects, served, ended = [], [], 0, Counter()
    while len(containers) < 10:
        for _ in range(steps // 10):
            if len(scripted.outputs) < 12:
                served += 1
                name = str(served)
                prompt = [rng.randrange(65, 68)] * rng.randint(1, 30) + [rng.randrange(65, 90)]
                if rng.random() < 0.05:
                    runner.fails_rows[name] = rng.randint(0, 4)
                params = (
                    {"stop": list("ABCDEFG"), "stop_token_ids": [7, 8, 9], "logprobs": 2}
                    if rng.random() < 0.3
                    else {"ignore_eos": True}
                )
                scripted.add(name, prompt, max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 2]), **params)
            if rng.random() < 0.05:
                engine.abort(rng.choice(list(scripted.outputs)))
            chance = rng.random()
            if chance < 0.013 and not runner.failures:  # never three in a row, which would end the engine
                runner.fails_when_read = rng.random() < 0.5
                fault = MemoryError("[malloc]") if chance < 0.003 else OSError("planted")
                runner.failures = [fault, None, None, None]
            if engine.has_work:
                scripted.step()
            runner.plans.clear()
            for name, outputs in list(scripted.outputs.items()):
                if outputs and (isinstance(outputs[-1], Exception) or outputs[-1].finished):
                    failed = isinstance(outputs[-1], RequestFailedError)
                    ended["error" if failed else outputs[-1].outputs[0].finish_reason] += 1
                    del scripted.outputs[name]
                    runner.fails_rows.pop(name, None)
            for name in [name for name in runner._known if name.split("#")[0] not in scripted.outputs]:
                del runner._known[name]
        runner.failures, outputs = [], None
        scripted.run()
        for held_by_the_test in (scripted.outputs, runner.plans, runner._known, runner.fails_rows):
            held_by_the_test.clear()
        engine._cache.hit_rate = HitRateWindow()  # holds the last thousand lookups: it takes a while to fill
        containers.append(elements(engine))
        objects.append(own_objects())
    assert engine.stats().steps > 0.9 * steps
    assert min(ended[reason] for reason in ("length", "stop", "abort", "error")) > steps // 100, ended
    assert engine.stats().preemptions > steps // 100
    assert no_growth(containers), containers
    assert no_growth(objects), objects


@pytest.mark.parametrize("steps", [400, pytest.param(20_000, marks=SLOW)])
def test_a_models_memory_does_not_grow(engine, steps):
    llm = engine("llama", num_blocks=70, max_num_seqs=6, max_num_batched_tokens=24)
    rng = random.Random(2)
    process = psutil.Process()
    active, resident, objects, cached = [], [], [], []

    def disturb(_plan):
        if rng.random() < 0.02:
            preempt_everything(llm)

    number = 0
    with wrapped_launch(llm, disturb):
        for _ in range(10):
            begun = settled_stats(llm).steps
            while settled_stats(llm).steps - begun < steps // 10:
                waits = []
                for _ in range(8):
                    number += 1
                    prompt = varied_prompt(rng.randint(1, 60), rng.randint(0, 20))
                    params = SamplingParams(
                        temperature=rng.choice([0.0, 0.8]),
                        top_p=rng.choice([1.0, 0.9]),
                        presence_penalty=rng.choice([0.0, 0.5]),
                        logprobs=rng.choice([None, 2]),
                        max_tokens=rng.randint(1, 30),
                        ignore_eos=True,
                        seed=1,
                    )
                    waits.append(submit(llm, prompt, params, str(number)))
                    if rng.random() < 0.2:
                        llm._engine.abort(str(rng.randint(number - 8, number)))
                for wait in waits:
                    wait()
            assert settled_stats(llm).used_blocks == 0
            active.append(mx.get_active_memory())
            cached.append(mx.get_cache_memory())
            resident.append(process.memory_info().rss)
            objects.append(own_objects())
    check_books(llm)
    runner = engine_of(llm)._runner
    assert len(runner._rows) <= 6  # those of the last step, released with the next
    assert len(runner._tables._lines) <= 6
    assert not llm._engine._open
    assert no_growth(active), active
    assert no_growth(objects), objects
    assert max(cached) < 64 << 20
    # Python's and the system's allocators keep some memory that is free; a leak of 1 KB a step would show.
    assert resident[-1] - max(resident[:5]) < max(8 << 20, steps << 9), resident
