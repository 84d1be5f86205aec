"""A prompt whose prefix another worker has computed: blocks for it, and a place to wait until they are filled.

    WAITING ─ begin ─▶ LOADING ─ arrived, arrived, … ─ end ─▶ WAITING

The prompt keeps its place in the queue. Its fetch owns the blocks to be filled and those found already; what has
arrived enters the prefix cache block by block, in order. When the fetch ends, whole or not, the prompt enters as any
other, finds what is there and computes the rest. Who carries the bytes decides when a fetch is over, and holds a
reference of its own on blocks that it may still write to.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine.blocks import BlockPool
from engine.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class PrefixRoom:
    """Blocks to be filled, which come after `held_blocks` that are here; `keys` are those of all granules of both."""

    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    held_blocks: int


@dataclass(slots=True)
class _Fetch:
    seq: Sequence
    found: list[int]
    fresh: list[int]
    keys: list[tuple[bytes, ...]]
    arrived: int = 0


class Fetching:
    """The fetches of one engine, by the sequence's name."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._fetches: dict[str, _Fetch] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def __contains__(self, name: str) -> bool:
        return name in self._fetches

    def begin(self, seq: Sequence, found: list[int], keys: list[tuple[bytes, ...]]) -> PrefixRoom | None:
        """Blocks for what `keys` (all granules' of each) name beyond those `found`; None when there is no room."""
        self._pool.retain(found)
        fresh = self._pool.allocate(len(keys) - len(found))
        if fresh is None:
            self._pool.release(found)
            return None
        self._fetches[seq.name] = _Fetch(seq, found, fresh, keys[len(found) :])
        seq.state = State.LOADING
        return PrefixRoom(tuple(key for granules in keys for key in granules), tuple(fresh), len(found))

    def arrived(self, name: str, blocks: int) -> bool:
        """The first `blocks` of the fetch are complete; False when it is over."""
        fetch = self._fetches.get(name)
        if fetch is None:
            return False
        for index in range(fetch.arrived, blocks):
            self._pool.publish(fetch.fresh[index], fetch.keys[index])
        fetch.arrived = max(fetch.arrived, blocks)
        return True

    def end(self, name: str) -> None:
        """Its prompt need wait no more. Unknown names are ignored."""
        fetch = self._fetches.pop(name, None)
        if fetch is not None:
            fetch.seq.state = State.WAITING
            self._pool.release([*fetch.found, *fetch.fresh])

    def brings(self, key: bytes) -> bool:
        """Whether the block of this key is still to arrive."""
        return any(key == granules[-1] for fetch in self._fetches.values() for granules in fetch.keys[fetch.arrived :])

    def clear(self) -> None:
        """What arrives from now on is not entered; who waits computes."""
        for name in tuple(self._fetches):
            self.end(name)

    def owners(self) -> Counter[int]:
        return Counter(block for fetch in self._fetches.values() for block in (*fetch.found, *fetch.fresh))

    def check(self) -> None:
        """Fetches and sequences agree. Raises AssertionError."""
        for name, fetch in self._fetches.items():
            assert fetch.seq.state is State.LOADING, f"{name} is fetched for and is {fetch.seq.state}"
            assert not fetch.seq.blocks, f"{name} holds blocks while its prefix is fetched"
