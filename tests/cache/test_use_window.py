"""What was held lately."""

from mlx_paged_attention.cache.use_window import UseWindow


def test_the_most_that_was_held_is_told_when_the_time_is_over() -> None:
    window = UseWindow(10, now=100)
    assert window.observe(3, 101) is None
    assert window.observe(7, 104) is None
    assert window.observe(2, 109) is None
    assert window.left(109) == 1
    assert window.observe(1, 110) == 7
    assert window.left(110) == 10


def test_what_is_held_when_a_time_begins_belongs_to_it() -> None:
    window = UseWindow(10, now=0)
    assert window.observe(5, 30) == 5
    assert window.observe(0, 40) == 5
    assert window.observe(0, 50) == 0
    assert window.left(70) == 0
