"""The progress bar of loading weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def loading_bar(total: int, shown: bool) -> Iterator[Callable[[int], object]]:
    """A function that is to be told the bytes as they are loaded.

    The bar is on stderr if that is a terminal and loading takes more than a moment; it goes away at the end.

    Args:
        total: bytes to be loaded.
        shown: ``False`` shows nothing.
    """
    from tqdm.auto import tqdm

    with tqdm(
        total=total,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        delay=1.0,
        leave=False,
        disable=None if shown else True,
    ) as bar:
        yield bar.update
