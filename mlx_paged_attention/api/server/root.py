"""``GET /`` and ``/v1``: what is here, for whoever opens the server's address in a browser."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mlx_paged_attention import __version__

router = APIRouter()

_PATHS = (
    *("/v1/models", "/v1/chat/completions", "/v1/responses", "/v1/completions"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/chat/completions/render", "/v1/completions/render", "/tokenize", "/detokenize"),
    "/tokenizer_info",
    *("/health", "/metrics", "/debug/blocks", "/sleep", "/wake_up", "/is_sleeping"),
)


@router.get("/")
@router.get("/v1")
async def root(request: Request) -> Response:
    """Name, version and the paths that answer."""
    app = request.app
    described = [path for path in (app.docs_url, app.openapi_url) if path is not None]
    return JSONResponse(
        {"name": app.title, "version": __version__, "paths": [*_PATHS, *described]},
    )
