"""Random requests on random engines: whatever else happens, each gets what it would get alone."""

import asyncio
import random

import pytest
from engine_hooks import (
    check_books,
    engine_of,
    poison_free_blocks,
    preempt_everything,
    settled_stats,
    shuffle_free_blocks,
    wrapped_launch,
)
from oracle import assert_matches, greedy, varied_prompt

from mlx_paged_attention import AsyncLLM, SamplingParams
from mlx_paged_attention.errors import RequestTooLongError

MODELS = ["llama", "gemma3", "qwen3_moe", "cohere"]
REQUESTS = 24


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 60))]
)
async def test_every_request_gets_what_it_would_get_alone(tiny_model, oracle, seed):
    rng = random.Random(seed)
    name = rng.choice(MODELS)
    block_size = rng.choice([1, 3, 4, 16])
    tokens = rng.choice([3, 8, 30, 100])
    policy = rng.choice(["fcfs", "priority", "longest_prefix"])
    async with AsyncLLM(
        model=str(tiny_model(name)),
        skip_tokenizer_init=True,
        block_size=block_size,
        num_blocks=rng.randint(60, 200) // block_size + 2,
        max_num_seqs=rng.randint(1, min(tokens, 8)),
        max_num_batched_tokens=tokens,
        enable_prefix_caching=policy == "longest_prefix" or rng.random() < 0.8,
        scheduling_policy=policy,
    ) as llm:
        shuffle_free_blocks(llm, seed)
        poison_free_blocks(llm)

        def disturb(_plan):
            engine_of(llm)._cache.check()
            if rng.random() < 0.03:
                preempt_everything(llm)

        alone: list[tuple[list[int], SamplingParams, list[list[int]]]] = []
        with wrapped_launch(llm, disturb):
            await asyncio.gather(
                *(
                    request(llm, oracle(name), policy, random.Random(100 * seed + n), alone)
                    for n in range(REQUESTS)
                )
            )
        check_books(llm)
        assert settled_stats(llm).used_blocks == 0
        poison_free_blocks(llm)
        for prompt, params, expected in alone[:6]:
            output = await last(llm.generate(prompt, params))
            assert [answer.token_ids for answer in output.outputs] == expected
        check_books(llm)


async def request(llm, oracle, policy, rng, alone):
    """One caller: waits, asks, reads to the end or leaves, and compares what it got."""
    await asyncio.sleep(rng.random() * 0.2)
    trunk = varied_prompt(rng.choice([5, 16, 40]), rng.randint(0, 1))
    prompt = trunk + varied_prompt(rng.randint(0, 20), rng.randint(0, 9))
    common = {
        "n": rng.choice([1, 1, 1, 3]),
        "priority": rng.randint(0, 2) if policy == "priority" else 0,
        "cache_salt": rng.choice([None, "salt"]),
    }
    length = rng.randint(1, 25)
    params = greedy(length, **common)
    seeded = rng.random() < 0.4
    if seeded:
        params = SamplingParams(
            temperature=0.9,
            top_p=0.9,
            presence_penalty=0.5,
            seed=rng.randint(0, 99),
            max_tokens=length,
            **common,
        )
    leaves_after = rng.choice([None, None, None, 0, 3])
    stream = llm.generate(prompt, params)
    seen = 0
    try:
        async for output in stream:  # noqa: B007
            seen += 1
            if leaves_after is not None and seen > leaves_after:
                break
    except RequestTooLongError:
        return
    finally:
        await stream.aclose()
    assert output.prompt_token_ids == prompt
    if seeded:
        if output.finished:
            alone.append((prompt, params, [answer.token_ids for answer in output.outputs]))
        return
    for answer in output.outputs:
        if answer.token_ids:
            assert_matches(answer, oracle.greedy(prompt, len(answer.token_ids)))
        if output.finished:
            assert len(answer.token_ids) == min(length, llm.info.max_model_len - len(prompt))


async def last(outputs):
    async for output in outputs:  # noqa: B007
        pass
    return output
