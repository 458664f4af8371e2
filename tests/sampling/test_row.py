import numpy as np
from sampling_reference import make_row, sample


def test_a_row_made_after_a_preemption_equals_the_row_that_went_on():
    """vllm-project/vllm#5349"""
    prompt, output = [3, 1, 3, 7], [7, 9, 9, 200]
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    went_on = make_row(prompt, **penalties)
    for token in output:
        went_on.append(token)
    resumed = make_row(prompt, output, **penalties)
    assert resumed.output_token_ids == went_on.output_token_ids == output
    for row in (went_on, resumed):
        counts = dict(zip(row.penalized.ids.tolist(), row.penalized.counts.tolist(), strict=True))
        assert counts == {1: 0, 3: 0, 7: 1, 9: 2, 200: 1}


def test_a_resumed_row_goes_on_with_the_same_random_numbers():
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(12, 1, 500)).astype(np.float32)
    row, tokens = make_row([1, 2], seed=4), []
    for logits in steps:
        tokens += sample(logits, [row])
        row.append(tokens[-1])
    resumed = make_row([1, 2], tokens[:5], seed=4)
    for logits, expected in zip(steps[5:], tokens[5:], strict=True):
        assert sample(logits, [resumed]) == [expected]
        resumed.append(expected)
    assert sample(steps[5], [make_row([1, 2], seed=4)]) != [tokens[5]]  # number 0 instead of 5


def test_the_prompt_counts_for_the_repetition_penalty_alone():
    row = make_row([1, 2], [3], presence_penalty=1.0)
    assert row.penalized.ids.tolist() == [3]
    assert make_row([1, 2], [3]).penalized is None


def test_token_counts_grow_past_any_size():
    row = make_row(range(10), repetition_penalty=2.0)
    for token in [*range(1000), *range(500)]:
        row.append(token)
    assert row.penalized.ids.tolist() == list(range(1000))
    assert row.penalized.counts.tolist() == [2] * 500 + [1] * 500


def test_stops_are_banned_until_min_tokens_are_out():
    row = make_row([1], min_tokens=2, stop_ids=[5, 6])
    assert row.banned_ids() == [5, 6]
    row.append(1)
    assert row.banned_ids() == [5, 6]
    row.append(1)
    assert row.banned_ids() == []


def test_a_bad_word_is_banned_once_the_output_has_all_but_its_last_token():
    row = make_row([8, 9], bad_words=[[4], [8, 9, 2], [9, 3]])
    assert row.banned_ids() == [4]
    row.append(9)
    assert row.banned_ids() == [4, 3]
    row.append(8)
    row.append(9)
    assert row.banned_ids() == [4, 2, 3]
