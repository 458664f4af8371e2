"""Beam search finds what a plain search over mlx-lm's logits finds, whatever runs beside it."""

import itertools
import math

import pytest
from fake_runner import expected_output
from oracle import assert_matches, greedy, varied_prompt
from plain_search import PlainSearch, assert_found, beam_params
from scripted_engine import ScriptedEngine, letters, text_ids

from mlx_paged_attention import SamplingParams
from mlx_paged_attention.engine.beams import Hypothesis
from mlx_paged_attention.errors import InvalidRequestError, RequestFailedError

PROMPTS = [varied_prompt(length, seed) for seed, length in enumerate((37, 16, 5))]
# Tokens that tiny models like, so that answers end.
ENDS = (3, 9, 17, 21, 40, 41, 42, 55, 60, 77, 90, 101)


@pytest.fixture(scope="module")
def search(oracle):
    return PlainSearch(oracle("llama").model)


@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_beams_of_several_prompts_at_once_are_those_of_the_plain_search(engine, search, width):
    llm = engine("llama")
    outputs = llm.generate(PROMPTS, beam_params(n=width, max_tokens=9))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_found(output, search.run(prompt, width, 9), width)
        assert [answer.index for answer in output.outputs] == list(range(width))
    assert llm.stats().used_blocks == 0


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
def test_answers_that_end_compete_by_their_score(engine, search, length_penalty, early_stopping):
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    params = beam_params(n=2, best_of=4, max_tokens=12, stop_token_ids=ENDS, **options)
    outputs = engine("llama").generate(PROMPTS, params)
    reasons = set()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_found(output, search.run(prompt, 4, 12, ENDS, **options), 2)
        reasons |= {answer.finish_reason for answer in output.outputs}
    assert "stop" in reasons or length_penalty == 2.0  # which long answers win


def test_beams_in_few_blocks_lose_and_regain_theirs_and_find_the_same(engine, search, oracle):
    llm = engine(
        "llama", num_blocks=9, max_num_seqs=6, max_num_batched_tokens=16, enable_prefix_caching=False
    )
    before = llm.stats().preemptions
    beams = beam_params(n=3, max_tokens=14)
    outputs = llm.generate([*PROMPTS, PROMPTS[0]], [beams, beams, beams, greedy(20)])
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert_found(output, search.run(prompt, 3, 14), 3)
    assert_matches(outputs[3].outputs[0], oracle("llama").greedy(PROMPTS[0], 20))
    assert llm.stats().preemptions > before
    assert llm.stats().used_blocks == 0


def test_beams_share_the_blocks_of_what_they_have_in_common():
    engine = ScriptedEngine(num_blocks=200, max_model_len=400, max_num_batched_tokens=256)
    prompt = list(range(1, 151))
    engine.add("r", prompt, n=4, use_beam_search=True, max_tokens=8, ignore_eos=True)
    most = 0
    while engine.engine.has_work:
        engine.step()
        most = max(most, engine.engine.stats().used_blocks)
    engine.check_idle()
    size = engine.engine.info.block_size
    # Everything that is common once, and for each beam its own tokens and a partly filled block.
    assert most <= -(-len(prompt) // size) + 4 * (-(-8 // size) + 1)


def test_text_ends_at_the_models_end_of_sequence():
    engine = ScriptedEngine(tokenizer=letters())
    # The scripted runner offers tokens 7 and 8 everywhere.
    engine.engine.info.eos_token_ids[:] = [7]
    engine.add("r", text_ids("ab"), n=2, use_beam_search=True, length_penalty=0.0, max_tokens=3)
    engine.run()
    answers = engine.last("r").outputs
    assert [(a.token_ids, a.finish_reason, a.stop_reason) for a in answers] == [
        ([7], "stop", None),
        ([8, 7], "stop", None),
    ]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_an_aborted_search_reports_the_best_so_far_and_leaves_nothing_behind(steps):
    engine = ScriptedEngine()
    engine.add("r", [1, 2, 3], n=2, use_beam_search=True, max_tokens=20)
    engine.step(steps)
    engine.engine.abort("r")
    engine.check_idle()
    answers = engine.last("r").outputs
    assert {answer.finish_reason for answer in answers} == {"abort"}
    assert {len(answer.token_ids) for answer in answers} == {steps}


def test_a_step_that_raises_ends_the_whole_search_with_an_error():
    engine = ScriptedEngine()
    engine.add("r", [1, 2, 3], n=3, use_beam_search=True, max_tokens=20)
    engine.add("s", [9, 9], max_tokens=2)
    engine.step(3)
    engine.runner.failures = [RuntimeError("broken")]
    engine.run()
    assert isinstance(engine.error("r"), RequestFailedError)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 1.0}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": "x"}, "stop"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logprobs": 2}, "logprobs"),
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_what_beam_search_would_ignore_is_refused_by_name(options, named):
    with pytest.raises(InvalidRequestError) as caught:
        beam_params(**options)
    assert caught.value.param == named


def test_a_search_wider_than_the_engine_is_refused():
    engine = ScriptedEngine(max_num_seqs=4)
    with pytest.raises(InvalidRequestError, match="max_num_seqs is 4"):
        engine.add("r", [1], n=5, use_beam_search=True)


def test_searches_beside_drawn_answers_change_nothing(engine, search):
    llm = engine("llama")
    drawn = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=9, ignore_eos=True)
    alone = llm.generate(PROMPTS[1], drawn)[0]
    both = llm.generate(
        list(itertools.chain(PROMPTS, PROMPTS[1:2])), [*[beam_params(n=3, max_tokens=9)] * 3, drawn]
    )
    for prompt, output in zip(PROMPTS, both, strict=False):
        assert_found(output, search.run(prompt, 3, 9), 3)
    assert [a.token_ids for a in both[3].outputs] == [a.token_ids for a in alone.outputs]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest_prefix"])
@pytest.mark.parametrize(
    ("searches", "width", "seats", "blocks"),
    [(2, 4, 6, 300), (3, 4, 8, 300), (6, 4, 8, 300), (4, 4, 5, 300), (3, 4, 16, 9)],
)
def test_searches_that_have_too_few_seats_or_blocks_between_them_all_end(
    policy, searches, width, seats, blocks
):
    engine = ScriptedEngine(
        config={"scheduling_policy": policy}, num_blocks=blocks, max_num_seqs=seats, max_model_len=32
    )
    for i in range(searches):
        priority = {"priority": i % 2} if policy == "priority" else {}
        engine.add(f"b{i}", [65 + i] * 10, n=width, use_beam_search=True, max_tokens=12, **priority)
    engine.run(limit=12 * searches * (width + 2) * 2)
    for i in range(searches):
        assert len(engine.last(f"b{i}").outputs) == width


@pytest.mark.parametrize("penalty", [-10.0, 10.0])
def test_a_long_answer_has_a_score_at_every_penalty(penalty):
    long = Hypothesis(tuple(range(1_000_000)), -1e6)
    assert -math.inf < long.score(penalty) < 0.0


def test_a_beam_takes_no_name_that_somebody_else_has():
    engine = ScriptedEngine()
    engine.add("r", [1, 2, 3], n=3, use_beam_search=True, max_tokens=6)
    engine.add("r#1", [4, 5], max_tokens=6, ignore_eos=True)
    engine.run()
    assert len(engine.last("r").outputs) == 3
    assert engine.last("r#1").outputs[0].token_ids == expected_output([4, 5], 6)
