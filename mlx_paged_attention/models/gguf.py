"""From a GGUF file to an mlx-lm model: its configuration and its weights under mlx-lm's names.

GGUF stores the same tensors as a Hugging Face checkpoint, with these differences, undone here:

* Llama's query and key rows are permuted for interleaved rotary embedding,
* Gemma's norm weights have 1 added,
* float values of the metadata are float32 (``1e-05`` reads as ``9.999999747378752e-06``),
* Llama 3's frequency scaling is a tensor of factors instead of four numbers.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged_attention.errors import ModelLoadError, UnsupportedModelError
from mlx_paged_attention.models.gguf_header import GGUFHeader
from mlx_paged_attention.models.gguf_tensors import GGUFData

_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
SUPPORTED_ARCHITECTURES = tuple(_MODEL_TYPES)

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK_NAMES = {
    **_BLOCK_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Layers of the 27B models, which alone scale attention by hidden_size / heads instead of head_dim.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """The ``config.json`` that mlx-lm would want for this file, as far as the metadata tells.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, cannot be run exactly.
        ModelLoadError: a needed key is missing.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} is not supported; these are: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}. Use the model's MLX or safetensors version instead"
        )
    get = _Metadata(header.metadata, architecture)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelLoadError("the GGUF file has no tensor token_embd.weight")
    heads, hidden = get.integer("attention.head_count"), get.integer("embedding_length")
    head_dim = get.integer("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "model_type": _MODEL_TYPES[architecture],
        "hidden_size": hidden,
        "num_hidden_layers": get.integer("block_count"),
        "intermediate_size": get.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": get.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": get.number("rope.freq_base", 10000.0),
        "max_position_embeddings": get.integer("context_length"),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if get.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{architecture} with different key and value head sizes is not supported"
        )
    if get.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{architecture} with partial rotary embedding is not supported")
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if architecture == "gemma2":
        config["attn_logit_softcapping"] = get.number("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = get.number("final_logit_softcapping", 30.0)
    if architecture == "gemma3":
        config["sliding_window"] = get.integer("attention.sliding_window")
        config["sliding_window_pattern"] = get.integer("attention.sliding_window_pattern", 6)
        config["rope_local_base_freq"] = get.number("rope.freq_base_swa", 10000.0)
    if architecture in _GEMMA_27B_LAYERS:
        is_27b = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[architecture]
        config["query_pre_attn_scalar"] = hidden // heads if is_27b else head_dim
    scaling = get.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling == "linear" and architecture != "gemma2":
        config["rope_scaling"] = {"rope_type": "linear", "factor": get.number("rope.scaling.factor")}
    elif scaling != "none":
        raise UnsupportedModelError(f"rope scaling {scaling!r} of a GGUF {architecture} is not supported")
    if eos := eos_token_ids(header):
        config["eos_token_id"] = eos
    return config


def eos_token_ids(header: GGUFHeader) -> list[int]:
    """Ids of the end-of-text and end-of-turn tokens that the metadata names, each once."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return list(dict.fromkeys(int(header.metadata[key]) for key in keys if key in header.metadata))


def weights_from_gguf(
    path: Path,
    header: GGUFHeader,
    config: dict[str, Any],
    *,
    expand: bool,
    float_type: mx.Dtype,
    advance: Callable[[int], object] = lambda _nbytes: None,
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The file's tensors under mlx-lm's names, and what ``config`` gains by them.

    Args:
        path: a file whose header has been checked: every tensor of a loadable type and in full.
        header: of the file.
        config: of ``config_from_gguf``.
        expand: dequantise every tensor; otherwise quantised ones become ``weight``, ``scales`` and
            ``biases`` of MLX's affine format.
        float_type: of all floats, scales and biases.
        advance: is told the bytes of the file after each tensor.

    Returns:
        Weights by parameter name, and additions to ``config`` (``rope_scaling`` of Llama 3).

    Raises:
        UnsupportedModelError: the file holds tensors that the architecture does not know.
    """
    gemma = config["model_type"].startswith("gemma")
    block_names = _GEMMA_BLOCK_NAMES if gemma else _BLOCK_NAMES
    targets = {tensor.name: _mlx_name(tensor.name, block_names) for tensor in header.tensors}
    unknown = [name for name, target in targets.items() if target is None and name != _ROPE_FACTORS]
    if unknown:
        raise UnsupportedModelError(
            f"the GGUF file holds tensors that {config['model_type']} does not know, such as "
            f"{', '.join(sorted(unknown)[:3])}: mixture-of-experts and other variants are not supported"
        )
    data = GGUFData(path)
    weights: dict[str, mx.array] = {}
    additions: dict[str, Any] = {}
    for tensor in header.tensors:
        target = targets[tensor.name]
        if target is None:
            factors = data.read(tensor, expand=True, float_type=mx.float32)["weight"]
            additions["rope_scaling"] = _llama3_scaling(np.array(factors), config)
            advance(tensor.nbytes or 0)
            continue
        stem, _, leaf = target.rpartition(".")
        exact = (
            mx.float32 if gemma and stem.endswith("norm") else float_type
        )  # 1 is taken off before rounding
        parts = data.read(tensor, expand=expand or leaf != "weight", float_type=exact)
        if config["model_type"] == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"]
            parts = {suffix: unpermute_rows(part, heads) for suffix, part in parts.items()}
        if gemma and stem.endswith("norm"):
            parts = {suffix: (part - 1).astype(float_type) for suffix, part in parts.items()}
        mx.eval(parts)  # one tensor at a time: what it was made from is freed before the next
        weights.update({f"{stem}.{leaf if s == 'weight' else s}": part for s, part in parts.items()})
        advance(tensor.nbytes or 0)
    return weights, additions


def unpermute_rows(array: mx.array, heads: int) -> mx.array:
    """Undo GGUF's interleaving of the two rotary halves of every head, along the first axis.

    Weights, packed weights, scales and biases permute alike, since all keep one row per output.
    """
    rows = array.shape[0]
    split = array.reshape(heads, rows // heads // 2, 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def _mlx_name(name: str, block_names: dict[str, str]) -> str | None:
    """mlx-lm's name of a parameter, ``None`` if there is none."""
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{leaf}"
    kind, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    if kind == "blk" and index.isdigit() and part in block_names:
        return f"model.layers.{int(index)}.{block_names[part]}.{leaf}"
    return None


def _llama3_scaling(factors: np.ndarray, config: dict[str, Any]) -> dict[str, Any]:
    """The four numbers of Llama 3's rope scaling whose factors these are.

    Formula: https://github.com/meta-llama/llama-models, ``apply_scaling`` in models/llama3/model.py.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(factors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    dims = config["head_dim"]
    cycles = 8192 / (2 * math.pi * config["rope_theta"] ** (np.arange(0, dims, 2) / dims))
    smooth = np.clip((cycles - 1.0) / (4.0 - 1.0), 0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if config["model_type"] != "llama" or factors.shape != expected.shape:
        raise UnsupportedModelError("the GGUF file's rope_freqs are not those of a Llama 3 model")
    if not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError("the GGUF file's rope_freqs do not follow Llama 3's formula")
    return scaling


class _Metadata:
    """Typed access to the keys under ``<architecture>.``."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedModelError(
                f"GGUF key {self.architecture}.{key} is {type(value).__name__}, one integer is expected"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UnsupportedModelError(
                f"GGUF key {self.architecture}.{key} is {type(value).__name__}, one number is expected"
            )
        return float(f"{value:.6g}")  # stored as float32: seven digits are all there is

    def _get(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"the GGUF file lacks the key {self.architecture}.{key}")
        return value
