"""AsyncLLM: the same engine for asyncio, on tiny models."""

import asyncio
import contextlib
import gc
import time

import pytest
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention import AsyncLLM, SamplingParams
from mlx_paged_attention.errors import EngineDeadError, InvalidRequestError, RequestTooLongError

PROMPT = varied_prompt(20, 1)
OPTIONS = {"skip_tokenizer_init": True, "num_blocks": 1024, "max_model_len": 8192}
LONG = 8000  # tokens that take many seconds: who is done within one has been stopped


@pytest.fixture(scope="module")
def llm(tiny_model):
    """One for all tests that do not close it."""
    llm = AsyncLLM(model=str(tiny_model("llama")), **OPTIONS)
    yield llm
    llm.close()


@pytest.fixture
def own(tiny_model):
    llm = AsyncLLM(model=str(tiny_model("llama")), **OPTIONS)
    yield llm
    llm.close()


async def collect(stream):
    return [output async for output in stream]


async def wait_until_idle(llm):
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        stats = llm.stats()
        if (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(llm.stats())


async def test_the_kinds_of_output_say_the_same(llm, oracle):
    cumulative, delta, final = await asyncio.gather(
        *(
            collect(llm.generate(PROMPT, greedy(6), output_kind=kind))
            for kind in ("cumulative", "delta", "final")
        )
    )
    reference = oracle("llama").greedy(PROMPT, 6)
    assert_matches(final[0].outputs[0], reference)
    tokens = final[0].outputs[0].token_ids
    assert [o.outputs[0].token_ids for o in cumulative] == [tokens[: i + 1] for i in range(6)]
    assert [o.outputs[0].token_ids for o in delta] == [[token] for token in tokens]
    for outputs in (cumulative, delta, final):
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


async def test_outputs_come_as_they_are_made(llm):
    steps = []
    async for _ in llm.generate(PROMPT, greedy(200)):
        steps.append(llm.stats().steps)
    assert len(steps) == 200
    assert len(set(steps)) > 50


async def test_concurrent_requests_each_get_their_own(llm, oracle):
    prompts = [varied_prompt(3 + i, i) for i in range(20)]
    results = await asyncio.gather(
        *(collect(llm.generate(p, greedy(5), output_kind="final")) for p in prompts)
    )
    for (output,), prompt in zip(results, prompts, strict=True):
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 5))


async def test_defaults_apply_and_an_id_is_drawn(llm):
    outputs = await collect(llm.generate(PROMPT))
    assert len(outputs[-1].outputs[0].token_ids) == 16
    assert outputs[0].request_id
    assert {o.request_id for o in outputs} == {outputs[0].request_id}


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ([], InvalidRequestError, "empty"),
        ("text", InvalidRequestError, "no tokenizer"),
        ([1] * 9000, RequestTooLongError, "9000 tokens"),
        (None, InvalidRequestError, "a prompt must be .* not NoneType"),
        ({"prompt": "x"}, InvalidRequestError, "a prompt must be .* not dict"),
        ([None], InvalidRequestError, "integer token ids, not None"),
    ],
)
async def test_what_cannot_be_served_is_refused_before_anything_runs(llm, prompt, kind, message):
    steps = llm.stats().steps
    with pytest.raises(kind, match=message):
        await collect(llm.generate(prompt))
    assert llm.stats().steps == steps


async def test_parameters_of_another_type_are_refused(llm):
    with pytest.raises(InvalidRequestError, match=r"sampling_params must be .* not dict"):
        await collect(llm.generate(PROMPT, {"temperature": 0}))


async def test_chat_without_a_tokenizer_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="chat needs a tokenizer"):
        await collect(llm.chat([{"role": "user", "content": "hi"}]))


async def test_an_unknown_kind_of_output_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="output_kind must be one of cumulative, delta, final"):
        await collect(llm.generate(PROMPT, greedy(1), output_kind="deltas"))


async def test_an_id_in_use_is_refused_and_the_first_goes_on(llm, oracle):
    stream = llm.generate(PROMPT, greedy(100), request_id="mine")
    await anext(stream)
    with pytest.raises(InvalidRequestError, match="'mine' is already in use"):
        await collect(llm.generate([1, 2], request_id="mine"))
    outputs = await collect(stream)
    assert len(outputs[-1].outputs[0].token_ids) == 100
    assert_matches(outputs[-1].outputs[0], oracle("llama").greedy(PROMPT, 100))


async def test_giving_up_on_a_refused_id_does_not_end_the_request_that_has_it(llm):
    stream = llm.generate(PROMPT, greedy(150), request_id="mine")
    await anext(stream)
    second = llm.generate([1, 2], request_id="mine")
    waiting = asyncio.ensure_future(anext(second))
    await asyncio.sleep(0)  # handed in, not yet answered
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError, InvalidRequestError):
        await waiting
    outputs = await collect(stream)
    assert outputs[-1].outputs[0].finish_reason == "length"


async def test_abort_ends_the_stream_with_what_there_is(llm):
    outputs = []
    async for output in llm.generate(PROMPT, greedy(LONG), request_id="r"):
        outputs.append(output)
        if len(outputs) == 3:
            await llm.abort("r")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert 3 <= len(outputs[-1].outputs[0].token_ids) < LONG
    await llm.abort("r")
    await wait_until_idle(llm)


async def test_abort_all_ends_every_stream_with_what_there_is(llm):
    streams = [llm.generate(varied_prompt(10, seed), greedy(LONG)) for seed in range(3)]
    for stream in streams:
        await anext(stream)
    assert llm.abort_all() == 3
    for stream in streams:
        last = (await collect(stream))[-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
    assert llm.abort_all() == 0
    await wait_until_idle(llm)


async def test_closing_the_iterator_frees_the_blocks_within_a_second(llm):
    stream = llm.generate(PROMPT, greedy(LONG))
    await anext(stream)
    assert llm.stats().used_blocks > 0
    await stream.aclose()
    await wait_until_idle(llm)


async def test_leaving_the_loop_and_dropping_the_iterator_frees_the_blocks(llm):
    async for _ in llm.generate(PROMPT, greedy(LONG)):
        break
    gc.collect()
    await wait_until_idle(llm)


@pytest.mark.parametrize("outputs_before", [0, 1, 5])
async def test_cancelling_the_task_frees_the_blocks_within_a_second(llm, outputs_before):
    seen = asyncio.Semaphore(0)

    async def read():
        async for _ in llm.generate(PROMPT, greedy(LONG)):
            seen.release()

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    for _ in range(outputs_before):
        await seen.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_idle(llm)


async def test_a_timeout_frees_the_blocks_within_a_second(llm):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await collect(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=LONG, n=8)))
    await wait_until_idle(llm)


async def test_stopping_early_among_many_leaves_the_others_alone(llm, oracle):
    async def some(number):
        prompt = varied_prompt(10, number)
        stream = llm.generate(prompt, greedy(40))
        async for output in stream:
            answer = output.outputs[0]
            if number % 2 and len(answer.token_ids) >= 4:
                break
        await stream.aclose()
        return prompt, answer

    for number, (prompt, answer) in enumerate(await asyncio.gather(*(some(i) for i in range(10)))):
        assert (answer.finish_reason == "length") == (number % 2 == 0)
        assert_matches(answer, oracle("llama").greedy(prompt, len(answer.token_ids)))
    await wait_until_idle(llm)


async def test_the_loop_stays_responsive_while_the_engine_works(llm):
    """Loading and steps happen elsewhere: nothing here may block the loop for long."""
    gaps = []

    async def tick():
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    await asyncio.gather(*(collect(llm.generate(varied_prompt(50, i), greedy(60))) for i in range(8)))
    ticking.cancel()
    assert len(gaps) > 20
    assert sorted(gaps)[len(gaps) // 2] < 0.1


async def test_closing_ends_the_streams_that_run_and_refuses_new_ones(own):
    assert own.is_alive
    assert own.dead_reason is None
    stream = own.generate(PROMPT, greedy(LONG))
    await anext(stream)
    await asyncio.to_thread(own.close)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        await collect(stream)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        await collect(own.generate(PROMPT))
    with pytest.raises(EngineDeadError):
        await own.reset_prefix_cache()
    await own.abort("anything")
    own.close()
    assert not own.is_alive
    assert own.dead_reason == "the engine was closed"


async def test_leaving_the_context_closes(tiny_model):
    async with AsyncLLM(model=str(tiny_model("llama")), **OPTIONS) as llm:
        await collect(llm.generate(PROMPT, greedy(2)))
    assert not llm.is_alive


def test_an_unknown_option_is_refused():
    with pytest.raises(InvalidRequestError, match="unknown option tensor_parallel_size"):
        AsyncLLM(model="/nowhere", tensor_parallel_size=2)


def test_one_engine_serves_one_event_loop_after_another(llm, oracle):
    for _ in range(2):
        outputs = asyncio.run(collect(llm.generate(PROMPT, greedy(3))))
        assert_matches(outputs[-1].outputs[0], oracle("llama").greedy(PROMPT, 3))


async def test_a_loop_that_closes_while_it_is_told_does_not_take_the_engine_along(own):
    loop = asyncio.get_running_loop()
    stream = own.generate(PROMPT, greedy(LONG))
    await anext(stream)

    def closed(*_):
        raise RuntimeError("Event loop is closed")

    loop.call_soon_threadsafe = closed
    steps = own.stats().steps
    deadline = time.monotonic() + 5
    while own.is_alive and own.stats().steps < steps + 3 and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    del loop.call_soon_threadsafe
    assert own.is_alive, own.dead_reason
    await stream.aclose()
    assert len(await collect(own.generate(PROMPT, greedy(3)))) == 3
