"""A tiny configuration for every model file of mlx-lm, and the files that are no models.

The rows are in ``rows_*.py``, by family. Prompts of a few dozen tokens leave their windows and
reach every kind of layer a file has.
"""

from pathlib import Path
from typing import Any

import mlx_lm.models
from rows_dense import DENSE
from rows_latent import LATENT_ROWS
from rows_moe import MOE
from rows_recurrent import RECURRENT
from tiny_models import TinyModel

TINY: dict[str, dict[str, Any]] = dict(sorted({**DENSE, **MOE, **LATENT_ROWS, **RECURRENT}.items()))

# Weights are drawn so that every old token matters, yet rounding (which changes with the number of rows)
# moves log-probabilities by less than 5e-5, half of what parity allows. Most rows do with these:
SCALE = 1.5
INIT: dict[str, dict[str, Any]] = {
    "bailing_moe_v3": {"seed": 2},
    "deepseek_v2": {"seed": 2},
    "deepseek_v41": {"seed": 2},
    "gemma3": {"gains": {"embed_tokens.weight": 0.5}},
    "gemma3_text": {"gains": {"embed_tokens.weight": 0.5}},
    "gpt2": {"seed": 1},
    "kimi_k3": {"seed": 2},
    "longcat_flash": {"seed": 2},
    "longcat_flash_ngram": {"seed": 4},
    "prism_hadamard_qwen35": {"seed": 1, "gains": {"scales": 0.1, "biases": 0.1}},
    "qwen3_next": {"seed": 1},
    "starcoder2": {"seed": 1},
    "rwkv7": {"gains": {"r_k": 0.1, "o_proj.weight": 4.0}},
}

# Files whose models cannot be compared with anything: what mlx-lm alone does with them.
NEEDS_METAL = ("bitnet", "muse_spark")
NO_REFERENCE = {
    "olmo": "mlx-lm raises on any prompt of more than one token",
    "phi3small": "mlx-lm adds its boolean mask to the scores, so its results depend on the size of chunks",
    "plamo3": "mlx-lm's window is one token longer in a chunk than in decoding",
}

# What the engine takes and does not compute as mlx-lm does. Nothing may stay here.
KNOWN_WRONG: dict[str, str] = {}

NOT_MODELS = {
    "__init__": "the package",
    "activations": "activation functions",
    "base": "masks and attention, called by models",
    "bitlinear_layers": "linear layers of BitNet",
    "cache": "caches",
    "gated_delta": "the gated delta rule, called by models",
    "mla": "linear layers of latent attention",
    "pipeline": "several machines",
    "rope_utils": "rotary embeddings",
    "ssm": "state space models' recurrence, called by models",
    "switch_layers": "layers of experts",
}


def model_files() -> list[str]:
    """Every module of the installed mlx-lm's ``models``."""
    (directory,) = mlx_lm.models.__path__
    return sorted(path.stem for path in Path(directory).glob("*.py"))


def tiny_row(name: str) -> TinyModel:
    """The row of one model file, with the way its weights are drawn."""
    init = {"gains": {}, "scale": SCALE, **INIT.get(name, {})}
    return TinyModel({"model_type": name, **TINY[name]}, **init)
