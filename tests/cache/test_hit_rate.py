import pytest

from mlx_paged_attention.cache.hit_rate import HitRateWindow


def test_the_hit_rate_covers_the_latest_requests() -> None:
    window = HitRateWindow(5)
    assert window.hit_rate == 0.0
    window.observe(1, 20, 9)
    assert window.hit_rate == pytest.approx(0.45)
    window.observe(4, 80, 16)
    assert window.hit_rate == pytest.approx(0.25)
    window.observe(1, 10, 2)
    assert window.hit_rate == pytest.approx(18 / 90)


def test_one_entry_larger_than_the_window_still_counts() -> None:
    window = HitRateWindow(5)
    window.observe(10, 100, 50)
    assert window.hit_rate == pytest.approx(0.5)
