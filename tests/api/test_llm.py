"""LLM: the in-process API, on tiny models."""

import gc
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention import LLM, SamplingParams
from mlx_paged_attention.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    RequestFailedError,
    RequestTooLongError,
)
from mlx_paged_attention.text.messages import normalize_messages

PROMPTS = [varied_prompt(length, seed) for seed, length in enumerate((20, 3, 41, 1, 9))]
OPTIONS = {"skip_tokenizer_init": True, "num_blocks": 1024, "max_model_len": 8192}
LONG = 8000  # tokens that take many seconds: who is done within one has been stopped


@pytest.fixture
def llm(engine):
    return engine("llama")


@pytest.fixture
def own(tiny_model):
    """Engines that a test may close."""
    made = []

    def make(**options):
        made.append(LLM(model=str(tiny_model("llama")), **{**OPTIONS, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


# --- results ------------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts_whatever_ends_first(llm, oracle):
    counts = [12, 1, 3, 7, 2]
    outputs = llm.generate(PROMPTS, [greedy(n) for n in counts])
    for output, prompt, count in zip(outputs, PROMPTS, counts, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.finished
        assert output.prompt is None
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, count))


def test_one_params_serves_all_prompts(llm):
    outputs = llm.generate(PROMPTS, greedy(2))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2] * 5


def test_a_list_of_ids_is_one_prompt(llm, oracle):
    (output,) = llm.generate(PROMPTS[0], greedy(3))
    assert_matches(output.outputs[0], oracle("llama").greedy(PROMPTS[0], 3))


def test_without_params_the_defaults_apply(llm):
    (output,) = llm.generate(PROMPTS[0])
    assert len(output.outputs[0].token_ids) == 16
    assert output.outputs[0].finish_reason == "length"


def test_no_prompts_give_no_results(llm):
    assert llm.generate([]) == []


def test_prompts_may_come_in_any_sequence(llm):
    outputs = llm.generate(tuple(PROMPTS), greedy(2))
    assert [output.prompt_token_ids for output in outputs] == PROMPTS


def test_every_request_has_an_id_of_its_own(llm):
    outputs = llm.generate([PROMPTS[0]] * 3, greedy(1)) + llm.generate(PROMPTS[0], greedy(1))
    assert len({output.request_id for output in outputs}) == 4


def test_more_prompts_than_seats_are_all_answered(llm, oracle):
    prompts = [varied_prompt(5 + i % 7, i) for i in range(50)]
    outputs = llm.generate(prompts, greedy(4))
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 4))


# --- refusals, before anything has run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "kind", "message"),
    [
        ([[1, 2], []], None, InvalidRequestError, "prompt 1: the prompt is empty"),
        ([[1, 2], [300]], None, InvalidRequestError, "prompt 1: prompt has token id 300"),
        ([[1, 2], [1.5]], None, InvalidRequestError, "prompt 1: .* not 1.5"),
        ([[1, 2], None], None, InvalidRequestError, "prompt 1: .* not NoneType"),
        ([[1, 2], "text"], None, InvalidRequestError, "prompt 1: .* no tokenizer"),
        ("text", None, InvalidRequestError, "the prompt is text, .* no tokenizer"),
        ([1.0, 2.0], None, InvalidRequestError, "integer token ids, not 1.0"),
        ([[1, 2], [1] * 9000], None, RequestTooLongError, "prompt 1: .* 9000 tokens"),
        ([[1], [2]], [SamplingParams()] * 3, InvalidRequestError, "3 sampling_params for 2 prompts"),
        ([[1], [2]], [], InvalidRequestError, "0 sampling_params for 2 prompts"),
        ([[1]], [], InvalidRequestError, "0 sampling_params for 1 prompt;"),
        (None, None, InvalidRequestError, "prompts must be a string, .* not NoneType"),
        ({"prompt": "x"}, None, InvalidRequestError, "prompts must be .* not dict"),
        (5, None, InvalidRequestError, "prompts must be .* not int"),
        ({1, 2}, None, InvalidRequestError, "prompts must be .* not set"),
        ((p for p in [[1]]), None, InvalidRequestError, "prompts must be .* not generator"),
        (np.array([1, 2]), None, InvalidRequestError, "prompts must be .* not ndarray"),
        ([None], None, InvalidRequestError, "a prompt must be .* not NoneType"),
        ([{"prompt": "x"}], None, InvalidRequestError, "a prompt must be .* not dict"),
        ((1, 2), None, InvalidRequestError, "a prompt must be .* not tuple"),
        (b"text", None, InvalidRequestError, "a prompt must be .* not bytes"),
        ([[1]], {"temperature": 0}, InvalidRequestError, "sampling_params must be .* not dict"),
        ([[1]], "greedy", InvalidRequestError, "sampling_params must be .* not str"),
        ([[1]], [3], InvalidRequestError, "sampling_params must be .* not int"),
        (
            [[1], [2]],
            [SamplingParams(), SamplingParams(stop="x")],
            InvalidRequestError,
            "prompt 1: stop needs",
        ),
    ],
)
def test_one_bad_request_among_good_ones_is_refused_before_anything_runs(llm, prompts, params, kind, message):
    before = llm.stats()
    with pytest.raises(kind, match=message):
        llm.generate(prompts, params)
    after = llm.stats()
    assert after.steps == before.steps
    assert (after.running, after.waiting, after.used_blocks) == (0, 0, 0)


def test_chat_without_a_tokenizer_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])


class AnyTokenizer:
    def chat_token_ids(self, messages, **_):
        return [len(normalize_messages(messages))]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages must be a list of messages, .* not NoneType"),
        ({"role": "user", "content": "hi"}, "messages must be .* not dict"),
        ("hi", "messages must be .* not str"),
        ([], "no messages"),
        ([None], "messages must be .* not NoneType"),
        (["hi"], "messages must be .* not str"),
        ([[]], "messages must not be empty"),
    ],
)
def test_what_is_no_conversation_is_refused(llm, monkeypatch, messages, message):
    monkeypatch.setattr(llm, "tokenizer", AnyTokenizer())
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 3}, "unknown option max_seqs; the options are .*max_num_seqs"),
        ({"zeta": 1, "alpha": 2}, "unknown option alpha, zeta"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, not 0"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"num_blocks": 10, "kv_memory": 10}, "not both"),
        ({"kv_memory": "4GB"}, "bytes .* or a fraction .*, not '4GB'"),
        ({"kv_memory": 1.5}, "bytes .* or a fraction .*, not 1.5"),
        ({"kv_memory": True}, "bytes .* or a fraction .*, not True"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false"),
        ({"seed": "x"}, "seed must be an integer, not 'x'"),
        ({"block_size": None}, "block_size must be an integer of at least 1, not None"),
    ],
)
def test_options_are_checked_before_a_model_is_looked_for(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        LLM(model="/nowhere", **options)


def test_errors_of_loading_reach_the_caller(tiny_model, tmp_path):
    with pytest.raises(ModelLoadError, match="does not exist"):
        LLM(model=str(tmp_path / "nothing"), **OPTIONS)
    with pytest.raises(InvalidRequestError, match=r"max_model_len \(9000\) exceeds the 8192"):
        LLM(model=str(tiny_model("llama")), skip_tokenizer_init=True, max_model_len=9000)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        LLM(model=str(tiny_model("llama")))


# --- life and death -----------------------------------------------------------------------------------------


def test_after_closing_every_call_says_so_and_closing_twice_is_fine(own):
    llm = own()
    llm.generate([PROMPTS[1]], greedy(1))
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        llm.generate([PROMPTS[1]], greedy(1))
    with pytest.raises(EngineDeadError):
        llm.reset_prefix_cache()
    assert llm.stats().used_blocks == 0
    assert llm.info.num_blocks == 1024


def test_leaving_the_with_block_closes(own):
    with own() as llm:
        assert len(llm.generate([PROMPTS[1]], greedy(1))) == 1
    with pytest.raises(EngineDeadError):
        llm.generate([PROMPTS[1]], greedy(1))


def test_closing_from_another_thread_ends_a_running_call(own):
    llm = own()
    result = []

    def run():
        try:
            llm.generate([[i + 1] for i in range(8)], greedy(LONG))
        except EngineDeadError as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not llm.stats().running:
        time.sleep(0.001)
    llm.close()
    thread.join(20)
    assert [str(error) for error in result] == ["the engine was closed"]


def test_closing_gives_the_memory_back_while_the_object_lives(own):
    llm = own()
    runner = weakref.ref(llm._engine._engine._runner)
    pool = weakref.ref(runner()._pool)
    model = weakref.ref(runner()._host.model)
    llm.close()
    gc.collect()
    assert [ref() for ref in (runner, pool, model)] == [None] * 3


def test_dropping_the_last_reference_closes(tiny_model):
    llm = LLM(model=str(tiny_model("llama")), **OPTIONS)
    llm.generate([PROMPTS[1]], greedy(1))
    engine = llm._engine
    del llm
    gc.collect()
    assert engine.dead_reason == "the engine was closed"


def test_several_threads_may_call_at_once(llm, oracle):
    results = {}

    def work(number):
        for turn in range(3):
            prompt = varied_prompt(4 + number, 10 * number + turn)
            results[number, turn] = (prompt, llm.generate([prompt], greedy(6))[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 18
    for prompt, output in results.values():
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 6))


def test_two_models_in_one_process_keep_to_themselves(engine, oracle):
    one, other = engine("llama"), engine("llama_other_weights")
    results = {}

    def work(name, llm):
        results[name] = llm.generate(PROMPTS * 3, greedy(10))

    threads = [
        threading.Thread(target=work, args=item) for item in (("llama", one), ("llama_other_weights", other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, outputs in results.items():
        for output, prompt in zip(outputs, PROMPTS * 3, strict=True):
            assert_matches(output.outputs[0], oracle(name).greedy(prompt, 10))
    assert len(results) == 2


# --- what is left behind when a call does not end as planned ------------------------------------------------


def idle(llm):
    stats = llm.stats()
    return (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)


def wait_until_idle(llm):
    deadline = time.monotonic() + 1
    while not idle(llm) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert idle(llm), llm.stats()


def test_an_interrupted_call_frees_its_blocks_within_a_second(own, monkeypatch, oracle):
    """As Ctrl-C does: the exception comes while results are awaited."""
    llm = own()

    class Interrupting:
        def SimpleQueue(self):  # noqa: N802
            return self

        def put(self, _):
            pass

        def get(self):
            while not llm.stats().running:
                time.sleep(0.001)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["mlx_paged_attention.api.llm"], "queue", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[i + 1] for i in range(6)], greedy(LONG))
    wait_until_idle(llm)
    (output,) = llm.generate([PROMPTS[0]], greedy(4))
    assert_matches(output.outputs[0], oracle("llama").greedy(PROMPTS[0], 4))


def test_an_interrupt_while_requests_are_handed_in_leaves_none_behind(own, monkeypatch):
    llm = own()
    start, started = llm._engine.start, []

    def interrupted(group):
        if len(started) == 3:
            raise KeyboardInterrupt
        started.append(group)
        start(group)

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[i + 1] for i in range(6)], greedy(LONG))
    # False while a request holds blocks; whatever had been handed in holds some after a step.
    assert all(llm.reset_prefix_cache() for _ in range(3))
    wait_until_idle(llm)


def test_a_failed_step_raises_and_the_engine_goes_on(own, oracle, monkeypatch):
    llm = own()
    runner = llm._engine._engine._runner
    launch = runner.launch

    def failing(plan):
        monkeypatch.setattr(runner, "launch", launch)
        raise OSError("no room")

    monkeypatch.setattr(runner, "launch", failing)
    with pytest.raises(RequestFailedError, match="OSError: no room"):
        llm.generate(PROMPTS[:2], greedy(50))
    wait_until_idle(llm)
    (output,) = llm.generate([PROMPTS[0]], greedy(4))
    assert output.num_cached_tokens == 0
    assert_matches(output.outputs[0], oracle("llama").greedy(PROMPTS[0], 4))


def test_resetting_the_prefix_cache_forgets_it(own):
    llm = own()
    prompt = varied_prompt(40, 9)
    cached = []
    for reset in (False, False, True):
        if reset:
            assert llm.reset_prefix_cache()
        cached.append(llm.generate([prompt], greedy(1))[0].num_cached_tokens)
    assert cached == [0, 32, 0]
