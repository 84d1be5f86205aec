"""Where bytes lie: spans of blocks, runs of neighbouring spans, and cursors that walk over them.

Pure functions over whole lists (arrays, no object per span) and one small cursor; nothing here knows a transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.device import DeviceRegion, Region
from kvtransfer.errors import TransferError
from kvtransfer.types import Numbers, Span, Spans

_FEW = 4
_ONE = Numbers([1])


def block_spans(block_ids: Iterable[int], block_bytes: int) -> Spans:
    """The spans of whole blocks in a pool where block i begins at `i * block_bytes`."""
    ids = np.asarray(block_ids if isinstance(block_ids, np.ndarray) else list(block_ids), dtype="<i8")
    return Spans(ids * block_bytes, np.full(len(ids), block_bytes, "<i8"))


def cut(spans: Spans, length: int) -> Spans:
    """The same bytes in the same order in spans of `length`, which divides the length of each."""
    counts = spans.lengths // length
    starts = np.repeat(spans.offsets, counts)
    within = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Spans(starts + within * length, np.full(len(starts), length))


def coalesce(spans: Sequence[Span], max_bytes: int | None = None) -> Spans:
    """The same bytes in the same order with neighbours joined, none longer than `max_bytes` unless it came so."""
    return group(spans, runs(spans, max_bytes))


def runs(spans: Sequence[Span], max_bytes: int | None = None) -> Numbers:
    """How many consecutive spans form each contiguous run; the counts add up to `len(spans)`."""
    many = Spans.of(spans)
    ends = many.offsets + many.lengths
    cuts = np.append(np.flatnonzero(many.offsets[1:] != ends[:-1]) + 1, len(many))
    if max_bytes is not None and len(cuts) < len(many):
        cuts = _cut_long(cuts, np.cumsum(many.lengths), max_bytes)
    return Numbers(np.diff(cuts, prepend=0)) if len(many) else Numbers()


def _cut_long(cuts: NDArray[Any], bytes_until: NDArray[Any], max_bytes: int) -> NDArray[Any]:
    """The cuts and more, so that each piece takes as many spans as fit into `max_bytes`, at least one."""
    finer: list[int] = []
    start, before = 0, 0
    for cut in cuts.tolist():
        while start < cut:
            fits = int(np.searchsorted(bytes_until, before + max_bytes, side="right"))
            start = min(cut, max(fits, start + 1))
            finer.append(start)
            before = int(bytes_until[start - 1])
    return np.asarray(finer)


def common_runs(left: Sequence[int], right: Sequence[int]) -> Numbers:
    """The longest runs that are contiguous at both ends: cut wherever either side cuts.

    Raises `ValueError` when the two sides do not count the same number of spans.
    """
    ends = [np.cumsum(Numbers.of(side).array) for side in (left, right)]
    counted = [int(end[-1]) if len(end) else 0 for end in ends]
    if counted[0] != counted[1]:
        raise ValueError(f"runs of {counted[0]} spans against runs of {counted[1]}")
    return Numbers(np.diff(np.union1d(*ends).astype("<i8"), prepend=0))


def shared_runs(left: Spans, right: Spans) -> Numbers:
    """The longest runs that are contiguous in both of two lists of the same lengths, however long."""
    if len(left) == 1:
        return _ONE
    joined = left.offsets[1:] == left.offsets[:-1] + left.lengths[:-1]
    joined &= right.offsets[1:] == right.offsets[:-1] + right.lengths[:-1]
    if not joined.any():
        return Numbers(np.ones(len(left), "<i8"))
    ends = np.append(np.flatnonzero(~joined) + 1, len(left))
    counts = ends.copy()  # np.diff takes longer for its arguments than for the numbers
    counts[1:] -= ends[:-1]
    return Numbers(counts)


def group(spans: Sequence[Span], counts: Sequence[int]) -> Spans:
    """One span per run: `counts` must be runs of `spans` (or cut them finer)."""
    many = Spans.of(spans)
    if len(counts) == len(many):
        return many
    starts = np.cumsum(Numbers.of(counts).array.astype("<i8")) - Numbers.of(counts).array.astype("<i8")
    return Spans(many.offsets[starts], np.add.reduceat(many.lengths, starts))


def check_spans(spans: Sequence[Span], region_bytes: int) -> str:
    """Why these spans cannot be used in a region of that size; empty when they can."""
    try:
        many = Spans.of(spans)
    except OverflowError:
        return f"a span of more than 63 bits is outside the region of {region_bytes} bytes"
    if len(many) <= _FEW:  # arrays cost more than they save
        for offset, length in zip(many.offsets.tolist(), many.lengths.tolist(), strict=True):
            if offset < 0 or not 0 < length <= region_bytes or offset > region_bytes - length:
                return f"span [{offset}, +{length}) is outside the region of {region_bytes} bytes"
        return ""
    # Written without a sum of two numbers from outside, which could wrap around.
    wrong = (many.offsets < 0) | (many.lengths <= 0) | (many.lengths > region_bytes)
    wrong |= many.offsets > region_bytes - many.lengths
    if not wrong.any():
        return ""
    span = many[int(np.argmax(wrong))]
    return f"span [{span.offset}, +{span.length}) is outside the region of {region_bytes} bytes"


def check_region(region: Region) -> None:
    """Raises `TransferError` unless offsets into `region` are those of its bytes, and bytes can be written to it."""
    if isinstance(region, DeviceRegion):
        return
    if not isinstance(region, memoryview) or region.ndim != 1 or region.itemsize != 1 or not region.c_contiguous:
        raise TransferError("a region is a memoryview of contiguous, single bytes: `memoryview(array).cast('B')`")
    if region.readonly:
        raise TransferError("a region must be writable: bytes of peers arrive in it")


class Cursor:
    """Walks over memory views as vectored socket calls consume or fill them, without copying."""

    __slots__ = ("_next", "_views", "remaining")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = list(views)
        self._next = 0
        self.remaining = sum(map(len, views))

    def window(self, max_views: int, max_bytes: int) -> list[memoryview]:
        """The next views to hand to one vectored call, the last one cut where they would be too much."""
        views = []
        for view in self._views[self._next : self._next + max_views]:
            views.append(view[:max_bytes])
            max_bytes -= len(view)
            if max_bytes <= 0:
                break
        return views

    def advance(self, num_bytes: int) -> None:
        """Step over bytes that the call has moved."""
        self.remaining -= num_bytes
        while num_bytes:
            view = self._views[self._next]
            if num_bytes < len(view):
                self._views[self._next] = view[num_bytes:]
                return
            num_bytes -= len(view)
            self._next += 1


def views_of(region: Region, spans: Sequence[Span]) -> list[Any]:
    """The memory of each span, of the region's own kind."""
    many = Spans.of(spans)
    bounds = zip(many.offsets.tolist(), (many.offsets + many.lengths).tolist(), strict=True)
    return [region[start:end] for start, end in bounds]
