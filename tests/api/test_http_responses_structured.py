"""Forms of answers in ``/v1/responses``, on the real engine."""

import enum
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from responses_client import client_of, said, stream, whole
from tiny_text_model import write_tiny_text_model

from mlx_paged_attention.api.async_llm import AsyncLLM


class Way(enum.StrEnum):
    LEFT = "left"
    RIGHT = "right"


class Step(BaseModel):
    way: Way
    far: bool


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path = write_tiny_text_model(tmp_path_factory.mktemp("text-model"))
    llm = AsyncLLM(str(path), num_blocks=128, max_num_seqs=16)
    yield llm
    llm.close()


@pytest.fixture
async def client(llm: AsyncLLM) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(llm) as client:
        yield client


async def test_openais_client_parses_an_answer(client: openai.AsyncOpenAI, llm: AsyncLLM) -> None:
    for seed in range(3):
        options: dict[str, Any] = {"input": "Where?", "extra_body": {"seed": seed}}
        answer = await client.responses.parse(model=llm.info.model, text_format=Step, **options)
        assert isinstance(answer.output_parsed, Step)
        assert json.loads(answer.output_text) == answer.output_parsed.model_dump()
        own = client.responses.stream(model=llm.info.model, text_format=Step, **options)
        async with own as events:
            final = await events.get_final_response()
        assert final.output_parsed == answer.output_parsed


async def test_each_form_is_followed_streamed_or_not(client: openai.AsyncOpenAI, llm: AsyncLLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema | {"additionalProperties": False}}
    for body in (
        {"text": {"format": form}},
        {"extra_body": {"structured_outputs": {"json": form["schema"]}}},
    ):
        answer = await whole(client, model=llm.info.model, **body)
        assert json.loads(answer.output_text) == {"a": 1}
        assert answer.status == "completed"
    body = {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 40, "temperature": 0}
    answer = await whole(client, model=llm.info.model, **body)
    assert answer.output_text.startswith("{")
    assert said((await stream(client, model=llm.info.model, **body))[-1].response) == said(answer)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_stream_joins_to_the_whole_answer(
    client: openai.AsyncOpenAI, llm: AsyncLLM, temperature: float
) -> None:
    body: dict[str, Any] = {"temperature": temperature, "max_output_tokens": 40, "extra_body": {"seed": 3}}
    body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = await whole(client, model=llm.info.model, **body)
    last = (await stream(client, model=llm.info.model, **body))[-1].response
    assert said(last) == said(answer)
    assert last.usage == answer.usage or last.usage.output_tokens == answer.usage.output_tokens  # type: ignore[union-attr]
    (part,), (streamed,) = answer.output[0].content, last.output[0].content  # type: ignore[union-attr]
    assert [t.token for t in part.logprobs] == [t.token for t in streamed.logprobs]  # type: ignore[union-attr]
    assert [t.logprob for t in part.logprobs] == pytest.approx([t.logprob for t in streamed.logprobs])  # type: ignore[union-attr]


async def test_bad_forms_are_refused_as_the_client_calls_them(
    client: openai.AsyncOpenAI, llm: AsyncLLM
) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "string", "pattern": "("}}
    with pytest.raises(openai.BadRequestError) as error:
        await whole(client, model=llm.info.model, text={"format": form})
    assert error.value.param == "text.format"


async def test_what_cannot_fit_is_refused_as_the_client_calls_it(
    client: openai.AsyncOpenAI, llm: AsyncLLM
) -> None:
    with pytest.raises(openai.BadRequestError, match="the prompt is too long: it has") as error:
        await whole(client, model=llm.info.model, input="long " * 10_000)
    assert error.value.param == "input"
    assert error.value.code == "context_length_exceeded"
