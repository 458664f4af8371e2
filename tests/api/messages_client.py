"""The official ``anthropic`` client on an app around an engine, without a socket."""

from typing import Any

import anthropic
import httpx2
from anthropic.types import Message, RawMessageStreamEvent
from fake_llm import FakeLLM
from pydantic import TypeAdapter

from mlx_paged_attention.api.server.app import create_app

HI: list[Any] = [{"role": "user", "content": "hi"}]

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def client_of(llm: FakeLLM, *, api_key: str = "none", **app_options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url="http://server", api_key=api_key, http_client=http_of(llm, **app_options), max_retries=0
    )


def http_of(llm: FakeLLM, **app_options: Any) -> httpx2.AsyncClient:
    app = create_app(llm, **app_options)  # type: ignore[arg-type]
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://server")


def filled(body: dict[str, Any]) -> dict[str, Any]:
    """A request's arguments, those that the client wants and a test need not care for included.

    What the client has no argument for is sent all the same.
    """
    body = {"model": "fake/bytes", "max_tokens": 200, "messages": HI} | body
    extra = {name: body.pop(name) for name in ("temperature", "top_p", "top_k") if name in body}
    return body | {"extra_body": extra | body.get("extra_body", {})}


async def whole(llm: FakeLLM, **body: Any) -> Message:
    answer = await client_of(llm).messages.create(**filled(body))
    Message.model_validate(answer.to_dict(), strict=True)
    return answer


async def streamed(llm: FakeLLM, **body: Any) -> Message:
    """The message that the client puts together from a stream."""
    async with client_of(llm).messages.stream(**filled(body)) as stream:
        return await stream.get_final_message()


async def raw_events(llm: FakeLLM, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream as they are sent, each checked against the client's own types."""
    async with http_of(llm) as http:
        body = {"model": "fake/bytes", "max_tokens": 200, "messages": HI, "stream": True} | body
        response = await http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.split("\n\n")
    assert end == ""
    return [_event(text) for text in events]


def _event(text: str) -> dict[str, Any]:
    name, data = text.split("\n")
    event = TypeAdapter(dict[str, Any]).validate_json(data.removeprefix("data: "))
    assert name == f"event: {event['type']}"
    if event["type"] not in ("ping", "error"):
        EVENT.validate_python(event, strict=True)
    return event


def said(message: Message) -> dict[str, Any]:
    """What a message says, without the ids that differ from one to the next."""
    content = [block.to_dict() for block in message.content]
    return {
        "content": [{key: value for key, value in block.items() if key != "id"} for block in content],
        "stop": (message.stop_reason, message.stop_sequence),
        "usage": message.usage.to_dict(),
    }
