"""Masks of grammars on logits, against masking token by token."""

import mlx.core as mx
import numpy as np
import pytest
from small_vocabularies import byte_level

from mlx_paged_attention.sampling.grammar import MaskFiller
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.sampling.processors import process_logits
from mlx_paged_attention.sampling.row import SamplingRow
from mlx_paged_attention.sampling.sampler import launch
from mlx_paged_attention.sampling.structured_outputs import structured_outputs
from mlx_paged_attention.text.grammar import Grammars

EOS, OTHER_STOP = 257, 300
VOCAB = 320  # more than the tokenizer has


@pytest.fixture(scope="module")
def grammars():
    return Grammars(byte_level(b"ab", special=("<end>",)), [EOS])


@pytest.fixture
def row(grammars):
    def make(regex, output=(), prompt=(1,), **sampling):
        source = grammars.compile(structured_outputs({"regex": regex})) if regex else None
        matcher = grammars.new_matcher(source) if source else None
        values = {"temperature": 0.0, "stop_ids": [EOS], "grammar": source, **sampling}
        return SamplingRow([*prompt, *output], len(prompt), RowSampling(**values), matcher)

    return make


def allowed(grammars, rows, vocab=VOCAB):
    """The ids that each row's logits leave, after every processor."""
    masks = MaskFiller(grammars).fill(rows)
    logits = np.array(process_logits(mx.zeros((len(rows), vocab)), rows, masks))
    return [set(np.nonzero(np.isfinite(line))[0].tolist()) for line in logits]


@pytest.mark.parametrize(
    ("regex", "output", "expected"),
    [
        ("ab*", "", set(b"a") | {256}),
        ("ab*", "a", set(b"b") | {EOS}),
        ("ab", "a", set(b"b")),
        ("[a-c]x", "", set(b"abc")),
        ("a|xy", "", set(b"ax")),
    ],
)
def test_a_row_may_sample_what_its_grammar_allows_and_end_only_where_it_may(
    grammars, row, regex, output, expected
):
    assert allowed(grammars, [row(regex, output.encode())]) == [expected]


def test_rows_without_a_grammar_are_left_as_they_are(grammars, row):
    rows = [row(None), row("ab"), row(None, min_tokens=1), row("x"), row(None, allowed_token_ids=[3])]
    everything = set(range(VOCAB))
    ids = allowed(grammars, rows)
    assert ids == [everything, set(b"a") | {256}, everything - {EOS}, set(b"x"), {3}]


def test_logits_without_masks_are_not_copied(row):
    logits = mx.zeros((1, VOCAB))
    assert process_logits(logits, [row(None)], None) is logits


def test_a_model_with_fewer_logits_than_the_tokenizer_has_tokens_is_masked_too(grammars, row):
    assert allowed(grammars, [row("ab*")], vocab=256) == [set(b"a")]


@pytest.mark.parametrize("seed", range(5))
def test_masks_of_a_ragged_batch_equal_masking_token_by_token(grammars, row, seed):
    rng = np.random.default_rng(seed)
    regexes = [None, "[a-m]+x?", "(ab|c)*", "[^a]+", "é|ü", None, r"\d+"]
    rows = [row(regexes[i], temperature=1.0, seed=int(i)) for i in rng.integers(0, 7, 9)]
    logits = rng.normal(size=(9, VOCAB)).astype(np.float32)
    masks = MaskFiller(grammars).fill(rows)
    result = np.array(process_logits(mx.array(logits), rows, masks))
    for line, expected, of_row in zip(result, logits.copy(), rows, strict=True):
        if of_row.grammar is not None:
            bits = np.unpackbits(
                np.frombuffer(of_row.grammar.matcher.compute_bitmask(), np.uint8), bitorder="little"
            )
            for token_id in range(VOCAB):
                if token_id >= len(bits) or not bits[token_id]:
                    expected[token_id] = -np.inf
        np.testing.assert_array_equal(line, expected)


def test_min_tokens_and_bad_words_give_way_only_where_nothing_else_is_left(grammars, row):
    early, alone = row("ab*", b"a", min_tokens=5), row("b?", b"", min_tokens=5)
    assert allowed(grammars, [early, alone]) == [set(b"b"), set(b"b")]
    # The end is all there is: after "ab" of "ab" nothing may follow.
    assert allowed(grammars, [row("[ab]", bad_words=[[97]]), row("a", bad_words=[[97]])]) == [
        set(b"b"),
        set(b"a"),
    ]


def test_stop_token_ids_are_allowed_where_the_grammar_may_end(grammars, row):
    stops = [EOS, OTHER_STOP % 256]
    assert allowed(grammars, [row("ab*", b"a", stop_ids=stops)]) == [set(b"b") | set(stops)]
    assert allowed(grammars, [row("ab+", b"a", stop_ids=stops)]) == [set(b"b")]


def test_bias_cannot_bring_back_what_the_grammar_forbids(grammars, row):
    rows = [row("[ab]", logit_bias={ord("z"): 100.0, ord("b"): 5.0}, repetition_penalty=1.5)]
    pending = launch(mx.zeros((1, VOCAB)), rows, MaskFiller(grammars).fill(rows))
    assert pending.read()[0].token_id == ord("b")


@pytest.mark.parametrize("method", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}, {}])
@pytest.mark.parametrize("seed", range(4))
def test_every_way_to_draw_stays_inside_the_grammar(grammars, row, method, seed):
    rows = [row("[xyz]", temperature=3.0, seed=seed, **method) for _ in range(2)]
    logits = mx.random.normal((2, VOCAB), key=mx.random.key(seed)) * 5
    for result in launch(logits, rows, MaskFiller(grammars).fill(rows)).read():
        assert result.token_id in b"xyz"
        assert result.finite


def test_log_probabilities_are_of_the_logits_as_they_are(grammars, row):
    rows = [row("x", logprobs=1)]
    logits = mx.zeros((1, VOCAB)).at[0, 5].add(4.0)
    (result,) = launch(logits, rows, MaskFiller(grammars).fill(rows)).read()
    assert result.token_id == ord("x")
    assert result.logprobs.top[0][0] == 5
    assert result.logprobs.logprob == pytest.approx(-np.log(VOCAB - 1 + np.exp(4.0)), abs=1e-5)


def test_an_output_known_at_the_start_has_been_read(row):
    assert row("abc", b"abc").grammar.complete
    assert not row("abc", b"ab").grammar.complete
    assert row("abc", b"c", prompt=b"xxab", num_grammar_tokens=2).grammar.complete


def test_a_row_that_left_its_grammar_fails_alone(grammars, row):
    lost, well = row("ab", b"z"), row("ab")
    masks = MaskFiller(grammars).fill([lost, well])
    assert "grammar" in lost.grammar.failure
    assert well.grammar.failure is None
    assert launch(mx.zeros((2, VOCAB)), [lost, well], masks).read()[1].token_id in {ord("a"), 256}


def test_a_row_whose_allowed_tokens_the_model_lacks_fails_by_name(grammars, row):
    lost = row("a", bad_words=[[97]])
    lost.grammar.finish_mask(np.zeros(grammars.mask_words, np.uint32), [])
    assert "allows no token" in lost.grammar.failure


def test_a_row_with_a_grammar_does_not_run_ahead(row):
    assert not row("a").sampling.runs_ahead
    assert row(None).sampling.runs_ahead


def test_a_mask_hides_no_logits_that_are_no_numbers(grammars, row):
    logits = mx.full((2, VOCAB), mx.nan)
    for rows in ([row("ab"), row("x")], [row("ab", temperature=1.0), row(None)]):
        results = launch(logits, rows, MaskFiller(grammars).fill(rows)).read()
        assert not any(result.finite for result in results)


def test_half_precision_logits_are_masked_alike(grammars, row):
    for dtype in (mx.float16, mx.bfloat16):
        masked = process_logits(
            mx.zeros((1, VOCAB), dtype), [row("[xy]")], MaskFiller(grammars).fill([row("[xy]")])
        )
        assert masked.dtype == mx.float32
        assert set(np.nonzero(np.isfinite(np.array(masked[0])))[0].tolist()) == set(b"xy")
