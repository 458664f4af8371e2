"""OpenAI's client on /v1/responses, with every answer and event held against the client's own models."""

from typing import Any

import httpx
import openai
import pydantic
from fake_llm import FakeLLM
from openai.types.responses import Response, ResponseFunctionCallArgumentsDoneEvent, ResponseStreamEvent
from openai.types.responses import response_text_delta_event as delta_event
from openai.types.responses import response_text_done_event as done_event

from mlx_paged_attention.api.server.app import create_app

_EVENT: pydantic.TypeAdapter[ResponseStreamEvent] = pydantic.TypeAdapter(ResponseStreamEvent)
_MORE = {
    (Response, "store"),
    (ResponseFunctionCallArgumentsDoneEvent, "name"),
    *((kind, "bytes") for kind in (delta_event.Logprob, delta_event.LogprobTopLogprob)),
    *((kind, "bytes") for kind in (done_event.Logprob, done_event.LogprobTopLogprob)),
}
_LAST = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


def client_of(llm: Any, *, key: str = "none", **app_options: Any) -> openai.AsyncOpenAI:
    """A client of an app of its own."""
    return client_on(create_app(llm, **app_options), key=key)


def client_on(app: Any, *, key: str = "none") -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60)
    return openai.AsyncOpenAI(base_url="http://server/v1", api_key=key, http_client=http, max_retries=0)


async def whole(llm: FakeLLM | openai.AsyncOpenAI, **body: Any) -> Response:
    """A response that is not streamed."""
    client = llm if isinstance(llm, openai.AsyncOpenAI) else client_of(llm)
    raw = await client.responses.with_raw_response.create(**({"model": "fake/bytes", "input": "hi"} | body))
    return valid(Response.model_validate_json(raw.text, strict=True))


async def stream(llm: FakeLLM | openai.AsyncOpenAI, **body: Any) -> list[Any]:
    """The events of one that is, which are in order and agree with each other."""
    client = llm if isinstance(llm, openai.AsyncOpenAI) else client_of(llm)
    body = {"model": "fake/bytes", "input": "hi"} | body
    received = [event async for event in await client.responses.create(stream=True, **body)]
    events = [valid(_EVENT.validate_python(event.to_dict(mode="json"), strict=True)) for event in received]
    if not any(event.type == "error" for event in events):
        check(events)
    return events


def valid(model: Any) -> Any:
    """The model, which has no field besides its own and those that OpenAI sends and the client lacks."""
    if isinstance(model, pydantic.BaseModel):
        assert (type(model), *(model.model_extra or ())) in _MORE or not model.model_extra, model
        for value in dict(model).values():
            valid(value)
    elif isinstance(model, list):
        for value in model:
            valid(value)
    return model


def check(events: list[Any]) -> None:
    """The events come in OpenAI's order, and what they add up to is in the last one's response."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    created, started, *middle, last = events
    assert (created.type, started.type) == ("response.created", "response.in_progress")
    assert created.response == started.response
    assert created.response.status == "in_progress"
    assert created.response.output == []
    assert created.response.usage is None
    assert last.type == _LAST[last.response.status]
    assert last.response.id == created.response.id
    rest = iter(middle)
    items = []
    for added in rest:
        assert added.type == "response.output_item.added"
        assert added.output_index == len(items)
        assert added.item.status == "in_progress"
        items.append(_item(added.item, added.output_index, rest))
    assert items == last.response.output


def _item(item: Any, index: int, rest: Any) -> Any:
    """Read one item's events and return it as they say it is."""
    joined = ""
    first = next(rest)
    kinds = {
        "message": ("response.content_part.added", "response.output_text"),
        "function_call": (None, "response.function_call_arguments"),
    }
    if item.type == "reasoning":
        parts = first.type.removesuffix(".added")
        assert parts in ("response.content_part", "response.reasoning_summary_part")
        texts = "response.reasoning_text" if "content" in parts else "response.reasoning_summary_text"
    else:
        begins, texts = kinds[item.type]
        parts = (begins or "").removesuffix(".added")
    events = [first]
    while events[-1].type != "response.output_item.done":
        events.append(next(rest))
    if parts:
        added, part_done = events.pop(0), events.pop(-2)
        assert (added.type, part_done.type) == (f"{parts}.added", f"{parts}.done")
        assert (added.item_id, added.output_index) == (part_done.item_id, part_done.output_index)
        assert (added.item_id, added.output_index) == (item.id, index)
        assert added.part.text == ""
    *deltas, text_done, item_done = events
    logprobs: list[Any] = []
    for delta in deltas:
        assert (delta.type, delta.item_id, delta.output_index) == (f"{texts}.delta", item.id, index)
        joined += delta.delta
        logprobs += getattr(delta, "logprobs", [])
    assert (text_done.type, text_done.item_id, text_done.output_index) == (f"{texts}.done", item.id, index)
    assert item_done.output_index == index
    done = item_done.item
    assert (done.id, done.type) == (item.id, item.type)
    if item.type == "function_call":
        assert (text_done.name, text_done.arguments) == (done.name, done.arguments) == (item.name, joined)
        assert item.call_id == done.call_id
        return done
    assert text_done.text == part_done.part.text == joined
    (part,) = done.summary if "summary" in parts else done.content
    assert part == part_done.part or part.model_dump() == part_done.part.model_dump()
    if item.type == "message":
        assert [t.token for t in logprobs] == [t.token for t in text_done.logprobs]
        assert [t.token for t in logprobs] == [t.token for t in part.logprobs or []]
    return done


def said(response: Response) -> list[tuple[str, ...]]:
    """A response's output without its ids, to compare two of them."""
    told: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "message":
            told.append(("message", str(item.status), "".join(part.text for part in item.content)))  # type: ignore[union-attr]
        elif item.type == "reasoning":
            texts = [part.text for part in [*item.summary, *(item.content or [])]]
            told.append(("reasoning", str(item.status), "".join(texts)))
        else:
            assert item.type == "function_call"
            told.append(("function_call", str(item.status), item.name, item.arguments))
    return told
