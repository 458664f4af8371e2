"""What LLM and AsyncLLM do first: configuration to files, tokenizer and a running engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_paged_attention.api.environment import require_supported
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.async_engine import AsyncEngine
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.models.gguf_header import read_gguf_header
from mlx_paged_attention.models.source import (
    ASSUMED_CONTEXT,
    ModelSource,
    read_json,
    resolve,
    stated_context,
)
from mlx_paged_attention.text.tokenizer import Tokenizer

Progress = Callable[[str], None]


@dataclass(frozen=True)
class StartedEngine:
    """A loaded engine and what the API needs beside it.

    Attributes:
        generation_config: the model's own sampling defaults, empty where it has none.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer | None
    generation_config: dict[str, Any] = field(default_factory=dict)


def start_engine(config: EngineConfig, progress: Progress | None) -> StartedEngine:
    """Find the model, read its tokenizer, load it on the engine's thread.

    Raises:
        ModelLoadError, UnsupportedModelError, InvalidRequestError: it could not be loaded.
    """
    require_supported()
    source = resolve(config.model, adapter=config.adapter_path, progress=progress is not None)
    _check_length(config.max_model_len, source)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(source)
    engine = AsyncEngine(config, source, tokenizer, progress or (lambda _: None))
    return StartedEngine(engine, tokenizer, _generation_config(source))


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that comes with a model's files."""
    if source.kind == "gguf":
        return Tokenizer.from_gguf(read_gguf_header(source.path).metadata)
    return Tokenizer.from_directory(source.path)


def _check_length(wanted: int | None, source: ModelSource) -> None:
    """Refuse what the model cannot do before it is loaded."""
    if wanted is not None and wanted > (limit := stated_context(source) or ASSUMED_CONTEXT):
        raise InvalidRequestError(
            f"max_model_len ({wanted}) exceeds the {limit} tokens the model was made for", "max_model_len"
        )


def _generation_config(source: ModelSource) -> dict[str, Any]:
    path = source.path / "generation_config.json"
    if source.kind == "gguf" or not path.is_file():
        return {}
    return read_json(path)
