"""ModelHost: a model prepared for the seam, and the one place where it is called."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged_attention.models.flat_linear import flatten_rows
from mlx_paged_attention.models.forward import ForwardContext
from mlx_paged_attention.models.head import select_rows_in_head, selected_logits
from mlx_paged_attention.models.merged_linear import merge_products
from mlx_paged_attention.models.seam import PagedLayerCache, rebind_attention
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.kernels.make import backend
from mlx_paged_attention.ops.rope import replace_rope


@dataclass(frozen=True)
class ModelCache:
    """What a model is called with as its cache.

    Attributes:
        entries: one for each that mlx-lm would make.
        layers: all the paged ones that are in them.
    """

    entries: list[Any]
    layers: Sequence[PagedLayerCache]


class ModelHost:
    """A model whose head selects rows and whose attention finds paged caches.

    Args:
        compiled_loops: the CPU computes, and there is a compiler for its loops.
    """

    def __init__(self, model: nn.Module, *, compiled_loops: bool = False) -> None:
        self.model = model
        self.context = ForwardContext()
        if backend() == "cuda":
            # There the host takes longer to launch a product than the device to compute a small one.
            flatten_rows(model)
            merge_products(model)
            replace_rope()
        select_rows_in_head(model, self.context)
        rebind_attention()
        self._activations: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if compiled_loops:
            # Imported on demand: the compiler exists only where it is needed.
            from mlx_paged_attention.models.host_activations import host_activations, rebind_swiglu

            rebind_swiglu()
            self._activations = host_activations

    def forward(
        self,
        tokens: mx.array,
        batch: AttentionBatch,
        cache: ModelCache,
        selected: mx.array | None = None,
    ) -> mx.array:
        """Logits ``[selected, vocabulary]`` of tokens int32 ``[rows, queries]``.

        Args:
            selected: int32 indices into the flattened tokens; ``None`` for all.
        """
        self.context.batch = batch
        self.context.selected = selected
        self.context.head_selected = False
        try:
            with self._activations():
                output: Any = self.model(tokens, cache=cache.entries)
            logits = selected_logits(output, self.context)
        finally:
            self.context.batch = self.context.selected = None
            # A list, not a generator: every cache must be settled.
            settled = [layer.settle() for layer in cache.layers]
        assert all(settled), f"layer {settled.index(False)} fetched keys but never attended with them"
        return logits
