"""``GET /v1/models`` and ``/v1/models/{id}``: what is served here."""

from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_paged_attention.api.server.chunks import Model, ModelList, encode
from mlx_paged_attention.api.server.serving import Serving

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Every name that requests may use."""
    serving: Serving = request.app.state.serving
    serving.require_engine()
    models = [_model(serving, name) for name in serving.names]
    listed = ModelList(data=models, first_id=models[0].id, last_id=models[-1].id)
    return Response(encode(listed), media_type="application/json")


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, request: Request) -> Response:
    """One of them."""
    serving: Serving = request.app.state.serving
    serving.require_engine()
    model = _model(serving, serving.model_name(model_id))
    return Response(encode(model), media_type="application/json")


def _model(serving: Serving, name: str) -> Model:
    info, created = serving.llm.info, serving.created
    return Model(
        id=name,
        created=created,
        root=info.model,
        max_model_len=info.max_model_len,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC).isoformat(),
        max_input_tokens=info.max_model_len,
        max_tokens=info.max_model_len,
    )
