"""From token times to metrics, and from runs to medians."""

import pytest

from mlx_paged_attention.bench.load import Load, Prompts
from mlx_paged_attention.bench.spread import Spread, number
from mlx_paged_attention.bench.timing import METRICS, Timing, end_to_end, first_token, latency, throughput

LOAD = Load([[1] * 10, [2] * 10], 3)
TIMING = Timing([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])


def test_throughput_counts_tokens_over_the_whole_run():
    values = throughput(LOAD, TIMING)
    assert values == {
        "decode_step_ms": pytest.approx(500),
        "output_tokens_per_s": pytest.approx(6 / 1.5),
        "total_tokens_per_s": pytest.approx(26 / 1.5),
        "prefill_tokens_per_s": pytest.approx(20 / 0.5),
        "ttft_ms": pytest.approx(500),
    }
    assert set(values) <= set(METRICS)


def test_steps_shared_with_a_prefill_or_without_all_requests_are_not_decode_steps():
    early = [0.1, 0.4, 1.0, 1.2, 1.4]  # slow while the other prefills
    late = [1.0, 1.2, 1.4, 1.41, 1.42]  # fast once it is alone
    assert Timing([early, late]).decode_step() == pytest.approx(0.2)


def test_there_is_no_decode_step_if_the_first_request_ends_before_the_last_one_starts():
    timing = Timing([[0.1, 0.2], [0.5, 0.6]])
    assert timing.decode_step() is None
    assert "decode_step_ms" not in throughput(Load([[1], [2]], 2), timing)


def test_ttft_is_the_median_over_requests_and_the_end_is_the_last_token():
    timing = Timing([[1.0, 1.5], [2.0, 2.5], [9.0, 9.5]])
    assert end_to_end(LOAD, timing) == {"elapsed_s": 9.5, "ttft_ms": 2000}
    assert first_token(LOAD, timing) == {"ttft_ms": 2000}


def test_itl_percentiles_are_of_the_gaps_between_tokens():
    times = [0.5] + [0.5 + 0.01 * i for i in range(1, 100)] + [0.5 + 0.99 + 1.0]
    values = latency(LOAD, Timing([times]))
    assert values["itl_p50_ms"] == pytest.approx(10)
    assert 10 < values["itl_p99_ms"] <= 1000
    assert values["ttft_ms"] == pytest.approx(500)


def test_prompts_have_the_exact_length_and_depend_on_seed_and_purpose_only():
    draw = Prompts(0, 50).draw
    prompts = draw("a", 3, 17)
    assert [len(prompt) for prompt in prompts] == [17] * 3
    assert all(0 <= token < 50 and type(token) is int for prompt in prompts for token in prompt)
    assert prompts == Prompts(0, 50).draw("a", 3, 17)
    assert prompts != draw("b", 3, 17)
    assert prompts != Prompts(1, 50).draw("a", 3, 17)
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_a_spread_is_the_median_and_both_ends():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0, 2.0]).median == 1.5
    assert str(Spread.of([61.23])) == "61.2 (61.2 to 61.2)"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123, "0.12"), (1.005, "1.00"), (9.994, "9.99"), (9.996, "10.0"), (99.96, "100"), (12345.6, "12,346")],
)
def test_numbers_keep_three_digits(value, text):
    assert number(value) == text
