"""Answers to one prompt, and branches of a running request, share blocks until they write into them."""

import asyncio
import contextlib

import pytest
from fake_runner import expected_output
from oracle import assert_matches, greedy, varied_prompt
from scripted_engine import ScriptedEngine

from mlx_paged_attention import AsyncLLM, SamplingParams
from mlx_paged_attention.errors import InvalidRequestError, RequestFailedError

PROMPT = varied_prompt(37, 1)


def fork(engine, parent, name, *, index=0, **params):
    outputs = engine.outputs.setdefault(name, [])
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params}) if params else None
    engine.engine.fork(parent, name, chosen, index=index, kind="cumulative", emit=outputs.append)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("prompt", [2000, 2007])
def test_eight_answers_take_the_blocks_of_one_prompt_and_their_own(caching, prompt, ahead):
    engine = ScriptedEngine(
        config={"enable_prefix_caching": caching},
        num_blocks=400,
        block_size=16,
        max_model_len=4000,
        max_num_batched_tokens=512,
        vocab_size=4000,
    )
    engine.runner.runs_ahead = ahead
    output = 40
    engine.add("r", list(range(1, prompt + 1)), n=8, max_tokens=output, ignore_eos=True)
    most = computed = 0
    while engine.engine.has_work:
        engine.step()
        most = max(most, engine.engine.stats().used_blocks)
    engine.check_idle()
    computed = sum(plan.num_tokens for plan in engine.runner.plans)
    assert most <= -(-prompt // 16) + 8 * -(-output // 16) + 8
    # The prompt once, its last token for each of the others, and all but the last token of each answer.
    assert computed == prompt + 7 + 8 * (output - 1)
    copies = sum(len(plan.copies) for plan in engine.runner.plans)
    assert copies == (7 if prompt % 16 else 0)  # whoever writes last has the block to itself
    for answer in engine.last("r").outputs:
        assert answer.token_ids == expected_output(range(1, prompt + 1), output)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("steps", range(1, 12))
def test_a_branch_goes_on_from_what_has_been_said(steps, ahead):
    engine = ScriptedEngine()
    engine.runner.runs_ahead = ahead
    prompt = [5, 6, 7, 8, 9, 10]
    engine.add("a", prompt, max_tokens=20, ignore_eos=True)
    engine.step(steps)
    said = expected_output(prompt, 20)[: len(engine.engine._live.of("a")[0].sequences[0]._token_ids)]
    used = engine.engine.stats().used_blocks
    fork(engine, "a", "b", max_tokens=6, ignore_eos=True)
    assert engine.engine.stats().used_blocks == used  # nothing is copied yet
    engine.run()
    branch = engine.last("b")
    assert branch.prompt_token_ids == prompt + said
    assert branch.outputs[0].token_ids == expected_output(prompt + said, 6)
    assert engine.last("a").outputs[0].token_ids == expected_output(prompt, 20)
    computed = [row.request_id for plan in engine.runner.plans for row in plan.rows if row.request_id == "b"]
    assert len(computed) == 6


def test_branches_of_branches_outlive_their_parents():
    engine = ScriptedEngine(num_blocks=40)
    engine.add("a", [1, 2, 3, 4, 5], max_tokens=30, ignore_eos=True)
    engine.step(4)
    fork(engine, "a", "b")
    engine.step(2)
    fork(engine, "b", "c")
    engine.engine.abort("a")
    engine.step()
    engine.engine.abort("b")
    engine.run()
    prompt = engine.last("c").prompt_token_ids
    assert prompt[:5] == [1, 2, 3, 4, 5]
    assert engine.last("c").outputs[0].token_ids == expected_output(prompt, 30)


def test_a_branch_without_a_seat_waits_and_is_served_though_its_parent_ends():
    engine = ScriptedEngine(max_num_seqs=1)
    engine.add("a", [1, 2, 3], max_tokens=3, ignore_eos=True)
    engine.step(1)
    fork(engine, "a", "b", max_tokens=4, ignore_eos=True)
    assert engine.engine.stats().waiting == 1
    engine.run()
    assert engine.last("b").outputs[0].token_ids == expected_output(engine.last("b").prompt_token_ids, 4)


def test_branches_that_lose_their_blocks_begin_again_and_say_the_same():
    engine = ScriptedEngine(num_blocks=12, max_model_len=44)
    engine.add("a", [1, 2, 3], max_tokens=30, ignore_eos=True)
    engine.step(6)
    said = {name: [(7 * i + ord(name)) % 250 for i in range(20)] for name in "bcd"}
    for name in said:
        engine.runner.answers[name] = said[name]
        fork(engine, "a", name, max_tokens=20, ignore_eos=True)
    engine.run()
    assert engine.engine.stats().preemptions > 0
    for name in said:
        assert engine.last(name).outputs[0].token_ids == said[name]


def test_a_step_that_fails_takes_along_the_branches_of_what_it_wrote():
    engine = ScriptedEngine()
    engine.runner.runs_ahead = True
    engine.runner.fails_when_read = True
    engine.add("a", [1, 2, 3, 4, 5], max_tokens=20, ignore_eos=True)
    engine.add("z", [9, 9, 9], max_tokens=20, ignore_eos=True)
    engine.step(3)
    engine.engine.abort("z")
    engine.runner.failures = [RuntimeError("broken")]
    engine.step()
    fork(engine, "a", "b")
    engine.run()
    assert isinstance(engine.error("a"), RequestFailedError)
    assert isinstance(engine.error("b"), RequestFailedError)


@pytest.mark.parametrize("case", ["unknown", "finished", "beams", "answer", "salt", "same id"])
def test_what_cannot_be_branched_is_refused(case):
    engine = ScriptedEngine()
    engine.add("a", [1, 2, 3], max_tokens=1 if case == "finished" else 9, cache_salt="x")
    engine.add("b", [1, 2, 3], n=2, use_beam_search=True)
    engine.step(2)
    parent = {"unknown": "c", "beams": "b"}.get(case, "a")
    options = {"cache_salt": "y"} if case == "salt" else {}
    with pytest.raises(InvalidRequestError):
        fork(engine, parent, "a" if case == "same id" else "d", index=case == "answer", **options)
    engine.run()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_branches_of_a_running_request_say_what_mlx_lm_says(tiny_model, oracle, name):
    llm = AsyncLLM(model=str(tiny_model(name)), skip_tokenizer_init=True, num_blocks=128)
    branches = []

    async def branch(name, params):
        return [output async for output in llm.fork("main", params, name)][-1]

    async for output in llm.generate(PROMPT, greedy(60), "main"):
        said = len(output.outputs[0].token_ids)
        if said in (1, 7, 30):
            branches.append(asyncio.create_task(branch(f"branch-{said}", greedy(10))))
            await asyncio.sleep(0)
    assert_matches(output.outputs[0], oracle(name).greedy(PROMPT, 60))
    for result in await asyncio.gather(*branches):
        assert result.prompt_token_ids[:37] == PROMPT
        assert_matches(result.outputs[0], oracle(name).greedy(result.prompt_token_ids, 10))
        assert result.num_cached_tokens >= 37
    with pytest.raises(InvalidRequestError, match="not being served"):
        await branch("late", greedy(3))
    stats = llm.stats()
    assert (stats.running, stats.used_blocks) == (0, 0)
    llm.close()


def test_a_step_that_found_no_memory_takes_along_blocks_that_its_rows_have_copied_since():
    answers = []
    for failures in ([], [None, MemoryError("full")]):
        engine = ScriptedEngine(block_size=8, num_blocks=40, max_num_batched_tokens=10)
        engine.runner.runs_ahead = True
        engine.runner.fails_when_read = True
        engine.runner.failures = list(failures)
        engine.add("r", list(range(65, 77)), n=2, max_tokens=6, ignore_eos=True)
        engine.run()
        answers.append([answer.token_ids for answer in engine.last("r").outputs])
    assert answers[0] == answers[1] == [expected_output(range(65, 77), 6)] * 2


def test_branches_take_no_seat_from_those_who_came_before_them():
    engine = ScriptedEngine(max_num_seqs=2)
    engine.add("agent", [1, 2, 3], max_tokens=40, ignore_eos=True)
    engine.add("other", [4, 5, 6], max_tokens=4, ignore_eos=True)
    engine.add("waiting", [7, 8, 9], max_tokens=2, ignore_eos=True)
    for number in range(12):
        fork(engine, "agent", f"branch-{number}", max_tokens=2, ignore_eos=True)
        engine.step()
    assert engine.outputs["waiting"]
    assert engine.outputs["waiting"][-1].finished
    engine.run()


def test_answers_whose_first_has_ended_keep_their_place():
    engine = ScriptedEngine(max_num_seqs=1)
    engine.add("a", [1, 2, 3], n=3, max_tokens=2, ignore_eos=True)
    for name in ("later", "last"):
        engine.add(name, [4, 5, 6], max_tokens=2, ignore_eos=True)
    engine.run()
    order = list(dict.fromkeys(row.request_id for plan in engine.runner.plans for row in plan.rows))
    assert order == ["a#0", "a#1", "a#2", "later", "last"]


async def test_a_branch_that_was_refused_ends_nobody_else(tiny_model):
    llm = AsyncLLM(model=str(tiny_model("llama")), skip_tokenizer_init=True, num_blocks=128)
    said = 0
    async for output in llm.generate(PROMPT, greedy(40), "main"):
        said = len(output.outputs[0].token_ids)
        if said == 5:
            twin = llm.fork("main", greedy(3), "main")  # a name that is taken
            pending = asyncio.ensure_future(anext(twin))
            await asyncio.sleep(0)
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, InvalidRequestError):
                await pending
            await twin.aclose()
    assert said == 40
    assert output.outputs[0].finish_reason == "length"
    llm.close()
