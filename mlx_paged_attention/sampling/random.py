"""Random numbers without state: number ``i`` of a seed's stream is a function of ``(seed, i)`` alone."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float32]:
    """One uniform number per ``(seed, index)`` pair.

    Number ``i`` of a stream is step ``i`` of SplitMix64 (https://doi.org/10.1145/2714064.2660195)
    started at the mixed seed, so neither batch mates nor earlier draws can change it.

    Args:
        seeds: one per number; any integer, taken modulo 2**64.
        indices: position in the seed's stream, at least 0.

    Returns:
        ``[numbers]`` float32 in ``[0, 1)``, multiples of 2**-24.
    """
    keys = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    steps = np.asarray(indices, dtype=np.uint64)
    bits = _mix(_mix(keys) + (steps + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
