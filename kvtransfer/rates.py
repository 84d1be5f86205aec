"""How fast each pair really moves bytes, beside what one thread could copy: measured on the traffic itself.

A *busy period* of a peer over a scheme runs from the moment its first push is offered until none is in flight. Its
time is that in which something was under way: an owner may offer the next push before it looks whether the last one has
ended, with a pause between the two. It is a sample if it moved enough for latency not to count and nothing in it
failed; the first one, which pays for joining the pair, is none. So nothing is sent for the measurement's sake, no start
waits for it, and a new peer is measured with its first hand-overs. The best of a pair's first samples is logged. A
pair that was lost begins anew.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from dataclasses import dataclass

import numpy as np

from kvtransfer.copying import best_copy
from kvtransfer.types import PeerId

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 2 * 2**20
"""Smaller busy periods measure latency."""
FIRST_SAMPLES = 3
"""A pair's rate is told once it has so many: the first ones are of a busy moment, a start."""
LIMIT_BYTES, LIMIT_PIECE_BYTES = 32 * 2**20, 4 * 2**20
LIMIT_DEADLINE_S = 0.1


@dataclass(frozen=True, slots=True)
class PeerRate:
    """What a pair achieved: the last busy period and the best, in bytes per second."""

    peer: PeerId
    scheme: str
    last: float
    best: float
    samples: int


@dataclass(slots=True)
class _Busy:
    in_flight: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    """In which something was under way, up to `until_s`."""
    until_s: float = -math.inf
    failed: bool = False


class Rates:
    """One engine's pairs. All calls from the owner's thread; times are seconds on the engine's clock."""

    def __init__(self) -> None:
        self.limit_bytes_per_s = copy_limit()
        """What one thread copies here, from memory to memory."""
        self._busy: dict[tuple[PeerId, str], _Busy] = {}
        self._joined: set[tuple[PeerId, str]] = set()
        self._rates: dict[tuple[PeerId, str], PeerRate] = {}

    def offered(self, peer: PeerId, scheme: str) -> None:
        """One more push to that peer is under way."""
        self._busy.setdefault((peer, scheme), _Busy()).in_flight += 1

    def ended(
        self, peer: PeerId, scheme: str, num_bytes: int, offered_s: float, ended_s: float, *, failed: bool
    ) -> None:
        """One of them ended, for better or worse."""
        busy = self._busy[peer, scheme]
        busy.in_flight -= 1
        busy.num_bytes += num_bytes
        busy.seconds += max(0.0, ended_s - max(offered_s, busy.until_s))
        busy.until_s = max(busy.until_s, ended_s)
        busy.failed |= failed
        if not busy.in_flight:
            del self._busy[peer, scheme]
            sound = (peer, scheme) in self._joined and not busy.failed and busy.seconds > 0
            if not busy.failed:
                self._joined.add((peer, scheme))
            if sound and busy.num_bytes >= SAMPLE_BYTES:
                self._sample(peer, scheme, busy.num_bytes / busy.seconds)

    def forget(self, peer: PeerId) -> None:
        """A peer that is lost: what comes under its name again may be elsewhere, or somebody else."""
        self._rates = {pair: rate for pair, rate in self._rates.items() if pair[0] != peer}
        self._joined = {pair for pair in self._joined if pair[0] != peer}

    def all(self) -> tuple[PeerRate, ...]:
        return tuple(self._rates.values())

    def last(self, peer: PeerId, scheme: str) -> float:
        """Of the last busy period that was a sample; 0 before the first."""
        rate = self._rates.get((peer, scheme))
        return 0.0 if rate is None else rate.last

    def best(self, scheme: str) -> float:
        """Over all peers; 0 before the first sample."""
        return max((rate.best for rate in self._rates.values() if rate.scheme == scheme), default=0.0)

    def _sample(self, peer: PeerId, scheme: str, rate: float) -> None:
        before = self._rates.get((peer, scheme), PeerRate(peer, scheme, 0.0, 0.0, 0))
        now = self._rates[peer, scheme] = PeerRate(peer, scheme, rate, max(rate, before.best), before.samples + 1)
        if now.samples == FIRST_SAMPLES:
            told = f"{now.best / 1e9:.2f} GB/s; one thread copies {self.limit_bytes_per_s / 1e9:.1f} GB/s here"
            logger.info("KV to %s over %s: %s", peer, scheme, told)


@functools.cache
def copy_limit() -> float:
    """Bytes per second of one thread from memory to memory, the best piece of a few turns within `LIMIT_DEADLINE_S`.

    Measured once per process, in some 50 ms, in pieces of less than a millisecond: workers start together, and a
    longer one would measure who else wants the core.
    """
    source, target = np.ones(LIMIT_BYTES, np.uint8), np.ones(LIMIT_BYTES, np.uint8)
    copy, best, end_s = best_copy(), 0.0, time.perf_counter() + LIMIT_DEADLINE_S
    for turn in range(3):
        for offset in range(0, LIMIT_BYTES, LIMIT_PIECE_BYTES):
            piece = np.array([[offset, offset, LIMIT_PIECE_BYTES]], np.int64)
            start_s = time.perf_counter()
            copy(target, source, piece)
            now_s = time.perf_counter()
            best = max(best, LIMIT_PIECE_BYTES / (now_s - start_s))
            if turn and now_s > end_s:
                return best
    return best
