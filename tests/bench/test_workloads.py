"""What each workload puts to its contestants."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from fake_contestant import FakeContestant

from mlx_paged_attention.bench import workloads
from mlx_paged_attention.bench.contestant import measure
from mlx_paged_attention.bench.load import Load, Prompts
from mlx_paged_attention.bench.session import make_trials, run_trials
from mlx_paged_attention.bench.settings import FULL, QUICK, BenchSettings
from mlx_paged_attention.errors import InvalidRequestError, MlxPagedError

SETTINGS = BenchSettings(
    concurrency=(1, 3),
    input_len=10,
    output_len=6,
    prefix_len=20,
    suffix_len=5,
    prefix_requests=4,
    prefix_output_len=2,
    pairs=2,
)
PROMPTS = Prompts(0, 1000)


@contextmanager
def ignored(_name):
    yield


def both():
    return FakeContestant("ours", step=0.01), FakeContestant("mlx-lm", step=0.02)


def test_decode_gives_both_the_same_new_prompts_in_every_pair():
    ours, other = both()
    comparison = workloads.decode([ours, other], SETTINGS, PROMPTS, 3).run(ignored)
    assert ours.loads == other.loads
    counted = ours.loads[1:]
    assert [[len(prompt) for prompt in load.prompts] for load in counted] == [[10] * 3] * 2
    assert [load.output_len for load in counted] == [6, 6]
    prompts = [tuple(prompt) for load in ours.loads for prompt in load.prompts]
    assert len(set(prompts)) == len(prompts)
    assert comparison.ratios("mlx-lm", "decode_step_ms") == pytest.approx([2.0, 2.0])


def test_a_warm_up_computes_the_same_prompts_lengths_and_few_tokens():
    ours, _ = both()
    workloads.decode([ours], SETTINGS, PROMPTS, 3).run(ignored)
    assert [len(prompt) for prompt in ours.loads[0].prompts] == [10] * 3
    assert ours.loads[0].output_len == 4


def test_shared_prefix_requests_begin_alike_and_differ_after():
    ours, other = both()
    workloads.shared_prefix([ours, other], SETTINGS, PROMPTS).run(ignored)
    assert ours.loads == other.loads
    prefixes = set()
    for load in ours.loads:
        assert [len(prompt) for prompt in load.prompts] == [25] * 4
        (prefix,) = {tuple(prompt[:20]) for prompt in load.prompts}
        prefixes.add(prefix)
        assert len({tuple(prompt[20:]) for prompt in load.prompts}) == 4
        assert load.output_len == 2
    assert len(prefixes) == len(ours.loads), "a prefix was seen before"


def test_a_warm_prefix_has_been_seen_and_its_suffix_has_not():
    ours, _ = both()
    comparison = workloads.warm_prefix(ours, SETTINGS, PROMPTS).run(ignored)
    assert comparison.ratio == "cost"
    assert comparison.pairs == 6
    warm = [load.prompts[0] for load in ours.loads if len(load.prompts[0]) == 25]
    alone = [load.prompts[0] for load in ours.loads if len(load.prompts[0]) == 5]
    assert (len(warm), len(alone)) == (2 * 7, 7)
    for first, second in zip(warm[::2], warm[1::2], strict=True):
        assert first[:20] == second[:20]
        assert first[20:] != second[20:]
    assert {load.output_len for load in ours.loads} == {1}


def test_latency_is_measured_on_one_request():
    ours, other = both()
    comparison = workloads.single_request([ours, other], SETTINGS, PROMPTS).run(ignored)
    assert {len(load.prompts) for load in ours.loads} == {1}
    assert comparison.spread("ours", "itl_p50_ms").median == pytest.approx(10)
    assert comparison.metrics == ["ttft_ms", "itl_p50_ms", "itl_p99_ms"]


def test_llama_cpp_takes_part_in_decode_alone():
    ours, other = both()
    llama = FakeContestant("llama.cpp")
    comparisons = run_trials(make_trials(SETTINGS, PROMPTS, ours, [ours, other], llama))
    takes_part = [(one.workload, "llama.cpp" in one.results) for one in comparisons]
    assert takes_part == [
        ("decode", True), ("decode", True), ("shared-prefix", False), ("shared-prefix", False),
        ("latency", False),
    ]  # fmt: skip


def test_only_the_chosen_workloads_are_run():
    ours, other = both()
    chosen = replace(SETTINGS, workloads=("latency",))
    assert [trial.workload for trial in make_trials(chosen, PROMPTS, ours, [ours, other])] == ["latency"]


def test_answers_of_another_length_are_refused():
    with pytest.raises(MlxPagedError, match=r"mlx-lm gave answers of \[5\] tokens to 1 of 1 .* 6 were asked"):
        measure(FakeContestant("mlx-lm", short_by=1), Load([[1]], 6))


def test_a_prefix_hit_among_prompts_with_nothing_in_common_is_refused():
    with pytest.raises(MlxPagedError, match="16 prompt tokens were found in the prefix cache"):
        workloads.decode([FakeContestant("ours", cached=16)], SETTINGS, PROMPTS, 1).run(ignored)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pairs", 0),
        ("output_len", 1),
        ("concurrency", ()),
        ("concurrency", (4, 0)),
        ("seed", -1),
        ("workloads", ()),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError, match=field) as caught:
        replace(QUICK, **{field: value})
    assert caught.value.param == field


def test_the_full_run_is_what_the_documentation_quotes():
    assert FULL.concurrency == (1, 8, 32)
    assert FULL.input_len == 512
    assert FULL.pairs >= 7
    assert (FULL.prefix_len, FULL.prefix_requests) == (1000, 16)
