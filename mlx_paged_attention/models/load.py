"""Load a model's weights into an unmodified mlx-lm model."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from mlx_paged_attention.errors import ModelLoadError, UnsupportedModelError
from mlx_paged_attention.models import adapter
from mlx_paged_attention.models.fingerprint import model_fingerprint
from mlx_paged_attention.models.gguf import config_from_gguf, eos_token_ids, weights_from_gguf
from mlx_paged_attention.models.gguf_blocks import QUANTISED
from mlx_paged_attention.models.gguf_header import GGUFHeader
from mlx_paged_attention.models.gguf_tensors import (
    GROUP_SIZE,
    REQUANTISED_BITS,
    held_bytes,
)
from mlx_paged_attention.models.loading_bar import loading_bar
from mlx_paged_attention.models.safetensors_files import weight_files
from mlx_paged_attention.models.source import (
    ASSUMED_CONTEXT,
    ModelSource,
    checked_gguf_header,
    context_length,
    read_json,
)
from mlx_paged_attention.models.weight_memory import (
    float32_bytes,
    free_memory,
    packed_bytes,
    parameters,
    require_memory,
)

_EXPANDED = "the {} weights were expanded to float32, which is faster on a CPU"
_KEPT = (
    "the {} weights stay packed, with float32 arithmetic, since expanding them takes {:.1f} GB and "
    "{:.1f} GB are free: this is several times slower"
)
_REQUANTISED = "weights in groups of 16, which MLX does not have, were quantised anew in groups of 32: {}"
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what the engine needs to know about it.

    Attributes:
        model: mlx-lm's module, its weights in memory.
        config: the model's configuration, as mlx-lm reads it.
        dtype: floating-point type of activations, and so of keys and values.
        quantisation: how linear layers are held, such as ``"4-bit"``; ``None`` if as plain floats.
        fingerprint: 64 hex digits that change with whatever changes keys and values.
        vocab_size: width of the logits.
        max_model_len: longest context the model was made for, in tokens.
        eos_token_ids: tokens that end a generation.
        notes: what loading changed or assumed, one line each, for a person.
    """

    model: nn.Module
    config: dict[str, Any]
    dtype: str
    quantisation: str | None
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    notes: list[str] = field(default_factory=list)


def load_model(source: ModelSource, *, dtype: str, device: str) -> LoadedModel:
    """Load the model of ``source``, in the calling thread and on MLX's default device.

    On a CPU every weight becomes float32 (quantised and half-precision matmuls are 10 to 100 times
    slower there), but quantised layers that would not fit stay packed, with float32 scales; on a GPU
    quantised layers stay quantised and ``"auto"`` keeps the checkpoint's type.

    Args:
        source: of ``resolve``.
        dtype: ``"auto"``, ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        device: ``"cpu"`` or ``"gpu"``, what MLX's default device is.

    Raises:
        UnsupportedModelError: mlx-lm does not know the architecture or number format, or the
            dtype cannot be run on the device.
        ModelLoadError: files do not fit the architecture, or memory is too small.
    """
    if device == "cpu" and dtype not in ("auto", "float32"):
        raise UnsupportedModelError(
            f"dtype {dtype} is not run on a CPU, where it is 10 to 100 times slower than float32: "
            "use auto or float32"
        )
    load = _load_gguf if source.kind == "gguf" else _load_directory
    return load(source, dtype, device)


def _load_directory(source: ModelSource, dtype: str, device: str) -> LoadedModel:
    path = source.path
    files = weight_files(path)
    if device == "gpu":
        require_memory(sum(file.stat().st_size for file in files), device)
    raw_config = read_json(path / "config.json")
    try:
        # Lazy: shapes are checked, but no weight is read before we know that it fits.
        model, config = mlx_lm_utils.load_model(path, lazy=True, trust_remote_code=False)
    except (Exception, SystemExit) as error:  # OLMo's file ends the process if it misses a package
        raise _load_error(path, raw_config, error) from error
    notes: list[str] = []
    quantisation = _quantisation(model)
    if device == "cpu":
        expanded = float32_bytes(model)
        if quantisation is not None and _stays_packed(model, expanded):
            require_memory(packed_bytes(model), device)
            model.set_dtype(mx.float32)
            notes.append(_KEPT.format(quantisation, expanded / 1e9, free_memory(device)[0] / 1e9))
        else:
            require_memory(expanded, device)
            model = _expand(model)
            if quantisation is not None:
                notes.append(_EXPANDED.format(quantisation))
                quantisation = _quantisation(model)
    elif dtype != "auto":
        _cast(model, dtype)
    final = _float_type(model)
    fingerprint = _add_adapter(source, model, files, raw_config, final, notes)
    with loading_bar(sum(array.nbytes for _, array in parameters(model)), source.progress) as advance:
        _evaluate(model, advance)
    generation_path = path / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.is_file() else {}
    return LoadedModel(
        model=model,
        config=config,
        dtype=final,
        quantisation=quantisation,
        fingerprint=fingerprint,
        vocab_size=_vocab_size(config, model),
        max_model_len=_max_model_len(config, notes),
        eos_token_ids=_eos_ids(raw_config, raw_config.get("text_config") or {}, generation_config),
        notes=notes,
    )


def _load_gguf(source: ModelSource, dtype: str, device: str) -> LoadedModel:
    path = source.path
    header = checked_gguf_header(path)
    config = config_from_gguf(header)
    types = Counter(tensor.type for tensor in header.tensors if tensor.type in QUANTISED)
    stored = _named(types)
    if device == "cpu":
        dtype = "float32"
    elif dtype == "auto":
        dtype = _gguf_float_type(header)
    float_type = getattr(mx, dtype)

    def needed(expand: bool) -> int:
        held = [held_bytes(t, expand=expand, float_bytes=float_type.size) for t in header.tensors]
        return sum(held)

    free = free_memory(device)[0]
    expand = device == "cpu" and (stored is None or needed(True) <= free)
    require_memory(needed(expand), device)
    try:
        stored_bytes = sum(tensor.nbytes or 0 for tensor in header.tensors)
        with loading_bar(stored_bytes, source.progress) as advance:
            weights, additions = weights_from_gguf(
                path, header, config, expand=expand, float_type=float_type, advance=advance
            )
        config.update(additions)
        model = _build(config, weights)
    except ModelLoadError:
        raise
    except Exception as error:
        raise _load_error(path, config, error) from error
    notes: list[str] = []
    if expand and stored:
        notes.append(_EXPANDED.format(stored))
    elif device == "cpu" and stored:
        notes.append(_KEPT.format(stored, needed(True) / 1e9, free / 1e9))
    if not expand and (anew := [kind for kind in types if kind in REQUANTISED_BITS]):
        widths = ", ".join(f"{kind} to {REQUANTISED_BITS[kind]} bits" for kind in sorted(anew))
        notes.append(_REQUANTISED.format(widths))
    final = _float_type(model)
    fingerprint = _add_adapter(source, model, [path], config, final, notes)
    _evaluate(model)
    return LoadedModel(
        model=model,
        config=config,
        dtype=final,
        quantisation=None if expand else stored,
        fingerprint=fingerprint,
        vocab_size=config["vocab_size"],
        max_model_len=_max_model_len(config, notes),
        eos_token_ids=eos_token_ids(header),
        notes=notes,
    )


def _add_adapter(
    source: ModelSource,
    model: nn.Module,
    files: list[Path],
    config: dict[str, Any],
    dtype: str,
    notes: list[str],
) -> str:
    """Fuse the source's adapter, if it has one; returns the fingerprint of what comes of it."""
    if source.adapter is None:
        return model_fingerprint(files, config, dtype)
    adapter_config = read_json(source.adapter / adapter.CONFIG)
    notes.append(adapter.fuse_adapter(model, source.adapter, adapter_config))
    return model_fingerprint(
        [*files, source.adapter / adapter.WEIGHTS], config | {"adapter": adapter_config}, dtype
    )


def _build(config: dict[str, Any], weights: dict[str, mx.array]) -> nn.Module:
    """mlx-lm's model for ``config`` with ``weights``, quantised where they are."""
    model_class, args_class = mlx_lm_utils._get_classes(config)
    model: nn.Module = model_class(args_class.from_dict(config))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)

    def layer_format(name: str, _module: nn.Module) -> bool | dict[str, Any]:
        scales = weights.get(f"{name}.scales")
        if scales is None:
            return False
        words, groups = weights[f"{name}.weight"].shape[-1], scales.shape[-1]
        return {"group_size": GROUP_SIZE, "bits": words * 32 // (groups * GROUP_SIZE)}

    nn.quantize(model, class_predicate=layer_format)
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    return model


def _load_error(path: Path, config: dict[str, Any], error: BaseException) -> ModelLoadError:
    """mlx-lm's exception as one line of ours, its text kept."""
    text = " ".join(str(error).split())[:400]
    model_type = config.get("model_type")
    if isinstance(error, ValueError) and f"Model type {model_type} not supported" in text:
        return UnsupportedModelError(f"{path}: the installed mlx-lm does not know model type {model_type!r}")
    return ModelLoadError(f"cannot load {path} as {model_type!r}: {type(error).__name__}: {text}")


def _stays_packed(model: nn.Module, expanded: int) -> bool:
    """Whether quantised layers must be kept: their expansion does not fit and MLX runs them in float32."""
    quantised = [module for module in model.modules() if getattr(module, "bits", None) is not None]
    affine = all(getattr(module, "mode", "affine") == "affine" for module in quantised)
    return affine and expanded > free_memory("cpu")[0]


def _expand(model: nn.Module) -> nn.Module:
    """Every parameter as float32, quantised layers as plain ones; nothing is evaluated yet."""
    for name, module in model.named_modules():
        if "global_scale" in module:
            raise UnsupportedModelError(f"{name} is quantised with a global scale, which is not run on a CPU")
    model.set_dtype(mx.float32)  # scales first, so that weights are not rounded to half precision
    model = mlx_lm_utils.dequantize_model(model)
    model.set_dtype(mx.float32)  # formats without float scales, such as mxfp4, expand to bfloat16
    return model


def _cast(model: nn.Module, dtype: str) -> None:
    # Some models name parameters that must keep their precision, such as a router's bias.
    keep = getattr(model, "cast_predicate", lambda _name: True)
    target = getattr(mx, dtype)
    model.load_weights(
        [
            (name, array.astype(target) if mx.issubdtype(array.dtype, mx.floating) and keep(name) else array)
            for name, array in parameters(model)
        ]
    )


def _evaluate(model: nn.Module, advance: Callable[[int], object] = lambda _nbytes: None) -> None:
    # One array at a time, so that packed and expanded weights are never all in memory together.
    for _, array in parameters(model):
        mx.eval(array)
        advance(array.nbytes)


def _quantisation(model: nn.Module) -> str | None:
    """``"4-bit"``, ``"mxfp4"``, or several, most common first; ``None`` if nothing is packed."""
    formats = Counter(
        f"{module.bits}-bit" if getattr(module, "mode", "affine") == "affine" else module.mode
        for _, module in model.named_modules()
        if "scales" in module and hasattr(module, "bits")
    )
    return _named(formats)


def _named(counts: Counter[str]) -> str | None:
    """All that were counted, most common first."""
    return ", ".join(sorted(counts, key=lambda name: (-counts[name], name))) or None


def _float_type(model: nn.Module) -> str:
    """The type of most floating-point parameters, which is that of the activations."""
    counts: Counter[str] = Counter()
    for _, array in parameters(model):
        counts[str(array.dtype).removeprefix("mlx.core.")] += 1
    return max(_FLOATS, key=lambda name: counts[name])


def _gguf_float_type(header: GGUFHeader) -> str:
    """float32 if every tensor is; bfloat16 if one is, or for Gemma; else float16, as GGUF's scales."""
    types = {tensor.type for tensor in header.tensors}
    if types == {"F32"}:
        return "float32"
    # Gemma's activations leave float16's range, which ends at 65,504: the 270M model's reach 104,000.
    gemma = str(header.metadata.get("general.architecture")).startswith("gemma")
    return "bfloat16" if gemma or "BF16" in types else "float16"


def _vocab_size(config: dict[str, Any], model: nn.Module) -> int:
    for holder in (config, config.get("text_config") or {}):
        if isinstance(size := holder.get("vocab_size"), int):
            return size
    size = getattr(getattr(model, "args", None), "vocab_size", None)
    if not isinstance(size, int):
        raise UnsupportedModelError(f"model type {config.get('model_type')!r} states no vocab_size")
    return size


def _max_model_len(config: dict[str, Any], notes: list[str]) -> int:
    length = context_length(config)
    if length is None:
        notes.append(f"the configuration states no context length: {ASSUMED_CONTEXT} tokens are assumed")
    return length or ASSUMED_CONTEXT


def _eos_ids(*configs: dict[str, Any]) -> list[int]:
    ids: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in found:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise ModelLoadError(f"eos_token_id must be a token id or a list of them, not {value!r}")
        ids += found
    return list(dict.fromkeys(ids))
