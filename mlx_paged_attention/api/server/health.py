"""``/health`` (and ``/ping``), ``/version``, ``/load`` and ``/metrics``: what keeps an eye on a server."""

from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import JSONResponse, Response

from mlx_paged_attention import __version__
from mlx_paged_attention.api.server.errors import ApiError
from mlx_paged_attention.api.server.serving import Serving

router = APIRouter()


@router.get("/health")
@router.get("/ping")
async def health(request: Request) -> Response:
    """200 while requests can be served; 503 with the reason once the engine is dead, or while it hangs."""
    serving: Serving = request.app.state.serving
    serving.require_engine()
    if (reason := serving.llm.stalled_reason) is not None:
        raise ApiError(503, reason, code="engine_stalled")
    return Response()


@router.get("/version")
async def version() -> Response:
    """The version of this package."""
    return JSONResponse({"version": __version__})


@router.get("/load")
async def load(request: Request) -> Response:
    """How many prompts are being answered."""
    serving: Serving = request.app.state.serving
    return JSONResponse({"server_load": serving.metrics.in_flight})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    serving: Serving = request.app.state.serving
    serving.require_engine()
    return Response(serving.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
