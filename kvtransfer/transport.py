"""What a transport is: one small interface, kept by `inproc`, `tcp` and `ucx` and tested by one contract suite.

A transport moves bytes between the registered regions of two peers and reports what happened. It decides nothing:
whether an offer is welcome, and where its bytes belong, is asked of the `acceptor` that the transfer engine gives it.
Calls never block on a peer; results come out of `poll`. Callbacks (`acceptor`, `wake`) may run on the transport's own
threads, and `wake` on any thread: it says "poll me" and must return at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.types import LeaseKey, Offer, PeerId, PeerLost, Span


@dataclass(frozen=True, slots=True)
class Refused:
    """The destination does not want these bytes (stale generation, closed lease, unknown peer). They are drained."""

    reason: str


Acceptor = Callable[[Offer], Sequence[Span] | Refused]
"""Asked at the destination for each offer: the spans to fill, in the offer's order, or why not."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Source: the push ended. `error` is empty when the destination acknowledged it. No local memory is in use.

    `unheard`: the destination never heard of it (no link came about), so the same push may be offered again.
    """

    key: LeaseKey
    push_id: int
    error: str = ""
    unheard: bool = False
    ended_s: float = field(default_factory=time.monotonic, compare=False)
    """When, on the machine's clock: the owner may look only once per step."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Destination: the offer's bytes are all in place (`error` empty) or will never be. No local memory is in use."""

    offer: Offer
    error: str = ""


TransportEvent = Sent | Taken | PeerLost


class Transport(Protocol):
    """One worker's end of one kind of link. All methods may be called from one thread only, the owner's."""

    @property
    def scheme(self) -> str:
        """Its name in configuration, addresses and metrics."""
        ...

    def start(self, acceptor: Acceptor, wake: Callable[[], None]) -> None:
        """Called once, before anything else: whom to ask about offers and whom to tell that `poll` has news."""
        ...

    def address(self) -> bytes:
        """An opaque address for peers; it travels over the authenticated control plane only."""
        ...

    def connect(self, peer: PeerId, address: bytes) -> None:
        """Make `peer` reachable. Idempotent; raises `TransferError` if the address cannot be used."""
        ...

    def offer(self, offer: Offer, spans: Sequence[Span]) -> None:
        """Source: announce and send the spans (as many as `offer.lengths`) to `offer.destination`."""
        ...

    def poll(self) -> list[TransportEvent]:
        """What ended since the last call; never blocks."""
        ...

    def linger(self, until_s: float) -> list[TransportEvent]:
        """`poll` again and again, until something ended or the machine's clock says `until_s`, which is a moment away:
        what a push of little needs is less than falling asleep and being woken."""
        ...

    def give_way(self, works: bool) -> None:
        """Whether the owner has work for this machine's cores and memory from now on, so that bulk is to go gently."""
        ...

    def cut(self, peer: PeerId) -> None:
        """End all traffic with this peer as it is now; each of its offers still ends by `Sent` or `Taken`. The next
        offer, from either side, begins anew, and nothing of before can touch memory then."""
        ...

    def forget(self, peer: PeerId) -> None:
        """Fence: end all traffic with this incarnation. Each of its offers still ends by `Sent` or `Taken`."""
        ...

    def close(self) -> None:
        """End everything; afterwards no thread of this transport runs and no memory is in use."""
        ...
