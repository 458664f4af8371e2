"""A model whose every answer tells which tokens its attention saw, each with how often.

A Llama of one layer: queries are zero, so that attention is the mean over all keys; embeddings, values and
head are identities; the MLP adds nothing. The logits then are the counts of the tokens in the context, but
for a factor. One foreign key or value among them shows as a token that should not be there.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama

VOCAB_SIZE = 512
# The last token's own embedding, beside the mean: it hardly counts, but is there.
EMBEDDING = 0.01
HEAD = 4.0

CONFIG = {
    "model_type": "llama",
    "hidden_size": VOCAB_SIZE,
    "num_hidden_layers": 1,
    "intermediate_size": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": VOCAB_SIZE // 8,
    "rms_norm_eps": 1e-12,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}


def write_counting_model(directory: Path) -> Path:
    """Write ``config.json`` and ``model.safetensors``; returns the directory."""
    weights = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(CONFIG)).parameters()))
    one = mx.eye(VOCAB_SIZE)
    for path, value in weights.items():
        weights[path] = mx.zeros(value.shape)
    weights["model.embed_tokens.weight"] = EMBEDDING * one
    weights["lm_head.weight"] = HEAD * one
    weights["model.norm.weight"] = mx.ones((VOCAB_SIZE,))
    layer = "model.layers.0."
    # The norm makes an embedding sqrt(VOCAB_SIZE) long; values are to be of length 1.
    weights[f"{layer}input_layernorm.weight"] = mx.full((VOCAB_SIZE,), VOCAB_SIZE**-0.5)
    weights[f"{layer}self_attn.k_proj.weight"] = one  # with the queries 0, of no effect
    weights[f"{layer}self_attn.v_proj.weight"] = weights[f"{layer}self_attn.o_proj.weight"] = one
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return directory


def expected_logprobs(context: Sequence[int]) -> np.ndarray:
    """``[VOCAB_SIZE]``: what the model says of the token after ``context``."""
    hidden = np.bincount(context, minlength=VOCAB_SIZE) / len(context)
    hidden[context[-1]] += EMBEDDING
    logits = HEAD * hidden / np.sqrt(np.mean(hidden**2))
    largest = logits.max()
    return logits - largest - np.log(np.exp(logits - largest).sum())
