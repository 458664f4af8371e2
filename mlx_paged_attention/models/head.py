"""The output head computes logits for selected rows only.

A step needs the logits of each sequence's last token; ``[2048, vocabulary]`` of them would be
hundreds of megabytes. mlx-lm models end in a module called ``lm_head``, or in ``as_linear`` of
their tied embedding; both become row-selecting in place, parameters and tree untouched.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged_attention.models.forward import ForwardContext


def select_rows_in_head(model: nn.Module, context: ForwardContext) -> None:
    """Make the model's head honour ``context.selected``.

    A head that is found nowhere is left alone: it then computes all rows, and
    :func:`selected_logits` selects afterwards.
    """
    for path, module in model.named_modules():
        if path.split(".")[-1] == "lm_head":
            _make_selecting(module, context, "__call__")
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            _make_selecting(module, context, "as_linear")


def selected_logits(logits: mx.array, context: ForwardContext) -> mx.array:
    """A model's output as ``[selected rows, vocabulary]``, whoever selected."""
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if context.selected is None or context.head_selected else flat[context.selected]


def _make_selecting(module: nn.Module, context: ForwardContext, method: str) -> None:
    """Give a module's ``method`` the selected rows of ``[rows, queries, width]`` only."""
    kind = type(module)
    original = getattr(kind, method)

    def selected(self: nn.Module, x: mx.array, *args: Any) -> mx.array:
        if context.selected is not None:
            x = x.reshape(1, -1, x.shape[-1])[:, context.selected]
            context.head_selected = True
        result: mx.array = original(self, x, *args)
        return result

    # A subclass for this one module: its class stays as it is for every other.
    module.__class__ = type(kind.__name__, (kind,), {method: selected})
