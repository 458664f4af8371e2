"""A tiny random model that reads and writes text: bytes are its tokens, beside a few pieces and an end."""

import json
from pathlib import Path

from small_vocabularies import byte_level
from tiny_models import TinyModel, write_model

END = "<end>"
PIECES = (b'{"', b'":', b'"}', b"true", b"  ")
# More than the tokenizer has, as many models' have.
VOCAB_SIZE = 288


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"

# Of one that thinks and calls, as Qwen 3 does.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CALLING_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    + TEMPLATE
    + "{% if open %}<think>\n{% endif %}"
    "{% if not enable_thinking|default(true) %}<think>\n\n</think>\n\n{% endif %}{# <tool_call> #}"
)


def write_tiny_text_model(directory: Path, *, calls: bool = False) -> Path:
    """Write a model with its tokenizer, one that thinks and calls tools or not; returns the directory."""
    write_model(TinyModel({"model_type": "llama", "vocab_size": VOCAB_SIZE}), directory)
    backend = byte_level(*PIECES, special=(END, *(MARKERS if calls else ())))
    assert backend.get_vocab_size() < VOCAB_SIZE
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "eos_token": END,
        "chat_template": CALLING_TEMPLATE if calls else TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
