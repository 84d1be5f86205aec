"""Reads of a peer's memory over one UCX link, in order and a few megabytes at a time.

UCX could be given all at once, and then could not be stopped: a link ends by destroying its UCX worker, and UCX 1.21
asserts that no read of another process's memory waits there (CMA). So little is under way at any time, and `drain` lets
it end, which takes no peer: the kernel reads, or says that there is nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtransfer import ucp

UNDER_WAY_BYTES = 4 * 2**20
"""Posted at a time, so also what the other links wait for."""
PIECE_BYTES = 2 * 2**20
DRAIN_S = 0.5

Move = tuple[int, int, int]
"""Their address, our offset, bytes."""


@dataclass(slots=True)
class _Batch:
    """One push: what is still to be posted, and how many of its reads are under way."""

    serial: int
    moves: Iterator[Move]
    under_way: int = 0
    posted_all: bool = False


class Reads:
    """The reads of one link, first come first served."""

    def __init__(self, reader: ucp.Reader, progress: Callable[[], object]) -> None:
        self._reader = reader
        self._progress = progress
        self._waiting: deque[_Batch] = deque()
        self._batches: deque[_Batch] = deque()
        self._posted: deque[tuple[int, int, _Batch]] = deque()
        self._bytes = 0

    def add(self, serial: int, moves: list[Move]) -> None:
        batch = _Batch(serial, _in_pieces(moves))
        self._waiting.append(batch)
        self._batches.append(batch)

    def advance(self) -> list[int]:
        """Collect what ended, post more; the serials of pushes that are complete. Raises `ucp.UcpError`."""
        self._collect()
        self._post()
        done = []
        while self._batches and self._batches[0].posted_all and not self._batches[0].under_way:
            done.append(self._batches.popleft().serial)
        return done

    def drain(self) -> None:
        """Post no more and let what is under way end; gives up after `DRAIN_S`."""
        self._waiting.clear()
        end_s = time.monotonic() + DRAIN_S
        while self._posted and time.monotonic() < end_s:
            self._progress()
            with contextlib.suppress(ucp.UcpError):
                self._collect()

    @property
    def under_way_bytes(self) -> int:
        """Posted and not known to have ended: what the next progress may copy."""
        return self._bytes

    def _collect(self) -> None:
        while self._posted:
            try:
                if not ucp.ended(self._posted[0][0]):
                    return
            except ucp.UcpError:
                self._drop_first()
                raise
            self._drop_first()

    def _drop_first(self) -> None:
        _, num_bytes, batch = self._posted.popleft()
        self._bytes -= num_bytes
        batch.under_way -= 1

    def _post(self) -> None:
        while self._waiting and self._bytes < UNDER_WAY_BYTES:
            batch = self._waiting[0]
            move = next(batch.moves, None)
            if move is None:
                batch.posted_all = True
                self._waiting.popleft()
            elif request := self._reader.read(*move):
                self._posted.append((request, move[2], batch))
                self._bytes += move[2]
                batch.under_way += 1


def _in_pieces(moves: list[Move]) -> Iterator[Move]:
    for theirs, ours, num_bytes in moves:
        for done in range(0, num_bytes, PIECE_BYTES):
            yield theirs + done, ours + done, min(PIECE_BYTES, num_bytes - done)
