"""What clients of other servers ask for and is not here: by path, what to do instead."""

_ONLY_TEXT = "only text is generated here"
_NO_VECTORS = (
    "this server runs a model that generates text, which gives no embeddings, scores or classes; "
    "serve one that was trained for them with another server"
)
_NO_STORE = "nothing is stored here: send files' contents and earlier turns along with each request"
_NO_OLLAMA = "Ollama's API is not served; set the client to OpenAI's, with this server's address and /v1"
_NO_TGI = "this is the API of another server; use /v1/completions or /v1/chat/completions"

# Each stands for the paths below it, too.
_NOT_SERVED = {
    "/v1/embeddings": _NO_VECTORS,
    "/embeddings": _NO_VECTORS,
    "/v1/rerank": _NO_VECTORS,
    "/v2/rerank": _NO_VECTORS,
    "/rerank": _NO_VECTORS,
    "/v1/score": _NO_VECTORS,
    "/score": _NO_VECTORS,
    "/pooling": _NO_VECTORS,
    "/classify": _NO_VECTORS,
    "/v1/moderations": f"{_NO_VECTORS}, or ask in /v1/chat/completions",
    "/v1/audio": _ONLY_TEXT,
    "/v1/images": _ONLY_TEXT,
    "/v1/videos": _ONLY_TEXT,
    "/v1/realtime": f"{_ONLY_TEXT}, over plain HTTP; use /v1/chat/completions with stream=true",
    "/v1/files": _NO_STORE,
    "/v1/uploads": _NO_STORE,
    "/v1/vector_stores": _NO_STORE,
    "/v1/conversations": _NO_STORE,
    "/v1/assistants": f"{_NO_STORE}; use /v1/chat/completions",
    "/v1/threads": f"{_NO_STORE}; use /v1/chat/completions",
    "/v1/batches": f"{_NO_STORE}; send the requests themselves, all at once: they are batched as they come",
    "/v1/fine_tuning": "models are not trained here; train with mlx-lm and serve the result",
    "/v1/load_lora_adapter": "adapters are loaded at the start: mlx-paged serve --adapter-path",
    "/v1/unload_lora_adapter": "adapters are loaded at the start: mlx-paged serve --adapter-path",
    "/api": _NO_OLLAMA,
    "/generate": _NO_TGI,
    "/generate_stream": _NO_TGI,
    "/inference/v1/generate": _NO_TGI,
    "/completion": _NO_TGI,
    "/infill": _NO_TGI,
    "/props": "GET /v1/models tells what is served",
    "/slots": "GET /debug/blocks and /metrics tell what is running",
}


# What clients put behind their base URL, which ends in /v1 for OpenAI's and before it for Anthropic's.
_AFTER_V1 = ("/chat/completions", "/completions", "/responses", "/messages", "/models")


def not_served(path: str) -> str:
    """Why there is nothing at a path, and what to use instead."""
    parts = path.split("/")
    for length in range(len(parts), 1, -1):
        prefix = "/".join(parts[:length])
        if prefix in _NOT_SERVED:
            return f"{prefix} is not served: {_NOT_SERVED[prefix]}"
    rest = path.removeprefix("/v1").removeprefix("/v1") if path.startswith("/v1/v1/") else path
    for known in _AFTER_V1:
        if rest == known or rest.startswith(f"{known}/"):
            change = "put /v1 at the end of" if rest == path else "leave out /v1 at the end of"
            return f"there is nothing at {path}, but at /v1{rest}: {change} the client's base URL"
    return f"there is nothing at {path}; GET / lists what is here"
