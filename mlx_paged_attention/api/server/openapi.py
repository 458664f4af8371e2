"""``/openapi.json``: requests as pydantic describes them, answers as msgspec does."""

from typing import Any

import msgspec
from fastapi import FastAPI

from mlx_paged_attention.api.server.chunks import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Model,
    ModelList,
    RenderedRequest,
    TokenizedPrompt,
    TokenizerInfo,
    TokensText,
)
from mlx_paged_attention.api.server.messages.events import MessageObject, TokenCount
from mlx_paged_attention.api.server.responses.objects import (
    DeletedResponse,
    InputTokenCount,
    ResponseObject,
)
from mlx_paged_attention.engine.blocks_view import BlocksView

_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"

# What each path (or a method of it) answers with, by media type. ``None`` is an empty body; where there is no
# type, only errors come.
ANSWERS: dict[str, dict[str, Any] | None] = {
    "/v1/chat/completions": {_JSON: ChatCompletion, _EVENTS: ChatChunk},
    "/v1/completions": {_JSON: Completion, _EVENTS: Completion},
    "/v1/chat/completions/render": {_JSON: RenderedRequest},
    "/v1/completions/render": {_JSON: list[RenderedRequest]},
    "/v1/responses": {_JSON: ResponseObject, _EVENTS: dict[str, Any]},
    "/v1/responses/input_tokens": {_JSON: InputTokenCount},
    "/v1/responses/{response_id}": {_JSON: ResponseObject},
    "delete /v1/responses/{response_id}": {_JSON: DeletedResponse},
    "/v1/responses/{response_id}/cancel": {},
    "/v1/responses/{response_id}/input_items": {},
    "/v1/messages": {_JSON: MessageObject, _EVENTS: dict[str, Any]},
    "/v1/messages/count_tokens": {_JSON: TokenCount},
    "/tokenize": {_JSON: TokenizedPrompt},
    "/detokenize": {_JSON: TokensText},
    "/tokenizer_info": {_JSON: TokenizerInfo},
    "/v1/models": {_JSON: ModelList},
    "/v1/models/{model_id}": {_JSON: Model},
    "/debug/blocks": {_JSON: BlocksView},
    "/version": {_JSON: dict[str, str]},
    "/load": {_JSON: dict[str, int]},
    "/is_sleeping": {_JSON: dict[str, bool]},
    "/": {_JSON: dict[str, Any]},
    "/v1": {_JSON: dict[str, Any]},
    "/metrics": {_TEXT: str},
    "/health": None,
    "/ping": None,
    "/sleep": None,
    "/wake_up": None,
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class DescribedApi(FastAPI):
    """An application that describes its answers, too."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            _describe_answers(super().openapi())
        assert self.openapi_schema is not None
        return self.openapi_schema


def _describe_answers(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    types = [kind for media in ANSWERS.values() if media is not None for kind in media.values()]
    described, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    assert not components.keys() & schemas.keys(), "a request and an answer have the same name"
    schemas.update(components, Error=_ERROR)
    schema_of = iter(described)
    answers = {
        path: None if media is None else {name: {"schema": next(schema_of)} for name in media}
        for path, media in ANSWERS.items()
    }
    content = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    error = {"description": "What is wrong", "content": content}
    anthropics = {"description": "What is wrong", "content": {_JSON: {"schema": {"type": "object"}}}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)  # FastAPI's own; here it is a 400
            operation["responses"]["default"] = anthropics if path.startswith("/v1/messages") else error
            name = f"{method} {path}" if f"{method} {path}" in answers else path
            if name in answers:
                del operation["responses"]["200"]
                media, empty = answers[name], {"description": "The answer"}
                if media != {}:
                    operation["responses"]["200"] = empty if media is None else {**empty, "content": media}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
