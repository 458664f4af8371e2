"""KVPool: the physical keys and values of every layer."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import mlx.core as mx

from mlx_paged_attention.cache.layer_groups import LayerGroup, one_group
from mlx_paged_attention.cache.spec import LayerKVSpec
from mlx_paged_attention.errors import PoolMemoryError
from mlx_paged_attention.models.cache_spec import ModelCacheSpec
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels.order import Order
from mlx_paged_attention.ops.layer import AttentionLayer
from mlx_paged_attention.runner.memory import device_memory

Layer = TypeVar("Layer", bound=AttentionLayer)


class KVPool:
    """Arrays for keys and values, all with the same number of blocks; block 0 is the null block.

    Args:
        layers: the model's, by index.
        groups: their layer groups; the layers at one place share its arrays.

    Attributes:
        places: the layers at each place, the first group's first.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        num_blocks: int,
        block_size: int,
        groups: Sequence[LayerGroup] | None = None,
    ) -> None:
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = tuple(groups or one_group(len(layers)))
        self.places = [[layers[i] for i in indices] for indices in _places(self.groups)]
        expected = num_blocks * sum(place[0].spec.bytes_per_block for place in self.places)
        assert self.nbytes == expected, "the specs' byte counts disagree with the arrays"

    @property
    def group_of(self) -> dict[int, int]:
        """The group of each layer."""
        return {layer: number for number, group in enumerate(self.groups) for layer in group.layers}

    @property
    def pack_limit(self) -> int:
        """Longest chunk worth running as rows of one token."""
        return min((layer.pack_limit for layer in self.layers), default=1)

    @property
    def nbytes(self) -> int:
        return sum(place[0].nbytes for place in self.places)

    @property
    def bytes_per_token(self) -> int:
        """Over all layers."""
        return sum(layer.spec.bytes_per_block for layer in self.layers) // self.block_size

    @property
    def state(self) -> list[mx.array]:
        """Arrays to evaluate so that all that has been stated has run."""
        return [array for layer in self.layers for array in layer.state]

    def resize(self, num_blocks: int) -> None:
        """Have so many blocks, layer by layer; those that stay keep their contents.

        All that was stated has run. Beside the pool as it is before or after, whichever is larger, this
        takes the memory of one layer.

        Raises:
            PoolMemoryError: there is no memory for it; the pool is as it was.
        """
        before, self.num_blocks = self.num_blocks, num_blocks
        self.flush()
        try:
            self._require_memory(before)
            for place in self.places:
                _resize(place, num_blocks)
        except (RuntimeError, MemoryError) as error:  # MLX's allocators raise the one or the other
            if not self._restore(before):
                return  # all places have as many as asked for, and some have more, which nobody uses
            self.num_blocks = before
            change = "grow" if num_blocks > before else "shrink"
            raise PoolMemoryError(
                f"the KV pool cannot {change} from {before} to {num_blocks} blocks: {error}"
            ) from error
        finally:
            mx.clear_cache()

    def _restore(self, num_blocks: int) -> bool:
        """Undo a change that failed halfway. Whether all places have that many blocks; some may have more."""
        restored = True
        for place in self.places:
            expected = num_blocks * place[0].spec.bytes_per_block
            if place[0].nbytes != expected:
                with contextlib.suppress(RuntimeError, MemoryError):
                    _resize(place, num_blocks)
                restored &= place[0].nbytes >= expected
        return restored

    def _require_memory(self, before: int) -> None:
        """Refuse to grow into memory that is not there: systems promise more than they have."""
        added = (self.num_blocks - before) * sum(place[0].spec.bytes_per_block for place in self.places)
        if added > 0 and added > (memory := device_memory()).free:
            raise PoolMemoryError(f"{added >> 20} MiB more are needed, {memory.free >> 20} MiB are free")

    def copy(self, source: int, target: int) -> None:
        """Copy a block, in place; at each place once, whichever group's it is."""
        self.flush()
        for first, *twins in self.places:
            first.copy([source], [target])
            for twin in twins:
                twin.forget()

    def flush(self) -> None:
        """Write what layers have put off."""
        for layer in self.layers:
            layer.flush()

    def discard(self) -> None:
        """Forget what was stated and has not run: a step has failed, and whatever had started has ended."""
        for layer in self.layers:
            layer.discard()


class KernelPool(KVPool):
    """A pool whose layers are all written in place by the project's kernels, in one order."""

    def __init__(
        self,
        specs: Sequence[LayerKVSpec],
        num_blocks: int,
        block_size: int,
        groups: Sequence[LayerGroup] | None = None,
    ) -> None:
        self.order = Order()
        groups = groups or one_group(len(specs))
        layers = _make_layers(specs, groups, lambda spec: KernelLayer(spec, num_blocks, self.order))
        self._kernel_places = [[layers[i] for i in indices] for indices in _places(groups)]
        super().__init__(layers, num_blocks, block_size, groups)

    @property
    def state(self) -> list[mx.array]:
        return [self.order.token]

    @property
    def planes(self) -> list[mx.array]:
        """Each place's keys and values, one after the other."""
        return [plane for place in self._kernel_places for plane in (place[0].k, place[0].v)]

    @planes.setter
    def planes(self, planes: Sequence[mx.array]) -> None:
        for place, k, v in zip(self._kernel_places, planes[::2], planes[1::2], strict=True):
            for layer in place:
                layer.k, layer.v = k, v


def make_pool(
    spec: ModelCacheSpec,
    num_blocks: int,
    *,
    host: bool,
    groups: Sequence[LayerGroup] | None = None,
    max_blocks: int | None = None,
) -> KVPool:
    """A pool of the fastest kind that there is here, for the model's attention layers, which may be none.

    Args:
        groups: one with all layers by default.
        host: keep the arrays in host memory, for MLX's CPU back end.
        max_blocks: as many as the pool will ever grow to; ``None``: it will not.
    """
    groups = groups or one_group(len(spec.layers))
    if host:
        # Imported on demand: the compiler for the host's kernel exists only where it is needed.
        from mlx_paged_attention.ops.host import HostLayer

        host_layers = _make_layers(
            spec.layers, groups, lambda layer: HostLayer(layer, num_blocks, max_blocks)
        )
        return KVPool(host_layers, num_blocks, spec.block_size, groups)
    if spec.layers and all(KernelLayer.supports(layer) for layer in spec.layers):
        return KernelPool(spec.layers, num_blocks, spec.block_size, groups)
    order = Order()

    def make_layer(layer: LayerKVSpec) -> AttentionLayer:
        if KernelLayer.supports(layer):
            return KernelLayer(layer, num_blocks, order)
        return DeviceLayer(layer, num_blocks)

    layers = _make_layers(spec.layers, groups, make_layer)
    return KVPool(layers, num_blocks, spec.block_size, groups)


def _resize(place: Sequence[AttentionLayer], num_blocks: int) -> None:
    """Have so many blocks at one place."""
    first, *twins = place
    try:
        first.resize(num_blocks)
    finally:  # one of its two arrays may have been replaced
        for twin in twins:
            twin.follow(first)
        mx.clear_cache()  # smaller arrays serve for no larger ones: kept, they would be a second pool


def _places(groups: Sequence[LayerGroup]) -> list[list[int]]:
    """The indices of the layers at each place."""
    size = max(len(group.layers) for group in groups)
    return [[group.layers[j] for group in groups if j < len(group.layers)] for j in range(size)]


def _make_layers(
    specs: Sequence[LayerKVSpec], groups: Sequence[LayerGroup], make: Callable[[LayerKVSpec], Layer]
) -> list[Layer]:
    """The layers by index; those at one place are twins."""
    layers: dict[int, Layer] = {}
    for first, *others in _places(groups):
        layers[first] = make(specs[first])
        for index in others:
            layers[index] = layers[first].twin(specs[index])
    return [layers[index] for index in range(len(specs))]
