"""The HTTP application."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI

from mlx_paged_attention import __version__
from mlx_paged_attention.api.server import (
    chat,
    completions,
    debug,
    health,
    models,
    render,
    root,
    sleep,
    tokenize,
)
from mlx_paged_attention.api.server.errors import add_error_handlers
from mlx_paged_attention.api.server.messages import route as messages
from mlx_paged_attention.api.server.middleware import ApiKey, BodyLimit
from mlx_paged_attention.api.server.openapi import DescribedApi
from mlx_paged_attention.api.server.responses import route as responses
from mlx_paged_attention.api.server.responses.store import ResponseStore
from mlx_paged_attention.api.server.serving import Serving

if TYPE_CHECKING:
    from mlx_paged_attention.api.async_llm import AsyncLLM

MAX_BODY_BYTES = 32 << 20


def create_app(
    llm: "AsyncLLM",
    *,
    served_model_names: Sequence[str] = (),
    api_keys: Sequence[str] = (),
    prefixes_per_key: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """An ASGI application that serves ``llm``, which stays its owner's to close.

    No cross-origin headers are sent: pages of other sites cannot read what is answered here.

    Args:
        served_model_names: what requests may call the model; by default its own name.
        api_keys: if any, one of them is needed for every route but ``/health`` and ``/ping``.
        prefixes_per_key: only requests with the same key share cached prefixes, whatever salts they bring.
        max_body_bytes: larger requests are answered 413.
    """
    assert all(api_keys), "an empty key lets everybody in"
    app = DescribedApi(title="mlx-paged-attention", version=__version__, docs_url=None, redoc_url=None)
    app.state.serving = Serving(llm, served_model_names or [llm.info.model])
    app.state.response_store = ResponseStore()
    protocols = (completions, chat, responses, messages)
    for family in (*protocols, render, tokenize, models, health, debug, sleep, root):
        app.include_router(family.router)
    add_error_handlers(app)
    # The last one added is the first to see a request: no key, no reading of bodies.
    app.add_middleware(BodyLimit, limit=max_body_bytes)
    if api_keys:
        app.add_middleware(ApiKey, keys=api_keys, prefixes_apart=prefixes_per_key)
    return app
