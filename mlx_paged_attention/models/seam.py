"""The seam to mlx-lm: layer caches its models write through, and the attention they then call.

Every mlx-lm model asks its cache for an offset, hands it new keys and values, and calls
``scaled_dot_product_attention``, which each model module imports by name. Rebinding that name
and passing our caches is all it takes to run the model's own code on a paged pool.
"""

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from mlx_paged_attention.models.forward import ForwardContext
from mlx_paged_attention.ops.layer import AttentionLayer

_mlx_lm_attention = base.scaled_dot_product_attention

# Keys that a paged cache has handed to a model, by identity, until the model attends with them:
# some models pass keys on to layers that have no cache of their own.
_pending: dict[int, "PagedLayerCache"] = {}


class PagedLayerCache:
    """What a model sees as one layer's cache; keys and values live in the pool.

    With ``dense=False``, ``update_and_fetch`` hands back the new keys and values and attention
    finds the pool through them. With ``dense=True`` it writes, and returns the rows' whole
    context gathered, for models that compute attention themselves.
    """

    def __init__(self, layer: AttentionLayer, context: ForwardContext, *, dense: bool) -> None:
        self.layer = layer
        self._context = context
        self._dense = dense
        self._new: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> mx.array:
        """int32 ``[rows]``: position of each row's first token, constant during a forward."""
        return self._context.current().offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take ``[rows, kv_heads, queries, head_dim]``; return what attention is to be called with."""
        if self._dense:
            batch = self._context.current()
            self.layer.write(keys, values, batch)
            return self.layer.gather_rows(batch)
        assert self._new is None, "a layer's cache was updated twice in one forward pass"
        self._new = (keys, values)
        _pending[id(keys)] = self
        return keys, values

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """``[rows, heads, queries, head_dim]`` over the pool, the new keys included."""
        assert self._new is not None, "attention before update_and_fetch"
        keys, values = self._new
        return self.layer.attend(queries, keys, values, self._context.current(), scale=scale, sinks=sinks)

    def settle(self) -> bool:
        """End a forward: forget the new keys. False if attention never came for them."""
        new, self._new = self._new, None
        return new is None or _pending.pop(id(new[0]), None) is None

    def make_mask(
        self, _queries: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """``None``, as our attention masks by position; a boolean mask for dense attention."""
        if not self._dense:
            return None
        return self._context.current().mask(window_size or self.layer.spec.window)

    @property
    def state(self) -> tuple[mx.array, ...]:
        return self.layer.state

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes

    def size(self) -> int:
        return self._context.current().longest

    def empty(self) -> bool:
        return False

    def is_trimmable(self) -> bool:
        return False


def scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's function of that name; keys that came from a paged cache attend over its pool."""
    owner = _pending.pop(id(keys), None)
    if owner is None:
        plain: mx.array = _mlx_lm_attention(queries, keys, values, cache, scale, mask, sinks)
        return plain
    return owner.attend(queries, scale, sinks)


def rebind_attention() -> None:
    """Put our attention under its name in every mlx-lm model module that is loaded."""
    rebind(_mlx_lm_attention, scaled_dot_product_attention)


def rebind(original: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Put our function in the place of mlx-lm's in every loaded model module that imported it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and name != original.__module__:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, ours)
