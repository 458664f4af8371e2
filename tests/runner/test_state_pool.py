"""States by slot: what a forward pass reads is what was stored, whatever came in between."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged_attention.runner.state_pool import StatePool


def advance(pool: StatePool, sources: list[int], targets: list[int], numbers: list[float]) -> list[mx.array]:
    """A forward pass that adds to each row's state a number of its own; from slot 0 it starts at that."""
    pool.load(sources)
    for cache in pool.caches:
        for i, shape in enumerate([(2, 3), (4,)]):
            new = mx.array(numbers).reshape(-1, *[1] * len(shape)) * mx.ones((len(targets), *shape))
            cache[i] = new if cache[i] is None else cache[i] + new
    return pool.store(sources, targets)


def value(pool: StatePool, slot: int) -> float:
    pool.load([slot])
    values = {float(x) for cache in pool.caches for i in range(2) for x in np.array(cache[i]).flat}
    assert len(values) == 1, "a row's arrays have parted"
    return values.pop()


@pytest.fixture
def pool() -> StatePool:
    return StatePool([3, 2])  # the third array of the first is never used


def test_a_slot_keeps_what_was_stored_while_others_go_on_from_it(pool):
    advance(pool, [0], [1], [5.0])
    advance(pool, [1], [2], [1.0])
    advance(pool, [1], [3], [2.0])
    assert [value(pool, slot) for slot in (1, 2, 3)] == [5.0, 6.0, 7.0]


def test_rows_that_stay_together_are_handed_on_as_they_are(pool):
    advance(pool, [0], [1], [1.0])
    advance(pool, [0], [2], [2.0])
    advance(pool, [2, 1], [2, 1], [10.0, 20.0])
    held = pool._slots[1][0].arrays[0][0]
    pool.load([2, 1])
    assert pool.caches[0][0] is held
    pool.load([1, 2])
    assert pool.caches[0][0] is not held
    np.testing.assert_array_equal(np.array(pool.caches[1][1])[:, 0], [21.0, 12.0])


def test_a_state_that_is_left_behind_does_not_keep_the_others_alive(pool):
    for slot in (1, 2, 3):
        advance(pool, [0], [slot], [float(slot)])
    advance(pool, [1, 2, 3], [1, 2, 3], [0.0] * 3)
    together = pool._slots[1][0]
    pending = advance(pool, [1, 2, 3], [4, 2, 3], [10.0] * 3)
    assert pool._slots[1][0] is not together
    assert pool._slots[1][0].arrays[0][0].shape[0] == 1
    assert any(array is pool._slots[1][0].arrays[0][0] for array in pending), "it is to be evaluated"
    assert [value(pool, slot) for slot in (1, 2, 3, 4)] == [1.0, 12.0, 13.0, 11.0]


def held_bytes(pool: StatePool) -> int:
    arrays = {id(rows): rows.arrays for rows, _ in pool._slots.values()}
    return sum(
        array.nbytes for layers in arrays.values() for layer in layers for array in layer if array is not None
    )


def test_rows_that_end_one_by_one_leave_one_state_each_behind(pool):
    slots = list(range(1, 9))
    for slot in slots:
        advance(pool, [0], [slot], [1.0])
    one = held_bytes(pool) // len(slots)
    while slots:
        mx.eval(advance(pool, slots, slots, [1.0] * len(slots)))
        mx.eval(pool.set_apart(slots.pop()))
        assert held_bytes(pool) <= (8 + len(slots)) * one
    assert held_bytes(pool) == 8 * one


def test_a_view_of_a_chunks_activations_does_not_keep_them_alive():
    pool = StatePool([1])
    mx.clear_cache()
    before = mx.get_active_memory()
    pool.load([0])
    activations = mx.random.normal((1, 4096, 1024))
    pool.caches[0][0] = activations[:, -3:, :]
    pending = pool.store([0], [1])
    mx.eval(pending)
    pool.drop([])  # what a next forward does to the caches
    del activations, pending
    assert mx.get_active_memory() - before < 1 << 20


def test_a_step_that_failed_leaves_nothing_in_its_slots(pool):
    advance(pool, [0], [1], [1.0])
    advance(pool, [1], [2], [1.0])
    pool.drop([2])
    assert set(pool._slots) == {1}
    assert all(array is None for cache in pool.caches for array in cache.cache)
    assert value(pool, 1) == 1.0


def test_the_first_tokens_of_a_sequence_come_alone(pool):
    advance(pool, [0], [1], [1.0])
    with pytest.raises(AssertionError, match="first tokens share a forward pass"):
        pool.load([0, 1])


def test_a_model_without_states_needs_no_slots():
    pool = StatePool([])
    pool.load([0, 0])
    assert pool.store([0, 0], [0, 0]) == []


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=4), max_size=15)
)
@settings(deadline=None)
def test_any_sequence_of_forward_passes_computes_what_numbers_alone_would(steps):
    pool, expected = StatePool([2]), {}
    for number, rows in enumerate(steps):
        known = [(source, target) for source, target in rows if source in expected]
        targets = {target for _, target in known}
        # As in a step: a slot is written once, and nobody reads what another row writes.
        rows = [
            (s, t) for s, t in known if [u for _, u in known].count(t) == 1 and (s == t or s not in targets)
        ]
        if not rows:
            rows = [(0, number % 5 + 1)]
        sources, targets = [s for s, _ in rows], [t for _, t in rows]
        mx.eval(advance(pool, sources, targets, [float(number)] * len(rows)))
        new = {t: expected.get(s, 0.0) + number for s, t in rows}
        expected.update(new)
    for slot, number in expected.items():
        assert value(pool, slot) == number
