"""KVPool: the physical keys and values of every layer."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_paged_attention.cache.spec import LayerKVSpec
from mlx_paged_attention.models.cache_spec import ModelCacheSpec
from mlx_paged_attention.ops.device import DeviceLayer
from mlx_paged_attention.ops.kernel_layer import KernelLayer
from mlx_paged_attention.ops.kernels.order import Order
from mlx_paged_attention.ops.layer import AttentionLayer


class KVPool:
    """One set of arrays per layer, all with the same number of blocks; block 0 is the null block."""

    def __init__(self, layers: Sequence[AttentionLayer], num_blocks: int, block_size: int) -> None:
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        expected = num_blocks * sum(layer.spec.bytes_per_block for layer in layers)
        assert self.nbytes == expected, "the specs' byte counts disagree with the arrays"

    @property
    def pack_limit(self) -> int:
        """Longest chunk worth running as rows of one token."""
        return min((layer.pack_limit for layer in self.layers), default=1)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        return self.nbytes // (self.num_blocks * self.block_size)

    @property
    def state(self) -> list[mx.array]:
        """Arrays to evaluate so that all that has been stated has run."""
        return [array for layer in self.layers for array in layer.state]

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

    def __init__(self, specs: Sequence[LayerKVSpec], num_blocks: int, block_size: int) -> None:
        self.order = Order()
        self._kernel_layers = [KernelLayer(spec, num_blocks, self.order) for spec in specs]
        super().__init__(self._kernel_layers, num_blocks, block_size)

    @property
    def state(self) -> list[mx.array]:
        return [self.order.token]

    @property
    def planes(self) -> list[mx.array]:
        """Each layer's keys and values, one after the other."""
        return [plane for layer in self._kernel_layers for plane in (layer.k, layer.v)]

    @planes.setter
    def planes(self, planes: Sequence[mx.array]) -> None:
        for layer, k, v in zip(self._kernel_layers, planes[::2], planes[1::2], strict=True):
            layer.k, layer.v = k, v


def make_pool(spec: ModelCacheSpec, num_blocks: int, *, host: bool) -> KVPool:
    """A pool of the fastest kind that there is here, for the model's attention layers, which may be none.

    Args:
        host: keep the arrays in host memory, for MLX's CPU back end.
    """
    if host:
        # Imported on demand: the compiler for the host's kernel exists only where it is needed.
        from mlx_paged_attention.ops.host import HostLayer

        host_layers = [HostLayer(layer, num_blocks) for layer in spec.layers]
        return KVPool(host_layers, num_blocks, spec.block_size)
    if spec.layers and all(KernelLayer.supports(layer) for layer in spec.layers):
        return KernelPool(spec.layers, num_blocks, spec.block_size)
    order = Order()

    def make_layer(layer: LayerKVSpec) -> AttentionLayer:
        if KernelLayer.supports(layer):
            return KernelLayer(layer, num_blocks, order)
        return DeviceLayer(layer, num_blocks)

    return KVPool([make_layer(layer) for layer in spec.layers], num_blocks, spec.block_size)
