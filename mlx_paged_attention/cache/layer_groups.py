"""LayerGroup: layers that look equally far back, and so keep and give back blocks together.

All groups take their blocks out of one pool. A block holds one layer's keys and values for each *place*, and
there are as many places as the largest group has layers: the layers of different groups at one place share
that place's arrays, in blocks of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one block table per request.

    Attributes:
        window: tokens that a query looks back on, its own included; ``None`` is all of them.
        layers: their indices; the layer at ``layers[j]`` is at place ``j``.
    """

    window: int | None
    layers: tuple[int, ...]


def group_layers(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Deal layers that are alike but for their windows into groups of about equally many.

    A group has as many layers as the rarest kind, so that no place is empty there; or as the most frequent
    one, if that is less than half as many again.

    Args:
        windows: of each layer.
    """
    kinds: dict[int | None, list[int]] = {None: []} if None in windows else {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    groups = []
    for window, layers in kinds.items():
        number = -(-len(layers) // size)
        groups += [LayerGroup(window, tuple(layers[i::number])) for i in range(number)]
    return tuple(groups)


def one_group(num_layers: int, window: int | None = None) -> tuple[LayerGroup, ...]:
    """All layers with one block table, and each with arrays of its own."""
    return (LayerGroup(window, tuple(range(num_layers))),)
