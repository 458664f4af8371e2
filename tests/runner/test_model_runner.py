"""A step plan in, sampled tokens out: what the runner computes, remembers, forgets and leaves undone."""

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from oracle import varied_prompt
from step_driver import ALONE, DENSE, PACKED, ROWS, StepDriver, load_host

from mlx_paged_attention.models import seam
from mlx_paged_attention.runner.model_host import ModelHost
from mlx_paged_attention.scheduler.step_plan import UNKNOWN_TOKEN, PlannedRow, StepOutput, StepPlan

PROMPTS = {"a": varied_prompt(37, 1), "b": varied_prompt(5, 2), "c": varied_prompt(21, 3)}


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return load_host(tiny_model("llama"))


@pytest.fixture
def driver(loaded):
    return StepDriver(*loaded)


def run_mixed_steps(driver):
    """Chunks, mixed steps and decodes of three requests, five outputs each; every step's output."""
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
    outputs = [driver.step(a=20, b=5, c=2), driver.step(b=1, a=17, c=19)]
    outputs += [driver.step(a=1, b=1, c=1) for _ in range(3)]
    return [*outputs, driver.step(c=1, a=1)]


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("layout", [PACKED, ROWS, DENSE, ALONE], ids=lambda layout: layout.name)
def test_chunks_and_mixed_steps_sample_what_mlx_lm_samples(loaded, oracle, layout, on_host):
    driver = StepDriver(*loaded, layout, on_host=on_host)
    run_mixed_steps(driver)
    for name, prompt in PROMPTS.items():
        output = driver.tokens[name][len(prompt) :]
        assert len(output) == 5
        assert output == oracle("llama").greedy(prompt, 5).token_ids


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_a_step_may_be_launched_before_the_tokens_it_starts_from_are_read(loaded, oracle, on_host):
    driver = StepDriver(*loaded, on_host=on_host)
    for name in "ab":
        driver.add(name, PROMPTS[name])
    first = driver.runner.launch(driver.plan(a=37, b=5))
    driver.add("c", PROMPTS["c"])
    plan = driver.plan(c=10)
    rows = [
        PlannedRow(name, [UNKNOWN_TOKEN], len(PROMPTS[name]), [], len(PROMPTS[name]), True) for name in "ba"
    ]
    second = driver.runner.launch(msgspec.structs.replace(plan, rows=[*rows, *plan.rows]))
    for output in (first.read(), second.read()):
        for row in output.rows:
            driver.tokens[row.request_id] += row.token_ids
    for name in "ab":
        assert driver.tokens[name][len(PROMPTS[name]) :] == oracle("llama").greedy(PROMPTS[name], 2).token_ids


def test_rows_report_in_plan_order_and_only_if_they_have_something_to_say(driver):
    outputs = run_mixed_steps(driver)
    assert [[row.request_id for row in output.rows] for output in outputs] == [
        ["b"],  # the chunks of a and c have not reached their last token
        ["b", "a", "c"],
        *[["a", "b", "c"]] * 3,
        ["c", "a"],
    ]
    assert [output.step for output in outputs] == list(range(6))
    assert all(len(row.token_ids) == 1 and row.logprobs is None for o in outputs for row in o.rows)


def test_a_plan_that_went_through_msgpack_gives_the_same_output(loaded):
    drivers = [StepDriver(*loaded) for _ in range(2)]
    for driver in drivers:
        driver.add("a", PROMPTS["a"], temperature=1.3, seed=2**63 + 5, logprobs=3, logit_bias={7: 2.5})
        driver.add("b", PROMPTS["b"], prompt_logprobs=2, top_p=0.9, temperature=0.7, seed=-1)
        driver.add("c", PROMPTS["c"], allowed_token_ids=[1, 2, 3], bad_words=[[1, 2]], logprobs=0)
    for counts in ({"a": 30, "b": 3, "c": 21}, {"a": 7, "b": 2, "c": 1}, {"c": 1, "b": 1, "a": 1}):
        direct = drivers[0].step(**counts)
        plan = drivers[1].plan(**counts)
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        assert copy == plan
        remote = drivers[1].runner.launch(copy).read()
        remote = drivers[1].take(msgspec.msgpack.decode(msgspec.msgpack.encode(remote), type=StepOutput))
        assert remote == direct
    assert {row.request_id for row in direct.rows} == {"a", "b", "c"}


def test_a_released_row_is_forgotten_and_its_id_may_come_again(driver, oracle):
    driver.add("a", PROMPTS["a"])
    driver.add("b", PROMPTS["b"])
    driver.step(a=37, b=5)
    driver.release("a")
    driver.step(b=1)
    assert list(driver.runner._rows) == ["b"]
    driver.add("a", PROMPTS["c"])
    driver.step(b=1, a=21)
    driver.step(b=1, a=1)
    assert driver.tokens["a"][21:] == oracle("llama").greedy(PROMPTS["c"], 2).token_ids
    assert driver.tokens["b"][5:] == oracle("llama").greedy(PROMPTS["b"], 4).token_ids


def test_releasing_what_the_runner_never_saw_is_no_error(driver):
    """A request may be preempted before any plan with it was run."""
    driver._blocks["ghost"] = []
    driver.release("ghost")
    driver.add("b", PROMPTS["b"])
    assert len(driver.step(b=5).rows) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.2, "seed": 9},
        {"temperature": 0.8, "seed": 9, "top_k": 40, "top_p": 0.95},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5, "temperature": 1.0, "seed": 3},
        {"min_tokens": 6, "stop_ids": list(range(0, 256, 2))},
    ],
    ids=["greedy", "seeded", "filtered", "repetition", "frequency", "min_tokens"],
)
def test_a_preempted_row_re_enters_and_goes_on_as_if_nothing_had_happened(loaded, sampling):
    def outputs(preempt_after, pause=0):
        driver = StepDriver(*loaded)
        driver.add("a", PROMPTS["a"], **sampling)
        driver.add("b", PROMPTS["b"])
        driver.step(a=37, b=5)
        for turn in range(8):
            if turn == preempt_after:
                driver.release("a")
                for _ in range(pause):
                    driver.step(b=1)
                # Without a pause it re-enters in the plan that releases it.
                driver.add("a", driver.tokens["a"], num_prompt_tokens=37, **sampling)
                driver.step(b=1, a=len(driver.tokens["a"]))
            else:
                driver.step(a=1, b=1)
        return driver.tokens["a"][37:]

    undisturbed = outputs(None)
    assert len(undisturbed) == 9
    assert outputs(3) == outputs(4, pause=2) == undisturbed


@pytest.mark.parametrize("chunks", [[37], [1] * 37, [16, 16, 5], [33, 4], [36, 1]], ids=str)
def test_prompt_logprobs_stand_at_their_positions_however_the_prompt_is_cut(driver, oracle, chunks):
    prompt = PROMPTS["a"]
    reference = oracle("llama").prompt_logprobs(prompt)
    driver.add("b", PROMPTS["b"])
    driver.step(b=5)
    driver.add("a", prompt, prompt_logprobs=3)
    at = {}
    position = 0
    for chunk in chunks:
        (entries,) = [r.prompt_logprobs for r in driver.step(b=1, a=chunk).rows if r.request_id == "a"] or [
            None
        ]
        # Position 0 is predicted by nothing; the last logits predict the first output.
        expected = min(chunk, len(prompt) - 1 - position)
        assert len(entries or []) == expected
        at |= {position + 1 + i: entry for i, entry in enumerate(entries or [])}
        position += chunk
    assert sorted(at) == list(range(1, 37))
    for position, entry in at.items():
        row = reference[position - 1]
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == 1 + (row > row[entry.token_id]).sum()
        best = np.argsort(-row, kind="stable")[:3]
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row[best].tolist(), abs=1e-4)
    assert driver.tokens["a"][37:] == oracle("llama").greedy(prompt, 1).token_ids


def test_prompt_logprobs_of_a_resumed_row_stop_at_the_prompt(driver):
    driver.add("a", [*PROMPTS["b"], 9, 8, 7], num_prompt_tokens=5, prompt_logprobs=0)
    (row,) = driver.step(a=8).rows
    assert [entry.token_id for entry in row.prompt_logprobs] == PROMPTS["b"][1:]
    assert len(row.token_ids) == 1


def test_a_prompt_of_one_token_has_no_prompt_logprobs(driver):
    driver.add("a", [5], prompt_logprobs=1)
    (row,) = driver.step(a=1).rows
    assert row.prompt_logprobs is None
    assert len(row.token_ids) == 1


def test_logprobs_come_for_the_rows_that_asked(driver, oracle):
    driver.add("a", PROMPTS["a"], logprobs=2)
    driver.add("b", PROMPTS["b"])
    driver.add("c", PROMPTS["c"], logprobs=0)
    rows = {row.request_id: row for row in driver.step(a=37, b=5, c=21).rows}
    assert rows["b"].logprobs is None
    assert rows["c"].logprobs[0].top == []
    (entry,) = rows["a"].logprobs
    reference = oracle("llama").greedy(PROMPTS["a"], 1).logprobs[0]
    assert entry.rank == 1
    assert entry.logprob == pytest.approx(float(reference.max()), abs=1e-4)


class CountingHead(nn.Linear):
    def __call__(self, x):
        CountingHead.rows.append(x.shape[0] * x.shape[1])
        return super().__call__(x)


def test_logits_are_computed_for_the_rows_that_need_them_alone(loaded, tiny_model):
    host, spec = load_host(tiny_model("llama"))
    plain = host.model.lm_head
    head = CountingHead(1, 1, bias=False)
    head.weight = plain.weight
    host.model.lm_head = head
    driver = StepDriver(ModelHost(host.model), spec)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, prompt_logprobs=0 if name == "c" else None)

    def counted(**counts):
        CountingHead.rows = []
        driver.step(**counts)
        return CountingHead.rows

    assert counted(a=33) == [0]
    # The last chunk of a: 1; of b: 1; 10 prompt positions of c.
    assert sum(counted(a=4, b=5, c=10)) == 12
    assert sum(counted(a=1, c=10, b=1)) == 12
    assert sum(counted(c=1, a=1)) == 2


def test_a_model_that_raises_leaves_the_seam_clean_and_the_next_step_right(loaded, oracle, monkeypatch):
    driver = StepDriver(*loaded)
    driver.add("b", PROMPTS["b"])
    driver.step(b=5)
    calls = []

    def raising(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:  # the second layer: the first has written, the second holds new keys
            raise RuntimeError("out of memory")
        return seam.scaled_dot_product_attention(*args, **kwargs)

    driver.add("a", PROMPTS["a"])
    plan = driver.plan(a=20)
    with monkeypatch.context() as patch:
        patch.setattr(llama, "scaled_dot_product_attention", raising)
        with pytest.raises(MemoryError, match="out of memory"):
            driver.runner.launch(plan).read()
    assert not seam.waiting_for_attention
    assert loaded[0].context.batch is None
    assert loaded[0].context.selected is None

    driver.release("a")
    driver.add("c", PROMPTS["c"])
    driver.step(b=1, c=21)
    driver.step(c=1, b=1)
    assert driver.tokens["b"][5:] == oracle("llama").greedy(PROMPTS["b"], 3).token_ids
    assert driver.tokens["c"][21:] == oracle("llama").greedy(PROMPTS["c"], 2).token_ids
    # mlx-lm itself still works on the same model.
    model = loaded[0].model
    logits = model(mx.array([PROMPTS["a"]]), cache=make_prompt_cache(model))
    assert logits.shape == (1, 37, 256)
    assert int(logits[0, -1].argmax()) == oracle("llama").greedy(PROMPTS["a"], 1).token_ids[0]


def test_nothing_of_a_step_that_failed_is_written_later(loaded, monkeypatch):
    driver = StepDriver(*loaded, on_host=True)
    driver.add("b", PROMPTS["b"])
    driver.step(b=5)
    layers = driver.runner._pool.layers
    before = [layer.k.copy() for layer in layers]

    def raising(*args, **kwargs):
        seam.scaled_dot_product_attention(*args, **kwargs)
        assert layers[0].state, "the first layer has written at once"
        raise RuntimeError("out of memory")

    plan = driver.plan(b=1)
    with monkeypatch.context() as patch:
        patch.setattr(llama, "scaled_dot_product_attention", raising)
        with pytest.raises(MemoryError, match="out of memory"):
            driver.runner.launch(plan).read()
    driver.runner._pool.flush()
    for layer, keys in zip(layers, before, strict=True):
        np.testing.assert_array_equal(layer.k, keys)


def test_a_model_that_fetches_keys_and_never_attends_is_an_error(loaded, monkeypatch):
    driver = StepDriver(*loaded)
    driver.add("a", PROMPTS["b"])
    with monkeypatch.context() as patch:
        patch.setattr(llama, "scaled_dot_product_attention", lambda q, *args, **kwargs: q)
        with pytest.raises(AssertionError, match="layer 0 fetched keys but never attended"):
            driver.step(a=5)
    assert not seam.waiting_for_attention


@pytest.mark.parametrize("on_host", [True, False])
def test_a_copied_block_saves_computing_what_it_holds(loaded, oracle, on_host):
    driver = StepDriver(*loaded, on_host=on_host)
    driver.add("a", PROMPTS["a"])
    driver.step(a=37)
    shared, own = PROMPTS["a"][:21], [7, 8, 9]
    source, used = driver._blocks["a"][1], driver._blocks["a"][0]
    driver.add("b", [*shared, *own])
    driver._blocks["b"], driver._computed["b"] = [used, 60], 21
    plan = driver.plan(b=3)
    row = msgspec.structs.replace(plan.rows[0], new_block_ids=[used, 60])
    plan = msgspec.structs.replace(plan, rows=[row], copies=[(source, 60)])
    driver.take(driver.runner.launch(plan).read())
    driver.step(b=1, a=1)
    assert driver.tokens["b"][24:] == oracle("llama").greedy([*shared, *own], 2).token_ids
    assert driver.tokens["a"][37:] == oracle("llama").greedy(PROMPTS["a"], 2).token_ids


def test_a_table_grows_beyond_its_first_capacity(driver, oracle):
    prompt = varied_prompt(16 * 16 + 3, 5)
    driver.add("a", prompt)
    driver.step(a=200)
    driver.step(a=59)
    driver.step(a=1)
    assert driver.tokens["a"][259:] == oracle("llama").greedy(prompt, 2).token_ids
