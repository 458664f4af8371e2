"""Write GGUF files of tiny random models, the way llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

QUANTISED = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
ARCHITECTURES = {"gemma3_text": "gemma3"}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_BLOCK = BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, gemma: bool) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    _, _, index, rest = stem.split(".", 3)
    return f"blk.{index}.{(GEMMA_BLOCK if gemma else BLOCK)[rest]}.{suffix}"


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the two rotary halves of each head, row by row."""
    head_dim = array.shape[0] // heads
    order = [h * head_dim + half * head_dim // 2 + i for h in range(heads) for i in range(head_dim // 2)
             for half in (0, 1)]  # fmt: skip
    return array[order]


def write_gguf(
    directory: Path,
    target: Path,
    *,
    quantised: str | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    extra_keys: dict[str, Any] | None = None,
    architecture: str | None = None,
) -> dict[str, mx.array]:
    """Convert a tiny model's directory to ``target``.

    Returns the weights that the file holds, under mlx-lm's names and in float32: with ``quantised``
    (``"Q4_0"``, ``"Q4_1"``, ``"Q8_0"``) those of matrices are what the ``gguf`` package dequantises.
    """
    config = json.loads((directory / "config.json").read_text())
    model_type = config["model_type"]
    gemma = model_type.startswith("gemma")
    arch = architecture or ARCHITECTURES.get(model_type, model_type)
    writer = gguf.GGUFWriter(str(target), arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_eos_token_id(7)
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32(f"{arch}.attention.sliding_window_pattern", config["sliding_window_pattern"])
    for key, value in (extra_keys or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    held = {}
    for name, array in mx.load(str(directory / "model.safetensors")).items():
        values = np.array(array, dtype=np.float32)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        stored = permute(values, config[heads]) if heads and model_type == "llama" else values
        if gemma and name.endswith("norm.weight"):
            stored = stored + 1
        if quantised is not None and values.ndim == 2:
            kind = gguf.GGMLQuantizationType(QUANTISED[quantised])
            packed = gguf.quants.quantize(stored, kind)
            writer.add_tensor(gguf_name(name, gemma), packed, raw_dtype=kind)
            # Quantisation works within rows, so that it commutes with permuting them.
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        else:
            writer.add_tensor(gguf_name(name, gemma), np.ascontiguousarray(stored))
        held[name] = mx.array(values)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
