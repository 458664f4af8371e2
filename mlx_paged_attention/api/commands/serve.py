"""``mlx-paged serve``: the server of OpenAI's and Anthropic's APIs."""

import gc
import ipaddress
import signal
import socket
import sys
from typing import Annotated

import uvicorn
from cyclopts import Parameter

from mlx_paged_attention.api.commands.flags import DEFAULT_ENGINE, EngineFlags, loaded, say
from mlx_paged_attention.errors import InvalidRequestError

EXAMPLES = """Examples:

    mlx-paged serve
    mlx-paged serve --model mlx-community/Qwen3-0.6B-4bit --port 8080 --kv-memory 4GB
    mlx-paged serve --host 0.0.0.0 --api-key "$MY_KEY"
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Hello"}'
"""


def serve(
    *,
    host: Annotated[str, Parameter(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        Parameter(
            help="Key that requests must send as a bearer token or in x-api-key; may be given several times.",
            negative="",
        ),
    ] = None,
    prefixes_per_key: Annotated[
        bool,
        Parameter(
            help="Let only requests with the same --api-key share cached prefixes.",
            negative="",
            show_default=False,
        ),
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        Parameter(
            help="Name that requests use for the model; may be given several times.",
            consume_multiple=True,
            negative="",
        ),
    ] = None,
    engine: EngineFlags = DEFAULT_ENGINE,
) -> None:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics."""
    options = engine.options()
    if not all(key.strip() for key in api_key or ()):  # everybody would have it
        raise InvalidRequestError("--api-key is empty: is the variable set that it comes from?", "api_key")
    if not all(name.strip() for name in served_model_name or ()):
        raise InvalidRequestError("--served-model-name is empty", "served_model_name")
    if prefixes_per_key and not api_key:
        raise InvalidRequestError("--prefixes-per-key needs keys: give --api-key, too", "prefixes_per_key")
    # Told to stop while loading or serving, close the engine before leaving.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # The address is taken before the model is loaded, and listened on only after.
    with _bind(host, port) as listener, loaded(options) as llm:
        from mlx_paged_attention.api.server.app import create_app
        from mlx_paged_attention.api.server.graceful import GracefulServer

        app = create_app(
            llm,
            served_model_names=served_model_name or (),
            api_keys=api_key or (),
            prefixes_per_key=prefixes_per_key,
        )
        names = ", ".join(app.state.serving.names)
        shown = f"[{host}]" if ":" in host else host
        say(f"serving {names} at http://{shown}:{listener.getsockname()[1]}/v1 (Ctrl-C stops)")
        if not api_key and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            say(
                f"warning: without --api-key, whoever reaches {host} from the network can use the model and "
                "read /metrics"
            )
        # A collection that walks all that imports and loading have made takes a tenth of a second or more,
        # in the middle of everybody's answers. None of it goes while the process serves.
        gc.collect()
        gc.freeze()
        try:
            GracefulServer(uvicorn.Config(app, log_level="info"), llm).run(sockets=[listener])
        finally:
            gc.unfreeze()


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise InvalidRequestError(f"--port must be from 0 to 65535, not {port}", "port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port or --host", "port"
        ) from error
    return listener
