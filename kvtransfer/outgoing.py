"""What the owner of an engine's blocks does about every lease, the same at all of its ends.

A block that a transfer reads may be given to nobody else, whatever becomes of the request that it belonged to. So each
push is an owner of its blocks, until it is acknowledged (`PushDone`), or, when something failed or was withdrawn, until
the lease is quiet (`Quiet`). A peer that leaves us waiting for that is cut off, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.engine import TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.frames import MAX_SPANS
from kvtransfer.plan import Side
from kvtransfer.types import LeaseKey, PeerId


class BlockOwners(Protocol):
    """Counts the owners of blocks."""

    def retain(self, block_ids: Iterable[int]) -> None: ...

    def unretain(self, block_ids: Iterable[int]) -> None: ...


class Parting:
    """A lease that was closed or withdrawn at `since_s` and waits for `Quiet`."""

    def __init__(self, transfers: TransferEngine, peer: PeerId, since_s: float, patience_s: float) -> None:
        self._transfers = transfers
        self._peer = peer
        self._until_s = since_s + patience_s
        self._cut = False

    def tick(self, now: float) -> None:
        """Cut off who never falls silent; `Quiet` follows then."""
        if now >= self._until_s and not self._cut:
            self._cut = True
            self._transfers.cut(self._peer)


@dataclass(slots=True, eq=False)
class _Push:
    """Pieces that were sent together. `parts`: ids of the transfer's pushes that are not acknowledged."""

    read: Sequence[int]
    num_pieces: int
    parts: set[int] = field(default_factory=set)


class Outgoing:
    """Pieces of one sequence under way into one lease, by push. The lease's spans begin with `first_piece`."""

    def __init__(
        self,
        transfers: TransferEngine,
        owners: BlockOwners,
        side: Side,
        key: LeaseKey,
        peer: PeerId,
        scheme: str,
        address: bytes,
        *,
        first_piece: int = 0,
    ) -> None:
        self.key = key
        self._transfers = transfers
        self._owners = owners
        self._side = side
        self._peer = peer
        self._scheme = scheme
        self._address = address
        self._first_piece = first_piece
        self._pushes: dict[int, _Push] = {}
        """By the id of each part."""
        self._parting: Parting | None = None

    def push(
        self, blocks: Sequence[int], first_piece: int, num_pieces: int, *, priority: int = 0, deadline_s: float
    ) -> None:
        """Send pieces `first_piece` … of the sequence that lies in `blocks`; of more spans than one offer may have, as
        several. Raises `TransferError`; then only what was sent before it is owned here."""
        spans = self._side.spans(blocks, first_piece, num_pieces)
        first_span = (first_piece - self._first_piece) * self._side.spans_per_piece
        read = [blocks[index] for index in self._side.blocks(first_piece, num_pieces)]
        push = _Push(read, num_pieces)
        self._owners.retain(read)
        try:
            self._transfers.connect(self._peer, self._scheme, self._address)
            for start in range(0, len(spans), MAX_SPANS):
                part = self._transfers.push(
                    self.key,
                    self._peer,
                    first_span + start,
                    spans[start : start + MAX_SPANS],
                    scheme=self._scheme,
                    priority=priority,
                    deadline_s=deadline_s,
                )
                push.parts.add(part)
                self._pushes[part] = push
        except TransferError:
            if not push.parts:
                self._owners.unretain(read)
            raise

    def done(self, push_id: int) -> int:
        """A push of the transfer was acknowledged; how many pieces have thereby arrived, 0 while others of those that
        were sent together are under way."""
        push = self._pushes.pop(push_id)
        push.parts.discard(push_id)
        if push.parts:
            return 0
        self._owners.unretain(push.read)
        return push.num_pieces

    def withdraw(self, now: float, patience_s: float) -> None:
        """Send no more; one `Quiet` follows. Asking again changes nothing."""
        if self._parting is None:
            self._parting = Parting(self._transfers, self._peer, now, patience_s)
            self._transfers.withdraw(self.key)

    def quiet(self) -> None:
        """Nothing of the lease is read any more."""
        for push in set(self._pushes.values()):
            self._owners.unretain(push.read)
        self._pushes.clear()

    def tick(self, now: float) -> None:
        if self._parting is not None:
            self._parting.tick(now)

    @property
    def withdrawn(self) -> bool:
        return self._parting is not None

    def __len__(self) -> int:
        """Pushes that are not acknowledged."""
        return len(self._pushes)
