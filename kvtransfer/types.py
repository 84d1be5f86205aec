"""The values of a transfer.

**The source offers spans, the destination takes them, the destination acknowledges.** The destination always posts
or moves the bytes, so a revived old writer cannot hit a block that was reused. A *lease* is the destination's
promise of room: a list of spans, numbered 0 … n-1 (one per KV block), open for one source incarnation under one
generation. The source pushes runs of that list, in any order, each index once.
"""

from __future__ import annotations

from dataclasses import dataclass

PeerId = str
"""A worker and its incarnation, `name#incarnation`: a restarted worker is another peer."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [offset, offset + length) of the registered region."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """Names a lease for ever: `generation` rises each time the same id is granted anew."""

    lease_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What the source announces for one push: lease spans `first` … `first + len(lengths) - 1`.

    `checksums` (one per span, see `kvtransfer.checksum`) may be empty: not verified.
    """

    key: LeaseKey
    push_id: int
    first: int
    lengths: tuple[int, ...]
    source: PeerId
    destination: PeerId
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PushDone:
    """Source side: the destination has acknowledged every span of this push; its local sends are complete."""

    key: LeaseKey
    push_id: int
    num_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class PushFailed:
    """Source side: this push will not arrive. Local sends may still be pending: wait for `Quiet`."""

    key: LeaseKey
    push_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """Destination side: these spans of the lease are complete and verified."""

    key: LeaseKey
    first: int
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """Destination side: a span of the lease failed (peer lost, checksum, truncated). The lease cannot complete."""

    key: LeaseKey
    reason: str


@dataclass(frozen=True, slots=True)
class Quiet:
    """After `close` (destination) or `withdraw` (source): nothing of this lease touches memory here any more.

    Only now may its blocks be given to somebody else.
    """

    key: LeaseKey


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer incarnation is gone, as seen by the transport. Its transfers end as failed, each by its own event."""

    peer: PeerId
    reason: str


TransferEvent = PushDone | PushFailed | Received | ReceiveFailed | Quiet | PeerLost


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters since start, by direction, for metrics."""

    scheme: str
    pushes: int = 0
    push_bytes: int = 0
    push_seconds: float = 0.0
    receives: int = 0
    receive_bytes: int = 0
    in_flight: int = 0
    failed: int = 0
