"""A tiny random model that reads and writes text: bytes are its tokens, beside a few pieces and an end."""

import json
from pathlib import Path

from small_vocabularies import byte_level
from tiny_models import TinyModel, write_model

END = "<end>"
PIECES = (b'{"', b'":', b'"}', b"true", b"  ")
# More than the tokenizer has, as many models' have.
VOCAB_SIZE = 288


def write_tiny_text_model(directory: Path) -> Path:
    """Write a model with its tokenizer; returns the directory."""
    write_model(TinyModel({"model_type": "llama", "vocab_size": VOCAB_SIZE}), directory)
    backend = byte_level(*PIECES, special=(END,))
    assert backend.get_vocab_size() < VOCAB_SIZE
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "eos_token": END,
        "chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
