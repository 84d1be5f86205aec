"""The in-process transport: peers of one process share an `InprocHub`, and the destination copies in its own `poll`.

No threads, so a test sees the same order every time. An offer lies in the destination's inbox until the destination
polls; the source hears of its end at its next poll. A lock guards each inbox because peers may live on different
threads; a copy holds it, so that after `forget` or `close` nothing reads the source's memory.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtransfer.errors import TransferError
from kvtransfer.transport import Acceptor, Refused, Sent, Taken, TransportEvent
from kvtransfer.types import Offer, PeerId, PeerLost, Span


class InprocHub:
    """The peers of one process that may reach each other."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._peers: dict[PeerId, InprocTransport] = {}

    def join(self, peer: PeerId, transport: InprocTransport) -> None:
        """Raises `TransferError` when the name is taken."""
        with self._lock:
            if peer in self._peers:
                raise TransferError(f"{peer} is already in this hub")
            self._peers[peer] = transport

    def leave(self, peer: PeerId) -> list[InprocTransport]:
        """Those that remain and should be told."""
        with self._lock:
            self._peers.pop(peer, None)
            return list(self._peers.values())

    def find(self, peer: PeerId) -> InprocTransport | None:
        """The live peer of that name."""
        with self._lock:
            return self._peers.get(peer)


@dataclass(frozen=True, slots=True)
class _Waiting:
    offer: Offer
    views: tuple[memoryview, ...]
    source: InprocTransport


class InprocTransport:
    """One peer of an `InprocHub`."""

    scheme = "inproc"

    def __init__(self, me: PeerId, region: memoryview, hub: InprocHub) -> None:
        self._me = me
        self._region = region
        self._hub = hub
        self._acceptor: Acceptor = lambda offer: Refused("not started")
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._inbox: deque[_Waiting] = deque()
        self._events: deque[TransportEvent] = deque()
        self._known: set[PeerId] = set()
        self._fenced: set[PeerId] = set()
        self._closed = False

    def start(self, acceptor: Acceptor, wake: Callable[[], None]) -> None:
        self._acceptor, self._wake = acceptor, wake
        self._hub.join(self._me, self)

    def address(self) -> bytes:
        return f"{self._hub.name}/{self._me}".encode()

    def connect(self, peer: PeerId, address: bytes) -> None:
        if address != f"{self._hub.name}/{peer}".encode():
            raise TransferError(f"inproc address {address!r} is not {peer} in this process")
        if peer in self._fenced:
            raise TransferError(f"{peer} was forgotten; only a new incarnation can be connected")
        self._known.add(peer)

    def offer(self, offer: Offer, spans: Sequence[Span]) -> None:
        peer = self._hub.find(offer.destination) if offer.destination in self._known else None
        views = tuple(self._region[span.offset : span.offset + span.length] for span in spans)
        if peer is None or not peer._put(_Waiting(offer, views, self)):
            self._tell(Sent(offer.key, offer.push_id, f"{offer.destination} cannot be reached"))

    def poll(self) -> list[TransportEvent]:
        self._take_all()
        events: list[TransportEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def linger(self, until_s: float) -> list[TransportEvent]:
        """There is nothing to wait for: the peer takes when it polls."""
        return self.poll()

    def give_way(self, works: bool) -> None:
        """There is no thread that could: the owner copies when it polls."""

    def cut(self, peer: PeerId) -> None:
        self._end_all(peer, f"{peer} was cut off")

    def forget(self, peer: PeerId) -> None:
        self._known.discard(peer)
        self._fenced.add(peer)
        self._end_all(peer, f"{peer} was forgotten")

    def _end_all(self, peer: PeerId, reason: str) -> None:
        self._end(lambda waiting: waiting.offer.source == peer, reason)
        other = self._hub.find(peer)
        if other is not None:
            other._end(lambda waiting: waiting.offer.source == self._me, reason)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        others = self._hub.leave(self._me)
        reason = f"{self._me} closed"
        self._end(lambda waiting: True, reason)
        for other in others:
            other._end(lambda waiting: waiting.offer.source == self._me, reason)
            other._lose(self._me, reason)

    def _put(self, waiting: _Waiting) -> bool:
        with self._lock:
            listening = not self._closed and waiting.offer.source not in self._fenced
            if listening:
                self._inbox.append(waiting)
        if listening:
            self._wake()
        return listening

    def _take_all(self) -> None:
        while True:
            with self._lock:
                if not self._inbox:
                    return
                waiting = self._inbox.popleft()
                sent, taken = self._take(waiting)
            if taken is not None:
                self._events.append(taken)
            waiting.source._tell(sent)

    def _take(self, waiting: _Waiting) -> tuple[Sent, Taken | None]:
        offer = waiting.offer
        spans = self._acceptor(offer)
        if isinstance(spans, Refused):
            return Sent(offer.key, offer.push_id, f"refused: {spans.reason}"), None
        for span, view in zip(spans, waiting.views, strict=True):
            target = np.frombuffer(self._region, np.uint8, span.length, span.offset)
            np.copyto(target, np.frombuffer(view, np.uint8))
        return Sent(offer.key, offer.push_id), Taken(offer)

    def _end(self, concerned: Callable[[_Waiting], bool], reason: str) -> None:
        with self._lock:
            ended = [waiting for waiting in self._inbox if concerned(waiting)]
            self._inbox = deque(waiting for waiting in self._inbox if not concerned(waiting))
        for waiting in ended:
            waiting.source._tell(Sent(waiting.offer.key, waiting.offer.push_id, reason))

    def _lose(self, peer: PeerId, reason: str) -> None:
        if peer in self._known:
            self._known.discard(peer)
            self._tell(PeerLost(peer, reason))

    def _tell(self, event: TransportEvent) -> None:
        self._events.append(event)
        self._wake()
