"""Linear layers see their rows flattened, where the back end would multiply them one by one.

MLX's CUDA back end runs a quantised product of ``[rows, 1, width]`` as one problem per row; as
``[rows, width]`` it is one. Modules change their class in place; the names and values of parameters
stay as they are.
"""

import mlx.core as mx
import mlx.nn as nn


def flatten_rows(model: nn.Module) -> None:
    """Make the model's quantised layers multiply all rows as one problem."""
    for module in model.modules():
        if type(module) is nn.QuantizedLinear:
            module.__class__ = FlatLinear
        elif type(module) is nn.QuantizedEmbedding:
            module.__class__ = FlatEmbedding


class FlatLinear(nn.QuantizedLinear):
    """Sees ``[rows * queries, width]``."""

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = super().__call__(x.reshape(-1, x.shape[-1]))  # type: ignore[no-untyped-call]
        return out.reshape(*x.shape[:-1], -1)


class FlatEmbedding(nn.QuantizedEmbedding):
    """As a head, sees ``[rows * queries, width]``."""

    def as_linear(self, x: mx.array) -> mx.array:
        out: mx.array = super().as_linear(x.reshape(-1, x.shape[-1]))  # type: ignore[no-untyped-call]
        return out.reshape(*x.shape[:-1], -1)
