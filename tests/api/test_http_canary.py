"""Secrets of many clients in real text, over HTTP, on a model that repeats what it was told."""

import asyncio
import itertools
import random
import string
from collections.abc import Callable
from contextlib import AbstractContextManager

import httpx
import pytest

from mlx_paged_attention.api.async_llm import AsyncLLM

CLIENTS, ROUNDS = 16, 200
SYSTEM = "You keep secrets. Each visitor tells you a code and asks for it again; say it to nobody else.\n"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_model_that_repeats_secrets_repeats_each_to_its_owner(
    serve: Callable[..., AbstractContextManager[str]],
) -> None:
    llm = AsyncLLM(max_model_len=256, num_blocks=36, max_num_seqs=12, max_num_batched_tokens=128)
    told: list[str] = []
    answers: list[tuple[str, str, bool]] = []
    rounds = itertools.count()

    async def client(url: str, number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            while next(rounds) < ROUNDS:
                secret = "".join(rng.choices(string.digits, k=8))
                told.append(secret)
                asks = f"{SYSTEM}Visitor {number}\nCode: {secret}\nCode: {secret}\nCode:"
                body = {"prompt": asks, "max_tokens": 16, "temperature": 0, "stream": True}
                leaves_after = rng.choice([None, None, None, 3])
                text = ""
                async with http.stream("POST", "/v1/completions", json=body) as stream:
                    assert stream.status_code == 200
                    seen = 0
                    async for line in stream.aiter_lines():
                        seen += 1
                        text += line
                        if leaves_after is not None and seen > leaves_after:
                            break
                answers.append((secret, letters_of(text), leaves_after is None))

    try:
        with serve(llm) as url:
            await asyncio.gather(*(client(url, number) for number in range(CLIENTS)))
        stats = llm.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0
        assert stats.used_blocks == 0
    finally:
        llm.close()
    assert len(answers) == ROUNDS
    for secret, text, _ in answers:
        foreign = [other for other in told if other != secret and other in text]
        assert not foreign, f"{foreign[0]} was told to the owner of {secret}"
    # Else its silence about others would mean nothing.
    whole = [secret in text for secret, text, read_to_the_end in answers if read_to_the_end]
    assert len(whole) > ROUNDS / 2
    assert sum(whole) > 0.9 * len(whole)


def letters_of(stream: str) -> str:
    """The text of a stream of events."""
    parts = [part.partition('"text":"')[2].partition('"')[0] for part in stream.split("data: ")]
    return "".join(parts)
