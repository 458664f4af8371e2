"""The end of the reasoning is forced when its budget is used up, and nothing else is."""

import mlx.core as mx
import numpy as np
import pytest
from small_vocabularies import byte_level

from mlx_paged_attention.sampling.grammar import MaskFiller
from mlx_paged_attention.sampling.params import RowSampling, RowThinking
from mlx_paged_attention.sampling.processors import process_logits
from mlx_paged_attention.sampling.row import SamplingRow
from mlx_paged_attention.sampling.structured_outputs import structured_outputs
from mlx_paged_attention.text.grammar import Grammars

END, START, CLOSE, CALL, VOCAB = 256, 257, 258, 259, 270


# Bytes of characters, as in byte_level, and a token that ends one and begins another.
PARTS = {byte: bytes([byte]) for byte in range(0x80, 0x100)} | {260: b"\xac\xe2\x82"}


def thinking(budget, *, inside=True, closing=(CLOSE,)):
    return RowThinking(
        budget=budget,
        start=[START],
        ends=[list(closing), [CALL]],
        closing=list(closing),
        inside=inside,
        fragments=PARTS,
    )


def row(output, budget=3, *, inside=True, closing=(CLOSE,), **sampling):
    asked = RowSampling(
        temperature=0.0, thinking=thinking(budget, inside=inside, closing=closing), **sampling
    )
    return SamplingRow([1, *output], 1, asked)


@pytest.mark.parametrize(
    ("output", "options", "expected"),
    [
        ([], {}, None),
        ([5, 6], {}, None),
        ([5, 6, 7], {}, CLOSE),
        ([5, 6, 7, CLOSE], {}, None),
        ([5, CLOSE, 6, 7, 8, 9], {}, None),
        ([5, CALL, 6, 7, 8, 9], {}, None),
        ([], {"budget": 0}, CLOSE),
        ([5, 6, 7, 8], {"inside": False}, None),
        ([START], {"inside": False}, None),
        ([START], {"inside": False, "budget": 0}, CLOSE),
        ([5, START, 6, 7, 8], {"inside": False}, CLOSE),
        # What has been thought before counts, too.
        ([5, 6, CLOSE, START], {"budget": 2}, CLOSE),
        ([5, 6, 7], {"closing": (9, CLOSE)}, 9),
        ([5, 6, 7, 9], {"closing": (9, CLOSE)}, CLOSE),
        ([5, 6, 7, 9, CLOSE], {"closing": (9, CLOSE)}, None),
        # The model itself had begun to close.
        ([5, 6, 9], {"closing": (9, CLOSE)}, 9),
        ([5, 6, 9, 9, CLOSE], {"closing": (9, CLOSE)}, None),
        # A character that has begun is completed.
        ([5, 6, 0xC3], {}, None),
        ([5, 6, 0xC3, 0xA9], {}, CLOSE),
        ([5, 0xC3, 0xA9], {}, CLOSE),
        ([0xF0, 0x9F, 0x91], {}, None),
        ([0xF0, 0x9F, 0x91, 0x8D], {}, CLOSE),
        ([0xE2, 0x82, 260], {}, None),
        ([0xE2, 0x82, 260, 0xAC], {}, CLOSE),
        # But not waited for if something else comes, or no end.
        ([5, 6, 0xE2, 7], {}, CLOSE),
        ([5, 6, 0xE2, 0x82, 7], {}, CLOSE),
        ([5, 6, 0xC3, 0xC3, 0xC3], {}, None),
        ([5, 6, 0xC3, 0xC3, 0xC3, 0xC3], {}, CLOSE),
        ([5, 6, 0xAC], {}, CLOSE),
        ([5, 6, 0xC3, CLOSE], {}, None),
    ],
)
def test_what_must_come_next_follows_from_the_answer_alone(output, options, expected):
    assert row(output, **options).forced_id == expected
    grown = row([], **options)
    for token_id in output:
        grown.append(token_id)
    assert grown.forced_id == expected


def allowed(rows, filler=None):
    masks = None if filler is None else filler.fill(rows)
    logits = np.array(process_logits(mx.zeros((len(rows), VOCAB)), rows, masks))
    return [set(np.nonzero(np.isfinite(line))[0].tolist()) for line in logits]


def test_nothing_but_the_forced_token_is_sampled_whatever_is_banned_or_biased():
    everything = set(range(VOCAB))
    rows = [
        row([5, 6]),
        row([5, 6, 7], logit_bias={4: 100.0, CLOSE: -100.0}, repetition_penalty=2.0),
        row([5, 6, 7], min_tokens=9, stop_ids=[CLOSE]),
        row([5, 6, 7], allowed_token_ids=[4]),
        row([5, 6, 7], bad_words=[[CLOSE]]),
    ]
    assert allowed(rows) == [everything, {CLOSE}, {CLOSE}, {CLOSE}, {CLOSE}]


def test_a_grammar_of_the_whole_answer_goes_on_after_a_forced_end():
    grammars = Grammars(byte_level(special=("<end>", "<think>", "</think>")), [END])
    asked = structured_outputs({"grammar": f"start: /(?s:.*)/ <[{CLOSE}]> /[ab]/"})
    source = grammars.compile(asked)

    def make(output):
        sampling = RowSampling(temperature=0.0, thinking=thinking(3), grammar=source, stop_ids=[END])
        return SamplingRow([1, *output], 1, sampling, grammars.new_matcher(source))

    rows = [make(b"xyz"), make([*b"xyz", CLOSE]), make(b"xy\xc3"), make(b"xy\xc3\xa9")]
    first, closed, within, whole = allowed(rows, MaskFiller(grammars))
    assert first == whole == {CLOSE}
    assert closed == set(b"ab")
    # A character is not cut in two.
    assert within == set(range(0x80, 0xC0))


def test_a_budget_is_looked_at_token_by_token():
    assert not RowSampling(temperature=0.0, thinking=thinking(3)).runs_ahead
    assert RowSampling(temperature=0.0).runs_ahead
