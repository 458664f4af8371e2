"""From planned rows to forward passes: which tokens go through the model together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlx_paged_attention.ops.batch import AttentionBatch
from mlx_paged_attention.scheduler.step_plan import PlannedRow


class Tables(Protocol):
    """Block tables by request."""

    def of(self, request_ids: Sequence[str], width: int, group: int = 0) -> NDArray[np.int32]:
        """The first ``width`` blocks of each, int32 ``[requests, width]``, padded with 0."""
        ...


@dataclass(frozen=True)
class BatchInput:
    """One forward pass.

    Attributes:
        tokens: int32 ``[rows, queries]``.
        attention: where the rows read and write, in the first layer group; the others are with it.
        planned: the planned rows that take part, in order.
        spans: for each of them, the half-open range of its tokens in the flattened ``tokens``.
    """

    tokens: NDArray[np.int32]
    attention: AttentionBatch
    planned: tuple[PlannedRow, ...]
    spans: tuple[tuple[int, int], ...]


def build_batches(
    rows: Sequence[PlannedRow],
    tables: Tables,
    block_size: int,
    *,
    pack_limit: int,
    batch_rows: bool,
    windows: Sequence[int | None] = (None,),
    first_alone: bool = False,
    most_scores: int | None = None,
) -> Iterator[BatchInput]:
    """Split a step into forwards, keeping the plan's order so that readers follow writers.

    Args:
        tables: each request's block table, int32, long enough for this step.
        pack_limit: chunks of up to this many tokens join single tokens as rows of one token each.
        batch_rows: several sequences may share a forward at all.
        windows: of the layer groups; blocks behind them are the null block in a step's tables.
        most_scores: most pairs of a query and a position that a chunk may have: a longer one is
            computed in several forwards.
        first_alone: not with a sequence's first tokens: a recurrent layer then has no state for it yet.
    """
    together: list[PlannedRow] = []
    for row in rows:
        length = len(row.token_ids)
        shares = batch_rows and not (first_alone and row.start == 0)
        if shares and length <= max(1, pack_limit):
            together.append(row)
            continue
        if together:
            yield _token_rows(together, tables, block_size, windows)
            together = []
        for piece in [row] if most_scores is None else _pieces(row, most_scores):
            yield _chunk(piece, tables, block_size, windows)
    if together:
        yield _token_rows(together, tables, block_size, windows)


def _token_rows(
    rows: Sequence[PlannedRow], tables: Tables, block_size: int, windows: Sequence[int | None]
) -> BatchInput:
    """Every token its own row: ``[tokens, 1]``."""
    lengths = np.array([len(row.token_ids) for row in rows])
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    starts = np.array([row.start for row in rows])
    first = np.repeat(starts - (ends - lengths), lengths)
    positions = (first + np.arange(total)).astype(np.int32)
    used = -(-(starts + lengths) // block_size)
    write_from = np.repeat(np.array([row.write_from for row in rows]), lengths)
    spans = tuple(pairwise([0, *ends.tolist()]))
    names = [row.request_id for row in rows]
    # Tables are as long as contexts: tokens of one sequence share theirs.
    lines = np.repeat(np.arange(len(rows)), lengths)
    places = []
    for group, window in enumerate(windows):
        table = _visible(tables.of(names, int(used.max()), group), starts, used, window, block_size)
        blocks = table[lines, positions // block_size]
        places.append((slots_of(positions, blocks, write_from, block_size), table))
    (slots, table), *others = places
    own = None if total == len(rows) else lines
    attention = AttentionBatch(positions, 1, slots, table, block_size, spans, own).with_groups(others)
    tokens = np.array([token for row in rows for token in row.token_ids], np.int32)[:, None]
    return BatchInput(tokens, attention, tuple(rows), spans)


def _chunk(row: PlannedRow, tables: Tables, block_size: int, windows: Sequence[int | None]) -> BatchInput:
    """One sequence's run of tokens: ``[1, tokens]``."""
    length = len(row.token_ids)
    positions = np.arange(row.start, row.start + length)
    write_from = np.full(length, row.write_from)
    start, used = np.array([row.start], np.int32), np.array([-(-(row.start + length) // block_size)])
    places = []
    for group, window in enumerate(windows):
        table = _visible(tables.of([row.request_id], int(used[0]), group), start, used, window, block_size)
        places.append((slots_of(positions, table[0, positions // block_size], write_from, block_size), table))
    (slots, table), *others = places
    attention = AttentionBatch(start, length, slots, table, block_size).with_groups(others)
    return BatchInput(np.array([row.token_ids], np.int32), attention, (row,), ((0, length),))


def _pieces(row: PlannedRow, most_scores: int) -> Iterator[PlannedRow]:
    """The row's tokens in chunks of at most so many pairs of a query and a position."""
    total = len(row.token_ids)
    length = max(1, most_scores // (row.start + total))
    for begin in range(0, total, length):
        end = min(begin + length, total)
        yield PlannedRow(
            row.request_id,
            row.token_ids[begin:end],
            row.start + begin,
            row.new_block_ids if begin == 0 else [],
            row.write_from,
            row.sample and end == total,
            row.state_from if begin == 0 else row.state_to,
            row.state_to,
        )


def _visible(
    table: NDArray[np.int32],
    starts: NDArray[np.integer],
    used: NDArray[np.integer],
    window: int | None,
    block_size: int,
) -> NDArray[np.int32]:
    """Tables ``[rows, width]`` with 0 in the place of what rows that begin at ``starts`` do not look at.

    Args:
        used: blocks of each row's context once this step is written.
    """
    index = np.arange(table.shape[1])
    seen = index < used[:, None]
    if window is not None:  # what lies behind it may have been given back
        seen &= index >= (np.maximum(starts - window + 1, 0) // block_size)[:, None]
    return np.where(seen, table, 0).astype(np.int32)


def slots_of(
    positions: NDArray[np.integer],
    blocks: NDArray[np.int32],
    write_from: NDArray[np.integer],
    block_size: int,
) -> NDArray[np.int64]:
    """Where tokens at ``positions``, whose blocks are ``blocks``, are to be written; all ``[tokens]``."""
    slots = blocks.astype(np.int64) * block_size + positions % block_size
    # What a published block holds already goes to the null block instead.
    return np.where(positions >= write_from, slots, positions % block_size)
