"""Tiny random models in MLX's directory format, written through mlx-lm's own model classes.

Every model has 2 layers (Gemma 3: 4), 64 hidden units, 4 query heads, 2 key/value heads of 16,
256 tokens and no end-of-sequence token. Matrices are drawn from N(0, (8 / sqrt(fan_in))^2), so that
attention is sharp, outputs vary from token to token, and a wrong position or a wrong key shows. Gains
hold this chaos where fp32 rounding alone (the order of sums changes with the number of rows) stays
well below the 1e-4 by which log-probabilities are compared.
"""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils as mlx_lm_utils

VOCAB_SIZE = 256
NUM_LAYERS = 2
NUM_KV_HEADS = 2
HEAD_DIM = 16
WINDOW = 8
FLOAT32_BYTES = 4
LLAMA_BYTES_PER_TOKEN = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * FLOAT32_BYTES

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


PLAIN_GAINS = {"q_proj.weight": 0.25, "k_proj.weight": 0.25, "lm_head.weight": 0.5}
# What recurrent layers keep of their state at each token: most, so that what is lost shows.
SHIFTS = {"A_log": -3.0, "recurrent_param": -4.0, "w_lora.lora.2.bias": -5.0}
# Gemma scales by 1 + weight, and normalises what each layer adds to the residual stream: beside
# large embeddings that would vanish, and a head tied to them would only repeat the last token.
GEMMA_GAINS = {"embed_tokens.weight": 0.05, "norm.weight": 0.3, "lm_head.weight": 0.5}


@dataclass(frozen=True)
class TinyModel:
    """What distinguishes one tiny model from the others.

    Attributes:
        config: entries of ``config.json`` beside the common ones.
        gains: factor on the parameters whose path ends with the key.
        scale: matrices are drawn from N(0, (scale / sqrt(fan_in))^2).
    """

    config: Mapping[str, Any]
    gains: Mapping[str, float] = field(default_factory=lambda: PLAIN_GAINS)
    seed: int = 0
    scale: float = 8.0


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * (HEAD_DIM // 2),
    "long_factor": [4.0] * (HEAD_DIM // 2),
}

TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel({"model_type": "llama"}),
    "llama_other_weights": TinyModel({"model_type": "llama"}, seed=1),
    "llama_llama3_rope": TinyModel({"model_type": "llama", "rope_scaling": LLAMA3_ROPE}),
    "llama_longrope": TinyModel(
        {"model_type": "llama", "rope_scaling": LONGROPE, "max_position_embeddings": 128}
    ),
    "qwen2": TinyModel({"model_type": "qwen2"}),
    "qwen3": TinyModel({"model_type": "qwen3"}),
    "gemma2": TinyModel(
        {"model_type": "gemma2", "query_pre_attn_scalar": HEAD_DIM},
        {**GEMMA_GAINS, "q_proj.weight": 0.25, "k_proj.weight": 0.25, "model.norm.weight": 20.0},
    ),
    "gemma3": TinyModel(
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
        GEMMA_GAINS,
    ),
    # One sliding layer; the second, which mlx-lm's mask code wants to exist, adds exactly nothing.
    "sliding_only": TinyModel(
        {
            "model_type": "llama",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
        },
        {**PLAIN_GAINS, "layers.1.self_attn.o_proj.weight": 0.0, "layers.1.mlp.down_proj.weight": 0.0},
    ),
    "olmo2": TinyModel({"model_type": "olmo2"}),
    "cohere": TinyModel({"model_type": "cohere", "logit_scale": 0.5}),
    "qwen3_moe": TinyModel(
        {
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {**PLAIN_GAINS, "mlp.gate.weight": 0.25, "down_proj.weight": 0.5},
    ),
}


def write_tiny_model(name: str, directory: Path) -> Path:
    """Write ``config.json`` and ``model.safetensors`` of ``TINY_MODELS[name]``; returns the directory."""
    return write_model(TINY_MODELS[name], directory)


def write_model(tiny: TinyModel, directory: Path) -> Path:
    """Write ``config.json`` and ``model.safetensors``; returns the directory."""
    model, config = build_model(tiny)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(
        str(directory / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    return directory


def build_model(tiny: TinyModel) -> tuple[Any, dict[str, Any]]:
    """mlx-lm's model with random weights, and its configuration."""
    config = {**COMMON, **tiny.config}
    model_class, args_class = mlx_lm_utils._get_classes(config)
    # Some models complete the dictionaries they are given.
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    weights = random_weights(dict(tree_flatten(model.parameters())), tiny)
    model.update(tree_unflatten(list(weights.items())))
    model.eval()
    return model, config


def random_weights(initial: Mapping[str, mx.array], tiny: TinyModel) -> dict[str, mx.array]:
    """Seeded weights of the shapes of ``initial``: norms around their first value, biases around 0."""
    weights = {}
    for number, (path, value) in enumerate(sorted(initial.items())):
        key = mx.random.key(1000 * tiny.seed + number)
        if not mx.issubdtype(value.dtype, mx.floating):  # packed
            weights[path] = mx.random.randint(0, 2**31 - 1, value.shape, mx.uint32, key).astype(value.dtype)
            continue
        noise = mx.random.normal(value.shape, key=key)
        if value.ndim >= 2:
            weights[path] = noise * (tiny.scale / math.sqrt(value.shape[-1]))
        else:
            weights[path] = value.astype(mx.float32) + 0.3 * noise
        for ending, gain in tiny.gains.items():
            if path.endswith(ending):
                weights[path] = weights[path] * gain
        for ending, shift in SHIFTS.items():
            if path.endswith(ending):
                weights[path] = weights[path] + shift
    return weights
