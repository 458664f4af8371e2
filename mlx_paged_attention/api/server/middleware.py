"""What happens before a route sees a request: the API key and the limit on the body's size.

Plain ASGI, so that streams and disconnect messages pass through untouched.
"""

import hashlib
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged_attention.api.server.errors import error_body, error_response

OPEN_PATHS = frozenset({"/health", "/ping"})


# Where the ASGI scope names the owner of a request, if keys are asked for.
KEY_OWNER = "mlx_paged_attention.key_owner"

# Where it names the owner of a request's prefixes, if it has one.
PREFIX_OWNER = "mlx_paged_attention.prefix_owner"


class ApiKey:
    """Answer 401 to everything but the health checks unless one of the keys comes with the request.

    It may come as a bearer token or, as Anthropic's clients send it, in ``x-api-key``.

    Args:
        prefixes_apart: note in the scope whose key it is, so that only requests of one key share prefixes.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], prefixes_apart: bool = False) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._owners = [hashlib.sha256(b"prefix owner\0" + key).hexdigest()[:32] for key in self._keys]
        self._prefixes_apart = prefixes_apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._owner(scope) if scope["type"] == "http" else None
        if owner is not None:
            scope[KEY_OWNER] = owner
            if self._prefixes_apart:
                scope[PREFIX_OWNER] = owner
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and owner is None:
            body = error_body(
                "wrong or missing API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                status=401,
                code="invalid_api_key",
            )
            # Claude Code tries for minutes unless it is told not to.
            headers = {"WWW-Authenticate": "Bearer", "x-should-retry": "false"}
            response = error_response(scope["path"], 401, body, headers)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _owner(self, scope: Scope) -> str | None:
        """Names the key that came, without telling it; ``None`` if none of them did."""
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        # Every key is compared, in constant time: how long it takes tells nothing.
        matches = [[hmac.compare_digest(one.strip().encode(), key) for key in self._keys] for one in given]
        return next((self._owners[match.index(True)] for match in matches if any(match)), None)


class BodyLimit:
    """Answer 413 as soon as a body is announced or grows larger than ``limit`` bytes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._limit:
            await self._refuse(scope, receive, send)
            return
        # Every route wants the whole body as one JSON value, so it is read here once and handed on.
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit:
                await self._refuse(scope, receive, send)
                return

        unread = True

        async def receive_after_body() -> Message:
            nonlocal unread
            if unread:
                unread = False
                return {"type": "http.request", "body": bytes(body), "more_body": False}
            return await receive()

        await self._app(scope, receive_after_body, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is larger than {self._limit} bytes; send fewer or shorter prompts per request"
        # Closing spares us reading the rest of a body that nobody wants.
        body = error_body(message, status=413)
        response = error_response(scope["path"], 413, body, {"Connection": "close"})
        await response(scope, receive, send)
