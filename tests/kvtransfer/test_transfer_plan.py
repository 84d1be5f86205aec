"""The planner: every value lands where the other cut expects it, once, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout import check_spans
from kvtransfer.plan import Cut, KvShape, plan
from kvtransfer.types import Span

ROW_VALUES = 2


def pools(shape: KvShape, cut: Cut, num_blocks: int) -> np.ndarray:
    """One pool per rank: (ranks, blocks, heads of a rank, layers, 2, block_size, ROW_VALUES), all -1."""
    heads = shape.kv_heads // cut.ranks
    return np.full((cut.ranks, num_blocks, heads, shape.layers, 2, cut.block_size, ROW_VALUES), -1, np.int32)


def expected(shape: KvShape, cut: Cut, blocks: list[int], num_blocks: int, tokens: range) -> np.ndarray:
    """Pools that hold, for each of these tokens, head and row, a value that names it."""
    made = pools(shape, cut, num_blocks)
    heads = shape.kv_heads // cut.ranks
    for token in tokens:
        for head in range(shape.kv_heads):
            place = made[head // heads, blocks[token // cut.block_size], head % heads]
            rows = np.arange(shape.layers * 2 * ROW_VALUES).reshape(shape.layers, 2, ROW_VALUES)
            place[:, :, token % cut.block_size] = (token * shape.kv_heads + head) * rows.size + rows
    return made


@st.composite
def cases(draw):
    shape = KvShape(kv_heads=draw(st.sampled_from([1, 2, 4, 8])), layers=draw(st.integers(1, 3)), row_bytes=8)
    divisors = [ranks for ranks in (1, 2, 4, 8) if shape.kv_heads % ranks == 0]
    small = draw(st.integers(1, 4))
    large = small * draw(st.integers(1, 3))
    sizes = draw(st.permutations([small, large]))
    source, destination = (Cut(size, draw(st.sampled_from(divisors))) for size in sizes)
    num_tokens = draw(st.integers(1, 14))
    first_token = draw(st.integers(0, num_tokens - 1))
    lists = [draw(st.permutations(range(16)))[: -(-num_tokens // cut.block_size)] for cut in (source, destination)]
    return shape, source, destination, *lists, num_tokens, first_token


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_value_lands_where_the_other_cut_expects_it_and_nothing_else_changes(case):
    shape, source, destination, source_blocks, destination_blocks, num_tokens, first_token = case
    piece = min(source.block_size, destination.block_size)
    moved = range(first_token // piece * piece, -(-num_tokens // piece) * piece)
    here = expected(shape, source, source_blocks, 16, range(moved.stop))
    there = pools(shape, destination, 16)
    written = np.zeros(there.nbytes, np.uint8).reshape(destination.ranks, -1)
    for takes in plan(*case):
        read, write = (memory.view(np.uint8).reshape(len(memory), -1) for memory in (here, there))
        assert not check_spans(takes.reads, read.shape[1])
        assert not check_spans(takes.writes, write.shape[1])
        for start, to in zip(takes.reads, takes.writes, strict=True):
            assert start.length == to.length
            chunk = read[takes.source_rank, start.offset : start.offset + start.length]
            write[takes.destination_rank, to.offset : to.offset + to.length] = chunk
            written[takes.destination_rank, to.offset : to.offset + to.length] += 1
    assert written.max() == 1, "a byte was taken twice"
    wanted = expected(shape, destination, destination_blocks, 16, moved)
    assert (there == wanted).all()


def test_equal_cuts_take_whole_blocks():
    shape, cut = KvShape(kv_heads=3, layers=2, row_bytes=16), Cut(block_size=4)
    (takes,) = plan(shape, cut, cut, [5, 6, 9], [1, 2, 3], 12)
    block_bytes = 3 * 2 * 2 * 4 * 16
    assert list(takes.reads) == [Span(block * block_bytes, block_bytes) for block in (5, 6, 9)]


def test_a_rank_takes_its_slice_of_heads_from_each_block_as_one():
    shape = KvShape(kv_heads=4, layers=2, row_bytes=16)
    takes = plan(shape, Cut(4), Cut(4, ranks=2), [5, 9], [0, 2], 8)
    head_bytes = 2 * 2 * 4 * 16
    assert [(part.source_rank, part.destination_rank) for part in takes] == [(0, 0), (0, 1)]
    assert takes[1].reads.offsets.tolist() == [(5 * 4 + 2) * head_bytes, (9 * 4 + 2) * head_bytes]
    assert takes[1].writes.offsets.tolist() == [0, 2 * 2 * head_bytes]
    assert set(takes[1].reads.lengths.tolist()) == {2 * head_bytes}


@pytest.mark.parametrize(
    ("source", "destination", "blocks", "tokens", "first", "reason"),
    [
        (Cut(4, ranks=3), Cut(4), [0], 4, 0, "4 heads do not divide over 3 ranks"),
        (Cut(4), Cut(6), [0, 1], 4, 0, "the larger must be a multiple of the smaller"),
        (Cut(4), Cut(4), [0], 5, 0, "1 blocks of 4 at the source do not hold 5 tokens"),
        (Cut(4), Cut(4), [0], 4, 4, "no tokens in"),
    ],
)
def test_cuts_that_do_not_fit_are_refused_with_the_reason(source, destination, blocks, tokens, first, reason):
    with pytest.raises(ValueError, match=reason):
        plan(KvShape(kv_heads=4, layers=1, row_bytes=2), source, destination, blocks, [0, 1], tokens, first)
