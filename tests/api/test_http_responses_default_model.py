"""``/v1/responses`` with the default model: real text, a real template, a real prefix cache."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from responses_client import client_of, said, stream, whole

from mlx_paged_attention.api.async_llm import AsyncLLM

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(max_model_len=1024, num_blocks=257)
    yield llm
    llm.close()


@pytest.fixture
async def client(llm: AsyncLLM) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(llm) as client:
        yield client


def body(llm: AsyncLLM, **more: Any) -> dict[str, Any]:
    return {"model": llm.info.model, "temperature": 0, "max_output_tokens": 24, **more}


async def test_it_says_what_chat_says(client: openai.AsyncOpenAI, llm: AsyncLLM) -> None:
    question = "What is the capital of France?"
    answer = await whole(client, **body(llm, input=question, instructions="Be brief."))
    chat = await client.chat.completions.create(
        model=llm.info.model,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}],
        temperature=0,
        max_tokens=24,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert "Paris" in answer.output_text
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens


async def test_a_stream_joins_to_the_whole_answer(client: openai.AsyncOpenAI, llm: AsyncLLM) -> None:
    options = body(llm, input="Tell a story of a café.", include=["message.output_text.logprobs"])
    answer = await whole(client, **options)
    assert said((await stream(client, **options))[-1].response) == said(answer)
    (part,) = answer.output[0].content  # type: ignore[union-attr]
    assert "".join(token.token for token in part.logprobs) == part.text  # type: ignore[union-attr]


@pytest.mark.parametrize("by_id", [True, False])
async def test_a_further_turn_finds_the_turns_before_it_cached(
    client: openai.AsyncOpenAI, llm: AsyncLLM, by_id: bool
) -> None:
    words = "six seven eight " if by_id else "one two three "
    first_input: list[Any] = [{"role": "user", "content": words * 40}]
    first = await whole(client, **body(llm, input=first_input))
    turn: list[Any] = [{"role": "user", "content": "And then?"}]
    if by_id:
        second = await whole(client, **body(llm, input=turn, previous_response_id=first.id))
    else:
        passed = [item.model_dump(exclude_none=True) for item in first.output]
        second = await whole(client, **body(llm, input=[*first_input, *passed, *turn]))
    assert first.usage is not None
    assert second.usage is not None
    read = first.usage.total_tokens
    assert second.usage.input_tokens > read
    # All blocks of the first turn, but for the last few tokens of its answer.
    assert second.usage.input_tokens_details.cached_tokens >= 16 * (read // 16) - 32
