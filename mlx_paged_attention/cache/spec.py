"""What each layer of a model keeps per block: named planes with a dtype and a shape."""

import math
from dataclasses import dataclass

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "int64": 8, "bool": 1}


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a layer's pool, without its leading axis.

    Attributes:
        name: ``"k"`` or ``"v"`` for plain attention; ``"latent"`` or ``"rope"`` for latent attention.
        dtype: name of the stored type.
        shape: of keys and values per block, ``(kv_heads, block_size, head_dim)``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Per block or sequence."""
        return math.prod(self.shape) * _ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one recurrent layer keeps per sequence, however long it is.

    Attributes:
        planes: the arrays it was seen to fill; shapes are per sequence.
        num_arrays: how many it has places for.
    """

    planes: tuple[Plane, ...]
    num_arrays: int

    @property
    def bytes_per_slot(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


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
        return sum(plane.nbytes for plane in self.planes)

    @property
    def is_latent(self) -> bool:
        """Whether a latent stands in place of keys and values (MLA)."""
        return self.planes[0].name == "latent"
