"""WatchedCache: one of mlx-lm's own caches, watched while its model attends for the first time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_paged_attention.models.seam import mlx_lm_attention, waiting_for_attention


class WatchedCache:
    """Notes which masks a layer's attention is called with.

    Attributes:
        entry: mlx-lm's cache.
        layer: its place in the model's cache.
        windows: of each attention over its keys; ``None`` is the whole context.
        has_own_mask: one had a mask that the cache did not make, or two had different ones.
    """

    def __init__(self, entry: Any, layer: int) -> None:
        self.entry = entry
        self.layer = layer
        self.windows: set[int | None] = set()
        self.has_own_mask = False
        self._fetched: list[tuple[mx.array, mx.array]] = []

    @property
    def window(self) -> int | None:
        """Positions that a token attends to, its own included, where the model's masks say so."""
        return next(iter(self.windows), None)

    def fetched(self, keys: mx.array, values: mx.array) -> None:
        """The model got these; whoever attends to them is noted."""
        self._fetched.append((keys, values))
        waiting_for_attention[id(keys)] = self

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None, mask: Any) -> mx.array:
        """mlx-lm's attention."""
        out: mx.array = mlx_lm_attention(queries, *self._fetched[-1], None, scale, mask, sinks)
        return out

    def forget(self) -> None:
        """The forward pass is over."""
        for keys, _ in self._fetched:
            waiting_for_attention.pop(id(keys), None)
        self._fetched.clear()

    def note(self, window: int | None, *, own: bool) -> None:
        """An attention with a mask of this window, or with one of the model's ``own``."""
        self.windows.add(window)
        self.has_own_mask |= own or len(self.windows) > 1


@contextmanager
def mask_windows(caches: Sequence[WatchedCache]) -> Iterator[None]:
    """Within, a forward pass on these caches shows what each layer attends to."""
    made: dict[int, tuple[mx.array, int | None]] = {}  # arrays are kept, so that their ids stay theirs

    def watch(one: WatchedCache) -> None:
        entry = one.entry
        update, attend = entry.update_and_fetch, one.attend

        def update_and_fetch(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            fetched: tuple[mx.array, mx.array] = update(keys, values)
            one.fetched(*fetched)
            return fetched

        def noting(queries: mx.array, scale: float, sinks: mx.array | None, mask: Any) -> mx.array:
            if not isinstance(mask, mx.array):
                one.note(None, own=False)
            elif id(mask) in made:
                one.note(made[id(mask)][1], own=False)
            else:
                one.note(None, own=True)
            return attend(queries, scale, sinks, mask)

        entry.update_and_fetch = update_and_fetch
        one.attend = noting  # type: ignore[method-assign]
        if hasattr(entry, "make_mask"):
            make = entry.make_mask

            def make_mask(length: int, return_array: bool = False, window_size: int | None = None) -> Any:
                # "causal" would not show where it came from.
                mask = make(length, return_array=True, window_size=window_size)
                if isinstance(mask, mx.array):
                    made[id(mask)] = (mask, window_size)
                return mask

            entry.make_mask = make_mask

    for one in caches:
        watch(one)
    try:
        yield
    finally:
        for one in caches:
            one.forget()
