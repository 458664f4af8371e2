"""make_paged_cache: the paged pool as a cache for mlx-lm's own generation, without the engine."""

import copy
import importlib.util
import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache

from mlx_paged_attention.cache.block_table import BlockTable
from mlx_paged_attention.errors import InvalidRequestError, RequestTooLongError, UnsupportedModelError
from mlx_paged_attention.models.cache_spec import ModelCacheSpec, observe_cache
from mlx_paged_attention.models.forward import ForwardContext
from mlx_paged_attention.models.seam import PagedLayerCache, rebind_attention
from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.ops.layer import AttentionLayer
from mlx_paged_attention.runner.kv_pool import KVPool, make_pool
from mlx_paged_attention.runner.self_check import TOLERANCE, mlx_lm_logits

# A chunk, a long chunk behind it, tokens: the paths that a sequence takes.
_CHECK = (5, 19, 1, 1)


class _NotToBeSaved:
    """Evaluation passes over it; mlx-lm refuses to write it to a file, and says what it is."""

    def __repr__(self) -> str:
        return (
            "a paged cache cannot be saved, as its keys and values lie in a pool; to keep a prompt in a "
            "file, compute it with mlx_lm.models.cache.make_prompt_cache"
        )


_NOT_TO_BE_SAVED = _NotToBeSaved()


class PagedKVCache(PagedLayerCache):
    """One layer's cache of one sequence, in the place of mlx-lm's ``KVCache``."""

    def __init__(self, layer: AttentionLayer, sequence: "_Sequence", *, dense: bool, latent: bool) -> None:
        super().__init__(layer, sequence, dense=dense, latent=latent)
        self._sequence = sequence
        self._length = 0

    @property
    def offset(self) -> int:
        """Tokens that the layer holds."""
        return self._length

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rows, _, length, _ = keys.shape
        if rows != 1:
            raise InvalidRequestError(f"a paged cache holds one sequence, not {rows}: make one for each")
        self._sequence.begin(self._length, length)
        self._length += length
        return super().update_and_fetch(keys, values)

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None, mask: Any) -> mx.array:
        out = super().attend(queries, scale, sinks, mask)
        self.settle()
        return out

    def make_mask(
        self, queries: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        self._sequence.begin(self._length, queries)
        return super().make_mask(queries, return_array, window_size)

    def size(self) -> int:
        return self._length

    def empty(self) -> bool:
        return self._length == 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens, or all if there are fewer; how many were forgotten."""
        n = min(self._length, n)
        self._length -= n
        return n

    @property
    def state(self) -> tuple[Any, ...]:
        """What to evaluate; and what keeps mlx-lm's ``save_prompt_cache`` from saving that alone."""
        return (*super().state, _NOT_TO_BE_SAVED)

    def __deepcopy__(self, memo: Any) -> "PagedKVCache":
        """A fork: a cache with the same tokens that goes its own way, see :func:`make_paged_cache`."""
        sequence = copy.deepcopy(self._sequence, memo)
        fork = PagedKVCache(self.layer, sequence, dense=self._dense, latent=self._latent)
        fork._length = self._length
        return fork


class _Sequence(ForwardContext):
    """Where the tokens of one sequence are.

    Args:
        table: of a pool of block ids that all forks share, as they share the layers.
        given_up: tables of forks that nobody uses any more. What a finaliser may do at any moment
            is to put one there; its blocks are freed when the next ones are needed.
    """

    def __init__(self, pool: KVPool, table: BlockTable, max_tokens: int, given_up: list[BlockTable]) -> None:
        super().__init__()
        self._pool = pool
        self._table = table
        self._ids = np.zeros(pool.num_blocks, np.int32)  # what the table held when last written to
        self._max_tokens = max_tokens
        self._given_up = given_up
        weakref.finalize(self, given_up.append, table).atexit = False

    def __deepcopy__(self, _memo: Any) -> "_Sequence":
        fork = _Sequence(self._pool, self._table.fork(), self._max_tokens, self._given_up)
        fork._ids[:] = self._ids
        # What could be written in place until now may be shared from here on.
        self.batch = None
        return fork

    def begin(self, start: int, length: int) -> None:
        """The next forward computes the tokens from ``start`` on; nothing if it has begun already."""
        batch, size = self.batch, self._pool.block_size
        if batch is not None and (int(batch.starts[0]), batch.queries) == (start, length):
            return
        end = start + length
        if end > self._max_tokens:
            raise RequestTooLongError(
                f"the paged cache holds {self._max_tokens} tokens, and {end} are needed: "
                "give make_paged_cache a larger max_tokens"
            )
        while self._given_up:
            self._given_up.pop().free()
        copies = self._table.make_writable(start, end)
        if copies is None:
            raise RequestTooLongError(
                f"the blocks that the paged cache and its copies share are used up, and {end} tokens are "
                "needed: give make_paged_cache a larger max_tokens, or drop a copy"
            )
        if copies:
            source, target = zip(*copies, strict=True)
            for layer in self._pool.layers:
                layer.copy(source, target)
        first, last = start // size, -(-end // size)
        self._ids[first:last] = self._table.block_ids(first)
        positions = np.arange(start, end)
        self.batch = AttentionBatch(
            starts=np.array([start], np.int32),
            queries=length,
            slots=self._ids[positions // size].astype(np.int64) * size + positions % size,
            block_tables=self._ids[None, :last].copy(),
            block_size=size,
        )


def make_paged_cache(model: nn.Module, *, max_tokens: int = 4096, block_size: int = 16) -> list[Any]:
    """A cache for ``mlx_lm.generate(..., prompt_cache=...)`` that keeps keys and values in blocks.

    Takes the place of mlx-lm's ``make_prompt_cache``: on a GPU the project's kernels write new
    tokens in place, and attention reads them where they lie. Before it is handed out, the cache has
    shown on a short text that the model computes with it what it computes with mlx-lm's own.

    Args:
        model: of ``mlx_lm.load``.
        max_tokens: most tokens it can hold, prompt and answer. Their memory is taken now, and
            is for its copies too.
        block_size: tokens per block.

    Returns:
        What the model is to be called with, for one sequence: a :class:`PagedKVCache` wherever it
        keeps keys and values, mlx-lm's own caches for states of recurrent layers. Trimming is exact,
        windows included; states cannot be trimmed. ``copy.deepcopy`` of the list forks the sequence:
        both share the blocks there are, in the memory there is, and the first to write into a
        partly filled one gets a copy of that block. It cannot be saved to a file.

    Raises:
        UnsupportedModelError: the model keeps something else, no keys and values at all, or does
            not compute the same.
        InvalidRequestError: a number is below 1.
    """
    for name, value in (("max_tokens", max_tokens), ("block_size", block_size)):
        if value < 1:
            raise InvalidRequestError(f"{name} must be at least 1, not {value}", name)
    rebind_attention()
    spec = observe_cache(model, block_size=block_size)
    if not spec.layers:
        raise UnsupportedModelError(
            "the model keeps no keys and values, so that there is nothing to page: "
            "use mlx_lm's make_prompt_cache"
        )
    failures = []
    for dense in (True,) if spec.own_masks else (False, True):
        try:
            error = _error(model, *_caches(spec, sum(_CHECK), dense=dense))
        except Exception as exception:  # whatever model code raises is the verdict
            failures.append(f"{type(exception).__name__}: {exception}")
            continue
        if error <= TOLERANCE[spec.dtype]:
            return _caches(spec, max_tokens, dense=dense)[0]
        failures.append(f"off by {error:.2g} standard deviations")
    raise UnsupportedModelError(
        "the model does not compute on a paged cache what it computes in mlx_lm "
        f"({'; '.join(failures)}); use mlx_lm's make_prompt_cache for it"
    )


def _caches(spec: ModelCacheSpec, max_tokens: int, *, dense: bool) -> tuple[list[Any], list[PagedKVCache]]:
    """What the model is called with, and the paged caches in it."""
    num_blocks = 1 + -(-max_tokens // spec.block_size)
    # The loop that reads host memory is made for float32, and for machines without a GPU.
    on_host = (
        mx.default_device() == mx.Device(mx.cpu)
        and all(plane.dtype == "float32" for layer in spec.layers for plane in layer.planes)
        and importlib.util.find_spec("numba") is not None
    )
    pool = make_pool(spec, num_blocks, host=on_host)
    sequence = _Sequence(pool, BlockTable.in_new_pool(num_blocks, spec.block_size), max_tokens, [])
    latent = spec.latents and not dense
    layers = [PagedKVCache(layer, sequence, dense=dense, latent=latent) for layer in pool.layers]
    states = [ArraysCache(state.num_arrays) for state in spec.states]
    return spec.make_cache(layers, states, KVCache()), layers


def _error(model: nn.Module, cache: list[Any], layers: list[PagedKVCache]) -> float:
    """Largest difference of logits to mlx-lm's, in standard deviations."""
    tokens = [(37 * i * i + 101 * i + 3) % 97 for i in range(sum(_CHECK))]
    reference = mlx_lm_logits(model, tokens)
    logits, begin = [], 0
    for length in _CHECK:
        output: Any = model(mx.array([tokens[begin : begin + length]]), cache=cache)
        settled = [layer.settle() for layer in layers]  # every cache must be
        if not all(settled):
            raise UnsupportedModelError("a layer fetched keys but never attended with them")
        logits.append(np.array(output[0].astype(mx.float32)))
        begin += length
    difference = float(np.abs(np.concatenate(logits) - reference).max() / max(reference.std(), 1e-6))
    return difference if np.isfinite(difference) else np.inf
