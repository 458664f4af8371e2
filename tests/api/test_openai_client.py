"""OpenAI's official client, all of it that concerns us: helpers, errors, lists, disconnects."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import openai
import pytest
from fake_llm import ANSWER, FakeLLM
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from scripted_llm import ScriptedLLM
from test_http_socket import openai_client, until

from mlx_paged_attention.errors import EngineBusyError, RequestFailedError

Serve = Callable[..., AbstractContextManager[str]]
MODEL: Any = "org/model-8b:4bit"
HI: Any = [{"role": "user", "content": "hi"}]
FIRST = "0" + ANSWER[1:]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "Brno"}}\n</tool_call>'


class Way(BaseModel):
    way: Literal["left", "right"]
    steps: int


@pytest.fixture
def client_of(serve: Serve) -> Iterator[Callable[..., openai.OpenAI]]:
    """A client of a server around an engine; all are closed at the end."""
    open_now: list[Any] = []

    def connect(llm: FakeLLM, **options: Any) -> openai.OpenAI:
        served = serve(llm, served_model_names=[MODEL], **options)
        client = openai_client(served.__enter__())
        open_now.extend((served, client))
        return client

    yield connect
    for each in reversed(open_now):
        each.__exit__(None, None, None)


Connect = Callable[..., openai.OpenAI]


def test_models_are_listed_and_found_by_names_with_slashes(client_of: Connect) -> None:
    client = client_of(FakeLLM())
    (model,) = client.models.list()
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="served: org/model-8b:4bit"):
        client.models.retrieve("org/other")


def test_an_answer_and_its_stream_are_what_the_client_declares(client_of: Connect) -> None:
    client = client_of(FakeLLM())
    for extra in ({}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["quick"]}):
        asked: dict[str, Any] = {"model": MODEL, "messages": HI, "max_completion_tokens": 12, **extra}
        answer = client.chat.completions.create(**asked)
        ChatCompletion.model_validate(answer.to_dict(), strict=False)
        assert set(answer.to_dict()) <= set(ChatCompletion.model_fields)
        for chunk in client.chat.completions.create(stream=True, **asked):
            ChatCompletionChunk.model_validate(chunk.to_dict(), strict=False)
        text = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=3, logprobs=1)
        Completion.model_validate(text.to_dict(), strict=False)
        assert [choice.text for choice in text.choices] == ["0he", "0he"]


def test_the_stream_helper_puts_an_answer_together(client_of: Connect) -> None:
    client = client_of(FakeLLM("nine long"))
    with client.chat.completions.stream(
        model=MODEL,
        messages=HI,
        n=2,
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(kinds)
    whole = client.chat.completions.create(model=MODEL, messages=HI, n=2, logprobs=True, top_logprobs=1)
    assert len(final.choices) == 2
    for streamed, answered in zip(final.choices, whole.choices, strict=True):
        assert streamed.message.content == answered.message.content
        assert streamed.finish_reason == answered.finish_reason
        assert streamed.logprobs is not None
        assert answered.logprobs is not None
        assert streamed.logprobs.content == answered.logprobs.content
    assert final.usage == whole.usage


def test_the_stream_helper_puts_tool_calls_together(client_of: Connect) -> None:
    client = client_of(ScriptedLLM(["Wait. ", *CALL, "\n", *CALL]))
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": TOOLS}
    with client.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.index, event.name, json.loads(event.arguments)) for event in done] == [
        (0, "look", {"where": "Brno"}),
        (1, "look", {"where": "Brno"}),
    ]
    whole = client.chat.completions.create(**asked).choices[0]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    functions = [
        [call.function.model_dump(include={"name", "arguments"}) for call in choice.message.tool_calls or []]
        for choice in (final, whole)
    ]
    assert functions[0] == functions[1]
    assert len(functions[0]) == 2


def test_an_answer_of_a_form_is_parsed_whole_and_streamed(client_of: Connect) -> None:
    llm = ScriptedLLM(list('{"way": "left", "steps": 3}'))
    client = client_of(llm)
    whole = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Way)
    assert whole.choices[0].message.parsed == Way(way="left", steps=3)
    with client.chat.completions.stream(model=MODEL, messages=HI, response_format=Way) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Way(way="left", steps=3)
    for params in llm.params:
        assert params.structured_outputs is not None, "the form did not reach the engine"


def test_an_answer_that_is_cut_is_told_so_by_the_parser(client_of: Connect) -> None:
    client = client_of(ScriptedLLM(['{"way": "le'], finish_reason="length"))
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=HI, response_format=Way)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (EngineBusyError("busy"), openai.ConflictError),
        (RequestFailedError("the step failed"), openai.InternalServerError),
        (ZeroDivisionError(), openai.InternalServerError),
    ],
)
def test_an_engines_errors_are_the_clients_own(
    client_of: Connect, error: Exception, raised: type[Exception], stream: bool
) -> None:
    class Failing(FakeLLM):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise error
            yield

    client = client_of(Failing())
    with pytest.raises(raised):
        client.chat.completions.create(model=MODEL, messages=HI, stream=stream)


def test_a_clients_errors_are_its_own_classes(client_of: Connect) -> None:
    llm = FakeLLM()
    client = client_of(llm, api_keys=["key"], max_body_bytes=5000)
    chat = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs") as bad:
        chat(model=MODEL, messages=HI, top_logprobs=2)
    assert (bad.value.param, bad.value.type, bad.value.code) == (
        "top_logprobs",
        "invalid_request_error",
        None,
    )
    with pytest.raises(openai.BadRequestError, match="prompt is too long") as long:
        chat(model=MODEL, messages=[{"role": "user", "content": "x" * 300}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(model="gpt-4o", messages=HI)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as key:
        client.with_options(api_key="other").models.list()
    assert key.value.code == "invalid_api_key"
    with pytest.raises(openai.APIStatusError) as large:
        chat(model=MODEL, messages=[{"role": "user", "content": "x" * 6000}])
    assert large.value.status_code == 413
    llm.first_step = 5.0
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.1).completions.create(model=MODEL, prompt="x")
    llm.first_step = 0.0
    until(lambda: not llm.active, 2)
    assert chat(model=MODEL, messages=HI).choices[0].message.content == FIRST


def test_what_is_not_served_raises_not_found_with_what_to_do(client_of: Connect) -> None:
    client = client_of(FakeLLM())
    calls: dict[str, Callable[[], Any]] = {
        "embeddings": lambda: client.embeddings.create(model=MODEL, input="x"),
        "moderations": lambda: client.moderations.create(input="x"),
        "images": lambda: client.images.generate(prompt="x"),
        "audio": lambda: client.audio.speech.create(model=MODEL, voice="alloy", input="x"),
        "files": lambda: client.files.list(),
        "batches": lambda: client.batches.list(),
        "fine_tuning": lambda: client.fine_tuning.jobs.list(),
    }
    for path, call in calls.items():
        with pytest.raises(openai.NotFoundError, match=f"/v1/{path} is not served: ") as error:
            call()
        assert error.value.code == "not_served"


async def test_streams_that_the_async_client_leaves_end_at_once(serve: Serve) -> None:
    llm = FakeLLM(step_time=0.05)
    with serve(llm) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            model = (await client.models.list()).data[0].id

            async def read(chunks: int) -> str:
                text = ""
                stream = await client.chat.completions.create(
                    model=model, messages=HI, stream=True, max_tokens=200, extra_body={"ignore_eos": True}
                )
                async with stream:
                    async for chunk in stream:
                        text += chunk.choices[0].delta.content or ""
                        if len(text) >= chunks:  # a space waits for what follows it
                            break
                return text

            texts = await asyncio.gather(*(read(length) for length in range(1, 9)))
            for length, text in enumerate(texts, 1):
                assert text == FIRST[: len(text)]
                assert length <= len(text) <= length + 1
            await asyncio.to_thread(until, lambda: not llm.active, 2)
            assert llm.aborted == 8

            waiting = asyncio.create_task(
                client.completions.create(model=model, prompt="x", max_tokens=200, n=2)
            )
            await asyncio.to_thread(until, lambda: bool(llm.active), 2)
            waiting.cancel()
            await asyncio.to_thread(until, lambda: not llm.active, 2)
            answer = await client.completions.create(model=model, prompt="x", max_tokens=3)
            assert answer.choices[0].text == FIRST[:3]
