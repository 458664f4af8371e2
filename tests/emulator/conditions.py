"""What a launch runs under: rules that are checked, and choices that Metal leaves open."""

from dataclasses import dataclass
from typing import Literal

SimdRule = Literal["every lane", "converged lanes", "any lane"]
SIMD_RULES: tuple[SimdRule, ...] = ("every lane", "converged lanes", "any lane")


@dataclass(frozen=True)
class Conditions:
    """A kernel whose results are to be trusted gives them, within its tolerance, under any of the choices.

    Attributes:
        simd: who must take part in a simd operation. ``every lane`` of the simdgroup: what CUDA's full mask
            needs too. ``converged lanes``: those that have returned may be missing. ``any lane``: lanes of a
            divergent branch run apart.
        shuffle_order: seed for the order of simdgroups and of the terms of a reduction; 0: ascending.
        fuse_multiply_add: ``a * b + c`` rounds once.
        flush_subnormals: subnormal floats are zero.
        fast_math_ulps: how wrong ``fast::`` functions are, at most, in units in the last place.
        threadgroup_memory: bytes that a threadgroup may use.
        seconds: after which a launch is taken for an endless loop.
    """

    simd: SimdRule = "every lane"
    shuffle_order: int = 0
    fuse_multiply_add: bool = False
    flush_subnormals: bool = False
    fast_math_ulps: int = 0
    threadgroup_memory: int = 32 * 1024
    seconds: int = 120


STRICT = Conditions()
