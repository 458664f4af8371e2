"""``/v1/messages`` with the default model: real text, a real prefix cache, Anthropic's client on a socket."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, Usage

from mlx_paged_attention.api.async_llm import AsyncLLM

pytestmark = pytest.mark.model

HI: list[Any] = [{"role": "user", "content": "hi"}]
LONG = "You are a helpful assistant who answers in short sentences. " * 10


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(max_model_len=1024, num_blocks=257)
    yield llm
    llm.close()


@pytest.fixture
def client(llm: AsyncLLM, serve: Callable[..., AbstractContextManager[str]]) -> Iterator[anthropic.Anthropic]:
    with serve(llm) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, *, stream: bool = False, **body: Any) -> Message:
    body = {"model": client.models.list().data[0].id, "max_tokens": 12, "messages": HI} | body
    greedy = {"extra_body": {"temperature": 0}}
    if not stream:
        return client.messages.create(**body, **greedy)
    with client.messages.stream(**body, **greedy) as events:
        return events.get_final_message()


def total(usage: Usage) -> int:
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_creation_input_tokens is not None
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_a_stream_says_what_the_whole_answer_says(client: anthropic.Anthropic) -> None:
    for body in (
        {"max_tokens": 40},
        {"system": "Be brief."},
        {"max_tokens": 40, "stop_sequences": ["assist"]},
    ):
        plain, streamed = ask(client, **body), ask(client, stream=True, **body)
        assert plain.content[0].to_dict() == streamed.content[0].to_dict()
        assert (plain.stop_reason, plain.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence)
        assert plain.usage.output_tokens == streamed.usage.output_tokens
    assert (plain.stop_reason, plain.stop_sequence) == ("stop_sequence", "assist")
    assert plain.content[0].type == "text"
    assert "assist" not in plain.content[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_the_tokens_of_a_prompt_add_up_cached_or_not(
    client: anthropic.Anthropic, stream: bool, marked: bool
) -> None:
    """jundot/omlx#1487, jundot/omlx#912"""
    mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
    text = f"{LONG} {stream} {marked}"
    body = {"system": [{"type": "text", "text": text, **mark}]}
    first, second = (ask(client, stream=stream, **body).usage for _ in range(2))
    counted = client.messages.count_tokens(model=client.models.list().data[0].id, messages=HI, **body)
    assert total(first) == total(second) == counted.input_tokens > 100
    assert second.cache_read_input_tokens is not None
    assert second.cache_read_input_tokens >= counted.input_tokens - 16
    assert second.input_tokens > 0


def test_a_billing_line_does_not_part_prompts(client: anthropic.Anthropic) -> None:
    usages = []
    for fingerprint in ("eb6c6", "74943"):
        billing = f"x-anthropic-billing-header: cc_version=2.1.1.7b4; cc_entrypoint=cli; cch={fingerprint};"
        usages.append(ask(client, system=[{"type": "text", "text": t} for t in (billing, LONG, "!")]).usage)
    assert total(usages[0]) == total(usages[1])
    assert (usages[1].cache_read_input_tokens or 0) > 100


def test_an_answer_goes_on_where_it_was_begun(client: anthropic.Anthropic) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    begun = {"role": "assistant", "content": "The capital of France is"}
    (block,) = ask(client, messages=[question, begun], max_tokens=3).content
    assert block.type == "text"
    assert "Paris" in block.text


def test_an_answer_keeps_to_a_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [7]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    body = {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "max_tokens": 60}
    answer = ask(client, **body)
    assert answer.content[0].type == "text"
    assert answer.content[0].text.replace(" ", "").replace("\n", "") == '{"a":7}'
    assert answer.stop_reason == "end_turn"
    bad = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format: "):
        ask(client, output_config=bad)


def test_tools_are_refused_where_the_model_cannot_call_them(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tools: this model's chat template"):
        ask(client, tools=[{"name": "f", "input_schema": {"type": "object"}}])
