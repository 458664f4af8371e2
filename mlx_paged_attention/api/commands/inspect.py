"""``mlx-paged inspect``: what a model keeps, layer by layer, and how it would run."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mlx_paged_attention.api.commands.flags import DEFAULT_MODEL, ModelFlags, say
from mlx_paged_attention.api.environment import require_supported
from mlx_paged_attention.api.report import counted, per_token, size
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.models.source import resolve

if TYPE_CHECKING:
    from mlx_paged_attention.engine.inspection import ModelInspection

EXAMPLES = """Examples:

    mlx-paged inspect
    mlx-paged inspect mlx-community/Qwen3-0.6B-4bit
    mlx-paged inspect --json path/to/model > model.json
"""


def inspect(
    name: Annotated[
        str | None,
        Parameter(name="MODEL", help="As --model; SmolLM2-135M-Instruct if neither is given.", env_var=[]),
    ] = None,
    /,
    *,
    as_json: Annotated[
        bool, Parameter(name="--json", help="Print JSON.", negative="", show_default=False)
    ] = False,
    flags: ModelFlags = DEFAULT_MODEL,
) -> int:
    """Load a model, compare it with mlx-lm, and print what each layer keeps; exit 1 if it is refused."""
    if name is not None and flags.model not in (None, name):
        raise InvalidRequestError(f"inspect one model: {name!r} or {flags.model!r}", "model")
    config = EngineConfig(
        model=name or flags.model, adapter_path=flags.adapter_path, dtype=flags.dtype, device=flags.device
    )
    require_supported()
    source = resolve(config.model, adapter=config.adapter_path)
    from mlx_paged_attention.engine.loading import inspect_model  # brings MLX

    inspection = inspect_model(config, source, say)
    if as_json:
        print(json.dumps(inspection.as_json(), indent=2))
    else:
        print("\n".join(lines_of(inspection)))
    return 0 if inspection.refusal is None else 1


def lines_of(inspection: "ModelInspection") -> Iterable[str]:
    """For a person."""
    yield f"model     {inspection.model}: {inspection.dtype} on {inspection.backend}"
    if inspection.refusal is None:
        yield f"runs as   {inspection.forward}"
    else:
        yield f"refused   {inspection.refusal}"
    for count, layer in inspection.groups():
        costs = []
        if layer.bytes_per_token:
            costs.append(f"{size(layer.bytes_per_token)} per token")
        if layer.bytes_per_sequence:
            costs.append(f"{size(layer.bytes_per_sequence)} per sequence")
        parts = [layer.kind, layer.shape, " and ".join(costs) + (" each" if count > 1 and costs else "")]
        yield f"layers    {count} x {'; '.join(part for part in parts if part)}"
    if inspection.layers:
        beyond = inspection.bytes_beyond_windows
        yield f"cache     {per_token(inspection.bytes_per_token, inspection.windows, beyond)}" + (
            f", {size(inspection.bytes_per_sequence)} per sequence" if inspection.bytes_per_sequence else ""
        )
    if inspection.windows_kept is not None:
        yield f"windows   masked, and nothing behind them is freed: {inspection.windows_kept}"
    tokens = inspection.tokens_per_gib
    if tokens is not None:
        made_for = f"the model was made for {inspection.max_model_len:,}"
        yield f"per GiB   a context of {counted(tokens, 'token')}; {made_for}"
