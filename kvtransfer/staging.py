"""For a pool that transports cannot reach, in the memory of a device: its bytes go by way of a region in host memory.

    push:  pool ══ copied when there is room ══▶ staging region ══ transport ══▶ peer
    open:  peer ══ transport ══▶ staging region ══ copied when received and verified ══▶ pool

`StagedTransfers` is a `TransferEngine` whose callers name spans of the *pool*, as ever; the transports, and the fences,
know the staging region alone. Bytes of a dead lease can land nowhere else, so a block of the pool is never at risk. The
region is shared by all transfers: a lease holds its landing place from `open` to `Quiet`; what is sent is cut into
parts, which wait their turn by priority. Extents go back when no transport touches them any more, and not before.

Two things keep one transfer from stopping all others. Leases never take the last part of the region: two workers that
send to one another, each full of landing places that wait for the other, would wait for ever. And a peer may hold no
more than it leaves free, so one that hangs with all its parts takes half of what there was, and the next one half of
the rest (dynamic thresholds: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches").
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

import numpy as np

from kvtransfer.engine import WINDOW_BYTES, TransferEngine, _Lease, _Push
from kvtransfer.errors import TransferError
from kvtransfer.layout import check_spans
from kvtransfer.transport import Transport
from kvtransfer.types import LeaseKey, PeerId, PushDone, PushFailed, Received, Span, Spans, TransferEvent, TransferStats

ALIGNMENT = 4096
PARTS = 16
"""A push is cut into parts of at most this fraction of the region, so that several peers are served at once."""
SENDS = 4
"""This fraction of the region is for what is sent alone."""


class PoolCopies(Protocol):
    """Whoever can reach the pool. Both copies are complete when they return."""

    @property
    def nbytes(self) -> int: ...

    def read(self, spans: Spans, into: memoryview) -> None:
        """Copy spans of the pool, one after the other, into as many bytes of host memory."""
        ...

    def write(self, spans: Spans, data: memoryview) -> None:
        """The inverse of `read`."""
        ...


class Extents:
    """A region's free bytes, given out in runs, first fit. Freed runs join their neighbours."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[tuple[int, int]] = [(0, num_bytes)]

    @property
    def free(self) -> int:
        return sum(length for _, length in self._free)

    def take(self, num_bytes: int, before: int | None = None) -> Span | None:
        """The first run of at least `num_bytes`, aligned, that ends at `before` at the latest; None when there is none
        now."""
        wanted, end = _aligned(num_bytes), self.num_bytes if before is None else before
        for index, (start, length) in enumerate(self._free):
            if min(start + length, end) - start >= wanted:
                return self._carve(index, start, wanted)
        return None

    def take_last(self, num_bytes: int) -> Span | None:
        """As `take`, the last one."""
        wanted = _aligned(num_bytes)
        for index in range(len(self._free) - 1, -1, -1):
            start, length = self._free[index]
            if length >= wanted:
                return self._carve(index, start + length - wanted, wanted)
        return None

    def _carve(self, index: int, start: int, length: int) -> Span:
        first, whole = self._free[index]
        rests = ((first, start - first), (start + length, first + whole - start - length))
        self._free[index : index + 1] = [rest for rest in rests if rest[1]]
        return Span(start, length)

    def give(self, extent: Span) -> None:
        start, length = extent.offset, extent.length
        index = bisect.bisect_left(self._free, (start, length))
        if index < len(self._free) and start + length == self._free[index][0]:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            start, before = self._free.pop(index - 1)
            index, length = index - 1, length + before
        self._free.insert(index, (start, length))

    @property
    def whole(self) -> bool:
        return self._free == [(0, self.num_bytes)]


@dataclass(slots=True)
class _Outer:
    """One push of the caller: parts that wait for room in the region, and parts under way."""

    key: LeaseKey
    push_id: int
    peer: PeerId
    scheme: str | None
    priority: int
    started_s: float
    deadline_s: float
    waiting: list[tuple[int, Spans]]
    """(first span of the lease, spans of the pool), in order."""
    under_way: int = 0
    num_bytes: int = 0
    """Acknowledged so far."""
    failed: bool = False


@dataclass(slots=True)
class _Landing:
    """A lease: where its bytes arrive, and where they belong."""

    extent: Span
    arrives: Spans
    belongs: Spans


@dataclass(slots=True)
class _Books:
    outer: dict[int, _Outer] = field(default_factory=dict)
    """In the order in which they came."""
    parts: dict[int, tuple[_Outer, Span]] = field(default_factory=dict)
    """By the push id of the engine below."""
    held: Counter[PeerId] = field(default_factory=Counter)
    """Bytes of the region in parts under way to each peer."""
    landings: dict[LeaseKey, _Landing] = field(default_factory=dict)


class StagedTransfers(TransferEngine):
    """Moves spans of a pool by way of `region`, the memory that the transports were made with.

    Raises what `TransferEngine` does; `open` also when the region has no room for the lease now.
    """

    def __init__(
        self,
        me: PeerId,
        region: memoryview,
        transports: Sequence[Transport],
        copies: PoolCopies,
        *,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
        checksums: bool = False,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        super().__init__(me, region, transports, clock=clock, wake=wake, checksums=checksums, window_bytes=window_bytes)
        self._copies = copies
        self._staging = region
        self._extents = Extents(region.nbytes // ALIGNMENT * ALIGNMENT)
        self._landings_end = _aligned(self._extents.num_bytes - self._extents.num_bytes // SENDS)
        self._books = _Books()
        self._numbers = count(-1, -1)  # so that no caller's push is taken for one of the engine below

    def most_lease_bytes(self) -> float:
        return self._landings_end

    def has_room(self, num_bytes: int) -> bool:
        extent = self._extents.take(num_bytes, self._landings_end)
        if extent is not None:
            self._extents.give(extent)
        return extent is not None

    # -- source --------------------------------------------------------------------------------------------------------

    def push(
        self,
        key: LeaseKey,
        peer: PeerId,
        first: int,
        spans: Sequence[Span],
        *,
        scheme: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> int:
        self._check_push(key, first, spans, self._copies.nbytes)
        self._choose(peer, scheme)
        now, push_id = self._clock(), next(self._numbers)
        parts = self._cut(first, Spans.of(spans))
        until_s = float("inf") if deadline_s is None else now + deadline_s
        self._books.outer[push_id] = _Outer(key, push_id, peer, scheme, priority, now, until_s, parts)
        self._stage()
        return push_id

    def _cut(self, first: int, spans: Spans) -> list[tuple[int, Spans]]:
        """Parts of whole spans. Raises `TransferError` when one span alone is larger than the region."""
        if int(spans.lengths.max()) > self._extents.num_bytes:
            size = int(spans.lengths.max())
            raise TransferError(
                f"a span of {size} bytes is larger than the staging memory of {self._extents.num_bytes}"
            )
        most = self._extents.num_bytes // PARTS
        ends = np.cumsum(spans.lengths)
        parts, start = [], 0
        while start < len(spans):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
            parts.append((first + start, spans[start:stop]))
            start = stop
        return parts

    def _stage(self) -> None:
        """Copy what waits into the region, while there is room, and hand it to the transports."""
        waiting = [outer for outer in self._books.outer.values() if outer.waiting]
        full = set[PeerId]()
        for outer in sorted(waiting, key=lambda outer: outer.priority):
            while outer.waiting and outer.peer not in full:
                first, spans = outer.waiting[0]
                if not self._may_hold(outer.peer, spans.num_bytes):
                    full.add(outer.peer)
                    break
                extent = self._extents.take_last(spans.num_bytes)
                if extent is None:
                    return
                outer.waiting.pop(0)
                self._send(outer, first, spans, extent)

    def _may_hold(self, peer: PeerId, num_bytes: int) -> bool:
        held = self._books.held[peer]
        return not held or held + 2 * num_bytes <= self._extents.free

    def _send(self, outer: _Outer, first: int, spans: Spans, extent: Span) -> None:
        num_bytes = spans.num_bytes
        self._copies.read(spans, self._staging[extent.offset : extent.offset + num_bytes])
        left_s = None if outer.deadline_s == float("inf") else max(0.0, outer.deadline_s - self._clock())
        try:
            number = super().push(
                outer.key,
                outer.peer,
                first,
                _behind(extent.offset, spans),
                scheme=outer.scheme,
                priority=outer.priority,
                deadline_s=left_s,
            )
        except TransferError as error:  # its peer was cut off while it waited
            self._extents.give(extent)
            self._fail(outer, str(error))
            return
        outer.under_way += 1
        self._books.held[outer.peer] += extent.length
        self._books.parts[number] = (outer, extent)

    def _fail(self, outer: _Outer, reason: str) -> None:
        """Parts that wait are dropped; those under way end by themselves."""
        outer.waiting = []
        if not outer.failed:
            outer.failed = True
            self._events.append(PushFailed(outer.key, outer.push_id, reason))
        self._forget_ended(outer)

    def _forget_ended(self, outer: _Outer) -> bool:
        over = not outer.waiting and not outer.under_way
        if over:
            self._books.outer.pop(outer.push_id, None)
        return over

    def _released(self, push: _Push) -> None:
        part = self._books.parts.get(push.offer.push_id)
        if part is None:
            return
        outer, extent = part
        outer.under_way -= 1
        self._books.held[outer.peer] -= extent.length
        self._extents.give(extent)
        if push.reported:  # its failure was told before
            del self._books.parts[push.offer.push_id]
            self._forget_ended(outer)

    def _tell(self, event: PushDone | PushFailed) -> None:
        """What a part's end means to the caller."""
        outer, _ = self._books.parts[event.push_id]
        if event.push_id not in self._pushes:
            del self._books.parts[event.push_id]
        if isinstance(event, PushFailed):
            self._fail(outer, event.reason)
            return
        outer.num_bytes += event.num_bytes
        if self._forget_ended(outer) and not outer.failed:
            duration_s = self._clock() - outer.started_s
            self._events.append(PushDone(outer.key, outer.push_id, outer.num_bytes, duration_s))

    def withdraw(self, key: LeaseKey) -> None:
        self._drop(lambda outer: outer.key == key, "withdrawn")
        super().withdraw(key)

    def _end_all(self, peer: PeerId, reason: str) -> None:
        self._drop(lambda outer: outer.peer == peer, reason)
        super()._end_all(peer, reason)

    def _drop(self, concerns: Callable[[_Outer], bool], reason: str) -> None:
        for outer in tuple(self._books.outer.values()):
            if outer.waiting and concerns(outer):
                self._fail(outer, reason)

    # -- destination ---------------------------------------------------------------------------------------------------

    def open(self, key: LeaseKey, source: PeerId, spans: Sequence[Span]) -> None:
        if problem := check_spans(spans, self._copies.nbytes):
            raise TransferError(f"{key}: {problem}")
        belongs = Spans.of(spans)
        extent = self._extents.take(belongs.num_bytes, self._landings_end) if len(belongs) else Span(0, 0)
        if extent is None:
            free = f"{belongs.num_bytes} bytes in one piece"
            raise TransferError(f"{key}: the staging memory of {self._landings_end} bytes has not {free} now")
        landing = _Landing(extent, _behind(extent.offset, belongs), belongs)
        try:
            super().open(key, source, landing.arrives)
        except TransferError:
            self._give(extent)
            raise
        self._books.landings[key] = landing

    def _quiet_if_closed(self, key: LeaseKey, lease: _Lease) -> None:
        super()._quiet_if_closed(key, lease)
        if key not in self._leases and (landing := self._books.landings.pop(key, None)) is not None:
            self._give(landing.extent)

    def _give(self, extent: Span) -> None:
        if extent.length:
            self._extents.give(extent)

    # -- both ----------------------------------------------------------------------------------------------------------

    def poll(self) -> list[TransferEvent]:
        now = self._clock()
        self._drop(lambda outer: outer.deadline_s <= now, "deadline passed")
        events = super().poll()
        for event in events:
            if isinstance(event, Received):
                self._land(self._books.landings[event.key], event.first, event.count)
        self._stage()  # into what has become free
        if self._events:
            self._wake()
        return events

    def in_flight(self) -> int:
        return super().in_flight() + sum(len(outer.waiting) for outer in self._books.outer.values())

    def _land(self, landing: _Landing, first: int, spans: int) -> None:
        arrived, belongs = landing.arrives[first : first + spans], landing.belongs[first : first + spans]
        start = int(arrived.offsets[0])
        self._copies.write(belongs, self._staging[start : start + belongs.num_bytes])

    def stats(self) -> tuple[TransferStats, ...]:
        return tuple(replace(one, staged_bytes=one.push_bytes + one.receive_bytes) for one in super().stats())

    def check(self) -> None:
        super().check()
        books = self._books
        assert set(books.landings) == set(self._leases), "landings and leases differ"
        for outer in books.outer.values():
            assert outer.waiting or outer.under_way, f"push {outer.push_id} is over but kept"
        held = Counter[PeerId]()
        for outer, extent in books.parts.values():
            held[outer.peer] += extent.length
        assert +books.held == held, f"{books.held} is said to be held, {held} is"
        if not (self._leases or self._pushes):
            assert self._extents.whole, f"extents are held by nobody: free {self._extents._free}"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _behind(start: int, spans: Spans) -> Spans:
    """Spans of the same lengths, one behind the other from `start` on."""
    return Spans(start + np.cumsum(spans.lengths) - spans.lengths, spans.lengths)
