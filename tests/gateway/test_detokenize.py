"""Streams of tokens become text without a wrong character, and stop strings end it in the right place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ids, toy_text
from tokenizers import Tokenizer, decoders, models

from cluster.detokenize import StopMatcher, WindowDetokenizer

TEXT = toy_text()


def _streamed(token_ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer = TEXT.detokenizer()
    pieces = [detokenizer.push(chunk) for chunk in _cut(token_ids, sizes)]
    return [*pieces, detokenizer.flush()]


def _cut(items: list[int] | str, sizes: list[int]) -> list:
    pieces, at = [], 0
    for size in [*sizes, len(items)]:
        pieces.append(items[at : at + size])
        at += size
    return pieces


@given(st.lists(st.integers(0, 263)), st.lists(st.integers(0, 4)))
def test_the_pieces_of_any_ids_equal_the_whole_decode(token_ids: list[int], sizes: list[int]) -> None:
    assert "".join(_streamed(token_ids, sizes)) == TEXT.decode(token_ids)


@given(st.text())
def test_no_piece_holds_half_a_character(text: str) -> None:
    text = text.replace("\ufffd", "")
    pieces = _streamed(ids(text), [1] * len(ids(text)))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_bytes_that_never_become_a_character_do_not_wait_for_ever() -> None:
    detokenizer = TEXT.detokenizer()
    assert detokenizer.push([0xE2]) == ""
    assert detokenizer.push([0xE2]) == "\ufffd"
    assert detokenizer.flush() == "\ufffd"


def _sentencepiece() -> Tokenizer:
    words = ["▁", "▁Hel", "lo", "▁wor", "ld", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@given(
    st.lists(
        st.one_of(st.integers(0, 5).map(lambda i: [i]), st.text(max_size=2).map(lambda t: [6 + b for b in t.encode()]))
    )
)
def test_a_sentencepiece_stream_equals_the_whole_decode(groups: list[list[int]]) -> None:
    tokenizer = _sentencepiece()
    token_ids = [token_id for group in groups for token_id in group]
    detokenizer = WindowDetokenizer(lambda some: tokenizer.decode(list(some)))
    streamed = "".join(detokenizer.push([token_id]) for token_id in token_ids) + detokenizer.flush()
    whole = tokenizer.decode(token_ids)
    if "\ufffd" not in whole:
        assert streamed == whole


def test_a_window_stays_short_however_long_the_answer() -> None:
    tokenizer = _sentencepiece()
    detokenizer = WindowDetokenizer(lambda some: tokenizer.decode(list(some)))
    detokenizer.push([1, 2, 3, 4] * 500)
    assert len(detokenizer._ids) <= 4


ANSWER = "1. the quick brown fox\njumps über the lazy dog"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["ick br"], "1. the qu"),
        (["quick brown fox"], "1. the "),
        (["x\nj"], "1. the quick brown fo"),
        (["\n"], "1. the quick brown fox"),
        (["ü"], "1. the quick brown fox\njumps "),
        (["über the"], "1. the quick brown fox\njumps "),
        (["qui", "quick"], "1. the "),
        (["quick", "qui"], "1. the "),
        (["dog", "the"], "1. "),
        (["thex", "the z", "lazy cat"], ANSWER),
        (["dogs"], ANSWER),
        ([], ANSWER),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_text_ends_before_the_first_stop_string(stops: list[str], expected: str, size: int) -> None:
    matcher = StopMatcher(stops)
    got = ""
    for piece in _cut(ANSWER, [size] * (len(ANSWER) // size)):
        matched = matcher.push(piece)
        got += matched.text
        if matched.stop is not None:
            assert got == expected
            return
    assert got + matcher.flush() == expected == ANSWER


def test_include_adds_exactly_the_stop() -> None:
    matched = StopMatcher(["own"], include=True).push("the brown fox")
    assert (matched.text, matched.stop) == ("the brown", "own")


@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 3))
)
def test_matching_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], sizes: list[int]) -> None:
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[0] + min(ends)[1]] if ends else text
    matcher, got = StopMatcher(stops), ""
    for piece in _cut(text, sizes):
        matched = matcher.push(piece)
        got += matched.text
        assert expected.startswith(got)
        if matched.stop is not None:
            assert got == expected
            return
    assert got + matcher.flush() == expected


def test_text_that_cannot_become_a_stop_is_not_kept_back() -> None:
    matcher = StopMatcher(["xyz"])
    assert matcher.push("abcx").text == "abc"
    assert matcher.push("y").text == ""
    assert matcher.push("a").text == "xya"
