"""``/sleep``, ``/wake_up`` and ``/is_sleeping``: the KV pool's memory, given back and taken again."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mlx_paged_attention.api.server.serving import Serving

router = APIRouter()


@router.post("/sleep")
async def sleep(request: Request, level: int = 1) -> Response:
    """Give the pool's memory back; 409 while requests are being served. The next request wakes the engine."""
    serving: Serving = request.app.state.serving
    serving.require_engine()
    await serving.llm.sleep(level)
    return Response()


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """End the sleep now; 503 if there is no memory for a pool."""
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
