"""Steps launched before the one before is read: answers stay what they are, and nothing is left behind."""

import random

import pytest
from fake_runner import expected_output
from scripted_engine import EOS, ScriptedEngine, letters

from mlx_paged_attention.engine.engine import MAX_FAILED_STEPS
from mlx_paged_attention.errors import RequestFailedError
from mlx_paged_attention.scheduler.step_plan import UNKNOWN_TOKEN


def ahead(**options):
    engine = ScriptedEngine(**options)
    engine.runner.runs_ahead = True
    return engine


def unknown_rows(engine):
    """(step, request) of every row that was planned before its token had come back."""
    return [
        (plan.step, row.request_id)
        for plan in engine.runner.plans
        for row in plan.rows
        if row.token_ids == [UNKNOWN_TOKEN]
    ]


def test_a_request_decodes_with_a_step_in_flight_and_takes_no_more_steps():
    engine = ahead()
    engine.add("a", [1, 2, 3], max_tokens=5)
    engine.step()
    assert engine.outputs["a"] == []  # launched, and not yet read
    engine.step()
    assert [len(output.outputs[0].token_ids) for output in engine.outputs["a"]] == [1]
    engine.run()
    assert engine.last("a").outputs[0].token_ids == expected_output([1, 2, 3], 5)
    assert unknown_rows(engine) == [(step, "a") for step in range(1, 5)]
    assert len(engine.runner.plans) == 5  # none after its last token: its length was known


def test_random_traffic_gets_what_each_request_gets_alone():
    rng = random.Random(5)
    engine = ahead(num_blocks=30, max_num_seqs=5, max_num_batched_tokens=16)
    prompts = {}
    for number in range(60):
        name = str(number)
        prompts[name] = [rng.randrange(3)] * rng.randint(1, 30) + [rng.randrange(200)]
        engine.add(name, prompts[name], max_tokens=rng.randint(1, 20), ignore_eos=True)
        engine.step(rng.randint(0, 3))
    engine.run()
    assert engine.engine.stats().preemptions > 0
    assert len(unknown_rows(engine)) > 200
    for name, prompt in prompts.items():
        token_ids = engine.last(name).outputs[0].token_ids
        assert token_ids == expected_output(prompt, len(token_ids))


def test_the_row_after_an_unforeseen_end_is_for_nobody():
    engine = ahead(tokenizer=letters())
    engine.add("a", "xyz", answer=[*b"ab", EOS, *b"never seen"])
    engine.add("b", "uvw", answer="as usual", stop="u")
    engine.run()
    assert engine.last("a").outputs[0].text == "ab"
    assert engine.last("a").outputs[0].finish_reason == "stop"
    assert engine.last("b").outputs[0].text == "as "
    after = max(step for step, name in unknown_rows(engine) if name == "a")
    assert after == 3  # the step after that of the end


def test_an_id_given_away_again_does_not_get_its_namesakes_token():
    engine = ahead()
    engine.add("a", [1, 2, 3, 4], max_tokens=9)
    engine.step(2)
    engine.engine.abort("a")
    engine.add(
        "a", [9, 9, 9, 9, 9], max_tokens=3
    )  # as long as the first was when its row in flight was planned
    engine.run()
    assert engine.last("a").outputs[0].token_ids == expected_output([9, 9, 9, 9, 9], 3)


def test_a_launch_that_raises_comes_after_the_tokens_in_flight():
    engine = ahead()
    engine.add("a", [1, 2, 3], max_tokens=9)
    engine.step(2)
    engine.runner.failures = [RuntimeError("out of memory")]
    engine.step()
    assert isinstance(engine.error("a"), RequestFailedError)
    assert engine.outputs["a"][-2].outputs[0].token_ids == expected_output([1, 2, 3], 2)
    engine.check_idle()
    engine.add("b", [1, 2, 3], max_tokens=3)
    engine.run()
    assert engine.last("b").outputs[0].token_ids == expected_output([1, 2, 3], 3)


def test_one_fault_counts_once_whatever_becomes_of_the_step_after():
    engine = ahead()
    engine.runner.fails_when_read = True
    for fault in range(MAX_FAILED_STEPS - 1):
        engine.add(str(fault), [1, 2, 3], max_tokens=9)
        engine.runner.failures = [RuntimeError("out of memory")] * 2  # the step, and the one built on it
        while engine.engine.has_work:
            engine.step()
        assert isinstance(engine.error(str(fault)), RequestFailedError)
    engine.add("last", [1, 2, 3], max_tokens=9)
    engine.runner.failures = [RuntimeError("out of memory"), None]
    engine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()


def test_nobody_is_preempted_for_a_token_that_may_be_for_nobody():
    engine = ahead(num_blocks=9, block_size=4)
    # Four blocks each are all there are. The second token of a is in flight, and its third would need
    # another block; but the second ends it.
    engine.add("a", list(range(15)), answer=[65, EOS], max_tokens=9)
    engine.add("b", [7] * 15, max_tokens=4, ignore_eos=True)
    engine.run()
    assert engine.last("a").outputs[0].finish_reason == "stop"
    assert engine.last("b").outputs[0].token_ids == expected_output([7] * 15, 4)
    assert engine.engine.stats().preemptions == 0


def test_a_read_that_raises_fails_its_requests_though_the_next_step_runs():
    engine = ahead(max_num_batched_tokens=8)
    engine.runner.fails_when_read = True
    engine.add("a", [1, 2, 3], max_tokens=9)
    engine.step(2)
    engine.runner.failures = [RuntimeError("out of memory")]
    engine.step()
    engine.add("b", [5, 6], max_tokens=4)
    engine.step()  # launches the first step of b, and reads the one that failed
    assert isinstance(engine.error("a"), RequestFailedError)
    assert not engine.engine._in_flight  # nothing is launched while what was built on a failure runs
    assert len(engine.outputs["b"]) == 1
    engine.run()
    assert engine.last("b").outputs[0].token_ids == expected_output([5, 6], 4)


@pytest.mark.parametrize(
    "params", [{"presence_penalty": 0.5}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.2}]
)
def test_while_a_request_waits_for_its_tokens_every_step_is_read_before_the_next(params):
    engine = ahead()
    engine.add("a", [1, 2, 3], max_tokens=20)
    engine.step(3)
    engine.add("b", [7, 8], max_tokens=4, **params)
    engine.step(3)
    before = len(unknown_rows(engine))
    while not engine.outputs["b"] or not engine.outputs["b"][-1].finished:
        engine.step()
    assert len(unknown_rows(engine)) == before
    engine.run()
    assert len(unknown_rows(engine)) > before
    assert engine.last("a").outputs[0].token_ids == expected_output([1, 2, 3], 20)
    assert engine.last("b").outputs[0].token_ids == expected_output([7, 8], 4)


def test_log_probabilities_of_a_prompt_land_where_they_belong():
    engine = ahead(max_num_batched_tokens=8)
    engine.add("a", [1, 2, 3], max_tokens=9)
    engine.step(2)
    engine.add("b", list(range(20)), max_tokens=2, prompt_logprobs=0)
    engine.run()
    entries = engine.last("b").prompt_logprobs
    assert entries[0] is None
    assert [next(iter(entry.values())).logprob for entry in entries[1:]] == [-float(i) for i in range(1, 20)]


@pytest.mark.parametrize("answer", [13, 14, 30])
def test_what_a_finished_request_computed_is_found_again(answer):
    """Its last full block, too, which was planned before its tokens were known."""
    first = [7, 8, 9]
    for steps_ahead in (False, True):
        engine = ScriptedEngine(num_blocks=10)
        engine.runner.runs_ahead = steps_ahead
        engine.add("a", first, max_tokens=answer, ignore_eos=True)
        engine.run()
        conversation = first + engine.last("a").outputs[0].token_ids
        engine.add("b", [*conversation, 5], max_tokens=1)
        engine.run()
        size = engine.engine.info.block_size
        computed = len(conversation) - 1
        assert engine.last("b").num_cached_tokens >= computed // size * size
