"""Jobs: what the check does, one after the other. Plain data that a process can hand to another."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

DType = Literal["float16", "bfloat16", "float32"]
PoolKernel = Literal["write_kv", "copy_blocks", "gather_kv"]

TYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32, 64)
POOL_KERNELS: tuple[PoolKernel, ...] = ("write_kv", "copy_blocks", "gather_kv")
# Each so strong that a kernel which ignores it is wrong by far more than the tolerance; a window that begins
# inside a block, whatever its size.
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 133}, {"sink": 0.5}, {"softcap": 2.0})


class DecodeJob(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compile ``paged_decode`` and compare it with attention in float64.

    Attributes:
        dtype: of the queries and the result.
        heads: (heads, kv_heads, head_dim, v_head_dim).
        queries: per row.
        window, softcap: as for ``paged_attention``.
        sink: about how large the heads' sinks are.
        split: cut the contexts into pieces, so that results must be merged.
        stored: the pool's type, where it is not ``dtype``.
        picked: the queries lie scattered among other tokens.
    """

    dtype: DType
    heads: tuple[int, int, int, int]
    block_size: int = 16
    queries: int = 1
    window: int | None = None
    sink: float | None = None
    softcap: float | None = None
    split: bool = True
    stored: DType | None = None
    picked: bool = False

    @property
    def name(self) -> str:
        heads, kv_heads, head_dim, v_dim = self.heads
        parts = [
            f"paged_decode {self.dtype}",
            f"{heads}/{kv_heads} heads of {_dims(head_dim, v_dim)}",
            f"blocks of {self.block_size}",
            "in pieces" if self.split else "whole",
            self.queries > 1 and f"{self.queries} queries",
            self.window and f"window {self.window}",
            self.sink is not None and "sinks",
            self.softcap and "soft cap",
            self.stored and f"stored as {self.stored}",
            self.picked and "picked",
        ]
        return ", ".join(part for part in parts if part)


class MergeJob(msgspec.Struct, frozen=True, tag=True):
    """Compile ``merge_splits`` and compare it with the same sums in float64."""

    dtype: DType
    head_dim: int
    sinks: bool

    @property
    def name(self) -> str:
        return f"merge_splits {self.dtype}, heads of {self.head_dim}{', sinks' if self.sinks else ''}"


class JoinJob(msgspec.Struct, frozen=True, tag=True):
    """Compile ``join_rows``, and look for anything out of place."""

    dtype: DType

    @property
    def name(self) -> str:
        return f"join_rows {self.dtype}"


class LatentJob(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compile ``latent_decode`` and compare it with attention in float64.

    Attributes:
        dtype: of the queries, the result and the pool.
        dims: (latent_dim, rope_dim).
        split: cut the contexts into pieces, so that results must be merged.
        stored: the pool's type, where it is not ``dtype``.
    """

    dtype: DType
    heads: int
    dims: tuple[int, int] = (512, 64)
    block_size: int = 16
    split: bool = True
    stored: DType | None = None

    @property
    def name(self) -> str:
        latent_dim, rope_dim = self.dims
        parts = [
            f"latent_decode {self.dtype}",
            f"{self.heads} heads over {latent_dim} and {rope_dim}",
            f"blocks of {self.block_size}",
            "in pieces" if self.split else "whole",
            self.stored and f"stored as {self.stored}",
        ]
        return ", ".join(part for part in parts if part)


class PoolJob(msgspec.Struct, frozen=True, tag=True):
    """Compile a kernel that moves keys and values, and look for anything out of place."""

    kernel: PoolKernel
    dtype: DType
    head_dim: int
    v_head_dim: int
    block_size: int

    @property
    def name(self) -> str:
        dims = _dims(self.head_dim, self.v_head_dim)
        return f"{self.kernel} {self.dtype}, heads of {dims}, blocks of {self.block_size}"


class SpeedJob(msgspec.Struct, frozen=True, tag=True):
    """Time ``paged_decode`` in turns with MLX's attention over contiguous keys and values (bfloat16)."""

    rows: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        return f"speed of {self.rows} x {self.context:,} tokens"

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a call reads."""
        return 2 * self.rows * self.context * self.kv_heads * self.head_dim * 2


Job = DecodeJob | LatentJob | MergeJob | JoinJob | PoolJob | SpeedJob


def _dims(keys: int, values: int) -> str:
    return f"{keys}" if keys == values else f"{keys} and {values}"


def all_jobs(backend: str) -> list[Job]:
    """Everything there is to check on a back end, ``"metal"`` or ``"cuda"``."""
    # On CUDA paged_decode merges by itself.
    merges = list(merge_jobs()) if backend == "metal" else []
    joins = map(JoinJob, TYPES)
    return [
        *pool_jobs(),
        *decode_grid(),
        *decode_extras(),
        *latent_jobs(),
        *merges,
        *joins,
        *speed_jobs(),
    ]


def decode_grid() -> Iterator[DecodeJob]:
    """Every pair of a head size, a block size, a type, an option and whole or in pieces, at least once.

    All combinations would be 672 compilations; what a compiler gets wrong shows in pairs.
    """
    for d, dim in enumerate(HEAD_DIMS):
        for s, size in enumerate(BLOCK_SIZES):
            yield DecodeJob(
                dtype=TYPES[(d + 2 * s) % 3],
                heads=(8, 2, dim, dim),
                block_size=size,
                split=(d + s // 2) % 2 == 0,
                **OPTIONS[(d + s) % 4],
            )


def decode_extras() -> Iterator[DecodeJob]:
    """What the grid leaves out: groups of heads, several queries, mixed sizes and types, all options."""
    yield DecodeJob(dtype="bfloat16", heads=(8, 2, 128, 128), window=133, sink=0.5, softcap=2.0)
    yield DecodeJob(dtype="bfloat16", heads=(16, 4, 192, 128))
    yield DecodeJob(dtype="float32", heads=(4, 2, 80, 48), split=False)
    yield DecodeJob(dtype="float16", heads=(4, 4, 64, 64))
    yield DecodeJob(dtype="bfloat16", heads=(5, 1, 64, 64))
    yield DecodeJob(dtype="float16", heads=(64, 8, 128, 128), split=False)
    yield DecodeJob(dtype="float16", heads=(40, 1, 64, 64))
    yield DecodeJob(dtype="bfloat16", heads=(32, 8, 128, 128), queries=5, window=133)
    yield DecodeJob(dtype="float32", heads=(8, 2, 64, 64), queries=16)
    yield DecodeJob(dtype="bfloat16", heads=(16, 8, 128, 128), queries=16, picked=True)
    yield DecodeJob(dtype="float16", heads=(8, 2, 80, 80), picked=True)
    yield DecodeJob(dtype="float32", heads=(8, 2, 64, 64), stored="bfloat16")


def latent_jobs() -> Iterator[LatentJob]:
    """Every type, block size and size of latent that models have; heads for one threadgroup, and for more."""
    yield LatentJob(dtype="bfloat16", heads=16)
    yield LatentJob(dtype="bfloat16", heads=128, block_size=64, split=False)
    yield LatentJob(dtype="float16", heads=40, block_size=32)
    yield LatentJob(dtype="float16", heads=32, dims=(256, 32), block_size=8, split=False)
    yield LatentJob(dtype="float32", heads=20, block_size=8)
    yield LatentJob(dtype="float32", heads=16, dims=(256, 64), split=False, stored="bfloat16")


def merge_jobs() -> Iterator[MergeJob]:
    """Every head size; every type with sinks and without."""
    for d, dim in enumerate(HEAD_DIMS):
        yield MergeJob(TYPES[d % 3], dim, d % 2 == 0)


def pool_jobs() -> Iterator[PoolJob]:
    """For each kernel every type with every block size, and every head size."""
    for kernel in POOL_KERNELS:
        for s, size in enumerate(BLOCK_SIZES):
            for t, dtype in enumerate(TYPES):
                dim = HEAD_DIMS[(3 * s + t) % 7]
                yield PoolJob(kernel, dtype, dim, 48 if t == 0 else dim, size)


def speed_jobs() -> Iterator[SpeedJob]:
    """A person alone, with a short and a long context; several at once."""
    for rows, context in ((1, 4096), (1, 16384), (8, 1024), (8, 4096), (32, 1024)):
        yield SpeedJob(rows, context)
