"""Errors as OpenAI's clients expect them: ``{"error": {message, type, param, code}}`` and a status.

Below ``/v1/messages`` they have the shape that Anthropic's clients expect.
"""

import logging
import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from mlx_paged_attention.api.server.not_served import not_served
from mlx_paged_attention.errors import (
    EngineBusyError,
    EngineDeadError,
    FormFailedError,
    InvalidRequestError,
    MlxPagedError,
    PoolMemoryError,
    RequestFailedError,
    RequestTooLongError,
)

logger = logging.getLogger(__name__)

_LONGEST_MESSAGE = 1000

_MESSAGES = "/v1/messages"

_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer other than 200, decided by the HTTP layer itself."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def error_body(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON body of an error; messages that quote a client's huge value are shortened."""
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "…"
    message = message.encode(errors="backslashreplace").decode()
    param = None if param is None else param.encode(errors="backslashreplace").decode()
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def messages_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """What :func:`error_body` says, as Anthropic's clients expect it."""
    kind = _MESSAGES_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": body["error"]["message"]}
    if body["error"]["code"] is not None:
        error["details"] = {"error_code": body["error"]["code"]}
    return {"type": "error", "error": error, "request_id": f"req_{uuid.uuid4().hex}"}


def error_response(
    path: str, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error in the shape of the API that the path belongs to.

    Args:
        body: from :func:`error_body`.
    """
    if path == _MESSAGES or path.startswith(f"{_MESSAGES}/"):
        body = messages_error(status, body)
        headers = {**(headers or {}), "request-id": body["request_id"]}
    return JSONResponse(body, status, headers)


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for any exception: what a client did wrong is 4xx, a dead engine 503, else 500."""
    match error:
        case ApiError():
            status, param, code = error.status, error.param, error.code
        case RequestTooLongError():
            status, param, code = 400, error.param, "context_length_exceeded"
        case InvalidRequestError():
            status, param, code = 400, error.param, None
        case EngineBusyError():
            status, param, code = 409, None, "engine_busy"
        case PoolMemoryError():
            status, param, code = 503, None, "out_of_memory"
        case EngineDeadError():
            status, param, code = 503, None, "engine_dead"
        case FormFailedError():  # what was asked for cannot be had: trying again would not help
            status, param, code = 400, "structured_outputs", "form_failed"
        case RequestFailedError():
            status, param, code = 500, None, "request_failed"
        case _:
            return 500, error_body(
                f"internal error ({type(error).__name__}); the server's log has the details", status=500
            )
    return status, error_body(str(error), status=status, param=param, code=code)


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of every route come out in the shape of its API."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        status, body = describe(error)
        # What is unknown goes on to the server, which logs it; these end here, with what raised them.
        if isinstance(error, MlxPagedError) and error.__cause__ is not None and status >= 500:
            logger.error("a request failed", exc_info=error)
        return error_response(request.url.path, status, body)

    async def validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        message, param = _first_problem(error.errors(), request.headers.get("content-type", ""))
        return error_response(request.url.path, 400, error_body(message, status=400, param=param))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path, status, code = request.url.path, error.status_code, None
        message = error.detail or HTTPStatus(status).phrase
        if status == HTTPStatus.NOT_FOUND:
            message, code = not_served(path), "not_served"
        elif status == HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{path} takes {(error.headers or {}).get('Allow')}, not {request.method}"
        return error_response(path, status, error_body(message, status=status, code=code), error.headers)

    for known_type in (ApiError, MlxPagedError, Exception):
        app.add_exception_handler(known_type, known)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)


def _first_problem(problems: Sequence[Any], content_type: str) -> tuple[str, str | None]:
    """The first of pydantic's complaints as one sentence, and the field it is about."""
    problem = problems[0]
    kind, location = problem["type"], [str(part) for part in problem["loc"]]
    location = location[1:] if location[:1] in (["body"], ["query"]) else location
    if kind == "json_invalid":
        return f"the body is not valid JSON: {problem['ctx']['error']}", None
    if kind == "value_error":  # raised by our own validators, which name the field themselves
        error = problem["ctx"]["error"]
        return str(error), error.param if isinstance(error, InvalidRequestError) else None
    if not location:
        media = content_type.split(";")[0].strip().lower()
        if media != "application/json":
            return f"send Content-Type: application/json, not {media or 'none'}", None
        return "the body must be a JSON object", None
    if kind == "extra_forbidden":
        return f"{'.'.join(location)} is not a known field; leave it out", location[0]
    text = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"{'.'.join(location)}: {text}", location[0]
