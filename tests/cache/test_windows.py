"""Layer groups with windows: what is found, taken and given back; the published vectors with exact ids."""

from typing import Any

import pytest
from fake_runner import make_manager, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged_attention.cache.block_need import BlockNeed
from mlx_paged_attention.cache.manager import KVCacheManager, PrefixHit
from mlx_paged_attention.cache.prefix_lookup import group_hash, longest_window_hit
from mlx_paged_attention.scheduler.request import Request

COMMON = [0] * 16 + [1] * 16 + [2] * 16
HYBRID = (None, 32, 32)


def manager_of(windows: tuple[int | None, ...], num_blocks: int, block_size: int, **options: Any):
    return make_manager(num_blocks, block_size, windows=windows, max_step_tokens=64, **options)


def request_of(manager: KVCacheManager, request_id: str, tokens: list[int]) -> Request:
    request = make_request(request_id, tokens)
    if manager.enable_caching:
        request.start_hashing(manager.hasher)
    return request


def compute(manager: KVCacheManager, request: Request, upto: int) -> None:
    """A step up to ``upto`` tokens is planned, has run and has come back."""
    assert manager.allocate_slots(request, upto - request.num_computed_tokens) is not None
    request.num_computed_tokens = upto
    manager.check()


def admit(manager: KVCacheManager, request_id: str, tokens: list[int]) -> tuple[PrefixHit, Request]:
    request = request_of(manager, request_id, tokens)
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, len(tokens) - hit.num_tokens, hit) is not None
    request.num_computed_tokens = len(tokens)
    manager.check()
    return hit, request


def test_each_group_has_blocks_of_its_own_and_windows_start_late() -> None:
    """Vector H1."""
    manager = manager_of(HYBRID, 21, 16)
    hit, _ = admit(manager, "req0", COMMON + [3] * 7)
    assert hit == PrefixHit()
    assert manager.tables("req0") == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    hit, _ = admit(manager, "req1", COMMON + [4] * 5)
    assert hit == PrefixHit((1, 2, 3, 0, 6, 7, 0, 10, 11), 48)
    assert manager.tables("req1") == [[1, 2, 3, 13], [0, 6, 7, 14], [0, 10, 11, 15]]
    assert manager.num_free_blocks == 20 - 15
    manager.free("req0")
    manager.free("req1")
    manager.check()
    assert manager.num_free_blocks == 20


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        ([], 3),
        ([(1, 0)], 3),
        ([(1, 0), (2, 0)], 3),
        ([(0, 0)], 0),
        ([(0, 2)], 2),
        ([(1, 2)], 2),
        ([(2, 2)], 2),
        ([(0, 2), (1, 0)], 0),
        ([(1, 1)], 1),
        ([(1, 1), (2, 0)], 0),
    ],
)
def test_groups_agree_on_the_longest_prefix_that_all_can_go_on_from(lost, found) -> None:
    """Vector H2: blocks are lost one by one, whatever the other groups have."""
    manager = manager_of(HYBRID, 21, 16)
    admit(manager, "req0", COMMON + [3] * 7)
    tables = manager.tables("req0")
    manager.free("req0")
    manager.unpublish([tables[group][index] for group, index in lost])
    hit = manager.get_computed_blocks(request_of(manager, "req1", COMMON + [4] * 5))
    assert hit.num_tokens == found * 16
    for group in range(3):
        ids = hit.block_ids[group * found : (group + 1) * found]
        expected = tables[group][:found]
        assert ids == tuple([0, *expected[1:]] if group and found == 3 else expected)


@pytest.mark.parametrize(
    ("cached", "found"),
    [
        ("TTFTFFTTFTTT", 12),
        ("TTFTFFTTFFF", 8),
        ("TTFTFFTTFFFT", 8),
        ("T", 1),
        ("TF", 1),
        ("TTT", 3),
        ("FFFF", 0),
        ("", 0),
    ],
)
def test_a_window_is_found_from_the_right(cached, found) -> None:
    """Vector H3: blocks of 2, a window of 4, so that two in a row are needed unless they are the first."""
    assert longest_window_hit(lambda i: cached[i] == "T", len(cached), lambda end: max(0, end - 2)) == found


def test_blocks_behind_the_window_are_given_back_deeper_ones_first() -> None:
    """Vector H4: blocks of 2, a window of 4, 11 blocks."""
    manager = manager_of((4,), 30, 2, enable_caching=False)
    request = request_of(manager, "r", list(range(22)))
    assert manager.allocate_slots(request, 22) is not None
    behind = []
    for computed in (0, 4, 5, 6, 7, 11):
        request.num_computed_tokens = computed
        assert manager.allocate_slots(request, 22 - computed, whole_sequence=True) == []
        manager.check()
        (table,) = manager.tables("r")
        assert len(table) == 11
        behind.append(table.count(0))
        assert table == [0] * behind[-1] + list(range(1 + behind[-1], 12))
    assert behind == [0, 0, 1, 1, 2, 4]
    free = [block.block_id for block in manager.pool.free_queue.get_all()]
    assert free[:4] == [4, 3, 2, 1]


@pytest.mark.parametrize(("windows", "needed"), [((None,), 20), ((10,), 15)])
def test_what_is_found_and_would_be_reused_counts_as_needed(windows, needed) -> None:
    """Vector H6: 40 tokens in blocks of 2, 10 of them found and free; half of them behind a window."""
    manager = manager_of(windows, 31, 2)
    admit(manager, "first", list(range(20)))
    manager.free("first")
    request = request_of(manager, "r", list(range(40)))
    hit = manager.get_computed_blocks(request)
    assert hit.num_tokens == 20
    assert hit.block_ids.count(0) == 20 - needed
    spare = manager.num_free_blocks - needed
    assert manager.allocate_slots(request, 20, hit, reserved_blocks=spare + 1) is None
    assert manager.tables("r") == []
    assert manager.allocate_slots(request, 20, hit, reserved_blocks=spare) is not None
    assert manager.num_free_blocks == spare


def test_one_block_found_and_one_new_are_two_needed_and_one_taken() -> None:
    """Vector H7."""
    manager = manager_of((4,), 12, 2)
    admit(manager, "first", [1, 2])
    manager.free("first")
    request = request_of(manager, "r", [1, 2, 3, 4])
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 2, hit, reserved_blocks=11 - 1) is None
    assert manager.allocate_slots(request, 2, hit, reserved_blocks=11 - 2) == [1, 2]
    assert manager.num_free_blocks == 9


def test_what_a_step_in_flight_reads_is_not_given_back() -> None:
    manager = manager_of((4,), 12, 2)
    request = request_of(manager, "r", list(range(12)))
    assert manager.allocate_slots(request, 8) == [1, 2, 3, 4]
    request.num_computed_tokens = request.num_tokens_in_flight = 8
    assert manager.allocate_slots(request, 2) == [5]
    assert manager.tables("r") == [[1, 2, 3, 4, 5]]
    request.num_computed_tokens, request.num_tokens_in_flight = 10, 2
    assert manager.allocate_slots(request, 2) == [6]
    assert manager.tables("r") == [[0, 0, 3, 4, 5, 6]]


def test_a_prefix_is_found_after_the_blocks_behind_the_window_were_reused() -> None:
    manager = manager_of((None, 4), 19, 2)
    tokens = list(range(17))
    request = request_of(manager, "r", tokens)
    for end in (4, 8, 12, 16, 17):
        compute(manager, request, end)
    full, windowed = manager.tables("r")
    assert 0 not in full
    assert windowed[:6] == [0] * 6
    manager.free("r")
    other = request_of(manager, "other", [100] * 7)
    compute(manager, other, 7)  # takes the blocks that were given back first
    manager.free("other")
    hit = manager.get_computed_blocks(request_of(manager, "again", tokens))
    assert hit.num_tokens == 16
    assert hit.block_ids == (*full[:8], *[0] * 6, *windowed[6:8])


def test_a_prompt_found_whole_keeps_what_its_last_token_sees() -> None:
    """It is computed once more, from a position earlier: its window begins a token earlier, too."""
    manager = manager_of((None, 5), 21, 4)
    tokens = list(range(12))
    admit(manager, "r", tokens)
    longer = manager.get_computed_blocks(request_of(manager, "longer", [*tokens, 99]))
    assert (longer.num_tokens, longer.block_ids.count(0)) == (12, 2)  # position 12 sees 8 to 11
    whole = manager.get_computed_blocks(request_of(manager, "whole", tokens))
    assert (whole.num_tokens, whole.block_ids.count(0)) == (11, 1)  # position 11 sees 7 to 10


def test_a_sequence_rolls_back_unless_its_window_is_gone() -> None:
    manager = manager_of((None, 4), 40, 2, enable_caching=False)
    request = request_of(manager, "r", list(range(12)))
    compute(manager, request, 8)
    compute(manager, request, 12)
    before = manager.tables("r")
    assert manager.rollback("r", 9) == [before[0][5], before[1][5]]
    assert manager.tables("r") == [before[0][:5], before[1][:5]]
    manager.check()
    with pytest.raises(ValueError, match="its window is gone"):
        manager.rollback("r", 6)


def test_windows_need_to_know_how_much_a_step_computes() -> None:
    with pytest.raises(ValueError, match="max_step_tokens"):
        make_manager(10, 16, windows=(None, 8))


def test_need_is_bounded_by_window_steps_and_edges() -> None:
    need = BlockNeed((None, 8, 8), 4, 16)
    # 7 tokens before the steps' 32, in blocks of 4: 11 at worst.
    assert [need.of_group(8, n) for n in (1, 4, 40, 44, 45, 1000)] == [1, 1, 10, 11, 11, 11]
    assert need.most(1000) == 250 + 2 * 11
    assert need.longest(272, 10**6) == 1000
    assert need.longest(271, 10**6) == 996
    assert need.longest(272, 500) == 500
    assert need.longest(2, 500) == 0
    assert BlockNeed((8,), 4, 16).longest(11, 10**6) == 10**6


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_request_alone_needs_more_than_was_said(data: st.DataObject) -> None:
    """Chunks of any sizes, a step in flight: a pool of just that many blocks is enough."""
    size = data.draw(st.integers(1, 5))
    windows = tuple(data.draw(st.lists(st.sampled_from([None, 1, 3, 7, 12]), min_size=1, max_size=3)))
    most, length = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 60))
    need = BlockNeed(windows, size, most).most(length)
    manager = make_manager(1 + need, size, windows=windows, max_step_tokens=most)
    request = request_of(manager, "r", list(range(length)))
    assert manager.num_missing_blocks(request) == need
    while request.num_computed_tokens < length:
        count = min(data.draw(st.integers(1, most)), length - request.num_computed_tokens)
        assert manager.allocate_slots(request, count) is not None
        manager.check()
        request.num_computed_tokens += count
        request.num_tokens_in_flight = count
        missing = manager.num_missing_blocks(request)
        assert 0 <= missing <= need - sum(block_id > 0 for block_id in manager.block_ids("r"))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_the_prefix_found_is_the_longest_that_all_groups_can_go_on_from(data: st.DataObject) -> None:
    """Against trying every length, with any blocks lost."""
    size, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    windows = tuple(data.draw(st.lists(st.sampled_from([None, 1, 3, 5, 9]), min_size=1, max_size=3)))
    full_hit = data.draw(st.sampled_from(["one_token", "recompute_block"]))
    manager = manager_of(windows, 200, size, full_hit=full_hit)
    tokens = list(range(count * size))
    admit(manager, "r", tokens)
    lost = data.draw(st.sets(st.tuples(st.integers(0, len(windows) - 1), st.integers(0, count - 1))))
    tables = manager.tables("r")
    manager.free("r")
    manager.unpublish([tables[group][index] for group, index in lost if tables[group][index]])
    more = data.draw(st.integers(0, size))
    length = len(tokens) + more

    def works(blocks: int) -> bool:
        start = min(blocks * size, length - 1)
        if full_hit == "recompute_block" and blocks * size > length - 1:
            return False
        for group, window in enumerate(windows):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, blocks * size):
                if (group, position // size) in lost:
                    return False
        return True

    hit = manager.get_computed_blocks(request_of(manager, "again", [*tokens, *[999] * more]))
    best = max(blocks for blocks in range(count + 1) if works(blocks))
    assert len(hit.block_ids) == best * len(windows)
    assert hit.num_tokens == min(best * size, length - 1)


def test_groups_name_equal_blocks_differently() -> None:
    key = b"k" * 32
    assert group_hash(key, 0) == key
    assert len({group_hash(key, group) for group in range(300)}) == 300


def test_a_fork_shares_every_group_and_copies_one_block_of_each() -> None:
    manager = manager_of((None, 4), 40, 2, enable_caching=False)
    parent = request_of(manager, "parent", list(range(9)))
    compute(manager, parent, 7)
    compute(manager, parent, 9)
    manager.fork("parent", "child", 9)
    manager.check()
    tables = manager.tables("parent")
    assert manager.tables("child") == tables
    assert tables[1][:2] == [0, 0]
    child = request_of(manager, "child", [*range(9), 50])
    child.num_computed_tokens = 9
    assert manager.allocate_slots(child, 1) == []
    changes = manager.take_changes("child")
    own = manager.tables("child")
    assert changes.indices == [4]
    assert changes.copies == [(table[4], mine[4]) for table, mine in zip(tables, own, strict=True)]
    assert manager.tables("parent") == tables
    manager.check()


def test_a_fork_needs_what_its_next_token_sees() -> None:
    manager = manager_of((None, 4), 40, 2, enable_caching=False)
    parent = request_of(manager, "parent", list(range(14)))
    compute(manager, parent, 7)
    compute(manager, parent, 13)  # gave back blocks 0 and 1 of the window, positions 0 to 3
    assert [manager.holds_window("parent", n) for n in (5, 6, 7, 8)] == [False, False, True, True]


@pytest.mark.parametrize("windows", [(None, 32), (32,), (32, None), (32, 64)])
def test_what_is_condemned_is_found_no_more_behind_windows_either(windows: tuple[int | None, ...]) -> None:
    manager = manager_of(windows, 60, 16)
    tokens = list(range(200))
    request = request_of(manager, "bad", tokens)
    for upto in (64, 128, 192, 200):
        compute(manager, request, upto)
    assert any(0 in table for table in manager.tables("bad"))  # some have been given back
    manager.condemn(request)
    manager.check()
    manager.free("bad")
    manager.check()
    assert manager.num_cached_blocks == 0
    assert manager.get_computed_blocks(request_of(manager, "next", tokens)) == PrefixHit()


@pytest.mark.parametrize("windows", [(None, 32), (32, None)])
def test_the_estimate_of_a_hit_looks_at_whole_contexts(windows: tuple[int | None, ...]) -> None:
    manager = manager_of(windows, 60, 16)
    _, request = admit(manager, "a", list(range(100)))
    manager.free(request.request_id)
    for length, expected in ((100, 96), (50, 48), (10, 0)):
        assert manager.estimate_hit(request_of(manager, "b", list(range(length)))) == expected
    assert manager.estimate_hit(request_of(manager, "c", list(range(1, 90)))) == 0
    assert manager.estimate_hit(request_of(manager, "d", list(range(48)) + [7] * 40)) == 48
