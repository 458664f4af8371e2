"""Secrets of many clients on one engine: none is ever seen by another, and a leak would show.

Each client has tokens of its own, of which every round's secret is another draw. The counting model answers
with the tokens that its attention saw; were a block, a slot, a table or an output another's, or a block's
contents those of an earlier round, a token would come up that is not in the client's own context.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_model import VOCAB_SIZE, expected_logprobs, write_counting_model
from engine_hooks import check_books, engine_of, preempt_everything, settled_stats, wrapped_launch
from oracle import Oracle

from mlx_paged_attention import AsyncLLM, SamplingParams

CLIENTS, ROUNDS = 16, 200
# In common. A prompt has 12 different tokens at most, so that 20 log-probabilities tell of any other.
SYSTEM = [3 + i * i % 6 for i in range(26)]
OWN_TOKENS = 30
SECRET = 8
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    return str(write_counting_model(tmp_path_factory.mktemp("counting") / "model"))


def small_engine(model: str, **options: Any) -> AsyncLLM:
    """An engine in which a few requests fill the pool."""
    return AsyncLLM(
        model=model,
        **{
            "skip_tokenizer_init": True,
            "block_size": 4,
            "num_blocks": 60,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 40,
            **options,
        },
    )


def secret_of(client: int, rng: random.Random) -> list[int]:
    """Tokens that no other client ever uses; another draw, in another order, each time."""
    first = 16 + OWN_TOKENS * client
    return rng.sample(range(first, first + OWN_TOKENS), SECRET)


def leaks(prompt: Sequence[int], answer: Any) -> list[str]:
    """What an answer shows of tokens that are not in its own context, and counts that are wrong."""
    found = []
    context = list(prompt)
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        expected = expected_logprobs(context)
        seen = set(context)
        unseen = min(expected)
        for told, entry in entries.items():
            if told not in seen and entry.logprob > unseen + TOLERANCE:
                found.append(f"token {told} was seen, which is not in the context")
            elif abs(entry.logprob - expected[told]) > TOLERANCE:
                found.append(f"token {told} was seen more or less often than it is in the context")
        if token not in seen:
            found.append(f"token {token} was answered, which is not in the context")
        context.append(token)
    return found


@dataclass
class Tally:
    """What happened, for it to be worth the name of a test."""

    finished: int = 0
    aborted: int = 0
    cached: int = 0


async def client(llm: AsyncLLM, number: int, rounds: "itertools.count[int]", tally: Tally) -> None:
    """Ask with a new secret each time; leave some answers early, compare all that came."""
    rng = random.Random(number)
    while (turn := next(rounds)) < ROUNDS:
        secret = secret_of(number, rng)
        prompt = [*SYSTEM, *secret, *rng.choices(secret, k=rng.randint(0, 12))]
        leaves_after = rng.choice([None, None, None, 0, 2, 9])
        salt = None if number % 2 else f"tenant {number % 4}"
        params = SamplingParams(
            temperature=0, max_tokens=rng.randint(1, 24), logprobs=20, ignore_eos=True, cache_salt=salt
        )
        outputs = llm.generate(prompt, params, f"{salt}/{number}/{turn}")
        seen = 0
        async for output in outputs:
            seen += 1
            assert output.prompt_token_ids == prompt
            assert not leaks(prompt, output.outputs[0])
            if leaves_after is not None and seen > leaves_after:
                break
        await outputs.aclose()
        tally.finished += output.finished
        tally.aborted += not output.finished
        tally.cached += output.num_cached_tokens


async def test_no_client_ever_sees_anothers_secret(counting):
    async with small_engine(counting) as llm:
        engine, rng = engine_of(llm), random.Random(0)

        def watch(_plan):
            engine._cache.check()
            for run in engine.blocks().runs:
                assert len({owner.split("/")[0] for owner in run.owners}) <= 1, f"tenants share {run}"
            if rng.random() < 0.01:
                preempt_everything(llm)

        tally, rounds = Tally(), itertools.count()
        with wrapped_launch(llm, watch):
            await asyncio.gather(*(client(llm, number, rounds, tally) for number in range(CLIENTS)))
        check_books(llm)
        stats = settled_stats(llm)
        assert stats.used_blocks == 0
        assert tally.finished + tally.aborted == ROUNDS
        assert tally.aborted > ROUNDS / 10
        assert stats.preemptions > 20
        assert tally.cached > ROUNDS * len(SYSTEM) / 3
        assert (await llm.blocks()).copies > 0


@pytest.mark.parametrize("fault", ["foreign block", "stale block", "swapped outputs"])
async def test_the_canary_dies_of_a_leak(counting, fault):
    """Each fault is planted once, and told."""
    async with small_engine(counting) as llm:
        secrets = [secret_of(number, random.Random(number)) for number in range(2)]
        prompts = [[*SYSTEM, *secret] for secret in secrets]
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=20, ignore_eos=True)
        runner = engine_of(llm)._runner
        launch = runner.launch

        def planted(plan):
            for new in plan.new:
                row = next(row for row in plan.rows if row.request_id == new.request_id)
                if fault == "foreign block" and new.request_id == "1":
                    # In place of a block found in the prefix cache: one with the first request's secret.
                    row.new_block_ids[0] = engine_of(llm)._cache.block_ids("0")[len(SYSTEM) // 4 + 1]
                if fault == "stale block" and new.request_id == "1":
                    # Slots that it must fill are taken for filled.
                    index = next(i for i, one in enumerate(plan.rows) if one is row)
                    plan.rows[index] = type(row)(
                        row.request_id,
                        row.token_ids[4:],
                        row.start + 4,
                        row.new_block_ids,
                        row.write_from + 4,
                        row.sample,
                    )
            launched = launch(plan)
            if fault == "swapped outputs" and len(plan.rows) == 2:
                return Swapped(launched)
            return launched

        runner.launch = planted

        async def ask(number):
            outputs = llm.generate(prompts[number], params, str(number))
            return [output async for output in outputs][-1]

        answers = await asyncio.gather(ask(0), ask(1))
        found = [leaks(prompt, output.outputs[0]) for prompt, output in zip(prompts, answers, strict=True)]
        assert found[1]


class Swapped:
    """A step whose two rows get each other's output."""

    def __init__(self, launched):
        self._launched = launched

    def read(self):
        output = self._launched.read()
        if len(output.rows) != 2:
            return output
        one, two = output.rows
        rows = [
            type(a)(b_id, a.token_ids, a.logprobs, a.prompt_logprobs)
            for a, b_id in ((two, one.request_id), (one, two.request_id))
        ]
        return type(output)(output.step, rows)


@pytest.mark.parametrize("partial", [False, True])
async def test_a_hit_never_crosses_tenants(counting, partial):
    """Neither in counts nor in work: a tenant's first prompt computes all of it, whoever sent it before."""
    async with small_engine(counting, num_blocks=200) as llm:
        prompt = SYSTEM[:-1] if partial else [*SYSTEM, *secret_of(0, random.Random(0))]
        computed: dict[str, int] = {}

        def count(plan):
            for row in plan.rows:
                computed[row.request_id] = computed.get(row.request_id, 0) + len(row.token_ids)

        tenants = [f"tenant {i}" for i in range(6)] + [None]
        with wrapped_launch(llm, count):
            for turn in range(2):
                asked = list(enumerate(tenants))
                random.Random(turn).shuffle(asked)

                async def ask(i, salt, turn=turn):
                    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, cache_salt=salt)
                    name = f"{i}/{turn}"
                    (output,) = [one async for one in llm.generate(prompt, params, name)]
                    assert not leaks(prompt, output.outputs[0])
                    assert computed[name] + output.num_cached_tokens == len(prompt)
                    return output.num_cached_tokens

                cached = await asyncio.gather(*(ask(i, salt) for i, salt in asked))
                if turn == 0:
                    assert cached == [0] * len(tenants)
                else:
                    assert min(cached) >= len(prompt) - 4
        assert settled_stats(llm).prefix_hits == sum(cached)


def test_the_model_counts(counting):
    """What the other tests build on, against mlx-lm alone."""
    context = [*SYSTEM, *secret_of(3, random.Random(3))]
    logprobs = Oracle.load(Path(counting)).greedy(context, 1).logprobs[0]
    assert np.allclose(logprobs, expected_logprobs(context), atol=TOLERANCE / 10)
    seen = sorted(set(context))
    others = np.delete(logprobs, seen)
    assert np.allclose(others, others[0], atol=1e-6)
    assert logprobs[seen].min() > others[0] + 1
    assert len(logprobs) == VOCAB_SIZE
