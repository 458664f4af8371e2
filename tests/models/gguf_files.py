"""Write GGUF files of tiny random models, the way llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

PACKED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]  # which the gguf package can also write
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
QUANTISED = PACKED + K_QUANTS
# Where float16 scales lie in a block, in bytes.
HALVES = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
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


def random_blocks(kind: str, rows: int, columns: int, std: float, seed: int = 0) -> np.ndarray:
    """``[rows, bytes]`` of a K-quant, every bit drawn, the values' standard deviation as given."""
    type_id = gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[type_id]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns // elements, nbytes), dtype=np.uint8)

    def scaled(scale: float) -> np.ndarray:
        for start in HALVES[kind]:
            blocks[..., start : start + 2] = np.array([scale], dtype="<f2").view(np.uint8)
        return blocks.reshape(rows, -1)

    return scaled(std / gguf.quants.dequantize(scaled(1.0), type_id).std())


def encode(kind: str, values: np.ndarray, seed: int = 0) -> np.ndarray:
    """A matrix as ``[rows, bytes]``; for a K-quant, another of about the same magnitude."""
    if kind in K_QUANTS:
        return random_blocks(kind, *values.shape, float(values.std()), seed)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def write_gguf(
    directory: Path,
    target: Path,
    *,
    quantised: str | None = None,
    others: dict[str, str] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    extra_keys: dict[str, Any] | None = None,
    architecture: str | None = None,
) -> dict[str, mx.array]:
    """Convert a tiny model's directory to ``target``.

    Returns the weights that the file holds, under mlx-lm's names and in float32: with ``quantised``
    (or ``"F16"``, ``"BF16"``) those of matrices are what the ``gguf`` package dequantises;
    ``others`` says it for some parts of blocks, such as ``{"ffn_down": "Q6_K"}``.
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
        raw_dtype = None
        stored = values
        if quantised is not None and values.ndim == 2:
            kind = (others or {}).get(gguf_name(name, gemma).split(".")[-2], quantised)
            raw_dtype = gguf.GGMLQuantizationType[kind]
            stored = encode(kind, values, len(held))
            values = gguf.quants.dequantize(stored, raw_dtype).astype(np.float32)
        elif gemma and name.endswith("norm.weight"):
            stored = values + 1
        if heads and model_type == "llama":  # whole rows move, of bytes as of values
            stored = permute(stored, config[heads])
        writer.add_tensor(gguf_name(name, gemma), np.ascontiguousarray(stored), raw_dtype=raw_dtype)
        held[name] = mx.array(values)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
