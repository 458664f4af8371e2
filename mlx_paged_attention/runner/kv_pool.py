"""KVPool: the physical keys and values of every layer."""

from collections.abc import Callable, Sequence

from mlx_paged_attention.cache.spec import LayerKVSpec
from mlx_paged_attention.ops.layer import AttentionLayer


class KVPool:
    """One set of arrays per layer, all with the same number of blocks; block 0 is the null block.

    Args:
        host: keep the arrays in host memory, for MLX's CPU back end.
    """

    def __init__(self, specs: Sequence[LayerKVSpec], num_blocks: int, *, host: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = specs[0].planes[0].shape[1]
        make_layer = _layer_maker(host)
        self.layers = [make_layer(spec, num_blocks) for spec in specs]
        expected = num_blocks * sum(spec.bytes_per_block for spec in specs)
        assert self.nbytes == expected, "the specs' byte counts disagree with the arrays"

    @property
    def pack_limit(self) -> int:
        """Longest chunk worth running as rows of one token."""
        return min(layer.pack_limit for layer in self.layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        return self.nbytes // (self.num_blocks * self.block_size)


def _layer_maker(host: bool) -> Callable[[LayerKVSpec, int], AttentionLayer]:
    """Imported on demand: the compiler for the host's kernel exists only where it is needed."""
    if host:
        from mlx_paged_attention.ops.host import HostLayer

        return HostLayer
    from mlx_paged_attention.ops.device import DeviceLayer
    from mlx_paged_attention.ops.kernel_layer import KernelLayer
    from mlx_paged_attention.ops.kernels.order import Order

    order = Order()

    def make(spec: LayerKVSpec, num_blocks: int) -> AttentionLayer:
        if KernelLayer.supports(spec):
            return KernelLayer(spec, num_blocks, order)
        return DeviceLayer(spec, num_blocks)

    return make
