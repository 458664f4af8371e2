import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="comes with the extra for Linux's CPU build")

from mlx_paged_attention.ops.host_copy import ContextCopy

HEADS, BLOCKS, SIZE, DIM = 2, 12, 4, 3
MOST = 7 * 4 * HEADS * SIZE * (DIM + DIM + 2)  # bytes of seven blocks


def fresh_planes() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((HEADS, BLOCKS, SIZE, dim)).astype(np.float32) for dim in (DIM, DIM + 2))


def hold(copy, table, begin, end):
    """Asked for twice: at first sight a sequence is only remembered."""
    table = np.array(table, np.int32)
    return copy.hold(table, begin, end) or copy.hold(table, begin, end)


def assert_holds(copy, planes, table, begin, end):
    for (held,), plane in zip(hold(copy, table, begin, end), planes, strict=True):
        whole = plane[:, table].reshape(HEADS, -1, plane.shape[3])
        np.testing.assert_array_equal(np.array(held), whole[:, begin:end])


def write(copy, planes, slots):
    """New numbers, different each time."""
    copy.written(np.array(slots, np.int64))
    for plane in planes:
        for slot in slots:
            plane[:, slot // SIZE, slot % SIZE] = write.count = write.count + 1


write.count = 0


def test_from_step_to_step_only_the_blocks_that_are_new_are_copied():
    planes = fresh_planes()
    copy = ContextCopy(planes, MOST)
    table = [7, 3, 9, 2]
    assert_holds(copy, planes, table[:2], 0, 6)
    planes[0][:, 7] = 0  # against the rules: shows that this block is not read again
    write(copy, planes, [3 * SIZE + 2])
    (held,), _ = copy.hold(np.array(table[:2], np.int32), 0, 7)
    assert np.array(held)[:, :4].all()
    np.testing.assert_array_equal(np.array(held)[:, 4:7], planes[0][:, 3, :3])


def test_sequences_that_take_turns_are_not_copied():
    copy = ContextCopy(fresh_planes(), MOST)
    for end in range(5, 9):
        for table in ([7, 3], [9, 2]):
            assert copy.hold(np.array(table, np.int32), 0, end) is None
    assert copy.hold(np.array([9, 2], np.int32), 0, 8) is not None


def test_a_context_of_more_bytes_is_not_copied():
    copy = ContextCopy(fresh_planes(), MOST)
    long = [1, 2, 3, 4, 5, 6, 7, 8]
    assert hold(copy, long, 0, 7 * SIZE) is not None
    assert hold(copy, long, 0, 7 * SIZE + 1) is None


def test_a_write_to_what_is_held_is_noticed():
    planes = fresh_planes()
    copy = ContextCopy(planes, MOST)
    assert_holds(copy, planes, [7, 3], 0, 8)
    write(copy, planes, [7 * SIZE])
    assert_holds(copy, planes, [7, 3, 1], 0, 9)


TABLES = [[1, 5, 3, 8, 2, 9], [1, 5, 3, 8, 11, 10], [4, 7, 6, 0, 2, 9]]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, 2), st.integers(0, 24), st.integers(0, 24)),
        st.tuples(st.just("write"), st.lists(st.integers(0, BLOCKS * SIZE - 1), min_size=1, max_size=2)),
        st.tuples(st.just("copy"), st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)),
    ),
    max_size=30,
)


@given(STEPS)
@settings(deadline=None)
def test_whatever_happens_in_between_it_holds_what_the_pool_has(steps):
    planes = fresh_planes()
    copy = ContextCopy(planes, MOST)
    for kind, *arguments in steps:
        if kind == "hold":
            table, *ends = arguments
            begin, end = sorted(ends)
            assert_holds(copy, planes, TABLES[table], begin, end)
        elif kind == "write":
            write(copy, planes, arguments[0])
        else:
            for plane in planes:
                plane[:, arguments[1]] = plane[:, arguments[0]]
            copy.forget()
