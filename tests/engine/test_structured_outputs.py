"""Answers of a form: valid whatever is drawn, the same however they are computed."""

import asyncio
import json
import re
import time
from dataclasses import replace

import pytest
from tiny_text_model import write_tiny_text_model

from mlx_paged_attention import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from mlx_paged_attention.errors import FormFailedError, InvalidRequestError

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": [True, "x", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
# A random model writes white space for ever where it may.
CALL = r'\{"a":(0|[1-9]\d{0,2}),"b":(true|"x"|null)\}'
FORM = StructuredOutputsParams(regex=CALL)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny_text_model(tmp_path_factory.mktemp("text-model")))


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, num_blocks=64, block_size=16, max_num_seqs=16) as llm:
        yield llm


def params(**values):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 64, "structured_outputs": FORM, **values})


def is_valid(text):
    value = json.loads(text)
    assert list(value) == ["a", "b"]
    assert value["a"] in range(1000)
    assert value["b"] in (True, "x", None)
    return re.fullmatch(CALL, text) is not None


def generate(llm, prompts, sampling):
    return [output.outputs for output in llm.generate(prompts, sampling, use_tqdm=False)]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 3.0},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"temperature": 100.0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"logit_bias": {ord("z"): 100.0}},
        {"min_tokens": 60},
        {"ignore_eos": True},
        {"bad_words": ["null"]},
    ],
    ids=str,
)
def test_every_answer_that_ends_by_itself_is_valid(llm, values):
    several = [params(seed=seed, **values) for seed in range(6)]
    for (answer,) in generate(llm, ["Give me JSON"] * 6, several):
        assert answer.finish_reason == "stop"
        assert answer.stop_reason is None
        assert is_valid(answer.text), answer.text


@pytest.mark.parametrize("seed", range(6))
def test_answers_to_a_schema_are_valid_or_cut_by_length_alone(llm, seed):
    asked = params(structured_outputs={"json": SCHEMA}, seed=seed, temperature=2.0, max_tokens=200)
    ((answer,),) = generate(llm, ["Give me JSON"], asked)
    if answer.finish_reason == "stop":
        value = json.loads(answer.text)
        assert set(value) == {"a", "b"}
        assert value["a"] in range(1000)
    else:
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == 200


@pytest.mark.parametrize("choice", [["yes", "no"], ["maybe", "maybe not"], ["é€"]])
def test_a_choice_is_one_of_the_texts(llm, choice):
    asked = [params(structured_outputs={"choice": choice}, seed=seed) for seed in range(8)]
    for (answer,) in generate(llm, ["?"] * 8, asked):
        assert answer.text in choice
        assert answer.finish_reason == "stop"


def test_an_answer_cut_by_max_tokens_says_so_and_one_that_is_complete_there_does_not(llm):
    form = {"structured_outputs": {"regex": "abcd"}, "temperature": 0}
    (cut,), (whole,) = generate(llm, ["?", "?"], [params(max_tokens=3, **form), params(max_tokens=4, **form)])
    assert (cut.text, cut.finish_reason) == ("abc", "length")
    assert (whole.text, whole.finish_reason) == ("abcd", "stop")


def test_stop_strings_end_an_answer_inside_its_form(llm):
    ((answer,),) = generate(llm, ["?"], params(structured_outputs={"regex": "abcd"}, stop="c"))
    assert (answer.text, answer.stop_reason) == ("ab", "c")


def test_a_stop_token_ends_an_answer_inside_its_form(llm):
    several = {"min_tokens": 0}, {"min_tokens": 3}
    for values in several:
        asked = params(structured_outputs={"regex": "abcabc"}, stop_token_ids=[ord("c")], **values)
        ((answer,),) = generate(llm, ["?"], asked)
        # Where nothing else is allowed, min_tokens cannot forbid it.
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", ord("c"))


def test_a_form_that_grows_too_large_on_the_way_ends_its_request_alone(llm):
    """What it takes shows in the answer only: nobody's fault but the form's, and the next is served."""
    hostile = params(structured_outputs={"regex": r"(\w{1,500}x?){1,500}a"}, max_tokens=200)
    with pytest.raises(FormFailedError, match="the grammar of structured_outputs"):
        generate(llm, ["?"], hostile)
    ((answer,),) = generate(llm, ["?"], params())
    assert is_valid(answer.text)


def test_neighbours_with_and_without_forms_do_not_touch_each_other(llm):
    """dottxt-ai/outlines#757"""
    prompts = ["x" * (3 + 7 * i) for i in range(12)]
    several = []
    for i in range(12):
        plain = {"structured_outputs": None, "max_tokens": 20, "ignore_eos": True}
        several.append(params(seed=i, temperature=0.7 * (i % 3), **(plain if i % 3 == 1 else {})))
    together = generate(llm, prompts, several)
    for prompt, one, (answer,) in zip(prompts, several, together, strict=True):
        ((alone,),) = generate(llm, [prompt], one)
        assert answer.token_ids == alone.token_ids
        assert answer.finish_reason == alone.finish_reason
        assert one.structured_outputs is None or is_valid(answer.text)


def test_plain_requests_before_and_after_one_with_a_form_are_what_they_always_are(llm):
    """waybarrios/vllm-mlx#784"""
    plain = params(structured_outputs=None, temperature=0, max_tokens=16, ignore_eos=True)
    ((first,),) = generate(llm, ["Tell me"], plain)
    for _ in range(2):
        ((form,),) = generate(llm, ["Tell me"], params(temperature=0))
        assert is_valid(form.text)
        assert generate(llm, ["Tell me"], plain)[0][0].token_ids == first.token_ids


def test_answers_do_not_share_their_place_in_the_form(llm):
    (answers,) = generate(llm, ["Give me JSON"], params(n=4, best_of=6, seed=3))
    assert len(answers) == 4
    assert all(is_valid(answer.text) for answer in answers)
    (four,) = generate(llm, ["Give me JSON"], params(n=4, seed=3))
    for i, answer in enumerate(four):
        ((alone,),) = generate(llm, ["Give me JSON"], params(seed=3 + i))
        assert answer.token_ids == alone.token_ids


def test_a_cached_prefix_changes_nothing(llm):
    asked = params(seed=5, cache_salt="cached")
    outputs = [llm.generate("p" * 100, asked, use_tqdm=False)[0] for _ in range(2)]
    assert outputs[0].num_cached_tokens == 0
    assert outputs[1].num_cached_tokens > 64
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_preempted_answers_go_on_where_they_stood_in_the_form(path):
    form = {"regex": r"(\d\d,){30}end"}
    asked = [params(structured_outputs=form, seed=seed, max_tokens=200) for seed in range(4)]
    prompts = [f"count {i}" for i in range(4)]
    with LLM(path, num_blocks=18, block_size=16, max_num_seqs=4, max_model_len=200) as small:
        answers = generate(small, prompts, asked)
        assert small.stats().preemptions > 0
    with LLM(path, num_blocks=128, block_size=16, max_num_seqs=4, max_model_len=200) as large:
        expected = generate(large, prompts, asked)
        assert large.stats().preemptions == 0
    for (answer,), (other,) in zip(answers, expected, strict=True):
        assert re.fullmatch(form["regex"], answer.text)
        assert answer.token_ids == other.token_ids


def test_log_probabilities_are_those_of_the_free_model(llm):
    ((answer,),) = generate(llm, ["Give me JSON"], params(temperature=0, logprobs=2))
    ((free,),) = generate(llm, ["Give me JSON"], params(structured_outputs=None, logprobs=2, max_tokens=1))
    first = answer.logprobs[0]
    assert set(free.logprobs[0]) - {free.token_ids[0]} <= set(first)
    assert first[answer.token_ids[0]].rank > 1


def test_beam_search_with_a_form_is_refused():
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        params(temperature=0, use_beam_search=True, n=2)


def test_without_a_tokenizer_a_form_is_refused(engine):
    with pytest.raises(InvalidRequestError, match="structured_outputs needs a tokenizer"):
        engine("llama").generate([1, 2], params(), use_tqdm=False)


@pytest.fixture
async def async_llm(path):
    llm = await asyncio.to_thread(AsyncLLM, path, num_blocks=128, block_size=16, max_num_seqs=16)
    yield llm
    await asyncio.to_thread(llm.close)


async def test_a_streamed_answer_equals_the_whole_one(async_llm):
    texts = {"delta": "", "final": ""}
    for kind in texts:
        async for output in async_llm.generate("Give me JSON", params(seed=9), output_kind=kind):
            texts[kind] += output.outputs[0].text
    assert is_valid(texts["delta"])
    assert texts["delta"] == texts["final"]


@pytest.mark.parametrize("same", [True, False])
async def test_a_fork_goes_on_in_its_parents_form_or_begins_one_of_its_own(async_llm, same):
    form = {"regex": r"[ab]{400}c"}
    parent = params(structured_outputs=form, seed=1, max_tokens=450)
    child = replace(parent, seed=2) if same else replace(parent, structured_outputs={"choice": ["other"]})
    async for _ in async_llm.generate("?", child):  # compiled before there is anything to miss
        pass
    said, forks = "", []
    async for output in async_llm.generate("?", parent, "parent"):
        said = output.outputs[0].text
        if not forks and len(said) >= 10:

            async def follow():
                return [output async for output in async_llm.fork("parent", child, "child")][-1]

            forks.append(asyncio.create_task(follow()))
    last = await forks[0]
    text = last.outputs[0].text
    assert re.fullmatch(form["regex"], said)
    assert last.outputs[0].finish_reason == "stop"
    if not same:
        assert text == "other"
        return
    begun = len(last.prompt_token_ids) - 1
    assert len(text) + begun == 401
    assert re.fullmatch(form["regex"], said[:begun] + text)


async def test_hostile_forms_are_refused_while_another_request_streams_undisturbed(async_llm):
    async for _ in async_llm.generate("warm up", params()):  # the tokenizer is prepared
        pass
    gaps, free = [], params(structured_outputs=None, max_tokens=300, ignore_eos=True, temperature=0)

    async def stream():
        last = time.monotonic()
        outputs = []
        async for output in async_llm.generate("stream", free):
            outputs.append(output)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        return outputs[-1]

    async def hostile(form):
        began = time.monotonic()
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            async for _ in async_llm.generate("?", params(structured_outputs=form)):
                pass
        return time.monotonic() - began

    streaming = asyncio.create_task(stream())
    forms = [
        {"json": {"type": "integer", "multipleOf": 77_777_777}},
        {"regex": "["},
        {"json": {"$ref": "#"}},
        {"json": {"enum": [f"value{i}" for i in range(20_000)]}},
    ]
    seconds = await asyncio.gather(*[hostile(form) for form in forms])
    output = await streaming
    assert len(output.outputs[0].token_ids) == 300
    assert max(seconds) < 10  # each waits for those before it, on a busy machine
    assert max(gaps) < 1.0


@pytest.mark.model
def test_the_default_model_answers_a_schema():
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    with LLM(num_blocks=256, max_num_seqs=8) as llm:
        messages = [{"role": "user", "content": "Describe Ada, who is 36, as JSON with name and age."}]
        asked = SamplingParams(temperature=0, max_tokens=60, structured_outputs={"json": schema})
        drawn = [replace(asked, temperature=1.0, seed=seed) for seed in range(3)]
        outputs = llm.chat([messages] * 4, [asked, *drawn], use_tqdm=False)
        assert outputs[0].outputs[0].finish_reason == "stop"
        for output in outputs:
            answer = output.outputs[0]
            if answer.finish_reason == "stop":
                value = json.loads(answer.text)
                assert set(value) == {"name", "age"}
                assert isinstance(value["name"], str)
                assert isinstance(value["age"], int)


async def test_a_request_that_is_cancelled_while_its_form_is_compiled_leaves_nothing_behind(async_llm):
    async def ask(**values):
        return [output async for output in async_llm.generate("?", params(**values))][-1]

    await ask()
    forms = [{"json": {"type": "integer", "multipleOf": 99_999_989 - number}} for number in range(3)]
    several = [asyncio.create_task(ask(structured_outputs=form)) for form in forms]
    await asyncio.sleep(0.2)
    for task in several:
        task.cancel()
    assert all(
        isinstance(result, asyncio.CancelledError)
        for result in await asyncio.gather(*several, return_exceptions=True)
    )
    last = await ask(structured_outputs={"choice": ["fine"]})
    assert last.outputs[0].text == "fine"
    assert (async_llm.stats().running, async_llm.stats().waiting) == (0, 0)


async def test_known_forms_and_free_requests_do_not_wait_for_the_hostile(async_llm):
    async def ask(**values):
        began = time.monotonic()
        async for _ in async_llm.generate("?", params(**values)):
            pass
        return time.monotonic() - began

    await ask()
    numbers = [99_999_989 - 10 * i for i in range(5)]
    forms = [{"json": {"type": "integer", "multipleOf": number}} for number in numbers]
    several = [asyncio.create_task(ask(structured_outputs=form)) for form in forms]
    await asyncio.sleep(0.05)
    for values in ({}, {"structured_outputs": None}):
        await ask(**values)
    assert not all(task.done() for task in several)
    for result in await asyncio.gather(*several, return_exceptions=True):
        assert isinstance(result, InvalidRequestError)
