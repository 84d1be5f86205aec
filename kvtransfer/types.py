"""The values of a transfer.

**The source offers spans, the destination takes them, the destination acknowledges.** The destination always posts
or moves the bytes, so a revived old writer cannot hit a block that was reused. A *lease* is the destination's
promise of room: a list of spans, numbered 0 … n-1 (one per KV block), open for one source incarnation under one
generation. The source pushes runs of that list, in any order, each index once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

PeerId = str
"""A worker and its incarnation, `name#incarnation`: a restarted worker is another peer."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [offset, offset + length) of the registered region."""

    offset: int
    length: int


class Numbers(Sequence[int]):
    """Many whole numbers of 64 bits, unsigned and immutable, at the price of one object: lengths, counts, checksums.

    Raises `OverflowError` or `ValueError` for anything else than such numbers.
    """

    __slots__ = ("array",)

    def __init__(self, values: Iterable[int] | NDArray[Any] = ()) -> None:
        """`array` is uint64, little endian, read-only."""
        self.array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype="<u8")
        self.array.setflags(write=False)

    @staticmethod
    def of(values: Iterable[int]) -> Numbers:
        return values if isinstance(values, Numbers) else Numbers(values)

    def pack(self) -> bytes:
        """Eight bytes each, little endian."""
        return self.array.tobytes()

    @staticmethod
    def unpack(raw: bytes) -> Numbers:
        """The inverse of `pack`. Raises `ValueError` for bytes that are no whole count of numbers."""
        return Numbers(np.frombuffer(raw, "<u8"))

    def sum(self) -> int:
        return int(self.array[0]) if len(self.array) == 1 else int(self.array.sum())

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Numbers: ...

    def __getitem__(self, index: int | slice) -> int | Numbers:
        return Numbers(self.array[index]) if isinstance(index, slice) else int(self.array[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return self.pack() == other.pack() if isinstance(other, Numbers) else list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.pack())

    def __repr__(self) -> str:
        return f"Numbers({self.array.tolist()})"


class Spans(Sequence[Span]):
    """Many spans, immutable, at the price of one object; equal to any sequence of the same spans.

    `offsets` and `lengths` are int64 and read-only.
    """

    __slots__ = ("lengths", "offsets")

    def __init__(self, offsets: NDArray[Any], lengths: NDArray[Any]) -> None:
        self.offsets = np.asarray(offsets, dtype="<i8")
        self.lengths = np.asarray(lengths, dtype="<i8")
        self.offsets.setflags(write=False)
        self.lengths.setflags(write=False)

    @staticmethod
    def of(spans: Sequence[Span]) -> Spans:
        if isinstance(spans, Spans):
            return spans
        flat = np.array([(span.offset, span.length) for span in spans], dtype="<i8").reshape(-1, 2)
        return Spans(flat[:, 0].copy(), flat[:, 1].copy())

    @property
    def num_bytes(self) -> int:
        return int(self.lengths[0]) if len(self.lengths) == 1 else int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self.offsets.tolist(), self.lengths.tolist())

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> Spans: ...

    def __getitem__(self, index: int | slice) -> Span | Spans:
        if isinstance(index, slice):
            return Spans(self.offsets[index], self.lengths[index])
        return Span(int(self.offsets[index]), int(self.lengths[index]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self.offsets.tobytes(), self.lengths.tobytes()))

    def __repr__(self) -> str:
        return f"Spans({list(self)})"


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """Names a lease for ever: `generation` rises each time the same id is granted anew."""

    lease_id: str
    generation: int


NO_NUMBERS = Numbers()


@dataclass(frozen=True, slots=True)
class Offer:
    """What the source announces for one push: lease spans `first` … `first + len(lengths) - 1`.

    `checksums` (one per span, see `kvtransfer.checksum`) may be empty: not verified.
    """

    key: LeaseKey
    push_id: int
    first: int
    lengths: Numbers
    source: PeerId
    destination: PeerId
    checksums: Numbers = NO_NUMBERS

    @property
    def num_bytes(self) -> int:
        return self.lengths.sum()


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
    staged_bytes: int = 0
    """Pushed and received by way of staging memory (`kvtransfer.staging`)."""
    best_bytes_per_s: float = 0.0
    """As a source, to the best of its peers, while traffic lasted; 0 before there was enough of it."""
    limit_bytes_per_s: float = 0.0
    """What one thread copies on this machine, from memory to memory."""
