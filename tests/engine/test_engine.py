"""Requests in, outputs out: every way a request goes through the engine and out of it."""

import pytest
from fake_runner import expected_output, varied_prompt
from scripted_engine import EOS, ScriptedEngine, letters, text_ids

from mlx_paged_attention.errors import InvalidRequestError, RequestFailedError, RequestTooLongError

PROMPT = varied_prompt(10, 1)


@pytest.fixture
def scripted():
    return ScriptedEngine()


@pytest.fixture
def texts():
    """An engine with a tokenizer whose tokens are characters."""
    return ScriptedEngine(tokenizer=letters())


def answers(output):
    return [answer.token_ids for answer in output.outputs]


# --- what comes out -----------------------------------------------------------------------------------------


def test_cumulative_outputs_grow_by_a_token_per_step(scripted):
    scripted.add("r", PROMPT, max_tokens=5)
    scripted.run()
    expected = expected_output(PROMPT, 5)
    assert [answers(o) for o in scripted.outputs["r"]] == [[expected[: i + 1]] for i in range(5)]
    last = scripted.last("r").outputs[0]
    assert (last.index, last.finish_reason, last.stop_reason) == (0, "length", None)
    assert (last.logprobs, last.cumulative_logprob) == (None, None)
    assert scripted.outputs["r"][0].outputs[0].finish_reason is None


def test_deltas_joined_are_the_final_answer(texts):
    for kind in ("delta", "cumulative", "final"):
        texts.add(kind, "question", kind=kind, answer="some answer", max_tokens=11, logprobs=1)
    texts.run()
    deltas = [output.outputs[0] for output in texts.outputs["delta"]]
    whole = texts.last("final").outputs[0]
    assert len(texts.outputs["final"]) == 1
    assert whole.text == "some answer"
    assert [delta.text for delta in deltas] == list("some answer")
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs] == whole.logprobs
    assert texts.last("cumulative").outputs[0] == whole
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].cumulative_logprob == whole.cumulative_logprob == pytest.approx(-11.0)


def test_a_delta_that_says_nothing_is_not_sent(texts):
    """The text that may begin a stop string is held back, but its token is news."""
    texts.add("r", "q", kind="delta", answer="abXY", max_tokens=4, stop="XYZ")
    texts.run()
    outputs = [output.outputs[0] for output in texts.outputs["r"]]
    assert [o.text for o in outputs] == ["a", "b", "", "XY"]
    assert [len(o.token_ids) for o in outputs] == [1, 1, 1, 1]


def test_several_requests_do_not_touch_each_other(scripted):
    prompts = {f"r{i}": varied_prompt(3 * i + 1, i) for i in range(12)}
    for name, prompt in prompts.items():
        scripted.add(name, prompt, max_tokens=6)
    scripted.run()
    for name, prompt in prompts.items():
        assert answers(scripted.last(name)) == [expected_output(prompt, 6)]
        assert scripted.last(name).request_id == name
        assert scripted.last(name).prompt_token_ids == prompt


def test_text_prompts_come_back_as_text_and_ids(texts):
    texts.add("r", "hello")
    texts.add("ids", [1, 2])
    texts.run()
    assert texts.last("r").prompt == "hello"
    assert texts.last("r").prompt_token_ids == text_ids("hello")
    assert texts.last("ids").prompt is None


def test_an_output_keeps_the_prompt_as_it_was_handed_in(scripted):
    prompt = list(PROMPT)
    scripted.add("r", prompt, max_tokens=2)
    prompt.append(999)
    scripted.run()
    assert scripted.last("r").prompt_token_ids == PROMPT


def test_without_detokenizing_there_are_ids_and_no_text(texts):
    texts.add("r", "q", answer="abc", max_tokens=3, detokenize=False)
    texts.run()
    assert texts.last("r").outputs[0].text == ""
    assert answers(texts.last("r")) == [text_ids("abc")]


def test_times_are_in_order_and_known_as_they_happen(scripted):
    scripted.add("r", varied_prompt(40, 1), max_tokens=3)
    scripted.run()
    first, last = scripted.outputs["r"][0].metrics, scripted.last("r").metrics
    assert first.arrival_time <= first.first_scheduled_time <= first.first_token_time <= last.finished_time
    assert first.finished_time is None
    assert last.first_token_time == first.first_token_time
    # 40 tokens are two steps: the first token comes with the second.
    assert first.first_scheduled_time < first.first_token_time


def test_cached_tokens_are_reported(scripted):
    for name in ("one", "two"):
        scripted.add(name, varied_prompt(13, 2), max_tokens=2)
        scripted.run()
    assert scripted.last("one").num_cached_tokens == 0
    assert scripted.last("two").num_cached_tokens == 12
    assert (scripted.engine.stats().prefix_queries, scripted.engine.stats().prefix_hits) == (26, 12)


# --- endings ------------------------------------------------------------------------------------------------


def test_end_of_sequence_ends_without_a_reason_of_its_own(texts):
    texts.add("r", "q", answer=[*text_ids("ab"), EOS, 1], max_tokens=9)
    texts.run()
    answer = texts.last("r").outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", None)
    assert answer.token_ids == [*text_ids("ab"), EOS]


def test_the_tokenizers_own_end_of_sequence_counts_beside_the_configurations():
    texts = ScriptedEngine(tokenizer=letters(), eos_token_ids=[ord("z")])
    assert texts.engine.info.eos_token_ids == [ord("z"), EOS]
    for name, end in (("tokenizer", EOS), ("configuration", ord("z"))):
        texts.add(name, "q", answer=[*text_ids("ab"), end, 1], max_tokens=9)
    texts.run()
    for name in ("tokenizer", "configuration"):
        assert texts.last(name).outputs[0].finish_reason == "stop"
        assert len(texts.last(name).outputs[0].token_ids) == 3


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_the_reason_and_shown_as_a_stop_string_is(texts, include, text):
    """vllm-project/vllm#3672"""
    texts.add(
        *("r", "q"),
        answer="abc",
        max_tokens=9,
        stop_token_ids=[ord("b")],
        include_stop_str_in_output=include,
    )
    texts.run()
    answer = texts.last("r").outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, "stop", ord("b"))
    assert answer.token_ids == text_ids("ab")


def test_ignoring_end_of_sequence_goes_on(texts):
    texts.add("r", "q", answer=[EOS, 97, EOS, 98], max_tokens=4, ignore_eos=True)
    texts.run()
    answer = texts.last("r").outputs[0]
    assert (answer.text, answer.finish_reason) == ("ab", "length")


@pytest.mark.parametrize(
    ("include", "text"), [(False, "one t"), (True, "one two")], ids=["excluded", "included"]
)
def test_a_stop_string_ends_a_request_that_the_scheduler_would_go_on_with(texts, include, text):
    texts.add(
        "r",
        "q",
        answer="one two three",
        max_tokens=13,
        stop=["wo", "never"],
        include_stop_str_in_output=include,
    )
    texts.add("other", "q2", answer="one two three", max_tokens=13)
    texts.run()
    answer = texts.last("r").outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, "stop", "wo")
    assert answer.token_ids == text_ids("one two")
    assert texts.last("other").outputs[0].text == "one two three"
    # Its blocks are back before the other ends.
    assert not any(row.request_id == "r" for plan in texts.runner.plans[7:] for row in plan.rows)


def test_a_stop_string_in_the_last_allowed_token_is_a_stop(texts):
    texts.add("r", "q", answer="ab!", max_tokens=3, stop="!")
    texts.run()
    answer = texts.last("r").outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", "!")


def test_a_stop_string_that_only_the_end_completes_is_a_stop(texts):
    """The last token begins a character; what is left of it comes out with the end."""
    texts.engine._builder._tokenizer = half_characters()
    texts.add("r", [97], answer=[97, 0xC3], max_tokens=2, stop="a\ufffd")
    texts.run()
    answer = texts.last("r").outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", "a\ufffd")


def half_characters():
    """Token ``i`` is byte ``i``."""
    import tokenizers
    from tokenizers import decoders, models

    from mlx_paged_attention.text.tokenizer import Tokenizer

    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend)


def test_held_text_comes_out_when_the_length_ends_it(texts):
    texts.add("r", "q", kind="delta", answer="ab<en", max_tokens=5, stop="<end>")
    texts.run()
    assert "".join(o.outputs[0].text for o in texts.outputs["r"]) == "ab<en"
    assert texts.last("r").outputs[0].finish_reason == "length"


def test_control_tokens_are_in_the_text_where_they_are_to_be_shown(texts):
    for name, shown, text in (("a", (), "xy"), ("b", [EOS], "x<eos>y")):
        answer = "x" + chr(EOS) + "y"
        texts.add(name, "q", answer=answer, max_tokens=3, ignore_eos=True, shown_special_ids=shown)
        texts.run()
        assert texts.last(name).outputs[0].text == text


def test_max_tokens_none_goes_on_to_the_context_limit(scripted):
    scripted.add("r", PROMPT, max_tokens=None)
    scripted.run()
    answer = scripted.last("r").outputs[0]
    assert len(PROMPT) + len(answer.token_ids) == 100
    assert answer.finish_reason == "length"


def test_max_tokens_none_stays_within_a_pool_smaller_than_the_context():
    scripted = ScriptedEngine(num_blocks=11)
    scripted.add("r", PROMPT, max_tokens=None)
    scripted.run()
    assert len(PROMPT) + len(scripted.last("r").outputs[0].token_ids) == 40


# --- several answers ----------------------------------------------------------------------------------------


def test_n_answers_share_the_prompt_and_come_in_order(texts):
    for i, text in enumerate(["first", "other", "third"]):
        texts.runner.answers[f"r#{i}"] = text_ids(text)
    texts.add("r", "a long question", n=3, max_tokens=5)
    texts.run()
    output = texts.last("r")
    assert [(a.index, a.text, a.finish_reason) for a in output.outputs] == [
        (0, "first", "length"),
        (1, "other", "length"),
        (2, "third", "length"),
    ]
    first, second, third = texts.runner.plans[:3]
    assert [len(row.token_ids) for row in first.rows] == [15]
    # All four blocks are shared, the last partly filled: the last token is computed again for its logits.
    assert [len(row.token_ids) for row in second.rows] == [1, 1, 1]
    assert first.rows[0].new_block_ids == second.rows[1].new_block_ids == second.rows[2].new_block_ids
    # Whoever writes into that block first has it copied, the last one to do so has not.
    assert (len(second.copies), len(third.copies)) == (1, 1)


def test_answers_that_end_apart_are_reported_as_they_end(texts):
    texts.runner.answers |= {"r#0": text_ids("ab!defgh"), "r#1": text_ids("abcdefgh")}
    texts.add("r", "q", n=2, kind="delta", stop="!")
    texts.run()
    ends = [
        (i, a.index, a.finish_reason)
        for i, o in enumerate(texts.outputs["r"])
        for a in o.outputs
        if a.finish_reason
    ]
    assert ends == [(2, 0, "stop"), (8, 1, "length")]
    indices = [[a.index for a in o.outputs] for o in texts.outputs["r"]]
    assert indices == [[0], [0, 1], [0, 1], *[[1]] * 6]
    texts.last("r")


def test_each_answer_has_a_seed_of_its_own(scripted):
    scripted.add("r", PROMPT, n=3, seed=5, temperature=1.0)
    scripted.add("s", PROMPT, n=2, temperature=1.0)
    scripted.run()
    seeds = {new.request_id: new.sampling.seed for plan in scripted.runner.plans for new in plan.new}
    assert [seeds[f"r#{i}"] for i in range(3)] == [5, 6, 7]
    assert len(set(seeds.values())) == 5


def test_best_of_returns_the_likeliest_once_at_the_end(texts):
    for i, (text, logprob) in enumerate([("aaaa", -2.0), ("bbbb", -0.5), ("cccc", -1.0)]):
        texts.runner.answers[f"r#{i}"] = text_ids(text)
        texts.runner.logprob[f"r#{i}"] = logprob
    texts.add("r", "q", n=2, best_of=3, kind="delta", max_tokens=4)
    texts.run()
    assert len(texts.outputs["r"]) == 1
    best = texts.last("r").outputs
    assert [(a.index, a.text) for a in best] == [(0, "bbbb"), (1, "cccc")]
    assert [a.logprobs for a in best] == [None, None]
    assert [a.cumulative_logprob for a in best] == [None, None]


def test_best_of_with_logprobs_shows_them(texts):
    texts.runner.logprob |= {"r#0": -2.0, "r#1": -0.5}
    texts.add("r", "q", n=1, best_of=2, logprobs=1, max_tokens=4)
    texts.run()
    (answer,) = texts.last("r").outputs
    assert answer.cumulative_logprob == pytest.approx(-2.0)
    assert len(answer.logprobs) == 4


# --- log-probabilities --------------------------------------------------------------------------------------


def test_logprobs_name_the_token_first_and_then_the_alternatives(texts):
    texts.add("r", "q", answer="a", max_tokens=1, logprobs=2)
    texts.run()
    (entry,) = texts.last("r").outputs[0].logprobs
    assert list(entry) == [97, 7, 8]
    assert (entry[97].logprob, entry[97].rank, entry[97].decoded_token) == (-1.0, 2, "a")
    assert (entry[7].logprob, entry[7].rank, entry[7].decoded_token) == (-0.5, 1, "\x07")


def test_without_a_tokenizer_logprobs_have_no_text(scripted):
    scripted.add("r", PROMPT, max_tokens=1, logprobs=1)
    scripted.run()
    assert {e.decoded_token for e in scripted.last("r").outputs[0].logprobs[0].values()} == {None}


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65])
def test_prompt_logprobs_stand_at_their_positions(scripted, length):
    """32 tokens are a step."""
    prompt = varied_prompt(length, 3)
    scripted.add("r", prompt, max_tokens=2, prompt_logprobs=0)
    scripted.run()
    first, *entries = scripted.last("r").prompt_logprobs
    assert first is None
    assert [list(entry) for entry in entries] == [[token] for token in prompt[1:]]
    assert [entry[token].logprob for entry, token in zip(entries, prompt[1:], strict=True)] == [
        -float(i) for i in range(1, length)
    ]


def test_prompt_logprobs_are_complete_with_the_first_token(scripted):
    scripted.add("r", varied_prompt(70, 3), max_tokens=2, prompt_logprobs=0)
    scripted.run()
    assert all(None not in output.prompt_logprobs[1:] for output in scripted.outputs["r"])


def test_prompt_logprobs_and_a_cached_prefix_and_several_answers(scripted):
    prompt = varied_prompt(20, 4)
    scripted.add("warm", prompt)
    scripted.run()
    scripted.add("r", prompt, n=2, prompt_logprobs=0)
    scripted.run()
    output = scripted.last("r")
    assert output.num_cached_tokens == 0
    assert [entry and next(iter(entry)) for entry in output.prompt_logprobs] == [None, *prompt[1:]]
    assert scripted.last("warm").prompt_logprobs is None


def test_prompt_logprobs_survive_preemption():
    scripted = ScriptedEngine(num_blocks=12, max_model_len=40)
    prompts = {f"r{i}": varied_prompt(12, i) for i in range(3)}
    for name, prompt in prompts.items():
        scripted.add(name, prompt, max_tokens=16, prompt_logprobs=0)
    scripted.run()
    assert scripted.engine.stats().preemptions > 0
    assert (
        sum(scripted.last(name).metrics.num_preemptions for name in prompts)
        == scripted.engine.stats().preemptions
    )
    for name, prompt in prompts.items():
        assert [entry and next(iter(entry)) for entry in scripted.last(name).prompt_logprobs] == [
            None,
            *prompt[1:],
        ]
        assert answers(scripted.last(name)) == [expected_output(prompt, 16)]


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], {}, "prompt", "empty"),
        ("text", {}, "prompt", "no tokenizer"),
        ((1, 2), {}, "prompt", "not tuple"),
        (None, {}, "prompt", "not NoneType"),
        ([1, 256], {}, "prompt", "token id 256; the vocabulary has ids 0 to 255"),
        ([-1], {}, "prompt", "token id -1"),
        ([1.5], {}, "prompt", r"integer token ids, not 1\.5"),
        ([True], {}, "prompt", "integer token ids, not True"),
        ([1], {"stop_token_ids": [256]}, "stop_token_ids", "256"),
        ([1], {"allowed_token_ids": [1, 999]}, "allowed_token_ids", "999"),
        ([1], {"logit_bias": {256: 1.0}}, "logit_bias", "256"),
        ([1], {"stop": "x"}, None, "stop needs a tokenizer"),
        ([1], {"bad_words": ["x"]}, None, "bad_words needs a tokenizer"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(scripted, prompt, params, param, message):
    with pytest.raises(InvalidRequestError, match=message) as refused:
        scripted.add("r", prompt, **params)
    assert refused.value.param == (param or next(iter(params)))
    scripted.check_idle()


@pytest.mark.parametrize(("length", "max_tokens", "numbers"), [(100, 1, "100"), (150, 5, "150")])
def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(scripted, length, max_tokens, numbers):
    with pytest.raises(RequestTooLongError, match=rf"{numbers} tokens.*99"):
        scripted.add("r", varied_prompt(length, 1), max_tokens=max_tokens)
    scripted.check_idle()


def test_the_longest_prompt_gets_its_one_token(scripted):
    scripted.add("r", varied_prompt(99, 1), max_tokens=20)
    scripted.run()
    assert len(scripted.last("r").outputs[0].token_ids) == 1


def test_an_id_in_use_is_refused_and_the_first_goes_on(scripted):
    scripted.add("r", PROMPT, max_tokens=3)
    with pytest.raises(InvalidRequestError, match="'r' is already in use") as refused:
        scripted.add("r", [1, 2], max_tokens=3)
    assert refused.value.param == "request_id"
    scripted.run()
    assert answers(scripted.last("r")) == [expected_output(PROMPT, 3)]
    scripted.add("r", [1, 2], max_tokens=3)
    scripted.run()
    assert answers(scripted.last("r")) == [expected_output([1, 2], 3)]


@pytest.mark.parametrize(("first", "second"), [(("r", 2), ("r#1", 1)), (("r#1", 1), ("r", 2))])
def test_an_id_that_names_one_of_anothers_answers_is_in_use_too(scripted, first, second):
    scripted.add(first[0], PROMPT, n=first[1], max_tokens=3)
    with pytest.raises(InvalidRequestError, match="already in use"):
        scripted.add(second[0], [1, 2], n=second[1], max_tokens=3)
    scripted.run()
    assert answers(scripted.last(first[0])) == [expected_output(PROMPT, 3)] * first[1]


# --- abort --------------------------------------------------------------------------------------------------


def aborted(scripted, request_id):
    output = scripted.last(request_id)
    assert {answer.finish_reason for answer in output.outputs} == {"abort"}
    return output


def test_abort_while_waiting(scripted):
    scripted.add("r", PROMPT)
    scripted.engine.abort("r")
    scripted.check_idle()
    assert answers(aborted(scripted, "r")) == [[]]
    assert scripted.runner.plans == []


def test_abort_in_the_middle_of_the_prompt(scripted):
    scripted.add("r", varied_prompt(80, 1))
    scripted.add("other", PROMPT)
    scripted.step()
    assert scripted.engine.stats().used_blocks > 0
    scripted.engine.abort("r")
    scripted.run()
    assert answers(aborted(scripted, "r")) == [[]]
    assert answers(scripted.last("other")) == [expected_output(PROMPT, 8)]


def test_abort_while_decoding_keeps_what_there_is(texts):
    texts.add("r", "q", answer="abcdefgh", stop="cz")
    texts.step(3)
    texts.engine.abort("r")
    texts.check_idle()
    (answer,) = aborted(texts, "r").outputs
    assert answer.text == "abc"  # the c was held back
    assert answer.token_ids == text_ids("abc")


def test_abort_while_preempted():
    scripted = ScriptedEngine(num_blocks=9, max_model_len=32)
    scripted.add("a", varied_prompt(8, 1), max_tokens=20)
    scripted.add("b", varied_prompt(8, 2), max_tokens=20)
    while not scripted.engine.stats().preemptions:
        scripted.step()
    assert scripted.engine.stats().waiting == 1
    scripted.engine.abort("b")
    scripted.run()
    assert 0 < len(aborted(scripted, "b").outputs[0].token_ids) < 20
    assert answers(scripted.last("a")) == [expected_output(varied_prompt(8, 1), 20)]


def test_abort_of_several_answers_ends_those_that_run(texts):
    texts.runner.answers |= {"r#0": text_ids("a!"), "r#1": text_ids("abcdefgh")}
    texts.add("r", "q", n=2, stop="!")
    texts.step(4)
    texts.engine.abort("r")
    texts.check_idle()
    assert [(a.text, a.finish_reason) for a in texts.last("r").outputs] == [("a", "stop"), ("abc", "abort")]


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_an_aborted_request_says_so_once_in_every_kind_of_stream(scripted, kind):
    scripted.add("r", PROMPT, kind=kind)
    scripted.step(2)
    scripted.engine.abort("r")
    scripted.engine.abort("r")
    assert aborted(scripted, "r").finished


def test_abort_of_best_of_returns_n(texts):
    texts.add("r", "q", n=1, best_of=3)
    texts.step(2)
    texts.engine.abort("r")
    assert len(aborted(texts, "r").outputs) == 1


def test_abort_after_the_end_and_of_the_unknown_does_nothing(scripted):
    scripted.add("r", PROMPT, max_tokens=2)
    scripted.run()
    scripted.engine.abort("r")
    scripted.engine.abort("nobody")
    assert scripted.last("r").outputs[0].finish_reason == "length"


# --- steps that raise ---------------------------------------------------------------------------------------


def test_a_failed_step_fails_the_requests_it_computed_and_those_alone():
    scripted = ScriptedEngine(max_num_seqs=2)
    for name in ("a", "b", "later"):
        scripted.add(name, varied_prompt(9, ord(name[0])), max_tokens=4)
    scripted.step(2)
    scripted.runner.failures = [ValueError("bad luck")]
    scripted.step()
    for name in ("a", "b"):
        error = scripted.error(name)
        assert isinstance(error, RequestFailedError)
        assert f"request {name} failed" in str(error)
        assert "ValueError: bad luck" in str(error)
        assert isinstance(error.__cause__, ValueError)
    scripted.run()
    assert answers(scripted.last("later")) == [expected_output(varied_prompt(9, ord("l")), 4)]


@pytest.mark.parametrize("failing_step", range(5))
def test_a_failed_step_leaves_nothing_that_another_could_find(failing_step):
    """The checking runner fails any row that reads a slot which the failed step left as garbage."""
    scripted = ScriptedEngine()
    prompt = varied_prompt(70, 1)
    scripted.add("r", prompt, max_tokens=6)
    scripted.runner.failures = [None] * failing_step + [RuntimeError("boom")]
    while scripted.engine.has_work:
        scripted.step()
    scripted.check_idle()
    assert isinstance(scripted.error("r"), RequestFailedError)
    scripted.add("again", prompt, max_tokens=6)
    scripted.add("longer", [*prompt, *expected_output(prompt, 6), 5], max_tokens=6)
    scripted.run()
    assert answers(scripted.last("again")) == [expected_output(prompt, 6)]
    # What had been written before is still there.
    assert scripted.last("again").num_cached_tokens == min(failing_step * 32, 68)


def test_a_request_that_hit_blocks_of_the_failed_step_fails_with_it():
    scripted = ScriptedEngine()
    prompt = varied_prompt(20, 1)
    scripted.runner.failures = [RuntimeError("boom")]
    scripted.add("writer", prompt)
    scripted.add("reader", [*prompt[:16], 9, 9])
    scripted.step()
    scripted.check_idle()
    assert isinstance(scripted.error("writer"), RequestFailedError)
    assert isinstance(scripted.error("reader"), RequestFailedError)


def test_one_failed_answer_fails_its_request_once():
    scripted = ScriptedEngine(max_num_seqs=2)
    scripted.add("r", PROMPT, n=4, max_tokens=3)
    scripted.runner.failures = [None, RuntimeError("boom")]
    scripted.step(2)
    scripted.check_idle()
    assert isinstance(scripted.error("r"), RequestFailedError)
    scripted.add("next", PROMPT, max_tokens=3)
    scripted.run()
    assert answers(scripted.last("next")) == [expected_output(PROMPT, 3)]


def test_an_answer_that_had_ended_does_not_save_its_request(texts):
    texts.runner.answers |= {"r#0": text_ids("a!"), "r#1": text_ids("abcdefgh")}
    texts.add("r", "q", n=2, stop="!")
    texts.step(3)
    texts.runner.failures = [RuntimeError("boom")]
    texts.step()
    texts.check_idle()
    assert isinstance(texts.error("r"), RequestFailedError)


def test_three_failed_steps_in_a_row_are_the_engines_end():
    scripted = ScriptedEngine()
    scripted.runner.failures = [RuntimeError(f"boom {i}") for i in range(3)]
    for i in range(2):
        scripted.add(f"r{i}", PROMPT)
        scripted.step()
    scripted.add("r2", PROMPT)
    with pytest.raises(RuntimeError, match="boom 2"):
        scripted.step()
    assert [str(scripted.error(f"r{i}").__cause__) for i in range(3)] == ["boom 0", "boom 1", "boom 2"]
    scripted.check_idle()


def test_a_step_that_succeeds_starts_the_count_anew():
    scripted = ScriptedEngine()
    boom = RuntimeError("boom")
    scripted.runner.failures = [boom, boom, None, boom, boom, None]
    for i in range(6):
        scripted.add(f"r{i}", PROMPT, max_tokens=1)
        scripted.step()
    assert answers(scripted.last("r2")) == answers(scripted.last("r5")) == [expected_output(PROMPT, 1)]


def test_what_is_no_exception_of_a_request_is_not_caught():
    scripted = ScriptedEngine()
    scripted.add("r", PROMPT)
    scripted.runner.failures = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        scripted.step()


# --- the rest -----------------------------------------------------------------------------------------------


def test_closing_tells_every_request_and_lets_go_of_the_runner(scripted):
    scripted.add("running", PROMPT)
    scripted.step(2)
    scripted.add("waiting", PROMPT)
    reason = RuntimeError("closed")
    scripted.engine.close(reason)
    assert scripted.error("running") is reason
    assert scripted.error("waiting") is reason
    assert not scripted.engine.has_work
    assert not hasattr(scripted.engine, "_runner")
    assert scripted.engine.stats().steps == 2


def test_a_step_that_can_schedule_nothing_raises_rather_than_hang(scripted):
    with pytest.raises(RuntimeError, match="nothing can be scheduled for 0 live requests"):
        scripted.engine.step()
    assert scripted.runner.plans == []


def test_the_prefix_cache_is_not_reset_under_a_running_request(scripted):
    scripted.add("r", varied_prompt(20, 1), max_tokens=5)
    scripted.step(2)
    assert not scripted.engine.reset_prefix_cache()
    scripted.run()
    assert scripted.engine.stats().cached_blocks > 0
    assert scripted.engine.reset_prefix_cache()
    assert scripted.engine.stats().cached_blocks == 0


def test_stats_add_up_at_every_step():
    scripted = ScriptedEngine(num_blocks=20, max_num_seqs=3)
    for i in range(7):
        scripted.add(f"r{i}", varied_prompt(5 + 3 * i, i % 3), max_tokens=4)
    total = 7
    while scripted.engine.has_work:
        scripted.step()
        stats = scripted.engine.stats()
        assert stats.used_blocks + stats.free_blocks == stats.num_blocks - 1 == 19
        assert stats.cached_blocks <= stats.free_blocks
        done = sum(bool(o) and getattr(o[-1], "finished", False) for o in scripted.outputs.values())
        assert stats.running + stats.waiting + done == total
        assert stats.prefix_hits <= stats.prefix_queries
    assert stats.steps == len(scripted.runner.plans)


def test_lower_priority_values_go_first_under_the_priority_policy():
    scripted = ScriptedEngine(config={"scheduling_policy": "priority"}, max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -1), ("middle", 0)):
        scripted.add(name, varied_prompt(4, priority), priority=priority, max_tokens=1)
    scripted.run()
    assert [plan.new[0].request_id for plan in scripted.runner.plans] == ["high", "middle", "low"]


def test_a_priority_that_would_be_ignored_is_refused():
    scripted = ScriptedEngine()
    with pytest.raises(InvalidRequestError, match="--scheduling-policy") as refused:
        scripted.add("r", PROMPT, priority=1)
    assert refused.value.param == "priority"
    scripted.add("r", PROMPT, priority=0)


def test_the_engines_seed_decides_where_a_request_brings_none():
    def drawn(seed):
        scripted = ScriptedEngine(config={"seed": seed})
        scripted.add("r", PROMPT, temperature=1.0, n=3, max_tokens=1)
        scripted.run()
        return [new.sampling.seed for plan in scripted.runner.plans for new in plan.new]

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2), *drawn(None)}) == 9


def test_params_reach_the_row_resolved(texts):
    texts.add(
        "r", "q", top_k=-1, temperature=0.5, stop_token_ids=[3], min_tokens=2, logit_bias={4: 2},
        bad_words=["ab"], allowed_token_ids=(97, 98), seed=-3,
    )  # fmt: skip
    texts.step()
    sampling = texts.runner.plans[0].new[0].sampling
    assert (sampling.top_k, sampling.temperature, sampling.seed) == (0, 0.5, -3)
    assert (sampling.stop_ids, sampling.min_tokens) == ([EOS, 3], 2)
    assert sampling.logit_bias == {4: 2.0}
    assert sampling.allowed_token_ids == [97, 98]
    assert text_ids("ab") in sampling.bad_words
    assert sampling.logprobs is None
