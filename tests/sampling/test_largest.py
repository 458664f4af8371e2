import mlx.core as mx
import numpy as np
import pytest

from mlx_paged_attention.sampling.largest import CHUNK, largest


@pytest.mark.parametrize("entries", [1, 5, CHUNK, CHUNK + 1, 111, 1000, 32000, 49157])
@pytest.mark.parametrize("k", [1, 5, 20, 256])
def test_the_largest_come_first_and_equal_ones_by_position(entries, k):
    rng = np.random.default_rng(k)
    for values in (rng.normal(size=(3, entries)), rng.integers(-3, 3, (3, entries)), np.zeros((3, entries))):
        x = values.astype(np.float32)
        x[1, rng.random(entries) < 0.9] = -np.inf
        order = np.argsort(-x, axis=-1, kind="stable")[:, :k]
        got_values, got_positions = largest(mx.array(x), k)
        np.testing.assert_array_equal(np.array(got_positions), order)
        np.testing.assert_array_equal(np.array(got_values), np.take_along_axis(x, order, -1))
