"""Runs in turns, and the ratio of each pair."""

from contextlib import contextmanager

import pytest

from mlx_paged_attention.bench.comparison import WARM_UP, Comparison, Trial


@contextmanager
def ignored(_name):
    yield


def trial(runs, pairs=3, **options):
    return Trial("decode", "a title", {"concurrency": 1}, runs, pairs, **options)


def test_contestants_take_turns_and_the_order_alternates():
    turns = []
    runs = {name: lambda pair, name=name: turns.append((pair, name)) or {"ttft_ms": 1.0} for name in "AB"}
    trial(runs, pairs=4).run(ignored)
    counted = [turn for turn in turns if turn[0] != WARM_UP]
    assert counted == [
        (0, "A"), (0, "B"), (1, "B"), (1, "A"), (2, "A"), (2, "B"), (3, "B"), (3, "A"),
    ]  # fmt: skip
    assert turns[:2] == [(WARM_UP, "B"), (WARM_UP, "A")]
    assert trial(runs, pairs=4).num_runs == len(turns)


def test_the_warm_up_is_not_counted():
    slow_at_first = {"A": lambda pair: {"ttft_ms": 1000.0 if pair == WARM_UP else 1.0}}
    assert trial(slow_at_first).run(ignored).values("A", "ttft_ms") == [1.0] * 3


def test_each_run_lies_inside_its_turn():
    seen = []

    @contextmanager
    def turn(name):
        seen.append(f"begin {name}")
        yield
        seen.append(f"end {name}")

    trial({"A": lambda _: seen.append("run") or {"ttft_ms": 1.0}}, pairs=1).run(turn)
    assert seen == ["begin A", "run", "end A"] * 2


def test_a_speed_up_is_how_many_times_better_whichever_way_is_better():
    results = {
        "ours": [{"ttft_ms": 10.0, "output_tokens_per_s": 30.0}],
        "mlx-lm": [{"ttft_ms": 20.0, "output_tokens_per_s": 15.0}],
    }
    one = Comparison("decode", "", {}, results, "speed-up")
    assert one.ratios("mlx-lm", "ttft_ms") == [2.0]
    assert one.ratios("mlx-lm", "output_tokens_per_s") == [2.0]


def test_a_cost_is_the_subjects_value_over_the_baselines():
    results = {"warm": [{"ttft_ms": 11.0}], "alone": [{"ttft_ms": 10.0}]}
    assert Comparison("shared-prefix", "", {}, results, "cost").ratios("alone", "ttft_ms") == [1.1]


def test_the_median_ratio_is_of_the_pairs_ratios_not_of_the_medians():
    # The machine slows down threefold: each pair still says 2.
    results = {
        "ours": [{"ttft_ms": 10.0}, {"ttft_ms": 30.0}, {"ttft_ms": 90.0}],
        "mlx-lm": [{"ttft_ms": 20.0}, {"ttft_ms": 60.0}, {"ttft_ms": 180.0}],
    }
    spread = Comparison("decode", "", {}, results, "speed-up").ratio_spread("mlx-lm", "ttft_ms")
    assert (spread.median, spread.lowest, spread.highest) == (2.0, 2.0, 2.0)


def test_a_metric_that_one_run_lacks_is_left_out():
    results = {"ours": [{"ttft_ms": 1.0, "decode_step_ms": 1.0}], "mlx-lm": [{"ttft_ms": 1.0}]}
    assert Comparison("decode", "", {}, results, "speed-up").metrics == ["ttft_ms"]


def test_json_has_every_value_beside_median_and_ends():
    results = {
        "ours": [{"ttft_ms": 1.0}, {"ttft_ms": 2.0}, {"ttft_ms": 6.0}],
        "mlx-lm": [{"ttft_ms": 2.0}, {"ttft_ms": 2.0}, {"ttft_ms": 3.0}],
    }
    data = Comparison("decode", "a title", {"concurrency": 8}, results, "speed-up").as_json()
    assert data["subject"] == "ours"
    assert data["pairs"] == 3
    assert data["setting"] == {"concurrency": 8}
    assert data["results"]["ours"]["ttft_ms"] == {
        "median": 2.0,
        "min": 1.0,
        "max": 6.0,
        "values": [1.0, 2.0, 6.0],
    }
    assert data["ratios"] == {
        "mlx-lm": {
            "ttft_ms": {"median": 1.0, "min": 0.5, "max": 2.0, "values": pytest.approx([2.0, 1.0, 0.5])}
        }
    }
