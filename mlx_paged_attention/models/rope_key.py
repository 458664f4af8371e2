"""RopeKey: stands in for the rope's part of latent attention's keys while a model states single tokens."""

from typing import Any

import mlx.core as mx


class RopeKey(mx.array):
    """An array in which a model's ``q_rope @ key.swapaxes(-1, -2)`` gives ``q_rope`` back, to be paged.

    All of mlx-lm's models with latent attention compute that product and pass it to attention as its mask.
    The array itself is empty, so that whatever else is done with it fails for its shape.
    """

    def __init__(self) -> None:
        super().__init__(mx.zeros((0,)))
        self._turned = False
        self._queries: mx.array | None = None

    def swapaxes(self, axis1: int, axis2: int, *, stream: Any = None) -> "RopeKey":
        assert {axis1 % 4, axis2 % 4} == {2, 3}, "a model turns latent attention's keys in a way of its own"
        self._turned = True
        return self

    def __rmatmul__(self, queries: mx.array) -> mx.array:
        assert self._turned, "a model multiplies latent attention's keys in a way of its own"
        assert self._queries is None, "a model multiplies latent attention's keys twice"
        self._queries = queries
        return queries

    def queries_behind(self, mask: object) -> mx.array:
        """What was multiplied with, given the mask that attention is called with: that very product."""
        queries: mx.array | None = self._queries
        assert queries is not None, "a model attends to latents without the rope's part"
        assert mask is queries, "a model changes the scores of the rope's part before it attends"
        return queries
