"""Spans, runs and cursors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import Cursor, block_spans, check_spans, coalesce, common_runs, group, runs, shared_runs
from kvtransfer.types import Span

BLOCK_LISTS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def touched(spans: list[Span]) -> list[int]:
    return [byte for span in spans for byte in range(span.offset, span.offset + span.length)]


@given(BLOCK_LISTS, st.integers(1, 7), st.one_of(st.none(), st.integers(1, 40)))
def test_coalescing_keeps_every_byte_in_order(blocks, block_bytes, max_bytes):
    spans = block_spans(blocks, block_bytes)
    joined = coalesce(spans, max_bytes)
    assert touched(joined) == touched(spans)
    assert max_bytes is None or all(span.length <= max(max_bytes, block_bytes) for span in joined)
    assert sum(runs(spans, max_bytes)) == len(spans)


@given(BLOCK_LISTS, st.randoms(use_true_random=False))
def test_common_runs_are_contiguous_at_both_ends_and_not_shorter_than_needed(blocks, chance):
    left = block_spans(blocks, 4)
    right = block_spans([chance.choice(blocks) for _ in blocks], 4)
    counts = common_runs(runs(left), runs(right))
    assert counts == shared_runs(left, right)
    assert touched(group(left, counts)) == touched(left)
    assert touched(group(right, counts)) == touched(right)
    assert len(counts) <= len(runs(left)) + len(runs(right)) - 1


def test_runs_of_different_lists_do_not_match():
    with pytest.raises(ValueError, match="3 spans against runs of 2"):
        common_runs((1, 2), (2,))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_cursor_walks_over_all_bytes_whatever_the_steps(lengths, chance):
    data = bytes(range(sum(lengths)))
    views, at = [], 0
    for length in lengths:
        views.append(memoryview(data)[at : at + length])
        at += length
    cursor, seen = Cursor(views), b""
    while cursor.remaining:
        most = chance.randint(1, 12)
        window = b"".join(cursor.window(3, most))
        assert len(window) <= most
        step = chance.randint(1, len(window))
        seen += window[:step]
        cursor.advance(step)
    assert seen == data


@pytest.mark.parametrize("span", [Span(-1, 2), Span(0, 0), Span(0, -4), Span(90, 11), Span(2**63, 1)])
def test_a_span_outside_the_region_is_named(span):
    assert "outside the region of 100 bytes" in check_spans([Span(0, 100), span], 100)
    assert check_spans([Span(0, 100)], 100) == ""
