"""Faults on purpose: a test asks for the Nth offer to be delayed, dropped or failed, or the Nth take to be corrupted.

`FaultPlan` is the list of wishes, empty in production. `FaultyTransport` wraps a real transport and carries them out:
at the source when an offer passes, at the destination when its bytes have arrived. Delays follow the given clock, so
tests advance it instead of sleeping.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtransfer.device import Region
from kvtransfer.transport import Acceptor, Refused, Sent, Taken, Transport, TransportEvent
from kvtransfer.types import LeaseKey, Offer, PeerId, Span


class Fault(enum.Enum):
    """What goes wrong."""

    DELAY = "delay"
    DROP = "drop"
    FAIL = "fail"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class FaultRule:
    """`fault` hits offers (takes, when it is `CORRUPT`) number `first` … `last` since the plan was clear, from 1."""

    fault: Fault
    first: int
    last: int
    delay_s: float = 0.0


@dataclass(slots=True)
class FaultPlan:
    """The faults a test wants of one worker. Counting starts anew with `clear`."""

    rules: list[FaultRule] = field(default_factory=list)
    offers_seen: int = 0
    takes_seen: int = 0

    def add(self, fault: Fault, nth: int = 1, *, count: int = 1, delay_s: float = 0.0) -> None:
        """From now on, the `nth` offer (or take) and `count - 1` after it."""
        seen = self.takes_seen if fault is Fault.CORRUPT else self.offers_seen
        self.rules.append(FaultRule(fault, seen + nth, seen + nth + count - 1, delay_s))

    def clear(self) -> None:
        """No more faults."""
        self.rules.clear()
        self.offers_seen = self.takes_seen = 0

    def next_offer(self) -> FaultRule | None:
        """Count an offer at the source; the rule that hits it."""
        self.offers_seen += 1
        return self._hit(self.offers_seen, corrupt=False)

    def next_take(self) -> FaultRule | None:
        """Count a completed take at the destination; the rule that hits it."""
        self.takes_seen += 1
        return self._hit(self.takes_seen, corrupt=True)

    def _hit(self, number: int, *, corrupt: bool) -> FaultRule | None:
        for rule in self.rules:
            if (rule.fault is Fault.CORRUPT) == corrupt and rule.first <= number <= rule.last:
                return rule
        return None


@dataclass(frozen=True, slots=True)
class _Held:
    offer: Offer
    spans: Sequence[Span]
    due_s: float


class FaultyTransport:
    """A transport whose offers and takes pass through a `FaultPlan`; transparent while the plan is empty."""

    def __init__(self, inner: Transport, region: Region, plan: FaultPlan, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._region = region
        self._plan = plan
        self._clock = clock
        self._wake: Callable[[], None] = lambda: None
        self._held: list[_Held] = []
        self._ended: list[TransportEvent] = []
        self._taking: dict[tuple[PeerId, LeaseKey, int], Sequence[Span]] = {}

    @property
    def scheme(self) -> str:
        return self._inner.scheme

    def start(self, acceptor: Acceptor, wake: Callable[[], None]) -> None:
        def remember(offer: Offer) -> Sequence[Span] | Refused:
            spans = acceptor(offer)
            if self._plan.rules and not isinstance(spans, Refused):
                self._taking[offer.source, offer.key, offer.push_id] = spans
            return spans

        self._wake = wake
        self._inner.start(remember, wake)

    def address(self) -> bytes:
        return self._inner.address()

    def connect(self, peer: PeerId, address: bytes) -> None:
        self._inner.connect(peer, address)

    def offer(self, offer: Offer, spans: Sequence[Span]) -> None:
        rule = self._plan.next_offer() if self._plan.rules else None
        if rule is None:
            self._inner.offer(offer, spans)
        elif rule.fault is Fault.FAIL:
            self._ended.append(Sent(offer.key, offer.push_id, "fault: failed on purpose"))
            self._wake()
        else:
            due_s = self._clock() + rule.delay_s if rule.fault is Fault.DELAY else float("inf")
            self._held.append(_Held(offer, spans, due_s))
            self._wake_after(rule.delay_s if rule.fault is Fault.DELAY else None)

    def poll(self) -> list[TransportEvent]:
        if self._held:
            self._release(self._clock())
        return self._passed_on(self._inner.poll())

    def linger(self, until_s: float) -> list[TransportEvent]:
        return self._passed_on(self._inner.linger(until_s))

    def give_way(self, works: bool) -> None:
        self._inner.give_way(works)

    def _passed_on(self, events: list[TransportEvent]) -> list[TransportEvent]:
        if self._taking:
            for event in events:
                if isinstance(event, Taken):
                    self._corrupt(event)
        if self._ended:
            events, self._ended = [*self._ended, *events], []
        return events

    def cut(self, peer: PeerId) -> None:
        self._drop_held(lambda held: held.offer.destination == peer, f"{peer} was cut off")
        self._inner.cut(peer)

    def forget(self, peer: PeerId) -> None:
        self._drop_held(lambda held: held.offer.destination == peer, f"{peer} was forgotten")
        self._inner.forget(peer)

    def close(self) -> None:
        self._drop_held(lambda held: True, "transport closed")
        self._inner.close()

    def _release(self, now: float) -> None:
        due = [held for held in self._held if held.due_s <= now]
        self._held = [held for held in self._held if held.due_s > now]
        for held in due:
            self._inner.offer(held.offer, held.spans)

    def _drop_held(self, concerned: Callable[[_Held], bool], reason: str) -> None:
        for held in self._held:
            if concerned(held):
                self._ended.append(Sent(held.offer.key, held.offer.push_id, reason))
        self._held = [held for held in self._held if not concerned(held)]

    def _corrupt(self, taken: Taken) -> None:
        spans = self._taking.pop((taken.offer.source, taken.offer.key, taken.offer.push_id), ())
        rule = self._plan.next_take()
        if rule is not None and len(spans) and not taken.error:
            assert isinstance(self._region, memoryview), "who corrupts bytes must be able to look at them"
            self._region[spans[0].offset] ^= 0xFF

    def _wake_after(self, delay_s: float | None) -> None:
        if delay_s is None:
            return
        timer = threading.Timer(delay_s, self._wake)
        timer.daemon = True
        timer.start()
