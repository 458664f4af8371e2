"""Linear layers see their rows flattened, where the back end would multiply them one by one.

MLX's CUDA back end runs a quantised product of ``[rows, 1, width]`` as one problem per row; as
``[1, rows, width]`` it is one. Module classes are replaced in place, parameters and tree untouched.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

_METHODS = {nn.QuantizedLinear: "__call__", nn.QuantizedEmbedding: "as_linear"}


def flatten_rows(model: nn.Module) -> None:
    """Make the model's quantised layers multiply all rows at once; only on CUDA."""
    if not (mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu)):
        return
    for module in model.modules():
        for kind, method in _METHODS.items():
            if isinstance(module, kind):
                _make_flattening(module, method)


def _make_flattening(module: nn.Module, method: str) -> None:
    kind = type(module)
    original = getattr(kind, method)

    def flattened(self: nn.Module, x: mx.array, *args: Any) -> mx.array:
        if x.ndim < 3:
            plain: mx.array = original(self, x, *args)
            return plain
        result: mx.array = original(self, x.reshape(-1, x.shape[-1]), *args)
        return result.reshape(*x.shape[:-1], result.shape[-1])

    # A subclass for this one module: its class stays as it is for every other.
    module.__class__ = type(kind.__name__, (kind,), {method: flattened})
