"""A LoRA or DoRA adapter in mlx-lm's format, added to the weights it was trained for.

The format is a directory of ``adapter_config.json`` and ``adapters.safetensors``
(https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/LORA.md). mlx-lm's own code makes the layers and
fuses them; here is checked that every tensor finds its place, so that none is left out silently.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_paged_attention.errors import ModelLoadError, UnsupportedModelError
from mlx_paged_attention.models.safetensors_files import read_tensor_names

if TYPE_CHECKING:
    import mlx.nn as nn

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"

_TYPES = {"lora": "LoRA", "dora": "DoRA"}
_PARAMETERS = ("lora_a", "lora_b", "m")


def check_adapter(path: Path) -> None:
    """Raise ``ModelLoadError`` unless ``path`` is a directory with a whole adapter."""
    if not path.is_dir():
        raise ModelLoadError(f"there is no adapter directory {path}")
    if (path / "adapter_model.safetensors").is_file() and not (path / WEIGHTS).is_file():
        raise UnsupportedModelError(
            f"{path} is an adapter of PEFT; adapters of mlx-lm ({WEIGHTS} and {CONFIG}, as 'mlx_lm.lora' "
            "writes them) can be loaded"
        )
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise ModelLoadError(f"{path} has no {name}: it is not an adapter directory of mlx-lm")
    read_tensor_names(path / WEIGHTS)


def fuse_adapter(model: "nn.Module", path: Path, config: dict[str, Any]) -> str:
    """Add the adapter to the model's weights; nothing is evaluated yet.

    Args:
        path: an adapter directory that was checked.
        config: content of its ``CONFIG``.

    Returns:
        What was done, one line for a person.

    Raises:
        UnsupportedModelError: it is of another kind than LoRA and DoRA.
        ModelLoadError: it does not fit the model; the message names what differs.
    """
    import mlx.core as mx
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    kind = config.get("fine_tune_type", "lora")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise UnsupportedModelError(
            f"{path} is of fine_tune_type {kind!r}; lora and dora can be fused at load: "
            "make a model of others with 'mlx_lm.fuse'"
        )
    for key in ("num_layers", "lora_parameters"):
        if key not in config:
            raise ModelLoadError(f"{path / CONFIG} has no {key}: is the adapter in mlx-lm's format?")
    try:
        linear_to_lora_layers(
            model, config["num_layers"], config["lora_parameters"], use_dora=kind == "dora"
        )  # fmt: skip
    except Exception as error:  # mlx-lm lets whatever goes wrong through
        text = " ".join(str(error).split())
        raise ModelLoadError(f"{path} does not fit this model: {type(error).__name__}: {text}") from error
    wanted: dict[str, Any] = {}
    for prefix, layer in model.named_modules():
        if hasattr(layer, "fuse"):
            own = {name: layer[name] for name in _PARAMETERS if name in layer}
            wanted |= {f"{prefix}.{name}": array.shape for name, array in own.items()}
    weights = mx.load(str(path / WEIGHTS))
    assert isinstance(weights, dict)
    _require_equal(path, wanted, {name: array.shape for name, array in weights.items()})
    model.load_weights(list(weights.items()), strict=False)
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "fuse")]
    packed = any("scales" in inner for _, layer in layers for inner in layer.modules())
    try:
        fused = [(name, layer.fuse()) for name, layer in layers]
    except Exception as error:  # a scale that is no number, for one
        text = " ".join(str(error).split())
        raise ModelLoadError(f"{path} cannot be fused: {type(error).__name__}: {text}") from error
    model.update_modules(tree_unflatten(fused))
    model.eval()
    anew = ", which quantised them anew" if packed else ""
    return f"the {_TYPES[kind]} adapter {path.name} was added to {len(layers)} layers{anew}"


def _require_equal(path: Path, wanted: dict[str, Any], stored: dict[str, Any]) -> None:
    if extra := sorted(set(stored) - set(wanted)):
        raise ModelLoadError(f"{path} was made for another model: this one has no {_some(extra)}")
    if missing := sorted(set(wanted) - set(stored)):
        raise ModelLoadError(f"{path} lacks {_some(missing)}, for which its {CONFIG} asks")
    for name, shape in stored.items():
        if tuple(shape) != tuple(wanted[name]):
            raise ModelLoadError(
                f"{path} was made for another model: {name} is {list(shape)}, this one needs "
                f"{list(wanted[name])}"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
