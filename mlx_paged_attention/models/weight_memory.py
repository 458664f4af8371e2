"""Memory that weights take, and whether it is there."""

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten

from mlx_paged_attention.errors import ModelLoadError


def free_memory(device: str) -> tuple[int, str]:
    """Bytes free for weights, and what kind of memory they are in."""
    if device == "gpu" and not mx.metal.is_available() and "free_memory" in mx.device_info():
        return int(mx.device_info()["free_memory"]), "GPU memory"
    return psutil.virtual_memory().available, "memory"


def require_memory(needed: int, device: str) -> None:
    """Raise ``ModelLoadError`` unless ``needed`` bytes are free."""
    free, where = free_memory(device)
    if needed > free:
        raise ModelLoadError(
            f"the model needs {needed / 1e9:.1f} GB of {where} for its weights, "
            f"{free / 1e9:.1f} GB are free: close other programs or take a smaller model"
        )


def float32_bytes(model: nn.Module) -> int:
    """Size of all parameters once every one is a plain float32 array, in bytes."""
    packed = {name.rpartition(".")[0] for name, _ in parameters(model) if name.endswith(".scales")}
    modules = dict(model.named_modules())
    total = 0
    for name, array in parameters(model):
        owner, _, leaf = name.rpartition(".")
        if owner in packed and leaf in ("scales", "biases"):
            continue
        bits = modules[owner].bits if owner in packed and leaf == "weight" else 32
        total += array.size * 32 // bits * 4
    return total


def packed_bytes(model: nn.Module) -> int:
    """Size of all parameters with quantised layers packed and floats as float32, in bytes."""
    return sum(
        array.size * 4 if mx.issubdtype(array.dtype, mx.floating) else array.nbytes
        for _, array in parameters(model)
    )


def parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    """All parameters by their dotted names."""
    return tree_flatten(model.parameters())  # type: ignore[return-value]
