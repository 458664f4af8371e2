"""The seam to mlx-lm: layer caches its models write through, and the attention they then call.

Every mlx-lm model asks its cache for an offset, hands it new keys and values, and calls
``scaled_dot_product_attention``, which each model module imports by name. Rebinding that name
and passing our caches is all it takes to run the model's own code on a paged pool.
"""

import sys
from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import base

from mlx_paged_attention.models.forward import ForwardContext
from mlx_paged_attention.models.rope_key import RopeKey
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.layer import AttentionLayer

mlx_lm_attention = base.scaled_dot_product_attention


class Attends(Protocol):
    """What attention over keys that a cache has handed out is left to."""

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None, mask: Any) -> mx.array:
        """``[rows, heads, queries, head_dim]``."""
        ...


# Keys that a cache has handed to a model, by identity, until the end of the forward pass: some models pass
# keys on to layers that have no cache of their own.
waiting_for_attention: dict[int, Attends] = {}


class UnusedCache:
    """What a model sees as the cache of a layer that keeps nothing, and may ask positions and masks of.

    Args:
        dense: the model applies its masks itself.
        one_row: forward passes have one row, whose offset is a number, as some models need.
        latent: as ``dense`` for runs of tokens, but not for single ones.
    """

    window: int | None = None

    def __init__(
        self, context: ForwardContext, *, dense: bool, one_row: bool = False, latent: bool = False
    ) -> None:
        self._context = context
        self._dense = dense
        self._one_row = one_row
        self._latent = latent

    def _is_dense(self, queries: int) -> bool:
        """Whether the model attends by itself with so many queries per row."""
        return self._dense or (self._latent and queries > 1)

    @property
    def offset(self) -> mx.array | int:
        """int32 ``[rows]``: position of each row's first token, constant during a forward."""
        batch = self._context.current()
        return int(batch.starts[0]) if self._one_row else batch.offsets

    def make_mask(
        self, queries: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """``None``, as our attention masks by position; a boolean mask for dense attention."""
        if not self._is_dense(queries):
            return None
        return self._context.current().mask(window_size or self.window)

    def size(self) -> int:
        return self._context.current().longest

    def empty(self) -> bool:
        return False

    def is_trimmable(self) -> bool:
        return False


class PagedLayerCache(UnusedCache):
    """What a model sees as one layer's cache; keys and values live in the pool.

    With ``dense=False``, ``update_and_fetch`` hands back the new keys and values and attention
    finds the pool through them. With ``dense=True`` it writes, and returns the rows' whole
    context gathered, for models that compute attention themselves.

    With ``latent=True`` keys are latents, and values their part for the rope. Models make keys and values
    for all heads of them for a run of tokens, for which they are gathered. For single tokens they use
    latents as both keys and values, with ``q_rope @ rope`` as mask: what stands in for the rope's part
    gives them the queries of that product in place of the product, and attention finds the pool.

    Args:
        group: the layer group whose blocks the layer's keys and values are in.
    """

    start_position = 0  # of what is fetched, for models that attend within chunks of the context

    def __init__(
        self,
        layer: AttentionLayer,
        context: ForwardContext,
        *,
        dense: bool,
        one_row: bool = False,
        latent: bool = False,
        group: int = 0,
    ) -> None:
        super().__init__(context, dense=dense, one_row=one_row, latent=latent)
        self.layer = layer
        self._group = group
        self.window = layer.spec.window
        self._new: tuple[mx.array, mx.array] | None = None
        self._rope_key: RopeKey | None = None
        self._attended = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take ``[rows, kv_heads, queries, head_dim]``; return what attention is to be called with."""
        if self._is_dense(keys.shape[2]):
            batch = self._batch()
            self.layer.write(keys, values, batch)
            return self.layer.gather_rows(batch)
        assert self._new is None, "a layer's cache was updated twice in one forward pass"
        self._new = (keys, values)
        waiting_for_attention[id(keys)] = self
        if self._latent:
            self._rope_key = RopeKey()
            return keys, self._rope_key
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last update returned, for layers that use another's."""
        if self._dense:  # gathered once more, as keeping it would cost memory in every layer
            return self.layer.gather_rows(self._batch())
        assert self._new is not None, "keys and values before update_and_fetch"
        return self._new

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None, mask: Any) -> mx.array:
        """``[rows, heads, queries, head_dim]`` over the pool, the new keys included."""
        assert self._new is not None, "attention before update_and_fetch"
        keys, values = self._new
        batch = self._batch()
        if self._rope_key is not None:
            assert not self._attended, "latents were attended to twice"
            self._attended = True
            rope_queries = self._rope_key.queries_behind(mask)
            return self.layer.attend_latents(queries, rope_queries, keys, values, batch, scale=scale)
        if self._attended:  # by another layer: they are in the pool
            return self.layer.attend_written(queries, keys, values, batch, scale=scale, sinks=sinks)
        self._attended = True
        return self.layer.attend(queries, keys, values, batch, scale=scale, sinks=sinks)

    def _batch(self) -> AttentionBatch:
        return self._context.current().of_group(self._group)

    def settle(self) -> bool:
        """End a forward: forget the new keys. False if attention never came for them."""
        new, attended = self._new, self._attended
        self._new, self._rope_key, self._attended = None, None, False
        if new is None:
            return True
        waiting_for_attention.pop(id(new[0]), None)
        return attended

    @property
    def keys(self) -> mx.array:
        """What models let depend on other arrays, to have those evaluated: the pool sees to that itself."""
        return mx.array(0.0)

    @keys.setter
    def keys(self, _: mx.array) -> None:
        pass

    @property
    def values(self) -> mx.array:
        """As ``keys``."""
        return self.keys

    @values.setter
    def values(self, _: mx.array) -> None:
        pass

    def maybe_trim_front(self) -> None:
        """Everything stays: masks say what is looked at."""

    @property
    def state(self) -> tuple[mx.array, ...]:
        return self.layer.state

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes


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
    owner = waiting_for_attention.get(id(keys))
    if owner is None:
        plain: mx.array = mlx_lm_attention(queries, keys, values, cache, scale, mask, sinks)
        return plain
    return owner.attend(queries, scale, sinks, mask)


def rebind_attention() -> None:
    """Put our attention under its name in every mlx-lm model module that is loaded."""
    rebind(mlx_lm_attention, scaled_dot_product_attention)


def rebind(original: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Put our function in the place of mlx-lm's in every loaded model module that imported it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and name != original.__module__:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, ours)
