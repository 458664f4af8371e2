"""``GET /debug/blocks``: who holds which block of the KV cache."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_paged_attention.api.server.serving import Serving

router = APIRouter()


@router.get("/debug/blocks")
async def blocks(request: Request) -> Response:
    """The pool, block by block, and what each request holds of it; no text. ``mlx-paged top`` shows it."""
    serving: Serving = request.app.state.serving
    serving.require_engine()
    view = await serving.llm.blocks()
    return Response(msgspec.json.encode(view), media_type="application/json")
