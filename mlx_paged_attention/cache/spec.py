"""What each layer of a model keeps per block: named planes with a dtype and a shape."""

import math
from dataclasses import dataclass

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a layer's pool, without its leading block axis.

    Attributes:
        name: ``"k"`` or ``"v"`` for plain attention.
        dtype: name of the stored type.
        shape: per block, ``(kv_heads, block_size, head_dim)``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes_per_block(self) -> int:
        return math.prod(self.shape) * _ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """The planes of one attention layer.

    Attributes:
        planes: in the order in which the layer's operations take them.
        window: sliding-window length in tokens, the query's own included, or ``None``.
    """

    planes: tuple[Plane, ...]
    window: int | None = None

    @property
    def bytes_per_block(self) -> int:
        return sum(plane.bytes_per_block for plane in self.planes)
