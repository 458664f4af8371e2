"""DecodeShape and MixedShape: a step's metadata as one array of a fixed shape.

A compiled function is compiled anew for every shape of its arguments, and whatever it does not get as
an argument is a constant of it. So rows, block tables and work lists are padded, and all of it
travels in one array: one upload per step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops import device_batch
from mlx_paged_attention.ops.batch import AttentionBatch, Cut
from mlx_paged_attention.ops.device_batch import DeviceBatch, DevicePacking, Fields
from mlx_paged_attention.ops.packing import TILE, Packing

Int32 = NDArray[np.int32]
Value = TypeVar("Value")


class StepShape(Protocol):
    """What is fixed in a compiled step.

    Attributes:
        tokens: in the step, padding included.
    """

    @property
    def tokens(self) -> int: ...

    def pack(self, tokens: Int32, batch: AttentionBatch, wanted: Int32) -> Int32:
        """All metadata of a step.

        Args:
            tokens: int32 ``[n]``, up to ``self.tokens``.
            batch: of these tokens, one per row.
            wanted: int32, the indices of the tokens whose logits are wanted.
        """
        ...

    def unpack(self, packed: mx.array) -> tuple[mx.array, DeviceBatch, mx.array | None]:
        """The tokens, int32 ``[tokens, 1]``, the batch, and which logits are wanted; ``None`` for all."""
        ...


@dataclass(frozen=True)
class DecodeShape:
    """A step in which every token is a row of its own sequence. All logits are computed.

    Attributes:
        tokens: padding included; a row of padding has no context and writes nothing.
        width: of the block tables.
        cuts: what the layers' work lists are cut for.
        groups: layer groups, each with slots and tables of its own.
    """

    tokens: int
    width: int
    block_size: int
    cuts: tuple[Cut, ...]
    groups: int = 1

    def pack(self, tokens: Int32, batch: AttentionBatch, wanted: Int32) -> Int32:
        lens = np.zeros(self.tokens, np.int32)
        lens[: len(tokens)] = batch.context_lens
        return device_batch.pack(
            self._fields,
            {
                "tokens": tokens,
                "positions": batch.starts,
                "lens": lens,
                **_by_group("slots", [one.slots for one in batch.groups]),
                **_by_group("tables", [one.all_tables for one in batch.groups]),
                **device_batch.cut("", lens, 1, self.block_size, self.cuts),
            },
        )

    def unpack(self, packed: mx.array) -> tuple[mx.array, DeviceBatch, mx.array | None]:
        arrays = device_batch.unpack(self._fields, packed)
        work = device_batch.work_of("", arrays, self.cuts)
        first, *others = (
            DeviceBatch(
                self.block_size,
                work=work,
                singles_only=True,
                offsets=arrays["positions"],
                device_slot_ids=arrays[f"slots{group}"],
                device_tables=arrays[f"tables{group}"],
                device_context_lens=arrays["lens"],
            )
            for group in range(self.groups)
        )
        return arrays["tokens"][:, None], first.joined_by(others), None

    @property
    def _fields(self) -> Fields:
        rows = (self.tokens,)
        return {
            **dict.fromkeys(("tokens", "positions", "lens"), rows),
            **_by_group("slots", [rows] * self.groups),
            **_by_group("tables", [(self.tokens, self.width)] * self.groups),
            **device_batch.cut_fields("", self.tokens, self.cuts),
        }


@dataclass(frozen=True)
class MixedShape:
    """A step with runs of tokens, all of which read their blocks in place.

    Attributes:
        singles, tiles: rows of one and of :data:`TILE` queries, see :class:`Packing`, padding included.
        wanted: logits computed, padding included.
        cuts, tile_cuts: what the layers' work lists for singles and for tiles are cut for.
        groups: layer groups, each with slots and tables of its own.
    """

    tokens: int
    singles: int
    tiles: int
    wanted: int
    width: int
    block_size: int
    cuts: tuple[Cut, ...]
    tile_cuts: tuple[Cut, ...]
    groups: int = 1

    def pack(self, tokens: Int32, batch: AttentionBatch, wanted: Int32) -> Int32:
        packing = batch.packing
        assert packing is not None
        lens, tile_lens = np.zeros(self.singles, np.int32), np.zeros(self.tiles * TILE, np.int32)
        lens[: len(packing.singles)] = packing.single_batch.context_lens
        tile_lens[: packing.tiles.size] = packing.tile_batch.context_lens
        parts = [Packing.of(one) for one in batch.groups]
        # Singles are padded to a length that the order must know.
        padding = self.singles - len(packing.singles)
        order = np.where(packing.order < len(packing.singles), packing.order, packing.order + padding)
        return device_batch.pack(
            self._fields,
            {
                "tokens": tokens,
                "positions": batch.starts,
                "order": order,
                "wanted": wanted,
                "singles": packing.singles[:, None],
                "lens": lens,
                "tiles": packing.tiles,
                "tile_lens": tile_lens,
                **_by_group("slots", [one.slots for one in batch.groups]),
                **_by_group("tables", [part.single_batch.block_tables for part in parts]),
                **_by_group("tile_tables", [part.tile_batch.block_tables for part in parts]),
                **device_batch.cut("", lens, 1, self.block_size, self.cuts),
                **device_batch.cut("tile_", tile_lens, TILE, self.block_size, self.tile_cuts),
            },
        )

    def unpack(self, packed: mx.array) -> tuple[mx.array, DeviceBatch, mx.array | None]:
        arrays = device_batch.unpack(self._fields, packed)
        work = device_batch.work_of("", arrays, self.cuts)
        tile_work = device_batch.work_of("tile_", arrays, self.tile_cuts)
        batches = []
        for group in range(self.groups):
            packing = DevicePacking(
                arrays["singles"],
                arrays["tiles"],
                arrays["order"],
                single_batch=DeviceBatch(
                    self.block_size,
                    work=work,
                    device_tables=arrays[f"tables{group}"],
                    device_context_lens=arrays["lens"],
                ),
                tile_batch=DeviceBatch(
                    self.block_size,
                    queries=TILE,
                    work=tile_work,
                    device_tables=arrays[f"tile_tables{group}"],
                    device_context_lens=arrays["tile_lens"],
                ),
            )
            batches.append(
                DeviceBatch(
                    self.block_size,
                    singles_only=False,
                    offsets=arrays["positions"],
                    device_slot_ids=arrays[f"slots{group}"],
                    packing=packing,
                )
            )
        first, *others = batches
        return arrays["tokens"][:, None], first.joined_by(others), arrays["wanted"]

    @property
    def _fields(self) -> Fields:
        return {
            **dict.fromkeys(("tokens", "positions", "order"), (self.tokens,)),
            "wanted": (self.wanted,),
            "singles": (self.singles, 1),
            "lens": (self.singles,),
            "tiles": (self.tiles, TILE),
            "tile_lens": (self.tiles * TILE,),
            **_by_group("slots", [(self.tokens,)] * self.groups),
            **_by_group("tables", [(self.singles, self.width)] * self.groups),
            **_by_group("tile_tables", [(self.tiles, self.width)] * self.groups),
            **device_batch.cut_fields("", self.singles, self.cuts),
            **device_batch.cut_fields("tile_", self.tiles, self.tile_cuts),
        }


def shape_of(
    batch: AttentionBatch, num_wanted: int, cuts: tuple[Cut, ...], tile_cuts: tuple[Cut, ...]
) -> StepShape | None:
    """The shape for a step, one of few; ``None`` if it cannot have a fixed one."""
    tokens, width, groups = batch.rows, width_bucket(batch.block_tables.shape[1]), len(batch.groups)
    if batch.singles_only:
        return DecodeShape(bucket(tokens), width, batch.block_size, cuts, groups)
    packing = batch.packing
    assert packing is not None
    if packing.gathered:
        return None
    padded = bucket(tokens) if tokens <= 128 else -(-tokens // 128) * 128
    least = -(-padded // TILE)  # and as many more as runs end within a tile
    return MixedShape(
        padded,
        capacity(len(packing.singles), 16),
        least + capacity(len(packing.tiles) - least, 4),
        min(padded, capacity(num_wanted, 16)),
        width,
        batch.block_size,
        cuts,
        tile_cuts,
        groups,
    )


def _by_group(name: str, values: Sequence[Value]) -> dict[str, Value]:
    """One entry for each layer group, by the name of its field."""
    return {f"{name}{group}": value for group, value in enumerate(values)}


def bucket(rows: int) -> int:
    """1, 2, 4, and from there in steps of about a third: 6, 8, 12, 16, 24, ..."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 8 and rows <= power * 3 // 4 else power


def capacity(count: int, least: int) -> int:
    """``least``, or as many times four as ``count`` needs: where padding costs less than another shape."""
    size = least
    while size < count:
        size *= 4
    return size


def width_bucket(width: int) -> int:
    """Blocks of a table: a power of two, 64 at least."""
    return max(64, 1 << (width - 1).bit_length())
