"""Reported faults of threads and dying engines, each as a test that names its report."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import pytest
from engine_hooks import check_books, engine_of, recorded_plans, settled_stats, start_together, submit
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention import LLM, AsyncLLM
from mlx_paged_attention.errors import EngineDeadError, InvalidRequestError, RequestFailedError


@pytest.fixture
def llm(tiny_model):
    with LLM(model=str(tiny_model("llama")), skip_tokenizer_init=True, num_blocks=64, max_num_seqs=2) as llm:
        yield llm


class Faulty(nn.Module):
    """A part of the model that raises in chosen calls; what was written before it stays written."""

    def __init__(self, part, raises):
        super().__init__()
        self.part = part
        self._raises = raises
        self._calls = 0

    def __call__(self, x):
        self._calls += 1
        if self._raises(self._calls):
            raise RuntimeError("planted fault")
        return self.part(x)


async def last(outputs):
    """The final output of an ``AsyncLLM`` stream."""
    async for output in outputs:  # noqa: B007
        pass
    return output


def plant_fault(llm, raises):
    layer = engine_of(llm)._runner._host.model.layers[1]
    layer.mlp = Faulty(layer.mlp, raises)


def test_two_threads_over_one_prefix(engine, oracle):
    """madroidmaq/mlx-omni-server#108"""
    llm = engine("llama")
    shared = varied_prompt(40, 1)
    prompts = [[shared + varied_prompt(3 + r % 5, 2 * r + t) for r in range(25)] for t in range(2)]
    references = [[oracle("llama").greedy(prompt, 3) for prompt in mine] for mine in prompts]

    def rounds(thread):
        params = greedy(3, cache_salt="mlx-omni-server#108")
        return [llm.generate([prompt], params)[0] for prompt in prompts[thread]]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(rounds, range(2)))
    for outputs, expected in zip(results, references, strict=True):
        for output, reference in zip(outputs, expected, strict=True):
            assert_matches(output.outputs[0], reference)


def test_a_step_that_raises_ends_its_requests_and_no_others(llm, oracle):
    """ml-explore/mlx-lm#1505: two requests run and one waits when the third step raises."""
    prompts = [varied_prompt(20, s) for s in range(3)]
    plant_fault(llm, lambda call: call == 3)
    begun = time.monotonic()
    start_together(llm, 3)
    waits = [submit(llm, prompt, greedy(8)) for prompt in prompts]
    for wait in waits[:2]:
        with pytest.raises(RequestFailedError, match="planted fault"):
            wait()
    assert_matches(waits[2]().outputs[0], oracle("llama").greedy(prompts[2], 8))
    for prompt in prompts:
        (output,) = llm.generate([prompt], greedy(8))
        assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 8))
    assert time.monotonic() - begun < 5
    check_books(llm)
    assert settled_stats(llm).used_blocks == 0


def test_nothing_a_failed_step_half_wrote_is_ever_hit(llm, oracle):
    """ml-explore/mlx-lm#1505: the first step raises after its first layer has written."""
    prompt = varied_prompt(48, 1)
    plant_fault(llm, lambda call: call == 1)
    with pytest.raises(RequestFailedError, match="planted fault"):
        llm.generate([prompt], greedy(4))
    (output,) = llm.generate([prompt], greedy(4))
    assert output.num_cached_tokens == 0
    assert_matches(output.outputs[0], oracle("llama").greedy(prompt, 4))


async def test_an_engine_that_always_fails_says_so_at_once(tiny_model):
    """ml-explore/mlx-lm#1505: nobody hangs, and it does not pretend to be alive."""
    llm = AsyncLLM(model=str(tiny_model("llama")), skip_tokenizer_init=True, num_blocks=64, max_num_seqs=1)
    try:
        plant_fault(llm, lambda call: True)

        async def ask(seed):
            await last(llm.generate(varied_prompt(9, seed), greedy(4)))

        results = await asyncio.wait_for(
            asyncio.gather(*(ask(s) for s in range(6)), return_exceptions=True), timeout=5
        )
        assert all(isinstance(r, RequestFailedError | EngineDeadError) for r in results)
        assert any(isinstance(r, EngineDeadError) for r in results)
        assert not llm.is_alive
        assert "planted fault" in llm.dead_reason
        with pytest.raises(EngineDeadError, match="planted fault"):
            await asyncio.wait_for(ask(9), timeout=5)
    finally:
        llm.close()


@pytest.mark.parametrize("bad", [[504, 99999999], [-1], [1.5], [3, 256], [3, True], [], "text"])
def test_bad_prompts_are_refused_and_the_next_request_is_served(engine, oracle, bad):
    """vllm-project/vllm#30895"""
    llm = engine("llama")
    good = varied_prompt(7, 1)
    with pytest.raises(InvalidRequestError) as refused:
        llm.generate([bad], greedy(2))
    assert refused.value.param == "prompt"
    # Nor is anything of a list served that has one bad entry.
    with pytest.raises(InvalidRequestError, match="prompt 1"):
        llm.generate([good, bad], greedy(2))
    (output,) = llm.generate([good], greedy(2))
    assert_matches(output.outputs[0], oracle("llama").greedy(good, 2))


async def test_many_callers_at_once_and_one_thread_that_evaluates(tiny_model, oracle, monkeypatch):
    """waybarrios/vllm-mlx#18: 32 callers, 512 calls."""
    references = [oracle("llama").greedy(varied_prompt(3 + s, s), 3) for s in range(32)]
    evaluating = set()
    evaluate = mx.eval
    async with AsyncLLM(
        model=str(tiny_model("llama")), skip_tokenizer_init=True, num_blocks=128, max_num_seqs=16
    ) as llm:

        def recorded(*args):
            evaluating.add(threading.current_thread().name)
            return evaluate(*args)

        monkeypatch.setattr(mx, "eval", recorded)

        async def caller(number):
            for _ in range(16):
                output = await last(llm.generate(varied_prompt(3 + number, number), greedy(3)))
                llm.stats()
                assert_matches(output.outputs[0], references[number])

        await asyncio.gather(*(caller(number) for number in range(32)))
        check_books(llm)
        assert settled_stats(llm).used_blocks == 0
    assert len(evaluating) == 1


async def test_a_caller_that_leaves_during_a_long_prompt_makes_room_at_once(tiny_model, oracle):
    """lmstudio-ai/.github#10: 4000 tokens at 32 per step would take 125 steps."""
    async with AsyncLLM(
        model=str(tiny_model("llama")),
        skip_tokenizer_init=True,
        num_blocks=300,
        max_num_seqs=1,
        max_num_batched_tokens=32,
    ) as llm:
        short = varied_prompt(5, 2)

        with recorded_plans(llm) as plans:
            task = asyncio.create_task(last(llm.generate(varied_prompt(4000, 1), greedy(4))))
            while not plans:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            seen = len(plans)
            output = await last(llm.generate(short, greedy(4), "short"))
            first = next(i for i, plan in enumerate(plans) if plan.rows[-1].request_id == "short")
            assert first - seen <= 3
        assert_matches(output.outputs[0], oracle("llama").greedy(short, 4))
        assert settled_stats(llm).used_blocks == 0
