"""The transfer engine: leases, pushes, and the moment when memory is quiet again.

At the destination `open` promises room: a lease, n numbered spans for one source incarnation under one generation.
Each span is *empty*, then *in flight* (a transport was told where its bytes go), then *done*; a failure ends the whole
lease. At the source `push` offers a run of the lease's spans; it waits in a queue (by priority) until the window of
its peer has room, is offered, and ends by `PushDone` or `PushFailed`.

Nobody frees memory on a guess: `close` (destination) and `withdraw` (source) stop new traffic at once and are answered
by `Quiet` when nothing of the lease is in flight here any more. A peer that hangs is ended by `cut` (it may come back
after a cooldown) or `forget` (never), after which its transfers finish as failed and the quiet follows. A peer that
cannot be reached is tried again a few times, after a rest of this pair alone; what it may have heard of is never sent
twice, and the next push tries anew.

One owner thread calls everything; transports ask `_accept` from their own threads, so a lock guards the lease table.
`poll` never blocks; `wake` (any thread) says that it has news.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtransfer.checksum import span_checksums
from kvtransfer.device import DeviceRegion, Region
from kvtransfer.errors import TransferError
from kvtransfer.faults import FaultPlan, FaultyTransport
from kvtransfer.frames import MAX_SPANS, check_key, check_names
from kvtransfer.layout import check_region, check_spans
from kvtransfer.lingering import LINGER_BYTES, LINGER_S, Lingering
from kvtransfer.rates import PeerRate, Rates
from kvtransfer.transport import Refused, Sent, Taken, Transport, TransportEvent
from kvtransfer.types import (
    NO_NUMBERS,
    LeaseKey,
    Numbers,
    Offer,
    PeerId,
    PeerLost,
    PushDone,
    PushFailed,
    Quiet,
    Received,
    ReceiveFailed,
    Span,
    Spans,
    TransferEvent,
    TransferStats,
)

logger = logging.getLogger(__name__)

COOLDOWN_S, COOLDOWN_MAX_S = 0.5, 30.0
"""How long a peer that was cut off stays off: the first, doubled each time until something arrives, and the most."""
MAX_ATTEMPTS = 5
"""How often a push is offered to a peer that cannot be reached before it fails."""
REST_S, MAX_REST_S = 0.1, 2.0
"""A pair rests after it could not be joined, twice as long each time it fails again; other pairs go on."""
WINDOW_S = 0.25
"""A peer is offered as much at a time as its link moves meanwhile: what is urgent waits no longer behind the rest, and
an owner that polls once a step, or once a chunk of a prompt, keeps the link busy."""
MIN_WINDOW_BYTES, WINDOW_BYTES = 32 * 2**20, 256 * 2**20
"""At least and at most; the least, too, while nothing is known of the link."""


@dataclass(slots=True)
class _Lease:
    source: PeerId
    spans: Spans
    empty: NDArray[np.bool_]
    """Which spans were not offered yet."""
    in_flight: int = 0
    failed: str = ""
    closing: bool = False


@dataclass(slots=True)
class _Push:
    offer: Offer
    spans: Spans
    num_bytes: int
    scheme: str
    priority: int
    deadline_s: float
    started_s: float
    offered_s: float = 0.0
    """The last time, if `offered`."""
    offered: bool = False
    reported: bool = False
    attempts: int = 0


@dataclass(slots=True)
class _Lane:
    """What goes to one peer: pushes that wait for the window, and the bytes inside it.

    `failures` in a row to reach it; nothing is offered before `rests_until_s`.
    """

    waiting: list[tuple[int, int]] = field(default_factory=list)
    offered_bytes: int = 0
    failures: int = 0
    rests_until_s: float = -math.inf

    def is_idle(self, now: float) -> bool:
        return not self.waiting and not self.offered_bytes and self.rests_until_s <= now


@dataclass(frozen=True, slots=True)
class _Cooling:
    """A peer that was cut off `times` times since something arrived."""

    times: int
    until_s: float


class TransferEngine:
    """Moves spans of one registered region to and from peers, over the transports it was given (best first)."""

    def __init__(
        self,
        me: PeerId,
        region: Region,
        transports: Sequence[Transport],
        *,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
        settle: Callable[[], None] = lambda: None,
        checksums: bool = False,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """`region` and `me` are those that the transports were made with, `clock` counts seconds, `wake` (called on any
        thread) says that `poll` has news, and when `settle` returns, what was last written to the region is there. With
        `checksums` what is sent from here is verified where it arrives.

        Raises `TransferError` for a region that is no writable, contiguous memory of single bytes, for a name longer
        than `MAX_NAME_CHARS`, and for checksums of a device's memory.
        """
        check_region(region)
        if problem := check_names(me):
            raise TransferError(problem)
        if checksums and isinstance(region, DeviceRegion):
            raise TransferError("checksums need memory that can be looked at: stage it, or do without them")
        self.me = me
        self.faults = FaultPlan()
        self._region = region
        self._region_bytes = region.nbytes
        self._clock = clock
        self._wake = wake
        self._settle = settle
        self._checksums = checksums
        self._window_bytes = window_bytes
        self._lock = threading.Lock()
        self._leases: dict[LeaseKey, _Lease] = {}
        self._fenced: set[PeerId] = set()
        self._cooling: dict[PeerId, _Cooling] = {}
        self._pushes: dict[int, _Push] = {}
        self._lanes: dict[PeerId, _Lane] = {}
        self._withdrawn: set[LeaseKey] = set()
        self._hushed: set[LeaseKey] = set()
        """Of those withdrawn: `Quiet` waits for `poll`."""
        self._schemes: dict[PeerId, list[str]] = {}
        self._taken_by: dict[tuple[PeerId, LeaseKey, int], str] = {}
        self._events: list[TransferEvent] = []
        self._last_push_id = 0
        self._counts: dict[str, Counter[str]] = {}
        self._rates = Rates()
        self._works = False
        self._lingering = Lingering()
        self._transports: dict[str, Transport] = {}
        for inner in transports:
            transport = FaultyTransport(inner, region, self.faults, clock)
            self._transports[inner.scheme] = transport
            self._counts[inner.scheme] = Counter()
            transport.start(self._acceptor_of(inner.scheme), wake)

    # -- peers ---------------------------------------------------------------------------------------------------------

    def addresses(self) -> tuple[tuple[str, bytes], ...]:
        """(scheme, address) of each transport, best first; they let the bearer write here: authenticated roads only."""
        return tuple((scheme, transport.address()) for scheme, transport in self._transports.items())

    def connect(self, peer: PeerId, scheme: str, address: bytes) -> None:
        """Make `peer` reachable over `scheme`. Idempotent.

        Raises `TransferError` for a bad address or name, and for a peer that is fenced or was cut off a moment ago.
        """
        if problem := check_names(peer):
            raise TransferError(problem)
        if peer == self.me:
            raise TransferError(f"{peer} cannot connect to itself")
        if peer in self._fenced:
            raise TransferError(f"{peer} was forgotten; only a new incarnation can be connected")
        if (wait_s := self.cooling_s(peer)) > 0:
            raise TransferError(f"{peer} hung; it is tried again in {wait_s:.1f} s")
        if scheme not in self._transports:
            raise TransferError(f"no transport {scheme!r} here, only {', '.join(self._transports)}")
        self._transports[scheme].connect(peer, address)
        known = self._schemes.setdefault(peer, [])
        if scheme not in known:
            known.append(scheme)
            logger.info("%s is joined over %s (here: %s, best first)", peer, scheme, ", ".join(self._transports))

    def cooling_s(self, peer: PeerId) -> float:
        """For how long a peer that was cut off cannot be connected yet; 0 for all others."""
        cooling = self._cooling.get(peer)
        return 0.0 if cooling is None else max(0.0, cooling.until_s - self._clock())

    def cut(self, peer: PeerId) -> None:
        """End all traffic with a peer that hangs: its transfers end as failed, its leases fail, and quiet follows.

        It may be connected again after a cooldown, longer each time until something arrives. What it still sends of
        before reaches no memory: its link is gone, and its leases are refused. For one that was forgotten all of this
        has happened.
        """
        if peer in self._fenced:
            return
        times = self._cooling[peer].times + 1 if peer in self._cooling else 1
        wait_s = min(COOLDOWN_S * 2.0 ** (times - 1), COOLDOWN_MAX_S)
        self._cooling[peer] = _Cooling(times, self._clock() + wait_s)
        self._end_all(peer, f"{peer} was cut off")
        for transport in self._transports.values():
            transport.cut(peer)

    def forget(self, peer: PeerId) -> None:
        """Fence an incarnation: its offers are refused from now on, its transfers end as failed, its leases fail."""
        with self._lock:
            self._fenced.add(peer)
        self._rates.forget(peer)
        self._cooling.pop(peer, None)
        self._end_all(peer, f"{peer} was forgotten")
        for transport in self._transports.values():
            transport.forget(peer)

    def _end_all(self, peer: PeerId, reason: str) -> None:
        """Leases of this source fail, and what waits for the window to this peer; the rest is the transports'."""
        with self._lock:
            for key, lease in self._leases.items():
                if lease.source == peer:
                    self._fail_lease(key, lease, reason)
        self._schemes.pop(peer, None)
        lane = self._lanes.get(peer, _Lane())
        waiting, lane.waiting = lane.waiting, []
        for _, push_id in waiting:
            self._end_push(self._pushes[push_id], reason)

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
        """Send `spans` into spans `first` … of the lease `key` at `peer`; returns the push id of its events.

        Smaller `priority` goes first. `deadline_s` is seconds from now until `PushFailed`. Raises `TransferError` when
        the spans lie outside the region or are more than `MAX_SPANS`, no offer can carry `key` or `first`
        (`frames.check_key`), the lease was withdrawn, or the peer is not connected.
        """
        self._check_push(key, first, spans, self._region_bytes)
        chosen = self._choose(peer, scheme)
        spans = Spans.of(spans)
        self._settle()
        self._last_push_id += 1
        now = self._clock()
        push = _Push(
            offer=Offer(
                key=key,
                push_id=self._last_push_id,
                first=first,
                lengths=Numbers(spans.lengths),
                source=self.me,
                destination=peer,
                checksums=self._sums(spans) if self._checksums else NO_NUMBERS,
            ),
            spans=spans,
            num_bytes=spans.num_bytes,
            scheme=chosen,
            priority=priority,
            deadline_s=float("inf") if deadline_s is None else now + deadline_s,
            started_s=now,
        )
        self._pushes[push.offer.push_id] = push
        lane = self._lanes.setdefault(peer, _Lane())
        heapq.heappush(lane.waiting, (priority, push.offer.push_id))
        self._fill(peer, lane)
        return push.offer.push_id

    def withdraw(self, key: LeaseKey) -> None:
        """Stop sending into `key`: what was not offered yet fails now, and one `Quiet` follows the rest.

        A key without pushes is answered at the next `poll`; asking again while a `Quiet` is owed adds none.
        """
        if key in self._withdrawn:
            return
        self._withdrawn.add(key)
        for push in [push for push in self._pushes.values() if push.offer.key == key and not push.offered]:
            self._unqueue(push)
            self._end_push(push, "withdrawn")
        self._quiet_if_withdrawn(key)

    # -- destination ---------------------------------------------------------------------------------------------------

    def open(self, key: LeaseKey, source: PeerId, spans: Sequence[Span]) -> None:
        """Grant a lease to one source incarnation.

        Raises `TransferError` if the key is in use, a span is wrong, or no offer can carry the names.
        """
        if problem := check_key(key) or check_names(source) or check_spans(spans, self._region_bytes):
            raise TransferError(f"{key}: {problem}")
        with self._lock:
            if key in self._leases:
                raise TransferError(f"{key} is already open")
            if source in self._fenced:
                raise TransferError(f"{key}: {source} was forgotten")
            self._leases[key] = _Lease(source, Spans.of(spans), np.ones(len(spans), np.bool_))

    def close(self, key: LeaseKey) -> None:
        """End a lease: later bytes are refused, and one `Quiet` follows when none is in flight.

        Idempotent: for a lease that is closed already, or was never open, nothing more happens.
        """
        with self._lock:
            lease = self._leases.get(key)
            if lease is not None and not lease.closing:
                lease.closing = True
                self._quiet_if_closed(key, lease)

    # -- both ----------------------------------------------------------------------------------------------------------

    def poll(self) -> list[TransferEvent]:
        """What happened since the last call; never blocks on a peer."""
        for scheme, transport in self._transports.items():
            for event in transport.poll():
                self._apply(scheme, event)
        now = self._clock()
        self._expire(now)
        for peer, lane in tuple(self._lanes.items()):
            self._fill(peer, lane)
            if peer not in self._schemes and lane.is_idle(now):
                del self._lanes[peer]
        with self._lock:
            events, self._events = self._events, []
        self._withdrawn -= self._hushed
        self._hushed.clear()
        return events

    def linger(self) -> bool:
        """For an owner with nothing else to do, before it sleeps: whether `poll` has news by now.

        A push of little ends sooner than a sleeper is woken, twice. So while it is the only one its transport is looked
        at again and again, for `LINGER_S` at most and behind whoever else wants the core, and less often when that was
        in vain.
        """
        if len(self._pushes) == 1 and not self._events:
            (push,) = self._pushes.values()
            if push.offered and push.num_bytes <= LINGER_BYTES and not self._lingering.spared():
                for event in self._transports[push.scheme].linger(time.monotonic() + LINGER_S):
                    self._apply(push.scheme, event)
                self._lingering.ended(well=bool(self._events))
        return bool(self._events)

    def look(self, scheme: str, until_s: float) -> bool:
        """Whether `poll` has news by now, after looking again and again on this thread, until `until_s` of
        `time.monotonic` at most and without giving way: for few bytes on which somebody waits, by an owner whose next
        work takes longer."""
        transport = self._transports[scheme]
        transport.give_way(False)
        for event in transport.linger(until_s):
            self._apply(scheme, event)
        transport.give_way(self._works)
        return bool(self._events)

    def give_way(self, works: bool) -> None:
        """Whether the owner has work for this machine's own cores: meanwhile bulk goes gently (`io_loop.REST`)."""
        self._works = works
        for transport in self._transports.values():
            transport.give_way(works)

    def most_lease_bytes(self) -> float:
        """The largest lease that can ever be opened. Here any: bytes arrive where they belong."""
        return math.inf

    def has_room(self, num_bytes: int) -> bool:
        """Whether a lease of so many bytes could be opened now."""
        return True

    def in_flight(self) -> int:
        """Pushes not ended plus takes not ended."""
        with self._lock:
            return len(self._pushes) + sum(lease.in_flight for lease in self._leases.values())

    def stats(self) -> tuple[TransferStats, ...]:
        """Counters per scheme."""
        return tuple(self._stats_of(scheme, counts) for scheme, counts in self._counts.items())

    def rates(self) -> tuple[PeerRate, ...]:
        """What each pair achieved as a source, for those that have moved enough to tell."""
        return self._rates.all()

    def check(self) -> None:
        """Raises `AssertionError` with the story when the books do not agree."""
        with self._lock:
            takes = Counter(key for _, key, _ in self._taken_by)
            for key, lease in self._leases.items():
                assert lease.in_flight == takes[key], f"{key}: {lease.in_flight} in flight, {takes[key]} takes known"
                assert not (lease.closing and not lease.in_flight), f"{key} is closed and quiet but still in the table"
            assert not set(takes) - set(self._leases), f"takes without a lease: {set(takes) - set(self._leases)}"
        for peer, lane in self._lanes.items():
            offered = sum(p.num_bytes for p in self._pushes.values() if p.offered and p.offer.destination == peer)
            assert offered == lane.offered_bytes, f"{peer}: {lane.offered_bytes} bytes in the window, {offered} offered"
            assert all(push_id in self._pushes for _, push_id in lane.waiting), f"{peer}: an ended push still waits"

    def shutdown(self) -> None:
        """End everything. Afterwards no memory is in use and no thread of a transport runs."""
        for peer in list(self._lanes):
            self._end_all(peer, f"{self.me} closed")  # nothing waits or is offered again from here on
        self._schemes.clear()
        for transport in self._transports.values():
            transport.close()
        self.poll()

    # -- source, inside ------------------------------------------------------------------------------------------------

    def _check_push(self, key: LeaseKey, first: int, spans: Sequence[Span], num_bytes: int) -> None:
        """Raises `TransferError` for what no offer can carry, and for spans that are none or not within `num_bytes`."""
        if not len(spans):
            raise TransferError(f"{key}: a push needs at least one span")
        if len(spans) > MAX_SPANS:
            raise TransferError(f"{key}: a push has at most {MAX_SPANS} spans, not {len(spans)}")
        if problem := check_key(key, first) or check_spans(spans, num_bytes):
            raise TransferError(f"{key}: {problem}")
        if key in self._withdrawn:
            raise TransferError(f"{key} was withdrawn")

    def _choose(self, peer: PeerId, scheme: str | None) -> str:
        known = self._schemes.get(peer, [])
        if scheme is not None and scheme not in known:
            raise TransferError(f"{peer} is not connected over {scheme}")
        if not known:
            raise TransferError(f"{peer} is not connected")
        return scheme or next(ours for ours in self._transports if ours in known)

    def _fill(self, peer: PeerId, lane: _Lane) -> None:
        while lane.waiting and lane.rests_until_s <= self._clock():
            push = self._pushes[lane.waiting[0][1]]
            if lane.offered_bytes and lane.offered_bytes + push.num_bytes > self._window(peer, push.scheme):
                return
            heapq.heappop(lane.waiting)
            push.offered, push.offered_s = True, self._clock()
            push.attempts += 1
            lane.offered_bytes += push.num_bytes
            self._rates.offered(peer, push.scheme)
            self._transports[push.scheme].offer(push.offer, push.spans)

    def _window(self, peer: PeerId, scheme: str) -> int:
        wanted = int(self._rates.last(peer, scheme) * WINDOW_S)
        return min(self._window_bytes, max(MIN_WINDOW_BYTES, wanted))

    def _unqueue(self, push: _Push) -> None:
        lane = self._lanes[push.offer.destination]
        lane.waiting.remove((push.priority, push.offer.push_id))
        heapq.heapify(lane.waiting)

    def _expire(self, now: float) -> None:
        for push in [push for push in self._pushes.values() if push.deadline_s <= now and not push.reported]:
            self._report_failed(push, "deadline passed")
            if not push.offered:
                self._unqueue(push)
                self._end_push(push, "deadline passed")

    def _sent(self, scheme: str, sent: Sent) -> None:
        push = self._pushes.get(sent.push_id)
        if push is None or not push.offered:
            return
        failed, peer = bool(sent.error) or push.reported, push.offer.destination
        ended_s = self._clock() - (time.monotonic() - sent.ended_s)  # not when the owner looked
        self._rates.ended(peer, push.scheme, push.num_bytes, push.offered_s, ended_s, failed=failed)
        lane = self._lanes.get(peer)
        if lane is not None:
            lane.offered_bytes -= push.num_bytes
            if sent.unheard and self._offer_again(push, lane):
                return
            if not sent.unheard:
                lane.failures = 0
        self._end_push(push, sent.error, ended_s)

    def _offer_again(self, push: _Push, lane: _Lane) -> bool:
        """Put a push that nobody heard of back into its queue, behind a rest of the pair; False when it is over."""
        key, peer, now = push.offer.key, push.offer.destination, self._clock()
        if push.reported or push.attempts >= MAX_ATTEMPTS or key in self._withdrawn or peer not in self._schemes:
            return False
        if lane.rests_until_s <= now:  # pushes that failed together are one failure of the pair
            rest_s = min(REST_S * 2**lane.failures, MAX_REST_S)
            lane.failures += 1
            lane.rests_until_s = now + rest_s
            alarm = threading.Timer(rest_s, self._wake)
            alarm.daemon = True
            alarm.start()
        push.offered = False
        heapq.heappush(lane.waiting, (push.priority, push.offer.push_id))
        return True

    def _end_push(self, push: _Push, error: str, ended_s: float = math.inf) -> None:
        key, push_id = push.offer.key, push.offer.push_id
        del self._pushes[push_id]
        self._released(push)
        if error:
            self._report_failed(push, error)
        elif not push.reported:
            duration_s = max(0.0, ended_s - push.started_s)
            counts = self._counts[push.scheme]
            self._cooling.pop(push.offer.destination, None)
            counts["pushes"] += 1
            counts["push_bytes"] += push.num_bytes
            counts["push_microseconds"] += round(duration_s * 1e6)
            self._tell(PushDone(key, push_id, push.num_bytes, duration_s))
        self._quiet_if_withdrawn(key)

    def _report_failed(self, push: _Push, reason: str) -> None:
        if not push.reported:
            push.reported = True
            self._counts[push.scheme].update(failed=1)
            self._tell(PushFailed(push.offer.key, push.offer.push_id, reason))

    def _tell(self, event: PushDone | PushFailed) -> None:
        self._events.append(event)

    def _released(self, push: _Push) -> None:
        """No transport reads its spans any more; how it ended is told next, if it was not before."""

    def _quiet_if_withdrawn(self, key: LeaseKey) -> None:
        owed = key in self._withdrawn and key not in self._hushed
        if owed and not any(push.offer.key == key for push in self._pushes.values()):
            self._hushed.add(key)
            self._events.append(Quiet(key))

    # -- destination, inside -------------------------------------------------------------------------------------------

    def _acceptor_of(self, scheme: str) -> Callable[[Offer], Sequence[Span] | Refused]:
        def accept(offer: Offer) -> Sequence[Span] | Refused:
            with self._lock:
                lease = self._leases.get(offer.key)
                reason = self._refusal(offer, lease)
                if reason or lease is None:
                    return Refused(reason)
                count = len(offer.lengths)
                lease.empty[offer.first : offer.first + count] = False
                lease.in_flight += 1
                self._taken_by[offer.source, offer.key, offer.push_id] = scheme
                return lease.spans[offer.first : offer.first + count]

        return accept

    def _refusal(self, offer: Offer, lease: _Lease | None) -> str:
        """Why an offer is not welcome; empty when it is."""
        if offer.destination != self.me:
            return f"offer for {offer.destination}, this is {self.me}"
        if lease is None or lease.closing:
            return f"no open lease {offer.key.lease_id} of generation {offer.key.generation}"
        if offer.source != lease.source or offer.source in self._fenced:
            return f"lease {offer.key.lease_id} is for {lease.source}, not for {offer.source}"
        if lease.failed:
            return f"lease {offer.key.lease_id} failed: {lease.failed}"
        if (offer.source, offer.key, offer.push_id) in self._taken_by:
            return f"push {offer.push_id} was taken before and has not ended"
        last = offer.first + len(offer.lengths)
        if offer.first < 0 or not len(offer.lengths) or last > len(lease.spans):
            return f"spans {offer.first} … {last - 1} of a lease with {len(lease.spans)}"
        if np.count_nonzero(lease.empty[offer.first : last]) < len(offer.lengths):
            return f"spans {offer.first} … {last - 1} were offered before"
        if offer.lengths.pack() != lease.spans.lengths[offer.first : last].tobytes():
            return f"lengths of spans {offer.first} … {last - 1} differ from the lease's"
        if len(offer.checksums) and isinstance(self._region, DeviceRegion):
            return "checksums cannot be verified in a device's memory: stage it, or send none"
        if len(offer.checksums) not in (0, len(offer.lengths)):
            return f"{len(offer.checksums)} checksums for {len(offer.lengths)} spans"
        return ""

    def _taken(self, scheme: str, taken: Taken) -> None:
        offer = taken.offer
        with self._lock:
            if self._taken_by.pop((offer.source, offer.key, offer.push_id), None) is None:
                return
            lease = self._leases[offer.key]
        error = taken.error or self._verify(offer, lease)
        with self._lock:
            lease.in_flight -= 1
            if error:
                self._fail_lease(offer.key, lease, error, scheme)
            elif not lease.failed and not lease.closing:
                num_bytes = offer.num_bytes
                self._cooling.pop(offer.source, None)
                self._counts[scheme].update(receives=1, receive_bytes=num_bytes)
                self._events.append(Received(offer.key, offer.first, len(offer.lengths), num_bytes))
            self._quiet_if_closed(offer.key, lease)

    def _verify(self, offer: Offer, lease: _Lease) -> str:
        if not len(offer.checksums) or lease.closing or lease.failed:
            return ""
        spans = lease.spans[offer.first : offer.first + len(offer.lengths)]
        for index, (got, sent) in enumerate(zip(self._sums(spans), offer.checksums, strict=True)):
            if got != sent:
                return f"checksum of span {offer.first + index} is {got:016x}, the source sent {sent:016x}"
        return ""

    def _sums(self, spans: Spans) -> Numbers:
        assert isinstance(self._region, memoryview), "checksums of a device's memory are refused at the start"
        return span_checksums(self._region, spans)

    def _fail_lease(self, key: LeaseKey, lease: _Lease, reason: str, scheme: str | None = None) -> None:
        if lease.failed or lease.closing:
            return
        lease.failed = reason
        if scheme is not None:
            self._counts[scheme].update(failed=1)
        self._events.append(ReceiveFailed(key, reason))

    def _quiet_if_closed(self, key: LeaseKey, lease: _Lease) -> None:
        if lease.closing and not lease.in_flight:
            del self._leases[key]
            self._events.append(Quiet(key))

    # -- shared, inside ------------------------------------------------------------------------------------------------

    def _apply(self, scheme: str, event: TransportEvent) -> None:
        match event:
            case Sent():
                self._sent(scheme, event)
            case Taken():
                self._taken(scheme, event)
            case PeerLost() if event.peer not in self._fenced:
                self._rates.forget(event.peer)
                with self._lock:
                    self._events.append(event)

    def _stats_of(self, scheme: str, counts: Counter[str]) -> TransferStats:
        with self._lock:
            takes = sum(1 for taken_over in self._taken_by.values() if taken_over == scheme)
        return TransferStats(
            scheme=scheme,
            pushes=counts["pushes"],
            push_bytes=counts["push_bytes"],
            push_seconds=counts["push_microseconds"] / 1e6,
            receives=counts["receives"],
            receive_bytes=counts["receive_bytes"],
            in_flight=takes + sum(1 for push in self._pushes.values() if push.scheme == scheme and push.offered),
            failed=counts["failed"],
            best_bytes_per_s=self._rates.best(scheme),
            limit_bytes_per_s=self._rates.limit_bytes_per_s,
        )
