"""Text comes out complete, once, and never beyond a stop string."""

import random
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabularies import byte_fallback, byte_level, piece_ids

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.text.tokenizer import Tokenizer

HARD_TEXTS = (
    "family 👨‍👩‍👧‍👦 and flag 🇨🇿, thumbs 👍🏽",
    "漢字かな交じり文、한국어",
    unicodedata.normalize("NFD", "příliš žluťoučký kůň"),
    "אב\u05b7ג \u202b\u0645\u0631\u062d\u0628\u0627\u202c",
    "one \ufffd real replacement character",
    " leading, trailing and\n\n\tinner space  ",
)


def stream(pieces, **options):
    """Push pieces of text, one token each; returns what each push and the flush gave, and what stopped it."""
    pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    backend = byte_level(*pieces)
    detokenizer = Tokenizer(backend).detokenizer(**options)
    outs = [detokenizer.push(token_id) for token_id in piece_ids(backend, pieces)]
    return [*outs, detokenizer.flush()], detokenizer.stopped


def split(text, borders):
    """Cut the bytes of a text at the borders."""
    data = text.encode()
    cuts = sorted({border % len(data) for border in borders} - {0}) if data else []
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


def expected_with_stops(text, stops, exempt=0):
    """The text up to the match that ends first, found character by character."""
    for end in range(exempt + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


# --- characters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_split_over_tokens_come_out_whole(text, size):
    data = text.encode()
    outs, _ = stream([data[i : i + size] for i in range(0, len(data), size)])
    assert "".join(outs) == text
    assert outs[-1] == ""
    if "\ufffd" not in text:
        assert not any("\ufffd" in out for out in outs)


def test_text_before_an_incomplete_character_of_the_same_token_is_not_held():
    outs, stopped = stream([b"the end\xe2", b"\x82\xac!"], stop=["end"])
    assert (outs, stopped) == (["the ", "", ""], "end")
    assert stream([b"price: \xe2\x82", b"\xac5"])[0] == ["price: ", "€5", ""]


def test_an_incomplete_character_at_the_end_is_one_replacement_character():
    assert stream([b"a", b"\xf0\x9f", b"\x98"])[0] == ["a", "", "", "\ufffd"]


def test_nothing_after_nothing():
    detokenizer = Tokenizer(byte_level()).detokenizer(stop=["x"])
    assert detokenizer.flush() == ""
    assert detokenizer.stopped is None


@given(st.lists(st.integers(0, 262), max_size=60), st.booleans())
@settings(max_examples=300, deadline=None)
def test_joined_pieces_equal_the_decoded_text_for_any_ids(ids, skip):
    """Ids 0-255 are single bytes, 259 is a special token, ids from 260 on exist in no vocabulary."""
    tokenizer = Tokenizer(byte_level(b"ab\xe2", b"\x82\xac", b" \xf0\x9f", special=("<|end|>",)))
    decoded = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    out = ""
    for token_id in ids:
        out += detokenizer.push(token_id)
        assert decoded.startswith(out), "text was taken back"
    assert out + detokenizer.flush() == decoded


@given(st.lists(st.sampled_from([0x80, 0x82, 0xAC, 256, 257, 258, 259, 300]), max_size=60))
@settings(max_examples=500, deadline=None)
def test_broken_characters_of_every_kind_stream_as_they_decode(ids):
    """Mostly undecided text, so that the window is cut all the time; id 300 exists in no vocabulary."""
    tokenizer = Tokenizer(byte_level(b"y\xe2", b"\xf0\x9f", b"\x82z\xe2\x82", b" "))
    decoded = tokenizer.decode(ids)
    detokenizer = tokenizer.detokenizer()
    out = ""
    for token_id in ids:
        out += detokenizer.push(token_id)
        assert decoded.startswith(out), "text was taken back"
    assert out + detokenizer.flush() == decoded


def test_a_window_cut_inside_a_token_that_is_partly_out_repeats_nothing():
    outs, _ = stream([b"y\xe2"] * 6 + [b"x\xe2", b"\x82", b"\xac"])
    assert outs == ["y", *["\ufffdy"] * 5, "\ufffdx", "", "€", ""]


@pytest.mark.parametrize("count", range(12))
def test_a_character_after_invalid_bytes_is_whole(count):
    outs, _ = stream([b"\x80"] * count + [bytes([byte]) for byte in "€😀".encode()])
    assert "".join(outs) == "\ufffd" * count + "€😀"


@pytest.mark.parametrize(("ids", "text"), [(range(0x80, 0xC0), "\ufffd"), (range(300, 364), "")])
def test_ids_that_never_make_a_character_flow_at_constant_cost(ids, text):
    sizes = []
    detokenizer = Tokenizer(byte_level()).detokenizer()
    plain = detokenizer._decode

    def counting(ids):
        sizes.append(len(ids))
        return plain(ids)

    detokenizer._decode = counting
    out = "".join(detokenizer.push(token_id) for token_id in [*ids] * 8)
    assert len(out) >= len(text) * 490
    assert out + detokenizer.flush() == text * 512
    assert max(sizes) <= 16


@given(
    st.lists(
        st.sampled_from([1 + 0x41, 1 + 0xE2, 1 + 0x82, 1 + 0xAC, 1 + 0xFF, *range(256, 264)]), max_size=40
    )
)
@settings(max_examples=300, deadline=None)
def test_a_byte_fallback_stream_reads_as_the_decoded_text(ids):
    tokenizer = Tokenizer(byte_fallback())
    detokenizer = tokenizer.detokenizer()
    out = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert out == tokenizer.decode(ids)
    library = tokenizer._backend.decode(ids)
    assert out == library or "\ufffd" in library
    # Characters are never lost or doubled: both agree up to what invalid bytes did to their run.
    words = [c for c in library if c not in "\ufffd"]
    remaining = iter(out)
    assert all(c in remaining for c in words)


@pytest.mark.parametrize("text", ["A", "é", "€", "x€", "€x"])
@pytest.mark.parametrize("invalid", [b"\xff", b"\x80", b"\xe2\x82"])
def test_a_character_that_is_out_stays_out_when_an_invalid_byte_follows_it(text, invalid):
    tokenizer = Tokenizer(byte_fallback())
    ids = [1 + byte for byte in text.encode() + invalid]
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) == text
    assert tokenizer.decode(ids) == text + detokenizer.flush() == text + "\ufffd" * len(invalid)
    assert tokenizer.decode([*ids, 258]) == text + "\ufffd" * len(invalid) + "a"


def test_a_byte_fallback_newline_is_out_at_once_and_can_stop():
    tokenizer = Tokenizer(byte_fallback())
    detokenizer = tokenizer.detokenizer(stop=["\n"])
    assert [detokenizer.push(token_id) for token_id in (258, 1 + 0x0A)] == ["a", ""]
    assert detokenizer.stopped == "\n"


def test_only_the_first_leading_space_is_stripped():
    tokenizer = Tokenizer(byte_fallback())
    ids = tokenizer.encode("foo a foo  a")
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "foo a foo  a"


def test_skipped_special_tokens_do_not_interrupt_a_character():
    backend = byte_level(special=("<|end|>",))
    ids = [0xE2, backend.token_to_id("<|end|>"), 0x82, 0xAC]
    skipping = Tokenizer(backend).detokenizer()
    assert [skipping.push(token_id) for token_id in ids] == ["", "", "", "€"]
    showing = Tokenizer(backend).detokenizer(skip_special_tokens=False)
    assert [showing.push(token_id) for token_id in ids[:2]] == ["", "\ufffd<|end|>"]


def test_invalid_bytes_before_a_space_token_give_one_replacement_character():
    """Blaizzy/mlx-vlm#1705"""
    outs, _ = stream([b"\xf0\x9f", b" fox"])
    assert outs == ["", "\ufffd fox", ""]


def test_interleaved_sequences_keep_their_own_characters():
    """exo-explore/exo#1691"""
    backend = byte_level()
    first, second = (Tokenizer(backend).detokenizer() for _ in range(2))
    outs = [(first.push(a), second.push(b)) for a, b in zip("😀".encode(), "🚀".encode(), strict=True)]
    assert outs == [("", ""), ("", ""), ("", ""), ("😀", "🚀")]


def test_a_copy_goes_its_own_way():
    original = Tokenizer(byte_level()).detokenizer(stop=["no"])
    for byte in b"n\xe2\x82":
        assert original.push(byte) == ""
    other = original.copy()
    assert original.push(0xAC) == "n€"
    assert other.push(0xA9) == "n\u20a9"
    for byte in b"no":
        assert original.push(byte) == ""
    assert (original.stopped, other.stopped) == ("no", None)
    assert other.push(ord("o")) == "o"


# --- stop strings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "stops", "outs", "stopped"),
    [
        (["a", "a", "a", "b", "c"], ["aab"], ["", "", "a", "", "", ""], "aab"),
        (["x", "S", "TO", "P", "y"], ["STOP"], ["x", "", "", "", "", ""], "STOP"),
        (["ab", "c"], ["abc", "ab"], ["", "", ""], "ab"),
        (["a", "bc"], ["bc", "ab"], ["", "", ""], "ab"),
        (["zab"], ["b", "ab"], ["za", ""], "b"),
        (["zab"], ["ab", "b"], ["z", ""], "ab"),
        (["wait", " sto"], ["stop"], ["wait", " ", "sto"], None),
        (["end", "."], ["."], ["end", "", ""], "."),
        (["no", " match"], ["."], ["no", " match", ""], None),
        (["a", "ba", "bac"], ["abac"], ["", "", "ab", ""], "abac"),
        (["👍", b"\xf0\x9f", b"\x8f", b"\xbd!"], ["🏽"], ["👍", "", "", "", ""], "🏽"),
    ],
)
def test_a_stop_string_is_never_shown(pieces, stops, outs, stopped):
    assert stream(pieces, stop=stops) == (outs, stopped)


def test_include_stop_ends_the_text_with_the_stop_string():
    outs, stopped = stream(["say S", "TOP now"], stop=["STOP"], include_stop=True)
    assert (outs, stopped) == (["say ", "STOP", ""], "STOP")


def test_tokens_after_the_stop_are_ignored():
    outs, _ = stream(["a.", "b", "c."], stop=["."])
    assert outs == ["a", "", "", ""]


def test_a_stop_string_completed_by_the_flush_counts():
    outs, stopped = stream(["ab", b"\xe2"], stop=["b\ufffd"])
    assert ("".join(outs), stopped) == ("a", "b\ufffd")


def test_the_first_half_of_a_stop_string_is_not_streamed():
    """SharpAI/SwiftLM#126"""
    outs, stopped = stream(["The", " quick", " brown", " fox", " jumps"], stop=["own f"])
    assert ("".join(outs), stopped) == ("The quick br", "own f")


def test_the_earlier_of_two_stops_wins_however_the_text_is_split():
    """ollama/ollama#4797"""
    text = "alpha beta gamma delta"
    for pieces in ([text], [f"{word} " for word in text.split()], list(text)):
        outs, stopped = stream(pieces, stop=["gamma", "beta"])
        assert ("".join(outs), stopped) == ("alpha ", "beta")


def test_a_stop_string_needs_no_token_alignment():
    """vllm-project/vllm#3672"""
    assert "".join(stream(["The", " capital", " of"], stop=["apit"])[0]) == "The c"


def test_of_stops_that_begin_alike_the_whole_one_and_the_begun_one_are_told_apart():
    assert stream(["a", "b", "c", "d"], stop=["abce", "abc", "ab c"]) == (["", "", "", "", ""], "abc")
    assert stream(["a", "b", "x"], stop=["abce", "abc", "ab c"]) == (["", "", "abx", ""], None)


def test_a_stop_string_that_was_too_early_may_be_the_beginning_of_another():
    assert stream(["ab", "c"], stop=["ab", "abc"], min_tokens=1) == (["", "", ""], "abc")


def test_many_stop_strings_cost_hardly_more_than_one():
    """They are looked for on the thread that runs the model."""
    stop = ["a" * (size % 40) + str(size) for size in range(100_000)]
    begun = time.perf_counter()
    outs, stopped = stream(["a"] * 50, stop=stop)
    assert ("".join(outs), stopped) == ("a" * 50, None)
    assert time.perf_counter() - begun < 2  # it took 7 s when every string was looked for


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stop):
    """EuroEval/EuroEval#560"""
    with pytest.raises(InvalidRequestError, match="empty"):
        Tokenizer(byte_level()).detokenizer(stop=stop)


@pytest.mark.parametrize(
    ("min_tokens", "text", "stopped"),
    [(0, "a", "."), (1, "a", "."), (2, "a.b", "."), (3, "a.b", "."), (4, "a.b.c", None)],
)
def test_stop_strings_within_the_first_min_tokens_are_text(min_tokens, text, stopped):
    outs, match = stream(["a", ".", "b", ".", "c"], stop=["."], min_tokens=min_tokens)
    assert ("".join(outs), match) == (text, stopped)


def test_a_stop_string_may_begin_within_the_first_min_tokens():
    outs, stopped = stream(["a", "S", "T"], stop=["ST"], min_tokens=2)
    assert ("".join(outs), stopped) == ("a", "ST")


def test_a_stop_string_that_is_text_is_not_held():
    assert stream(["xb", "y"], stop=["b", "long"], min_tokens=1)[0] == ["xb", "y", ""]


@given(
    text=st.text("ab€", min_size=1, max_size=24),
    borders=st.lists(st.integers(0, 80)),
    stops=st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_the_text_up_to_the_stop_does_not_depend_on_token_borders(text, borders, stops):
    pieces = split(text, borders)
    outs, stopped = stream(pieces, stop=stops)
    assert ("".join(outs), stopped) == expected_with_stops(text, stops)


@given(
    text=st.text("ab€", min_size=1, max_size=24),
    borders=st.lists(st.integers(0, 80)),
    stops=st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(1, 6),
)
@settings(max_examples=300, deadline=None)
def test_min_tokens_exempts_just_the_text_of_those_tokens(text, borders, stops, min_tokens):
    pieces = split(text, borders)
    outs, stopped = stream(pieces, stop=stops, min_tokens=min_tokens)
    exempt = len(b"".join(pieces[:min_tokens]).decode(errors="ignore"))
    if len(pieces) <= min_tokens:
        exempt = len(text)
    assert ("".join(outs), stopped) == expected_with_stops(text, stops, exempt)


@given(
    text=st.text("ab€", min_size=1, max_size=24),
    borders=st.lists(st.integers(0, 80)),
    stops=st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_only_a_possible_beginning_of_a_stop_string_is_held(text, borders, stops):
    pieces = split(text, borders)
    outs, _ = stream(pieces, stop=stops)
    for count in range(len(pieces)):
        complete = b"".join(pieces[: count + 1]).decode(errors="ignore")
        if expected_with_stops(complete, stops)[1] is not None:
            break
        held = complete[len("".join(outs[: count + 1])) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


# --- the default model's vocabulary -------------------------------------------------------------------------


@pytest.mark.model
def test_a_word_of_split_characters_streams_without_replacement_characters(smollm2):
    """waybarrios/vllm-mlx#109"""
    detokenizer = smollm2.detokenizer()
    outs = [detokenizer.push(token_id) for token_id in (143, 233, 5415, 82, 1025, 91, 2756)]
    assert outs == ["", "ď", "á", "b", "els", "k", "é"]


@pytest.mark.model
def test_invalid_bytes_then_a_space_token_of_the_default_model(smollm2):
    """Blaizzy/mlx-vlm#1705"""
    detokenizer = smollm2.detokenizer()
    assert [detokenizer.push(10813), detokenizer.push(16438), detokenizer.flush()] == ["", "\ufffd fox", ""]


@pytest.mark.model
def test_random_ids_of_the_default_model_stream_as_they_decode(smollm2):
    rng = random.Random(0)
    single_bytes = smollm2.encode("".join(map(chr, range(0x80, 0x800, 7))))
    for length in [1, 2, 3, *[80] * 400]:
        ids = [
            rng.choice(single_bytes) if rng.random() < 0.3 else rng.randrange(smollm2.vocab_size)
            for _ in range(length)
        ]
        detokenizer = smollm2.detokenizer()
        out = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        assert out == smollm2.decode(ids)


@pytest.mark.model
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_pass_through_the_default_model_unchanged(smollm2, text):
    detokenizer = smollm2.detokenizer()
    out = "".join(map(detokenizer.push, smollm2.encode(text))) + detokenizer.flush()
    assert out == text
