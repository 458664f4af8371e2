"""BlockMap: who holds which block at one moment, told in runs of blocks that are alike."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_paged_attention.cache.block import Block

BlockState = Literal["null", "free", "cached", "used", "shared"]

# A pool of 100,000 blocks in which no two neighbours are alike would be 10 MB of text.
MAX_RUNS = 2000
# Hundreds of requests may hold a common prefix; the first few tell whose it is.
MAX_OWNERS = 8


@dataclass(frozen=True, slots=True)
class HeldTable:
    """The blocks that a request holds for a layer group, and how many slots of the last one are empty."""

    request_id: str
    blocks: Sequence[Block]
    empty_slots: int


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one state and the same owners.

    Attributes:
        first: id of the first one.
        count: how many.
        state: ``"null"``, ``"free"`` (nobody's), ``"cached"`` (nobody's, but a published prefix that
            can be hit), ``"used"`` (one request's) or ``"shared"`` (several requests').
        owners: ids of the requests that hold them, the first :data:`MAX_OWNERS`.
        num_owners: how many hold them: the reference count.
    """

    first: int
    count: int
    state: BlockState
    owners: tuple[str, ...] = ()
    num_owners: int = 0


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Every block of a pool.

    Attributes:
        runs: by block id, :data:`MAX_RUNS` at most.
        blocks_left_out: blocks after the last run.
        shared_blocks: held by more than one request.
        saved_blocks: blocks that the requests would hold in addition if nothing were shared.
        empty_slots: slots of held blocks that no token has yet, each counted once.
    """

    runs: tuple[BlockRun, ...]
    blocks_left_out: int
    shared_blocks: int
    saved_blocks: int
    empty_slots: int


def map_blocks(blocks: Sequence[Block], tables: Iterable[HeldTable]) -> BlockMap:
    """Look at a pool; O(blocks + entries of all tables).

    Args:
        blocks: of the pool, by id.
        tables: of all requests.
    """
    owners: dict[int, tuple[str, ...]] = {}
    empty: dict[int, int] = {}  # by last block: forks that share one share its empty slots
    for table in tables:
        for block in table.blocks:
            known = owners.get(block.block_id, ())
            if len(known) < MAX_OWNERS:
                owners[block.block_id] = (*known, table.request_id)
        if table.blocks:
            last = table.blocks[-1].block_id
            empty[last] = min(empty.get(last, table.empty_slots), table.empty_slots)

    runs = _runs(blocks, owners)
    counts = [block.ref_count for block in blocks if block.ref_count > 1 and not block.is_null]
    return BlockMap(
        runs=tuple(runs),
        blocks_left_out=len(blocks) - runs[-1].first - runs[-1].count,
        shared_blocks=len(counts),
        saved_blocks=sum(counts) - len(counts),
        empty_slots=sum(empty.values()),
    )


def _runs(blocks: Sequence[Block], owners: dict[int, tuple[str, ...]]) -> list[BlockRun]:
    runs: list[BlockRun] = []
    first = 0
    previous = _alike(blocks[0], owners)
    for block in blocks:
        alike = _alike(block, owners)
        if alike != previous:
            runs.append(BlockRun(first, block.block_id - first, *previous))
            if len(runs) == MAX_RUNS:
                return runs
            first, previous = block.block_id, alike
    runs.append(BlockRun(first, len(blocks) - first, *previous))
    return runs


def _alike(block: Block, owners: dict[int, tuple[str, ...]]) -> tuple[BlockState, tuple[str, ...], int]:
    """What neighbours must have in common to be told as one run."""
    count = block.ref_count
    if block.is_null:
        return "null", (), 0
    if count == 0:
        return "free" if block.block_hash is None else "cached", (), 0
    return "used" if count == 1 else "shared", owners.get(block.block_id, ()), count
