"""Reasoning tokens are counted the same however many arrive at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_paged_attention.text.reasoning_tokens import ReasoningTokens

START, END, CALL = [1, 2], [3], [4, 5, 6]


def count(ids, *, in_reasoning=False):
    counter = ReasoningTokens(START, [END, CALL], in_reasoning=in_reasoning)
    counter.add(ids)
    return counter.count


@pytest.mark.parametrize(
    ("ids", "inside", "expected"),
    [
        ([], False, 0),
        ([9, 9], False, 0),
        ([9, 9], True, 2),
        ([9, 3, 9], True, 1),
        ([3], True, 0),
        ([1, 2, 9, 9, 3, 9], False, 2),
        ([1, 9, 2, 9, 3], False, 0),
        ([1, 2, 9, 4, 5, 6, 9], False, 1),
        ([1, 2, 4, 5, 3], False, 2),
        ([1, 2, 9, 3, 9, 1, 2, 9, 9], False, 3),
        ([1, 1, 2, 9], False, 1),
        ([1, 2, 3, 1, 2, 3], False, 0),
        ([3, 9], False, 0),
    ],
)
def test_tokens_between_start_and_end_count(ids, inside, expected):
    assert count(ids, in_reasoning=inside) == expected


@given(st.lists(st.integers(1, 7), max_size=40), st.booleans(), st.integers(1, 5))
def test_arrival_in_groups_changes_nothing(ids, inside, size):
    counter = ReasoningTokens(START, [END, CALL], in_reasoning=inside)
    for first in range(0, len(ids), size):
        counter.add(ids[first : first + size])
    assert counter.count == count(ids, in_reasoning=inside)
    assert 0 <= counter.count <= len(ids)


def test_markers_of_one_token_are_found():
    counter = ReasoningTokens([1], [[2]], in_reasoning=False)
    counter.add([1, 7, 7, 2, 7, 1, 7])
    assert counter.count == 3
