"""``/sleep``, ``/wake_up`` and ``/is_sleeping``: the KV pool's memory, given back and taken again."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mlx_paged_attention.api.server.serving import Serving
from mlx_paged_attention.errors import InvalidRequestError

router = APIRouter()


@router.post("/sleep")
async def sleep(request: Request, level: int = 1) -> Response:
    """Give the pool's memory back; 409 while requests are being served. The next request wakes the engine."""
    await _refuse_the_rest(request, "level")
    serving: Serving = request.app.state.serving
    serving.require_engine()
    await serving.llm.sleep(level)
    return Response()


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """End the sleep now; 503 if there is no memory for a pool."""
    await _refuse_the_rest(request)
    serving: Serving = request.app.state.serving
    serving.require_engine()
    await serving.llm.wake_up()
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Whether the pool has been given back."""
    serving: Serving = request.app.state.serving
    serving.require_engine()
    return JSONResponse({"is_sleeping": serving.llm.is_sleeping})


async def _refuse_the_rest(request: Request, *names: str) -> None:
    """Raises InvalidRequestError for a parameter that would be ignored."""
    for name in request.query_params:
        if name not in names:
            raise InvalidRequestError(f"{name} is not supported here; leave it out", name)
    if await request.body() not in (b"", b"{}"):
        known = " and ".join(f"{name} in the address (?{name}=1)" for name in names) or "nothing"
        raise InvalidRequestError(f"no body is read here; send {known}")
