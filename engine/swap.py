"""Swap space: host memory where preempted sequences leave their KV instead of computing it again.

`SwapSlots` keeps the books (which slot is whose is known by the roster, as with blocks), a `BlockMover` moves the bytes
(`engine.host_swap`), `CopyRate` measures how fast. A slot has the size of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

Pairs = Sequence[tuple[int, int]]

_PRIOR_BYTES_PER_S = 2e9
_PROBE_BYTES = 16 << 20
_NEWEST = 0.3
"""What the newest measurement counts."""


class BlockMover(Protocol):
    """Copies whole blocks; each call has ended its copies when it returns."""

    def out(self, pairs: Pairs) -> None:
        """Pool to swap space: (block, slot)."""

    def copy(self, pairs: Pairs) -> None:
        """Within the pool: (source block, target block)."""

    def back(self, pairs: Pairs) -> None:
        """Swap space to pool: (block, slot)."""


class SwapSlots:
    """Slots 0 … `total` - 1, each free or held by one sequence."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._returned: list[int] = []
        self._untouched = 0
        """From here on never taken: what was not used costs no memory, whatever the bound."""

    @property
    def free(self) -> int:
        return self.total - self._untouched + len(self._returned)

    def take(self, count: int) -> list[int] | None:
        """`count` slots, all or none."""
        if count > self.free:
            return None
        again = [self._returned.pop() for _ in range(min(count, len(self._returned)))]
        first, self._untouched = self._untouched, self._untouched + count - len(again)
        return [*again, *range(first, self._untouched)]

    def give_back(self, slots: Iterable[int]) -> None:
        self._returned.extend(slots)

    def check(self, held: Iterable[int]) -> None:
        """Free and held slots make up the whole, none twice. Raises AssertionError otherwise."""
        used = sorted([*self._returned, *held])
        story = f"swap slots: {used} of {self.total}, untouched from {self._untouched} on"
        assert used == list(range(self._untouched)), story
        assert self._untouched <= self.total, story


class CopyRate:
    """Bytes per second of copies to and from swap space (or a lower tier), a running mean of what was measured."""

    def __init__(self, prior_bytes_per_s: float = _PRIOR_BYTES_PER_S) -> None:
        self.bytes_per_s = prior_bytes_per_s
        self._prior = prior_bytes_per_s
        self._measured = False

    def observe(self, size: int, duration_s: float) -> None:
        """`size` bytes took `duration_s`; what took no time teaches nothing."""
        if size <= 0 or duration_s <= 0:
            return
        weight = _NEWEST if self._measured else 1.0
        self._measured = True
        # Means of seconds per byte: a slow copy counts for the time that it took.
        self.bytes_per_s = 1 / ((1 - weight) / self.bytes_per_s + weight * duration_s / size)

    def relax(self, share: float) -> None:
        """Where it is found slower than it was expected to be, believe a little less of that."""
        if self.bytes_per_s < self._prior:
            self.bytes_per_s += share * (self._prior - self.bytes_per_s)

    def seconds(self, size: int) -> float:
        return size / self.bytes_per_s


def probe(mover: BlockMover, blocks: int, block_bytes: int, rate: CopyRate, clock: Callable[[], float]) -> None:
    """A first measurement, before anybody's KV is in the pool: the first `blocks` there and back, after a first round
    for page faults. One block alone would be copied from cache to cache, several times faster than sequences are."""
    pairs = [(block, block) for block in range(min(blocks, -(-_PROBE_BYTES // block_bytes)))]
    for round_ in range(2):
        started_s = clock()
        mover.out(pairs)
        mover.back(pairs)
        if round_:
            rate.observe(2 * len(pairs) * block_bytes, clock() - started_s)
