"""Steps that find no memory: nobody fails who could run, and every answer stays what it is."""

import random

import mlx.core as mx
import mlx.nn as nn
import pytest
from engine_hooks import check_books, engine_of, settled_stats, start_together, submit
from fake_runner import expected_output, varied_prompt
from oracle import assert_matches, greedy
from scripted_engine import ScriptedEngine

from mlx_paged_attention import LLM
from mlx_paged_attention.errors import RequestFailedError
from mlx_paged_attention.scheduler.step_limit import CALM_STEPS, StepLimit
from mlx_paged_attention.scheduler.step_plan import PlannedRow, StepPlan

NO_MEMORY = "[metal::malloc] Attempting to allocate 8 bytes"


def tokens(engine, request_id):
    return engine.last(request_id).outputs[0].token_ids


def step_of(num_tokens):
    return StepPlan(0, [], [PlannedRow("a", [1] * num_tokens, 0, [], 0, True)], [])


def without_memory_beyond(engine, request_id, length):
    """Every step that computes the request beyond so many tokens finds no memory."""
    launch = engine.runner.launch

    def launch_if_it_fits(plan):
        ends = {row.request_id: row.start + len(row.token_ids) for row in plan.rows}
        if ends.get(request_id, 0) > length:
            engine.runner.failures = [MemoryError(NO_MEMORY)]
        return launch(plan)

    engine.runner.launch = launch_if_it_fits


@pytest.mark.parametrize("when_read", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_without_memory_is_taken_back_and_smaller_ones_follow(ahead, when_read):
    engine = ScriptedEngine(max_num_seqs=8)
    engine.runner.runs_ahead, engine.runner.fails_when_read = ahead, when_read
    for number in range(8):
        engine.add(str(number), [number] * 3, max_tokens=12)
    engine.step(4)
    taken = len(engine.runner.plans)
    engine.runner.failures = [MemoryError(NO_MEMORY)]
    engine.run()
    for number in range(8):
        assert tokens(engine, str(number)) == expected_output([number] * 3, 12)
    assert engine.runner.plans[taken].num_tokens == 8
    later = engine.runner.plans[taken + 1 + (ahead and when_read) :]
    assert max(plan.num_tokens for plan in later) == 4
    # With a step in flight, the failed one and the one built on it have all of them.
    assert engine.engine.stats().preemptions == 8


def test_the_limit_is_lifted_again_after_a_while():
    limit = StepLimit(100)
    assert limit.apply(100) == 100
    assert [limit.lower(step_of(80)), limit.lower(step_of(80)), limit.lower(step_of(3))] == [40, 20, 1]
    reached = []
    while limit.tokens is not None:
        for _ in range(CALM_STEPS):
            limit.step_ended(step_of(1))
        reached.append(limit.apply(100))
    assert reached == [2, 4, 8, 16, 32, 64, 100]


def test_a_long_prompt_is_computed_in_ever_smaller_chunks():
    engine = ScriptedEngine(max_num_batched_tokens=32)
    prompt = varied_prompt(60, 1)
    engine.add("a", prompt, max_tokens=4)
    engine.runner.failures = [MemoryError(NO_MEMORY)] * 3
    engine.run()
    assert tokens(engine, "a") == expected_output(prompt, 4)
    assert [plan.num_tokens for plan in engine.runner.plans[:5]] == [32, 16, 8, 4, 4]


@pytest.mark.parametrize("when_read", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_only_a_request_that_cannot_run_alone_fails_and_says_why(ahead, when_read):
    engine = ScriptedEngine()
    engine.runner.runs_ahead, engine.runner.fails_when_read = ahead, when_read
    engine.add("a", [1, 2, 3], max_tokens=4)
    engine.add("b", [4, 5, 6, 7], max_tokens=4)
    engine.runner.failures = [MemoryError(NO_MEMORY)] * 20
    while not engine.outputs["a"]:
        engine.step()
    error = engine.error("a")
    assert isinstance(error, RequestFailedError)
    assert "no memory to compute even one token" in str(error)
    assert "kv_memory" in str(error)
    assert NO_MEMORY in str(error)
    engine.runner.failures = []
    engine.run()
    assert tokens(engine, "b") == expected_output([4, 5, 6, 7], 4)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("when_read", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [1, 20, 21, 22, 23, 32])
def test_a_request_that_finds_no_memory_beyond_a_length_fails_and_others_are_served(
    length, ahead, when_read, caching
):
    engine = ScriptedEngine(config={"enable_prefix_caching": caching})
    engine.runner.runs_ahead, engine.runner.fails_when_read = ahead, when_read
    without_memory_beyond(engine, "a", length)
    engine.add("a", varied_prompt(30, 1), max_tokens=4, ignore_eos=True)  # decodes up to 33
    engine.add("z", [9, 9], max_tokens=4, ignore_eos=True)
    engine.run(150)
    assert "even one token" in str(engine.error("a"))
    assert tokens(engine, "z") == expected_output([9, 9], 4)


def test_a_request_of_the_same_name_as_one_that_failed_has_tries_of_its_own():
    limit = StepLimit(100)
    limit.lower(step_of(1))
    assert limit.is_hopeless(step_of(1))
    limit.forget("b")
    assert limit.is_hopeless(step_of(1))
    limit.forget("a")
    assert not limit.is_hopeless(step_of(1))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_lone_request_is_tried_again_once_memory_has_been_given_back(ahead):
    engine = ScriptedEngine()
    engine.runner.runs_ahead = ahead
    engine.add("a", [1], max_tokens=99, ignore_eos=True)
    engine.runner.failures = ([MemoryError(NO_MEMORY)] + [None] * 5) * 8
    engine.run()
    assert len(tokens(engine, "a")) == 99


def test_an_engine_without_any_memory_fails_each_request_and_lives_on():
    engine = ScriptedEngine()
    for number in range(6):
        engine.add(str(number), [number] * 20, max_tokens=4)
    engine.runner.failures = [MemoryError(NO_MEMORY)] * 10_000
    engine.run()
    assert all(isinstance(engine.error(str(number)), RequestFailedError) for number in range(6))
    engine.runner.failures = []
    engine.add("later", [1, 2], max_tokens=3)
    engine.run()
    assert tokens(engine, "later") == expected_output([1, 2], 3)


def test_chunks_built_on_one_that_had_no_memory_give_no_token():
    engine = ScriptedEngine(max_num_batched_tokens=8, num_blocks=60)
    engine.runner.runs_ahead = engine.runner.fails_when_read = True
    prompt = varied_prompt(16, 3)
    engine.add("a", prompt, max_tokens=4)
    engine.runner.failures = [MemoryError(NO_MEMORY)]  # the first chunk; the second samples
    engine.run()
    assert tokens(engine, "a") == expected_output(prompt, 4)


@pytest.mark.parametrize("states", [0, 24])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_under_random_want_of_memory(seed, ahead, states):
    rng = random.Random(seed)
    policy = rng.choice(["fcfs", "priority", "longest_prefix"])
    engine = ScriptedEngine(
        num_blocks=30,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        num_states=states,
        config={"scheduling_policy": policy},
    )
    engine.runner.runs_ahead = ahead
    prompts = {}
    for number in range(60):
        name = str(number)
        prompts[name] = [rng.randrange(3)] * rng.randint(1, 30) + [rng.randrange(200)]
        engine.add(name, prompts[name], max_tokens=rng.randint(1, 20), ignore_eos=True)
        for _ in range(rng.randint(0, 3)):
            if rng.random() < 0.1:
                engine.runner.fails_when_read = rng.random() < 0.5
                engine.runner.failures = [None] * rng.randint(0, 2) + [MemoryError(NO_MEMORY)]
            engine.step()
    engine.run(3000)
    for name, prompt in prompts.items():
        if isinstance(engine.outputs[name][-1], RequestFailedError):
            assert "even one token" in str(engine.outputs[name][-1])
            continue
        assert tokens(engine, name) == expected_output(prompt, len(tokens(engine, name)))


class OutOfMemory(nn.Module):
    """A part of the model that finds no memory in chosen calls; what was written before stays written."""

    def __init__(self, part, calls):
        super().__init__()
        self.part = part
        self._calls = calls
        self._count = 0

    def __call__(self, x):
        self._count += 1
        if self._count in self._calls:
            raise RuntimeError(f"{NO_MEMORY} which is greater than the maximum allowed buffer size.")
        return self.part(x)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("calls", [[1], [2, 3], [6, 7, 30]])
def test_a_models_answers_survive_steps_without_memory(tiny_model, oracle, calls, caching, monkeypatch):
    cleared = []
    clear_cache = mx.clear_cache
    monkeypatch.setattr(mx, "clear_cache", lambda: (cleared.append(1), clear_cache()))
    with LLM(
        model=str(tiny_model("llama")),
        skip_tokenizer_init=True,
        num_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        enable_prefix_caching=caching,
    ) as llm:
        layer = engine_of(llm)._runner._host.model.layers[1]
        layer.mlp = OutOfMemory(layer.mlp, calls)
        prompts = [varied_prompt(5 + 9 * s, s) for s in range(4)]
        start_together(llm, 4)
        waits = [submit(llm, prompt, greedy(12)) for prompt in prompts]
        for wait, prompt in zip(waits, prompts, strict=True):
            assert_matches(wait().outputs[0], oracle("llama").greedy(prompt, 12))
        check_books(llm)
        after = settled_stats(llm)
        assert after.preemptions >= len(calls)
        assert after.used_blocks == 0
        assert len(cleared) == len(calls)
