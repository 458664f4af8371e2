"""Conversations over several requests of ``/v1/responses``: by a response's id, and by items sent back."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import openai
import pytest
from fake_llm import ByteTokenizer, FakeLLM
from responses_client import client_of, client_on, stream, whole
from scripted_llm import HERMES, ScriptedLLM
from test_http_responses import SCRIPT, TOOLS, prompt

from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.api.server.responses.store import ResponseStore


class Seen(ScriptedLLM):
    """Keeps the messages that it was last asked to go on from."""

    def __init__(self, pieces: list[str]) -> None:
        super().__init__(pieces)
        self.messages: Any = None
        assert self.tokenizer is not None
        self.tokenizer.chat_token_ids = self._chat_token_ids  # type: ignore[method-assign]

    def _chat_token_ids(self, messages: Any, **options: Any) -> list[int]:
        self.messages = messages
        return ByteTokenizer(HERMES).chat_token_ids(messages, **options)


def outputs(response: Any) -> list[dict[str, Any]]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": str(n)}
        for n, call in enumerate(calls)
    ]


def turn(response: Any) -> dict[str, Any]:
    """The assistant's message that a response should become."""
    calls = [
        {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments},
        }
        for item in response.output
        if item.type == "function_call"
    ]
    return {
        "role": "assistant",
        "reasoning_content": "Hm é.",
        "content": "Let me.",
        "tool_calls": calls,
    }


async def test_a_conversation_goes_on_from_a_response() -> None:
    llm = FakeLLM("Yes. ")
    client = client_of(llm)
    first = await whole(client, instructions="one", input="a", max_output_tokens=4)
    second = await whole(client, instructions="two", input="b", previous_response_id=first.id)
    assert prompt(llm) == "<system>two<user>a<assistant>0es.<user>b<assistant>"
    assert second.previous_response_id == first.id
    third = await whole(client, input="c", previous_response_id=second.id)
    assert prompt(llm) == "<user>a<assistant>0es.<user>b<assistant>0es. <user>c<assistant>"
    # Going on from an earlier one, or after it has been deleted, is another branch of the conversation.
    await client.responses.delete(second.id)
    await whole(client, input="d", previous_response_id=third.id)
    assert prompt(llm).endswith("<user>c<assistant>0es. <user>d<assistant>")
    await whole(client, input="e", previous_response_id=first.id)
    assert prompt(llm) == "<user>a<assistant>0es.<user>e<assistant>"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("way", ["id", "items", "references", "encrypted", "summary"])
async def test_tools_are_called_and_their_outputs_read_in_every_way_to_go_on(
    way: str, streamed: bool
) -> None:
    llm = Seen([SCRIPT])
    client = client_of(llm)
    more: dict[str, Any] = {"store": way in ("id", "references"), "tools": TOOLS}
    if way in ("encrypted", "summary"):
        more |= {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    if streamed:
        response = (await stream(client, **more))[-1].response
    else:
        response = await whole(client, **more)
    results = outputs(response)
    user = {"role": "user", "content": "hi"}
    items = [item.model_dump(mode="json", exclude_none=True) for item in response.output]
    if way == "id":
        await whole(client, input=results, previous_response_id=response.id, **more)
    elif way == "references":
        references = [{"type": "item_reference", "id": item.id} for item in response.output]
        await whole(client, input=[user, *references, *results], **more)
    else:
        for item in items:
            if way == "encrypted":  # as coding agents send it: without the words
                item.pop("content", None)
                item |= {"summary": []} if item["type"] == "reasoning" else {}
            if way == "encrypted" and item["type"] == "message":
                item["content"] = [{"type": "output_text", "text": "Let me."}]
        await whole(client, input=[user, *items, *results], **more)
    tools = [{"role": "tool", "tool_call_id": r["call_id"], "content": r["output"]} for r in results]
    assert llm.messages == [user, turn(response), *tools]
    assert prompt(llm).startswith("<user>hi<assistant>Let me.<tool>0<tool>1<assistant>")


async def test_what_another_server_has_encrypted_is_passed_over() -> None:
    llm = Seen(["ok"])
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAA"}
    broken = {**foreign, "encrypted_content": "mlx-paged-1:%%"}
    told = {**foreign, "summary": [{"type": "summary_text", "text": "Hm."}]}
    user = {"role": "user", "content": "hi"}
    answer = {"role": "assistant", "content": "yes"}
    await whole(llm, input=[user, foreign, broken, answer, user, told, answer, user])
    thought = {"role": "assistant", "reasoning_content": "Hm.", "content": "yes"}
    assert llm.messages == [user, answer, user, thought, user]


async def test_each_turn_of_an_assistant_is_one_message() -> None:
    llm = Seen(["ok"])
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {
        "type": "reasoning",
        "id": "r",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "t"}],
    }
    says = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]}
    await whole(llm, input=[thought, call, call, result, result, says, call, says, says, thought, thought])
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    read = {"role": "tool", "tool_call_id": "c", "content": "1"}
    alone = {"role": "assistant", "content": "a"}
    assert llm.messages == [
        {"role": "assistant", "reasoning_content": "t", "content": "", "tool_calls": [made, made]},
        read,
        read,
        {"role": "assistant", "content": "a", "tool_calls": [made]},
        alone,
        alone,
        {"role": "assistant", "reasoning_content": "t", "content": ""},
        {"role": "assistant", "reasoning_content": "t", "content": ""},
    ]


async def test_an_item_is_referred_to_once() -> None:
    """Otherwise a few bytes each would make a prompt of any length."""
    client = client_of(FakeLLM())
    reference: Any = {"id": (await whole(client)).output[0].id}
    await whole(client, input=[reference, {"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] refers to .* a second time"):
        await whole(client, input=[reference, reference])


async def test_a_response_is_kept_until_it_is_deleted() -> None:
    client = client_of(FakeLLM())
    for response in (await whole(client), (await stream(client, max_output_tokens=3))[-1].response):
        assert response.store is True
        assert await client.responses.retrieve(response.id) == response
        deleted = await client.responses.with_raw_response.delete(response.id)
        assert json.loads(deleted.text) == {"id": response.id, "object": "response", "deleted": True}
        for gone in (client.responses.retrieve(response.id), client.responses.delete(response.id)):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await gone
        with pytest.raises(openai.NotFoundError, match="send the conversation's items") as error:
            await whole(client, previous_response_id=response.id)
        assert error.value.param == "previous_response_id"
        assert error.value.code == "previous_response_not_found"


async def test_what_is_not_to_be_stored_is_not() -> None:
    app = create_app(FakeLLM())
    response = await whole(client_on(app), store=False)
    events = await stream(client_on(app), store=False)
    assert response.store is events[-1].response.store is False
    assert len(app.state.response_store) == 0
    for response_id in (response.id, events[-1].response.id):
        with pytest.raises(openai.NotFoundError):
            await client_on(app).responses.retrieve(response_id)


async def test_a_response_too_large_to_be_kept_says_so() -> None:
    app = create_app(FakeLLM())
    app.state.response_store = ResponseStore(max_bytes=1800)
    small, large = await whole(client_on(app)), await whole(client_on(app), instructions="long " * 20)
    assert (small.store, large.store) == (True, True)
    assert len(app.state.response_store) == 1  # the first has made room
    huge = await whole(client_on(app), metadata={"a": "b" * 500})
    assert huge.store is False
    assert len(app.state.response_store) == 1


async def test_a_key_finds_nothing_of_another_keys() -> None:
    app = create_app(FakeLLM(), api_keys=["mine", "yours"])
    mine, yours = client_on(app, key="mine"), client_on(app, key="yours")
    response = await whole(mine)
    for attempt in (
        lambda: yours.responses.retrieve(response.id),
        lambda: yours.responses.delete(response.id),
        lambda: whole(yours, previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt()
    with pytest.raises(openai.BadRequestError, match="not stored here"):
        await whole(yours, input=[{"type": "item_reference", "id": response.output[0].id}])
    assert await mine.responses.retrieve(response.id) == response


async def test_the_tokens_counted_are_those_of_the_prompt() -> None:
    llm = ScriptedLLM(["x"])
    client = client_of(llm)
    first = await whole(client, instructions="Be.")
    body: dict[str, Any] = {"input": "ho", "previous_response_id": first.id, "tools": TOOLS}
    counted = await client.responses.input_tokens.count(model="fake/bytes", **body)
    assert len(llm.prompts) == 1, "counting computes nothing"
    second = await whole(client, **body)
    assert second.usage is not None
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == second.usage.input_tokens > 20
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.responses.input_tokens.count(model="other", input="hi")
    with pytest.raises(openai.BadRequestError, match="no place for") as error:
        await client_of(FakeLLM()).responses.input_tokens.count(model="fake/bytes", input="hi", tools=TOOLS)
    assert error.value.param == "tools"


async def test_what_is_not_offered_is_refused_clearly() -> None:
    client = client_of(FakeLLM())
    response = await whole(client)
    with pytest.raises(openai.BadRequestError, match="only background responses"):
        await client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="not listed here"):
        await client.responses.input_items.list(response.id)
    with pytest.raises(openai.BadRequestError, match="not streamed again") as error:
        await client.responses.retrieve(response.id, stream=True)
    assert error.value.param == "stream"


async def test_a_client_that_leaves_stores_nothing(
    serve: Callable[..., AbstractContextManager[str]],
) -> None:
    llm = FakeLLM(step_time=0.02)
    with serve(llm) as url:
        async with (
            httpx.AsyncClient(timeout=20) as http,
            http.stream("POST", f"{url}/v1/responses", json={"input": "hi", "stream": True}) as response,
        ):
            lines = response.aiter_lines()
            while not (line := await anext(lines)).startswith("data: "):
                pass
            response_id = json.loads(line.removeprefix("data: "))["response"]["id"]
        for _ in range(250):
            if llm.aborted:
                break
            await asyncio.sleep(0.02)
        assert llm.aborted == 1
        async with httpx.AsyncClient(timeout=20) as http:
            assert (await http.get(f"{url}/v1/responses/{response_id}")).status_code == 404
            # What is streamed to its end on a socket is there, and its end is the end of the stream.
            whole = await http.post(f"{url}/v1/responses", json={"input": "hi", "stream": True})
            last = json.loads(whole.text.rstrip().rsplit("data: ", 1)[1])
            assert last["type"] == "response.completed"
            kept = await http.get(f"{url}/v1/responses/{last['response']['id']}")
            assert kept.json() == last["response"]
