"""``mlx-paged top``: the KV cache of a running server, live in a terminal."""

import http.client
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated

import msgspec
from cyclopts import Parameter

from mlx_paged_attention.api.blocks_report import blocks_report
from mlx_paged_attention.engine.blocks_view import BlocksView
from mlx_paged_attention.errors import InvalidRequestError, MlxPagedError

EXAMPLES = """Examples:

    mlx-paged top
    mlx-paged top http://studio.local:8080 --api-key "$MY_KEY"
    mlx-paged top --once >> blocks.log
"""

_TIMEOUT = 30.0  # seconds; the server answers between two steps
_MOST_BYTES = 64 << 20
# The other screen and no cursor; home; the rest of a line, of the screen.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def top(
    url: Annotated[str, Parameter(name="URL", help="Address of the server.", env_var=[])] = (
        "http://127.0.0.1:8000"
    ),
    /,
    *,
    api_key: Annotated[str | None, Parameter(help="Key that the server asks for.")] = None,
    interval: Annotated[float, Parameter(help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool,
        Parameter(help="Look once and end, as without a terminal.", negative="", show_default=False),
    ] = False,
) -> None:
    """Show who holds which KV block of a running server, what is shared, cached, free and wasted."""
    if not interval > 0:
        raise InvalidRequestError(f"--interval must be more than 0 seconds, not {interval}", "interval")
    address = _address(url)
    view = fetch(address, api_key)
    if once or not sys.stdout.isatty():
        print("\n".join(blocks_report(view, shutil.get_terminal_size().columns)))
        return
    sys.stdout.write(_ENTER)
    try:
        while True:
            size = shutil.get_terminal_size()
            # The last column stays empty: a line that fills it may wrap.
            lines = blocks_report(view, size.columns - 1, size.lines - 1)
            sys.stdout.write(_HOME + "".join(line + _END_OF_LINE + "\n" for line in lines) + _END_OF_SCREEN)
            sys.stdout.flush()
            time.sleep(interval)
            view = fetch(address, api_key)
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def fetch(address: str, api_key: str | None) -> BlocksView:
    """Ask a server for its blocks.

    Raises:
        MlxPagedError: there is no server, it is not one of ours, or it refuses.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{address}/debug/blocks", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            body = response.read(_MOST_BYTES)
        return msgspec.json.decode(body, type=BlocksView)
    except urllib.error.HTTPError as error:
        raise MlxPagedError(_refusal(address, error)) from error
    except TimeoutError as error:
        raise MlxPagedError(f"{address} has not answered for {_TIMEOUT:.0f} seconds") from error
    except urllib.error.URLError as error:
        raise MlxPagedError(
            f"no server answers at {address} ({error.reason}): start one with mlx-paged serve, "
            "or name where it is"
        ) from error
    except (msgspec.DecodeError, http.client.HTTPException, OSError) as error:
        raise MlxPagedError(
            f"what answers at {address} is not mlx-paged serve, or one of another version ({error})"
        ) from error


def _refusal(address: str, error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return f"{address} wants a key: give it with --api-key"
    if error.code == 503:
        try:
            body = msgspec.json.decode(error.read(_MOST_BYTES))
            return f"{address}: {body['error']['message']}"
        except (msgspec.DecodeError, KeyError, TypeError):
            pass  # not in our words, so not ours
    answer = f"GET /debug/blocks: {error.code} {error.reason}"
    return f"what answers at {address} is not mlx-paged serve ({answer})"


def _address(url: str) -> str:
    """``localhost:8000`` and ``http://localhost:8000/v1/`` as ``http://localhost:8000``."""
    address = url if "://" in url else f"http://{url}"
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(f"{url!r} is no address of a server; one is http://127.0.0.1:8000", "url")
    return address.rstrip("/").removesuffix("/v1")
