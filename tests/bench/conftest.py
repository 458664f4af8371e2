"""What the tests of the benchmark share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_garbage_collection() -> Iterator[None]:
    """The benchmark collects garbage before each run: keep what other tests left out of that."""
    gc.freeze()
    yield
    gc.unfreeze()
