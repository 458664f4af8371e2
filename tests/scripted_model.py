"""A model that says what it is told to: each token has its likeliest successors.

A Llama of one layer that adds nothing: a token's embedding is one-hot (all tokens without successors of their
own share one place), and the head has, for that place, the successors' logits. So the whole engine answers by
script, with real log-probabilities, and sampling at a temperature leaves the script now and then.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama

# Logits: of the likeliest successor, and how much less the next one has; all others have 0.
FIRST, STEP = 8.0, 2.0

Follow = Mapping[int | None, Sequence[int]]


def chain(start: int | None, *ids: int) -> dict[int | None, list[int]]:
    """Each id follows the one before it; no id may be there twice."""
    steps: list[int | None] = [start, *ids]
    assert len(set(steps)) == len(steps), "after a token that is there twice, what is next?"
    return {before: [after] for before, after in zip(steps, ids, strict=False)}


def write_scripted_model(directory: Path, follow: Follow, *, vocab_size: int, **config: object) -> Path:
    """Write ``config.json`` and ``model.safetensors``; returns the directory.

    Args:
        follow: tokens' likeliest successors, the likeliest first; ``None`` stands for every other token.
    """
    hidden = -(-(len(follow) + 1) // 64) * 64
    settings = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "intermediate_size": 4,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-12,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,
        "torch_dtype": "float32",
        **config,
    }
    weights = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(settings)).parameters()))
    for path, value in weights.items():
        weights[path] = mx.zeros(value.shape)
    places = {token: place for place, token in enumerate((token for token in follow if token is not None), 1)}
    embedding = np.zeros((vocab_size, hidden), np.float32)
    head = np.zeros((vocab_size, hidden), np.float32)
    embedding[:, 0] = 1.0
    for token, place in places.items():
        embedding[token, [0, place]] = 0.0, 1.0
    for token, successors in follow.items():
        for rank, successor in enumerate(successors):
            head[successor, 0 if token is None else places[token]] = FIRST - STEP * rank
    weights["model.embed_tokens.weight"] = mx.array(embedding)
    weights["lm_head.weight"] = mx.array(head)
    # The norm makes an embedding sqrt(hidden) long.
    weights["model.norm.weight"] = mx.full((hidden,), hidden**-0.5)
    weights["model.layers.0.input_layernorm.weight"] = mx.ones((hidden,))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return directory
