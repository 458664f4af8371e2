"""Reasoning that is ended after so many tokens, on the engine."""

import asyncio
from dataclasses import replace

import pytest
from tiny_text_model import MARKERS, PIECES, write_tiny_text_model

from mlx_paged_attention import LLM, AsyncLLM, SamplingParams
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.text.reasoning_tokens import ReasoningTokens

START, END, CALL, _ = range(256 + len(PIECES) + 1, 256 + len(PIECES) + 1 + len(MARKERS))
NEVER = {END: -100, CALL: -100}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny_text_model(tmp_path_factory.mktemp("calling-model"), calls=True))


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, num_blocks=128, block_size=16, max_num_seqs=16) as llm:
        yield llm


def params(budget=10, **values):
    values = {
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 40,
        "logit_bias": NEVER,
        "ignore_eos": True,
    } | values
    return SamplingParams(thinking_token_budget=budget, **values)


def reasoning_tokens(token_ids, *, inside):
    counter = ReasoningTokens([START], [[END], [CALL]], in_reasoning=inside)
    counter.add(token_ids)
    return counter.count


def assert_at(budget, at, before):
    """The end comes at ``at``: where it should, or once a character that had begun is complete."""
    assert budget <= at <= budget + 3
    # Tokens below 256 are bytes: what comes too late comes after a part of a character.
    assert all(before[len(before) - i - 2] >= 0x80 for i in range(at - budget))


@pytest.mark.parametrize("budget", [0, 1, 10, 25])
@pytest.mark.parametrize("prompt", ["<assistant><think>\n", "<assistant>"])
def test_the_end_comes_after_so_many_tokens_of_reasoning(llm, budget, prompt):
    opened = prompt.endswith("<think>\n")
    bias = NEVER | ({} if opened else {START: 100})
    (output,) = llm.generate(prompt, params(budget, logit_bias=bias, n=3), use_tqdm=False)
    for answer in output.outputs:
        at = answer.token_ids.index(END)
        assert_at(budget, at if opened else at - 1, answer.token_ids[:at])
        assert len(answer.token_ids) == 40
        if opened:
            assert reasoning_tokens(answer.token_ids[: at + 1], inside=True) == at


def test_a_model_that_ends_its_reasoning_itself_is_not_disturbed(llm):
    free = params(None, logit_bias={END: 100})
    budgeted = replace(free, thinking_token_budget=10)
    several = llm.generate(["<think>", "<think>"], [free, budgeted], use_tqdm=False)
    assert several[0].outputs[0].token_ids == several[1].outputs[0].token_ids
    plain = params(None, logit_bias={START: -100})
    several = llm.generate(["a", "a"], [plain, replace(plain, thinking_token_budget=0)], use_tqdm=False)
    assert several[0].outputs[0].token_ids == several[1].outputs[0].token_ids


def test_neighbours_without_a_budget_are_left_alone(llm):
    free = params(None)
    (alone,) = llm.generate("<think>", free, use_tqdm=False)
    together = llm.generate(["<think>"] * 3, [params(5), free, params(7)], use_tqdm=False)
    assert together[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_preempted_answer_keeps_its_budget(path):
    asked = [params(60, seed=seed, max_tokens=90) for seed in range(4)]
    prompts = [f"count {i}<think>" for i in range(4)]
    with LLM(path, num_blocks=18, block_size=16, max_num_seqs=4, max_model_len=200) as small:
        outputs = small.generate(prompts, asked, use_tqdm=False)
        assert small.stats().preemptions > 0
    for output in outputs:
        token_ids = output.outputs[0].token_ids
        at = token_ids.index(END)
        assert_at(60, at, token_ids[:at])


def test_a_form_follows_the_forced_end(llm):
    grammar = f'start: /(?s:.*)/ <[{END}]> ("yes" | "no")'
    asked = params(12, structured_outputs={"grammar": grammar}, ignore_eos=False)
    (output,) = llm.generate("<think>", asked, use_tqdm=False)
    answer = output.outputs[0]
    assert 12 <= answer.token_ids.index(END) <= 15  # a character may have to be completed
    assert answer.text.endswith(("yes", "no"))
    assert answer.finish_reason == "stop"


async def test_a_fork_goes_on_with_what_is_left_of_the_budget(path):
    llm = await asyncio.to_thread(AsyncLLM, path, num_blocks=128, block_size=16, max_num_seqs=16)
    try:
        parent = params(60, max_tokens=400)
        fork = None
        async for output in llm.generate("<think>", parent, "parent"):
            if fork is None and len(output.outputs[0].token_ids) >= 20:
                child = replace(parent, seed=9, max_tokens=80)
                fork = asyncio.create_task(_last(llm.fork("parent", child, "child")))
        last = await fork
        said = len(last.prompt_token_ids) - 1
        if said < 60:
            token_ids = last.outputs[0].token_ids
            at = token_ids.index(END)
            assert_at(60 - said, at, token_ids[:at])
    finally:
        await asyncio.to_thread(llm.close)


async def _last(outputs):
    return [output async for output in outputs][-1]


def test_a_model_without_reasoning_is_refused_a_budget(tmp_path, llm):
    with (
        LLM(str(write_tiny_text_model(tmp_path)), num_blocks=32) as plain,
        pytest.raises(InvalidRequestError, match="marks no reasoning") as error,
    ):
        plain.generate("a", params(5), use_tqdm=False)
    assert error.value.param == "thinking_token_budget"
    with pytest.raises(InvalidRequestError, match="beam search") as error:
        SamplingParams(temperature=0, use_beam_search=True, n=2, thinking_token_budget=0)
    assert error.value.param == "thinking_token_budget"
