"""What a model keeps between forward passes, observed from the model itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_paged_attention.cache.layer_groups import LayerGroup
from mlx_paged_attention.cache.spec import LayerKVSpec, Plane, StateSpec
from mlx_paged_attention.errors import UnsupportedModelError
from mlx_paged_attention.models.watched_cache import WatchedCache, mask_windows

# How an attention looks at what it keeps: at all of it, at a window of the last tokens, at a chunk of the
# context, through a latent that keys and values are made from (MLA), or in some way of the model's own.
AttentionKind = Literal["full", "window", "chunked", "latent", "own"]

# Taken for granted where a model does not tell: large, so that it errs towards less memory.
UNKNOWN_HEADS = 128

# Tokens of the forward pass that is observed: several, so that models make masks.
_TOKENS = 3


@dataclass(frozen=True)
class CacheEntry:
    """One entry of the list that mlx-lm makes as a model's cache.

    Attributes:
        kind: keys and values for ``"attention"``, the ``"state"`` of a recurrent layer, a ``"list"`` of
            such, or ``"unused"``, which the model never writes.
        index: of attention among ``ModelCacheSpec.layers``, of a state among ``states``.
        parts: of a list.
    """

    kind: Literal["attention", "state", "list", "unused"]
    index: int = 0
    parts: tuple["CacheEntry", ...] = ()


@dataclass(frozen=True)
class ModelCacheSpec:
    """What a model keeps, and how it attends to it.

    Attributes:
        entries: the model's cache, entry by entry.
        layers: the keys and values of every attention, in the order of the entries.
        states: of every recurrent layer, likewise.
        block_size: tokens per block.
        kinds: of the layers.
        query_heads: of the layer with most of them, for what a model's own attention takes in memory.
        own_masks: some attention has a mask that does not follow from positions and a window alone, so
            that only the model itself can apply it.
    """

    entries: tuple[CacheEntry, ...]
    layers: tuple[LayerKVSpec, ...]
    states: tuple[StateSpec, ...]
    block_size: int
    own_masks: bool = False
    kinds: tuple[AttentionKind, ...] = ()
    query_heads: int = UNKNOWN_HEADS

    @property
    def latents(self) -> bool:
        """Whether all attention is latent: a model that looks at other things, too, such as an index of
        which latents to attend to, has to do so itself."""
        return bool(self.kinds) and all(kind == "latent" for kind in self.kinds)

    @property
    def dtype(self) -> str:
        """That the model computes in."""
        kept: list[LayerKVSpec | StateSpec] = [*self.layers, *self.states]
        return next(plane.dtype for one in kept for plane in one.planes)

    @property
    def bytes_per_block(self) -> int:
        """Over all layers."""
        return sum(layer.bytes_per_block for layer in self.layers)

    def bytes_per_block_of(self, groups: Sequence[LayerGroup]) -> int:
        """Of one block id, in as many places as the largest group has layers."""
        largest = max(groups, key=lambda group: len(group.layers))
        return sum(self.layers[index].bytes_per_block for index in largest.layers)

    def bytes_beyond_windows(self, groups: Sequence[LayerGroup]) -> int:
        """Of a token that lies behind all windows, over the layers of groups without one."""
        kept = [index for group in groups if group.window is None for index in group.layers]
        return sum(self.layers[index].bytes_per_block for index in kept) // self.block_size

    @property
    def bytes_per_state(self) -> int:
        """Per sequence, over all layers."""
        return sum(state.bytes_per_slot for state in self.states)

    def make_cache(self, attention: Sequence[Any], states: Sequence[ArraysCache], unused: Any) -> list[Any]:
        """The list that the model is called with, of these parts."""

        def make(entry: CacheEntry) -> Any:
            match entry.kind:
                case "attention":
                    return attention[entry.index]
                case "state":
                    return states[entry.index]
                case "list":
                    return CacheList(*(make(part) for part in entry.parts))
                case "unused":
                    return unused

        return [make(entry) for entry in self.entries]


def observe_cache(model: nn.Module, *, block_size: int) -> ModelCacheSpec:
    """What one forward pass of a few tokens puts into mlx-lm's own cache.

    Heads, head dims and the shapes of states are read off the arrays, so nothing is guessed from a config.
    Windows come from ``RotatingKVCache`` and from the masks that layers attend with. Our attention
    must have been put under mlx-lm's name before.

    Raises:
        UnsupportedModelError: a layer keeps something else, or mlx-lm cannot run the model at all.
    """
    cache = make_prompt_cache(model)
    watched: list[WatchedCache] = []
    states: list[ArraysCache] = []
    entries = [_entry(entry, index, watched, states) for index, entry in enumerate(cache)]
    try:
        with mask_windows(watched):
            mx.eval(model(mx.zeros((1, _TOKENS), mx.int32), cache=cache))
    except Exception as error:  # whatever model code raises: nothing of ours is in its way
        raise not_run_by_mlx_lm(error) from error
    if all(one.entry.keys is None for one in watched) and not any(True for s in states for _ in _arrays(s)):
        raise UnsupportedModelError("the model keeps nothing between forward passes; use mlx_lm for it")
    used = [one for one in watched if one.entry.keys is not None]
    order = {id(one): index for index, one in enumerate(used)}
    numbers = [order.get(id(one)) for one in watched]
    return ModelCacheSpec(
        tuple(_numbered(entry, numbers) for entry in entries),
        tuple(_layer(one, block_size) for one in used),
        tuple(_state(state) for state in states),
        block_size,
        own_masks=any(one.has_own_mask for one in used),
        kinds=tuple(_kind(one) for one in used),
        query_heads=_query_heads(getattr(model, "args", {})) or UNKNOWN_HEADS,
    )


def not_run_by_mlx_lm(error: Exception) -> UnsupportedModelError:
    """What a model's own code raised, on mlx-lm's own cache."""
    return UnsupportedModelError(
        f"mlx_lm itself does not run this model here: {type(error).__name__}: {error}"
    )


def _entry(entry: Any, layer: int, watched: list[WatchedCache], states: list[ArraysCache]) -> CacheEntry:
    """Of a cache before the forward; attention is numbered by its place among ``watched``."""
    if type(entry) in (KVCache, RotatingKVCache, ChunkedKVCache):
        if getattr(entry, "keep", 0):
            raise _unsupported(
                layer, entry, f"a window that always keeps its first {entry.keep} tokens is not"
            )
        watched.append(WatchedCache(entry, layer))
        return CacheEntry("attention", len(watched) - 1)
    if type(entry) is ArraysCache:
        states.append(entry)
        return CacheEntry("state", len(states) - 1)
    if type(entry) is CacheList:
        return CacheEntry("list", 0, tuple(_entry(part, layer, watched, states) for part in entry.caches))
    raise _unsupported(
        layer, entry, "only keys and values, states of recurrent layers, and lists of these are"
    )


def _unsupported(layer: int, entry: Any, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer} keeps a {type(entry).__name__}: {why} supported; "
        "this model cannot run on the paged engine yet, use mlx_lm for it"
    )


def _numbered(entry: CacheEntry, numbers: Sequence[int | None]) -> CacheEntry:
    """With attention numbered among those that are used."""
    if entry.kind == "list":
        return CacheEntry("list", 0, tuple(_numbered(part, numbers) for part in entry.parts))
    if entry.kind == "attention":
        number = numbers[entry.index]
        return CacheEntry("unused") if number is None else CacheEntry("attention", number)
    return entry


def _layer(watched: WatchedCache, block_size: int) -> LayerKVSpec:
    entry = watched.entry
    planes = []
    names = ("latent", "rope") if _kind(watched) == "latent" else ("k", "v")
    for name, array in zip(names, (entry.keys, entry.values), strict=True):
        _, kv_heads, _, head_dim = array.shape
        planes.append(Plane(name, _name(array), (kv_heads, block_size, head_dim)))
    window = watched.window
    if isinstance(entry, RotatingKVCache):
        if window is not None and window != entry.max_size:
            raise UnsupportedModelError(
                f"layer {watched.layer} attends in mlx_lm to {window} tokens in a prompt and to "
                f"{entry.max_size} in decoding, so that its results depend on how a prompt is cut; "
                "there is nothing to be equal to, use mlx_lm for it"
            )
        window = entry.max_size
    return LayerKVSpec(tuple(planes), window)


def _kind(watched: WatchedCache) -> AttentionKind:
    entry = watched.entry
    if isinstance(entry, ChunkedKVCache):
        return "chunked"
    if isinstance(entry, RotatingKVCache) or watched.window is not None:
        return "window"
    if watched.windows:
        return "own" if watched.has_own_mask else "full"
    # Nobody attended to what was fetched as it was.
    return "latent" if entry.keys.shape[1] == 1 and entry.keys.shape != entry.values.shape else "own"


def _query_heads(arguments: Any) -> int:
    """As the model's arguments, or those of the text model within, have it; 0 if they do not."""
    values = arguments if isinstance(arguments, dict) else vars(arguments)
    heads = [values.get(name) for name in ("num_attention_heads", "n_heads", "n_head", "num_heads")]
    counts = [count for count in heads if isinstance(count, int)]
    for name, part in values.items():
        if (
            name.endswith("_config")
            and name != "vision_config"
            and (isinstance(part, dict) or hasattr(part, "__dict__"))
        ):
            counts.append(_query_heads(part))
    return max(counts, default=0)


def _state(state: ArraysCache) -> StateSpec:
    planes = tuple(Plane(str(i), _name(array), array.shape[1:]) for i, array in _arrays(state))
    return StateSpec(planes, len(state.cache))


def _arrays(state: ArraysCache) -> Iterator[tuple[int, mx.array]]:
    for index, array in enumerate(state.cache):
        if array is not None:
            yield index, array


def _name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")
