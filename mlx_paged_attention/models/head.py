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
    for _, module in model.named_modules():
        for name, child in module.children().items():
            if name == "lm_head" and isinstance(child, nn.Module):
                child.__class__ = _selecting(type(child), context, "__call__")
            elif isinstance(child, nn.Embedding | nn.QuantizedEmbedding):
                child.__class__ = _selecting(type(child), context, "as_linear")


def selected_logits(logits: mx.array, context: ForwardContext, tokens: int) -> mx.array:
    """A model's output as ``[selected rows, vocabulary]``, whoever selected."""
    flat = logits.reshape(-1, logits.shape[-1])
    if context.selected is None or (flat.shape[0] != tokens):
        return flat
    # As many rows as tokens: either all are selected, or the head was not ours.
    return flat if context.selected.size == tokens else flat[context.selected]


def _selecting(kind: type[nn.Module], context: ForwardContext, method: str) -> type[nn.Module]:
    """A subclass whose ``method`` sees the selected rows of ``[rows, queries, width]`` only."""
    original = getattr(kind, method)

    def selected(self: nn.Module, x: mx.array, *args: Any) -> mx.array:
        if context.selected is not None:
            x = x.reshape(1, -1, x.shape[-1])[:, context.selected]
        result: mx.array = original(self, x, *args)
        return result

    return type(kind.__name__, (kind,), {method: selected})
