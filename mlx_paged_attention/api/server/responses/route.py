"""``/v1/responses``: answer a conversation given as items, and tell of answers that are kept."""

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_paged_attention.api.server.chunks import encode
from mlx_paged_attention.api.server.errors import ApiError
from mlx_paged_attention.api.server.middleware import KEY_OWNER
from mlx_paged_attention.api.server.respond import respond
from mlx_paged_attention.api.server.responses.answer import ResponseAnswer
from mlx_paged_attention.api.server.responses.events import (
    Completed,
    Event,
    Failed,
    Incomplete,
    ResponseEvents,
)
from mlx_paged_attention.api.server.responses.objects import (
    DeletedResponse,
    InputTokenCount,
    ResponseObject,
)
from mlx_paged_attention.api.server.responses.request import ResponsesRequest
from mlx_paged_attention.api.server.responses.store import ResponseStore

router = APIRouter()


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer the conversation."""
    answer = ResponseAnswer(request.app.state.serving, request.app.state.response_store, body, request)
    events = ResponseEvents(answer.failed)
    return await respond(request, answer.events(), _collect, stream=bool(body.stream), events=events)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """How many tokens the prompt of the same request has."""
    answer = ResponseAnswer(request.app.state.serving, request.app.state.response_store, body, request)
    count = InputTokenCount(input_tokens=await answer.prompt_tokens())
    return Response(encode(count), media_type="application/json")


async def _collect(steps: AsyncGenerator[list[Event], None]) -> ResponseObject:
    """The response that the last event tells of: all events before are in it."""
    last: Event | None = None
    async for events in steps:
        last = events[-1]
    assert isinstance(last, Completed | Incomplete | Failed), "an answer ends with its response"
    return last.response


@router.get("/v1/responses/{response_id}")
async def retrieve_response(response_id: str, request: Request) -> Response:
    """A response that is kept."""
    if request.query_params.get("stream") not in (None, "false"):
        raise ApiError(
            400, "stream: a response that is kept is not streamed again; leave it out", param="stream"
        )
    store: ResponseStore = request.app.state.response_store
    stored = store.get(request.scope.get(KEY_OWNER), response_id)
    if stored is None:
        raise _not_found(response_id)
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Response:
    """Forget a response."""
    store: ResponseStore = request.app.state.response_store
    if not store.delete(request.scope.get(KEY_OWNER), response_id):
        raise _not_found(response_id)
    return Response(encode(DeletedResponse(id=response_id)), media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str) -> Response:
    """Refused: close the connection instead, and the answer ends."""
    raise ApiError(
        400, f"{response_id!r} cannot be cancelled: only background responses can, and there are none here"
    )


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str) -> Response:
    """Refused: they are the client's own."""
    raise ApiError(
        400, f"the input items of {response_id!r} are not listed here: the client that sent them has them"
    )


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"response with id {response_id!r} not found: it was not stored, or has made room")
