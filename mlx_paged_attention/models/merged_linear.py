"""Linear layers that are given the same input are multiplied together.

On CUDA it takes the host tens of microseconds to launch a product, more than it takes the device to
multiply few rows with small weights. So a layer's queries, keys and values are one product there, and so
are a gate and what it gates. Modules change their class in place; the names and values of parameters
stay as they are.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged_attention.models.flat_linear import FlatLinear

# Weights that take the device longer to read than the host to launch what reads them, and elements of a
# product whose parts, which do not lie side by side, take longer to read than that: on an H200, a model of
# 0.6 billion parameters gained a third up to 64 rows and nothing at 256, a tenth or more in steps of 1,024
# tokens; one of 8 billion nothing.
MOST_BYTES = 32 << 20
MOST_ELEMENTS = 1 << 23

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def merge_products(model: nn.Module) -> None:
    """Merge the layers that bear the names of layers with the same input, where they are alike."""
    for module in model.modules():
        for names in _TOGETHER:
            layers = [module.get(name) for name in names]
            if _alike(layers) and sum(array.nbytes for x in layers for array in x.values()) <= MOST_BYTES:
                _merge(layers)


class Product:
    """One product for several layers.

    Which input they are given is seen as they are called: the first that is called computes for
    all, and the others find their part as long as they are given the very same array. Layers that
    turn out not to be go on alone.

    Args:
        whole: the layer with all of their outputs, side by side.
        borders: where the outputs of each end, ascending.
    """

    def __init__(self, whole: nn.Module, borders: list[int]) -> None:
        self._whole = whole
        self._borders = borders[:-1]
        self._width = borders[-1]
        self._x: mx.array | None = None
        self._parts: dict[int, mx.array] = {}
        self.apart = False

    def part(self, place: int, x: mx.array) -> mx.array | None:
        """What layer ``place`` makes of ``x [..., width]``; ``None`` if it is to see for itself."""
        if x.size // x.shape[-1] * self._width > MOST_ELEMENTS:
            return None
        if self._x is not x:
            # Something is left of another input: either these layers have different ones, or a
            # forward broke off. Alone they are right in both cases.
            self.apart = self.apart or self._x is not None
            self._x, self._parts = None, {}
            if self.apart:
                return None
            self._x = x
            out: mx.array = self._whole(x)
            self._parts = dict(enumerate(mx.split(out, self._borders, axis=-1)))
        part = self._parts.pop(place, None)
        if not self._parts:  # nothing is kept beyond the last part
            self._x = None
        return part


class _Merged:
    """A layer with a part in a product."""

    product: Product
    place: int

    def __call__(self, x: mx.array) -> mx.array:
        part = self.product.part(self.place, x)
        if part is not None:
            return part
        out: mx.array = super().__call__(x)  # type: ignore[misc]
        return out


class MergedLinear(_Merged, nn.Linear):
    """A plain layer with a part in a product."""


class MergedFlatLinear(_Merged, FlatLinear):
    """A quantised layer with a part in a product."""


_MERGED: dict[type, type] = {nn.Linear: MergedLinear, FlatLinear: MergedFlatLinear}


def _alike(layers: Sequence[Any]) -> bool:
    """Whether these are layers that differ in nothing but their width and parameters' values."""
    if type(layers[0]) not in _MERGED:
        return False
    formats = {
        (type(x), *(getattr(x, name, None) for name in ("group_size", "bits", "mode"))) for x in layers
    }
    if len(formats) > 1:
        return False
    shapes = {tuple((key, array.dtype, array.shape[1:]) for key, array in sorted(x.items())) for x in layers}
    return len(shapes) == 1


def _merge(layers: Sequence[Any]) -> None:
    """Make the layers' parameters views of joint ones."""
    borders = [0]
    for layer in layers:
        borders.append(borders[-1] + layer.weight.shape[0])
    whole = copy.copy(layers[0])
    for key in layers[0]:
        joint = mx.concatenate([layer[key] for layer in layers])
        mx.eval(joint)
        whole[key] = joint
        for layer, (begin, end) in zip(layers, pairwise(borders), strict=True):
            layer[key] = joint[begin:end]
        mx.eval([layer[key] for layer in layers])
    product = Product(whole, borders[1:])
    for place, layer in enumerate(layers):
        layer.product, layer.place = product, place
        layer.__class__ = _MERGED[type(layer)]
