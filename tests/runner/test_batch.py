"""How a step's rows are grouped into forwards, and where each token reads and writes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged_attention.runner.batch import build_batches
from mlx_paged_attention.scheduler.step_plan import PlannedRow

BLOCK_SIZE = 4
PACK_LIMIT = 32
WIDTH = 40
LAYOUTS = [(PACK_LIMIT, True), (1, True), (1, False)]


def row(name, length, start=0, write_from=None):
    tokens = [1000 * (ord(name[0]) - ord("a")) + start + i for i in range(length)]
    return PlannedRow(name, tokens, start, [], start if write_from is None else write_from, sample=True)


class Tables(dict):
    def of(self, request_ids, width, group=0):
        return np.array([self[request_id][:width] for request_id in request_ids])


def tables_for(rows):
    """A table of its own for each request, longer than needed, blocks in no order."""
    order = np.random.default_rng(0).permutation(np.arange(1, 1 + WIDTH * len(rows)))
    ids = order.reshape(len(rows), WIDTH).astype(np.int32)
    return Tables({r.request_id: ids[i] for i, r in enumerate(rows)})


def batches(rows, *, pack_limit=PACK_LIMIT, batch_rows=True, tables=None):
    tables = tables or tables_for(rows)
    return list(build_batches(rows, tables, BLOCK_SIZE, pack_limit=pack_limit, batch_rows=batch_rows))


def groups(rows, **options):
    return [[planned.request_id for planned in batch.planned] for batch in batches(rows, **options)]


def test_single_tokens_share_a_forward_of_one_token_per_row():
    rows = [row("a", 1, 5), row("b", 1, 0), row("c", 1, 30)]
    (batch,) = batches(rows, pack_limit=1)
    assert batch.tokens.tolist() == [[r.token_ids[0]] for r in rows]
    assert batch.tokens.dtype == np.int32
    assert batch.attention.queries == 1
    assert batch.attention.starts.tolist() == [5, 0, 30]
    assert batch.spans == ((0, 1), (1, 2), (2, 3))


def test_short_chunks_join_the_single_tokens_where_the_model_allows_it():
    rows = [row("a", 1, 5), row("b", 3, 7), row("c", PACK_LIMIT)]
    (batch,) = batches(rows)
    assert batch.tokens.shape == (4 + PACK_LIMIT, 1)
    assert batch.spans == ((0, 1), (1, 4), (4, 4 + PACK_LIMIT))
    assert batch.attention.starts.tolist() == [5, 7, 8, 9, *range(PACK_LIMIT)]
    assert groups(rows, pack_limit=1) == [["a"], ["b"], ["c"]]


def test_a_long_chunk_is_one_row_and_splits_the_rows_around_it():
    rows = [row("a", 1, 2), row("b", 1, 3), row("c", PACK_LIMIT + 1, 6), row("d", 1, 9), row("e", 2)]
    assert groups(rows) == [["a", "b"], ["c"], ["d", "e"]]
    chunk = batches(rows)[1]
    assert chunk.tokens.tolist() == [rows[2].token_ids]
    assert chunk.attention.starts.tolist() == [6]
    assert chunk.attention.queries == PACK_LIMIT + 1
    assert chunk.spans == ((0, PACK_LIMIT + 1),)


def test_a_model_that_takes_no_batches_gets_one_sequence_per_forward():
    rows = [row("a", 1, 2), row("b", 1, 3), row("c", 5)]
    assert groups(rows, pack_limit=1, batch_rows=False) == [["a"], ["b"], ["c"]]
    assert [batch.tokens.shape for batch in batches(rows, pack_limit=1, batch_rows=False)] == [
        (1, 1),
        (1, 1),
        (1, 5),
    ]


def test_a_step_without_rows_has_no_forwards():
    assert batches([]) == []


@pytest.mark.parametrize(("pack_limit", "batch_rows"), LAYOUTS)
def test_tokens_in_published_blocks_are_written_into_the_null_block(pack_limit, batch_rows):
    rows = [row("a", 1, 7, write_from=8), row("b", 6, 2, write_from=4)]
    tables = tables_for(rows)
    flat = [
        int(slot)
        for batch in batches(rows, pack_limit=pack_limit, batch_rows=batch_rows, tables=tables)
        for slot in batch.attention.slots
    ]
    b = tables["b"]
    assert flat == [3, 2, 3, *(int(b[1]) * BLOCK_SIZE + i for i in range(4))]


def test_tables_hold_the_blocks_of_the_context_and_zeros_beyond():
    rows = [row("a", 1, 3), row("b", 1, 4), row("c", 2, 11)]
    tables = tables_for(rows)
    (batch,) = batches(rows, tables=tables)
    a, b, c = (tables[r.request_id] for r in rows)
    last = [c[0], c[1], c[2], c[3]]
    assert batch.attention.all_tables.tolist() == [[a[0], 0, 0, 0], [b[0], b[1], 0, 0], last, last]
    assert batch.attention.block_tables.dtype == np.int32


@settings(deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 1, 2, 5, PACK_LIMIT, PACK_LIMIT + 1, 50]), max_size=8),
    layout=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_every_token_is_placed_as_if_it_were_alone_and_in_plan_order(lengths, layout, data):
    rows = []
    for i, length in enumerate(lengths):
        start = data.draw(st.integers(0, WIDTH * BLOCK_SIZE - length))
        write_from = data.draw(st.integers(start, start + length))
        rows.append(row(chr(ord("a") + i), length, start, write_from))
    tables = tables_for(rows)
    expected, found = [], []
    for r in rows:
        for i, token in enumerate(r.token_ids):
            position = r.start + i
            block = int(tables[r.request_id][position // BLOCK_SIZE]) if position >= r.write_from else 0
            expected.append((r.request_id, token, position, block * BLOCK_SIZE + position % BLOCK_SIZE))
    pack_limit, batch_rows = layout
    for batch in build_batches(rows, tables, BLOCK_SIZE, pack_limit=pack_limit, batch_rows=batch_rows):
        attention, queries = batch.attention, batch.attention.queries
        tokens = batch.tokens.reshape(-1)
        assert batch.tokens.shape == (attention.rows, queries)
        assert batch.spans[0][0] == 0
        assert batch.spans[-1][1] == len(tokens)
        for r, (begin, end) in zip(batch.planned, batch.spans, strict=True):
            assert tokens[begin:end].tolist() == r.token_ids
            for flat in range(begin, end):
                line, query = divmod(flat, queries)
                position = int(attention.starts[line]) + query
                found.append((r.request_id, int(tokens[flat]), position, int(attention.slots[flat])))
                used = position // BLOCK_SIZE + 1
                table = attention.table_of(line)
                assert table[:used].tolist() == tables[r.request_id][:used].tolist()
                assert set(table.tolist()) <= {0, *tables[r.request_id].tolist()}
                assert attention.context_lens[flat] == position + 1
    assert found == expected
