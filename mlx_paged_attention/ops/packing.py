"""Packing: which tokens of a step read blocks one by one, which in tiles of queries, which from a copy."""

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops.batch import AttentionBatch, Cut
from mlx_paged_attention.ops.kernels.make import backend
from mlx_paged_attention.ops.kernels.work_list import WorkList

# Queries of one run that read its blocks together.
TILE = 16

# Runs of more tokens copy contexts longer than this and leave them to MLX's own kernel, which reads a
# key once for more queries than ours. On CUDA that kernel is planned anew for every length, a tenth of
# a second each; on Metal it costs nothing to begin with.
GATHER_BEYOND = {"cuda": 8192, "metal": 0}


class TileBatch(AttentionBatch):
    """Rows of :data:`TILE` queries cut from runs; the last row of a run repeats its last token."""

    def __init__(self, batch: AttentionBatch, tokens: NDArray[np.int64], work: dict[Cut, WorkList]) -> None:
        lens = batch.context_lens[tokens]
        self.__dict__.update(
            starts=lens[:, 0] - 1,
            queries=TILE,
            block_tables=batch.tables_of(tokens[:, 0] // batch.queries),
            block_size=batch.block_size,
            context_lens=lens.reshape(-1),
            _work=work,
        )


@dataclass(frozen=True)
class Packing:
    """The flattened tokens of a batch, sorted by how attention reads their contexts.

    Attributes:
        batch: whose tokens they are.
        singles: int64 ``[n]``, tokens that are a run of their own.
        tiles: int64 ``[tiles, TILE]``, tokens of longer runs.
        gathered: the runs, as half-open ranges of tokens, whose contexts are copied first.
        twin: of the same rows in another layer group: work lists are made once for both.
    """

    batch: AttentionBatch
    singles: NDArray[np.int64]
    tiles: NDArray[np.int64]
    gathered: tuple[tuple[int, int], ...]
    twin: "Packing | None" = None

    @classmethod
    def of(cls, batch: AttentionBatch) -> "Packing":
        """The packing of a batch, made once for all its layers, and sorted once for all layer groups."""
        if batch.packing is not None:
            return batch.packing
        twins = batch._packings
        if twins:
            packing = cls(batch, twins[0].singles, twins[0].tiles, twins[0].gathered, twins[0])
        else:
            packing = cls._sorted(batch)
            twins.append(packing)
        object.__setattr__(batch, "packing", packing)
        return packing

    @classmethod
    def _sorted(cls, batch: AttentionBatch) -> "Packing":
        gather_beyond = GATHER_BEYOND[backend() or "metal"]
        singles, tiles, gathered = [], [], []
        for begin, end in batch.runs:
            if end - begin == 1:
                singles.append(begin)
            elif end - begin > TILE and batch.context_lens[end - 1] > gather_beyond:
                gathered.append((begin, end))
            else:
                padded = np.arange(begin, begin + -(-(end - begin) // TILE) * TILE)
                tiles.append(np.minimum(padded, end - 1).reshape(-1, TILE))
        return cls(
            batch,
            np.array(singles, np.int64),
            np.concatenate(tiles) if tiles else np.empty((0, TILE), np.int64),
            tuple(gathered),
        )

    @cached_property
    def has_singles(self) -> bool:
        return len(self.singles) > 0

    @cached_property
    def has_tiles(self) -> bool:
        return len(self.tiles) > 0

    @cached_property
    def device_singles(self) -> mx.array:
        """int32 ``[n, 1]``."""
        return mx.array(self.singles.astype(np.int32)[:, None])

    @cached_property
    def device_tiles(self) -> mx.array:
        """int32 ``[tiles, TILE]``."""
        return mx.array(self.tiles.astype(np.int32))

    @cached_property
    def single_batch(self) -> AttentionBatch:
        batch = self.batch
        return AttentionBatch(
            batch.context_lens[self.singles] - 1,
            1,
            batch.slots[self.singles],
            batch.tables_of(self.singles // batch.queries),
            batch.block_size,
            _work={} if self.twin is None else self.twin.single_batch._work,
        )

    @cached_property
    def tile_batch(self) -> TileBatch:
        work = {} if self.twin is None else self.twin.tile_batch._work
        return TileBatch(self.batch, self.tiles, work)

    @cached_property
    def gathered_batches(self) -> tuple[AttentionBatch, ...]:
        """A batch of one row for each gathered run."""
        batch = self.batch
        return tuple(
            AttentionBatch(
                batch.context_lens[begin : begin + 1] - 1,
                end - begin,
                batch.slots[begin:end],
                batch.table_of(begin // batch.queries)[None],
                batch.block_size,
            )
            for begin, end in self.gathered
        )

    @cached_property
    def order(self) -> NDArray[np.int32]:
        """``[tokens]``: where each token is found in singles, tiles and gathered runs, joined."""
        joined = [self.singles, self.tiles.reshape(-1), *(np.arange(*run) for run in self.gathered)]
        tokens = np.concatenate(joined)
        places = np.empty(len(self.batch.slots), np.int32)
        places[tokens] = np.arange(len(tokens))
        return places

    @cached_property
    def device_order(self) -> mx.array:
        """``order`` on the device, int32 ``[tokens]``."""
        return mx.array(self.order)
