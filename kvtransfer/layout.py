"""Where bytes lie: spans of blocks, runs of neighbouring spans, and cursors that walk over them.

Pure functions and one small cursor; nothing here knows a transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from kvtransfer.types import Span


def block_spans(block_ids: Iterable[int], block_bytes: int) -> list[Span]:
    """The spans of whole blocks in a pool where block i begins at `i * block_bytes`."""
    return [Span(block_id * block_bytes, block_bytes) for block_id in block_ids]


def coalesce(spans: Sequence[Span], max_bytes: int | None = None) -> list[Span]:
    """The same bytes in the same order with neighbours joined, none longer than `max_bytes` unless it came so."""
    joined = []
    start = 0
    for count in runs(spans, max_bytes):
        length = sum(span.length for span in spans[start : start + count])
        joined.append(Span(spans[start].offset, length))
        start += count
    return joined


def runs(spans: Sequence[Span], max_bytes: int | None = None) -> tuple[int, ...]:
    """How many consecutive spans form each contiguous run; the counts add up to `len(spans)`."""
    counts: list[int] = []
    end, length = -1, 0
    for span in spans:
        fits = max_bytes is None or length + span.length <= max_bytes
        if counts and span.offset == end and fits:
            counts[-1] += 1
            length += span.length
        else:
            counts.append(1)
            length = span.length
        end = span.offset + span.length
    return tuple(counts)


def common_runs(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    """The longest runs that are contiguous at both ends: cut wherever either side cuts.

    Raises `ValueError` when the two sides do not count the same number of spans.
    """
    if sum(left) != sum(right):
        raise ValueError(f"runs of {sum(left)} spans against runs of {sum(right)}")
    cuts = sorted(set(accumulate(left)) | set(accumulate(right)))
    return tuple(cut - before for before, cut in zip([0, *cuts], cuts, strict=False))


def group(spans: Sequence[Span], counts: Sequence[int]) -> list[Span]:
    """One span per run: `counts` must be runs of `spans` (or cut them finer)."""
    if len(counts) == len(spans):
        return list(spans)
    grouped = []
    start = 0
    for count in counts:
        part = spans[start : start + count]
        grouped.append(Span(part[0].offset, sum(span.length for span in part)))
        start += count
    return grouped


def check_spans(spans: Sequence[Span], region_bytes: int) -> str:
    """Why these spans cannot be used in a region of that size; empty when they can."""
    for span in spans:
        if span.offset < 0 or span.length <= 0 or span.offset + span.length > region_bytes:
            return f"span [{span.offset}, +{span.length}) is outside the region of {region_bytes} bytes"
    return ""


class Cursor:
    """Walks over memory views as vectored socket calls consume or fill them, without copying."""

    __slots__ = ("_next", "_views", "remaining")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = list(views)
        self._next = 0
        self.remaining = sum(len(view) for view in self._views)

    def window(self, max_views: int) -> list[memoryview]:
        """The next views to hand to one vectored call."""
        return self._views[self._next : self._next + max_views]

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
