"""Layers with equal windows are dealt into groups of about equally many."""

import pytest

from mlx_paged_attention.cache.layer_groups import LayerGroup, group_layers, one_group


def sizes(windows):
    return [(group.window, len(group.layers)) for group in group_layers(windows)]


def test_groups_are_as_large_as_the_rarest_kind():
    """Vector H8: 10 full and 20 sliding layers are 3 groups of 10."""
    assert sizes([None, 512, 512] * 10) == [(None, 10), (512, 10), (512, 10)]


def test_layers_are_dealt_one_by_one_and_some_places_stay_empty():
    """Vector H8: 52 sliding and 10 full layers are 7 groups with 8 empty places, dealt i::6."""
    windows = [None if i % 6 == 5 else 1024 for i in range(62)]
    full, *sliding = group_layers(windows)
    assert full.layers == tuple(range(5, 62, 6))
    assert len(sliding) == 6
    layers = [i for i in range(62) if windows[i] is not None]
    assert [group.layers for group in sliding] == [tuple(layers[i::6]) for i in range(6)]
    assert sum(10 - len(group.layers) for group in sliding) == 8


def test_kinds_of_about_equally_many_layers_are_one_group_each():
    """Vector H8: 12 sliding and 13 full layers are 2 groups with 13 places."""
    assert sizes([128, None] * 12 + [None]) == [(None, 13), (128, 12)]


@pytest.mark.parametrize("window", [None, 4096])
def test_layers_of_one_kind_are_one_group(window):
    assert group_layers([window] * 5) == (LayerGroup(window, (0, 1, 2, 3, 4)),) == one_group(5, window)


def test_two_windows_are_two_kinds():
    assert sizes([8, 64, 8, 64]) == [(8, 2), (64, 2)]
    assert sizes([8, None, 64, None]) == [(None, 1), (None, 1), (8, 1), (64, 1)]
