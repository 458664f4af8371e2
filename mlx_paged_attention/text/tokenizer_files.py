"""The tokenizer files of a model directory, as Hugging Face and MLX repositories lay them out."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from mlx_paged_attention.errors import ModelLoadError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files say.

    Attributes:
        backend: the vocabulary.
        special_tokens: texts by name, such as ``bos_token``.
        chat_templates: Jinja texts by name, empty if the model has none.
        eos_token_ids: ids listed in ``generation_config.json`` and ``config.json``.
        add_bos_token: whether bare prompts begin with the bos token; ``None``: as in ``tokenizer.json``.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    eos_token_ids: list[int]
    add_bos_token: bool | None

    @classmethod
    def read(cls, path: Path) -> "TokenizerFiles":
        """Read a directory.

        Raises:
            ModelLoadError: a file is missing or damaged; the message names it.
        """
        config = _read_json(path / "tokenizer_config.json")
        named = {**_read_json(path / "special_tokens_map.json"), **config}
        special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(named.get(name)))}
        ids = [
            *_ids(_read_json(path / "generation_config.json").get("eos_token_id")),
            *_ids(_read_json(path / "config.json").get("eos_token_id")),
        ]
        return cls(_backend(path), special, _chat_templates(path, config), ids, config.get("add_bos_token"))


def _backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        return _converted_backend(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises bare Exceptions.
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    # Saved limits of a training run would cut prompts short in silence.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _converted_backend(path: Path) -> tokenizers.Tokenizer:
    """Convert a SentencePiece or tiktoken vocabulary. Takes seconds, as it imports transformers."""
    try:
        from transformers import AutoTokenizer

        backend = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False).backend_tokenizer
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(
            f"{path} has no tokenizer.json, and its vocabulary cannot be converted to one: {reason}"
        ) from error
    assert isinstance(backend, tokenizers.Tokenizer)
    return backend


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name; a file of its own beats an entry of ``tokenizer_config.json``."""
    found: dict[str, str] = {}
    for source in (config.get("chat_template"), _read_json(path / "chat_template.json").get("chat_template")):
        if isinstance(source, str):
            found["default"] = source
        elif isinstance(source, list):
            found.update({item["name"]: item["template"] for item in source})
        elif source is not None:
            raise ModelLoadError(f"{path}: chat_template must be text or a list, not {type(source).__name__}")
    if (path / "chat_template.jinja").is_file():
        found["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted(path.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    return found


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{file} must hold a JSON object")
    return data


def _token_text(token: Any) -> str | None:
    """A token is given as text or as an object with its text as ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]
