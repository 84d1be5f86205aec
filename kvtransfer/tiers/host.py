"""The host tier: blocks in one preallocated arena, least recently used out first, hot ones last of all.

An entry is cold until it was read `pin_hits` times; then it is pinned: evicted only when no cold one is left. Pinned
entries fill at most a share of the arena, beyond which the one read longest ago is cold again. An entry in use (being
delivered, or on its way to disk) keeps its slot until its users are gone; one forgotten meanwhile is found by nobody
but its slot comes back only then. Single-threaded; others may read the bytes of an entry in use.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from itertools import chain, islice

from kvtransfer.checksum import checksum
from kvtransfer.tiers.types import TierCounters

NAME = "host"


class Entry:
    """A block in the arena. `users` count those who read it."""

    __slots__ = ("checksum", "hits", "key", "leaving", "slot", "users")

    def __init__(self, key: bytes, slot: int, digest: int) -> None:
        self.key = key
        self.slot = slot
        self.checksum = digest
        self.hits = 0
        self.users = 0
        self.leaving = False
        """On its way to disk, after which it goes, unless it is used meanwhile."""


class HostTier:
    """`capacity_bytes` bounds the arena; it becomes resident only as it is used."""

    def __init__(self, capacity_bytes: int, block_bytes: int, *, pin_hits: int = 2, pinned_share: float = 0.5) -> None:
        self.slots = capacity_bytes // block_bytes
        self.counters = TierCounters(NAME, capacity_bytes=self.slots * block_bytes)
        self._block_bytes = block_bytes
        self._arena = memoryview(mmap.mmap(-1, max(1, self.slots * block_bytes)))
        self._free = list(range(self.slots - 1, -1, -1))
        self._entries: dict[bytes, Entry] = {}
        self._cold: OrderedDict[bytes, Entry] = OrderedDict()
        self._pinned: OrderedDict[bytes, Entry] = OrderedDict()
        self._forgotten: list[Entry] = []
        self._pin_hits = pin_hits
        self._most_pinned = int(self.slots * pinned_share)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used(self) -> int:
        """Slots that hold something, forgotten blocks that are still being read included."""
        return self.slots - len(self._free)

    @property
    def full(self) -> bool:
        return not self._free

    def keys(self) -> tuple[bytes, ...]:
        return tuple(self._entries)

    def view(self, entry: Entry) -> memoryview:
        """The entry's bytes; whoever keeps it must `acquire` the entry."""
        begin = entry.slot * self._block_bytes
        return self._arena[begin : begin + self._block_bytes]

    # -- in ------------------------------------------------------------------------------------------------------

    def put(self, key: bytes, data: memoryview) -> tuple[bool, bytes | None]:
        """Copy a block in: whether it is there now, and whose place it took."""
        if key in self._entries:
            self.touch(key)
            return True, None
        victim = None
        if not self._free:
            victim = self._evict()
            if victim is None:
                return False, None
        entry = Entry(key, self._free.pop(), 0)
        view = self.view(entry)
        view[:] = data
        entry.checksum = checksum(view)
        self._entries[key] = self._cold[key] = entry
        self.counters.stored += 1
        self.counters.stored_bytes += self._block_bytes
        return True, victim

    # -- use -----------------------------------------------------------------------------------------------------

    def touch(self, key: bytes) -> None:
        """Used just now; unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.leaving = False
            (self._pinned if key in self._pinned else self._cold).move_to_end(key)

    def acquire(self, key: bytes) -> Entry:
        """Keep the entry's slot until `release`. KeyError when it is not here."""
        entry = self._entries[key]
        entry.users += 1
        return entry

    def release(self, entry: Entry) -> None:
        entry.users -= 1
        if not entry.users and self._entries.get(entry.key) is not entry:
            self._forgotten.remove(entry)
            self._free.append(entry.slot)

    def verified(self, entry: Entry) -> memoryview | None:
        """The bytes of an acquired entry, or None when they are no longer what was put in; then it is forgotten."""
        view = self.view(entry)
        if checksum(view) != entry.checksum:
            self.counters.failed += 1
            self.forget(entry.key)
            return None
        return view

    def hit(self, entry: Entry) -> None:
        """It was delivered: warmer by one."""
        key = entry.key
        entry.hits += 1
        if self._entries.get(key) is not entry:
            return
        self.touch(key)
        if key in self._cold and entry.hits >= self._pin_hits and self._most_pinned:
            del self._cold[key]
            self._pinned[key] = entry
            if len(self._pinned) > self._most_pinned:
                cooled, other = self._pinned.popitem(last=False)
                other.hits = 0
                self._cold[cooled] = other

    # -- out -----------------------------------------------------------------------------------------------------

    def coldest(self, most: int) -> list[Entry]:
        """Up to `most` entries that nobody uses, the first to go first."""
        entries = chain(self._cold.values(), self._pinned.values())
        return list(islice((entry for entry in entries if not entry.users), most))

    def forget(self, key: bytes) -> bool:
        """Out at once; a slot in use comes back with its last user."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._cold.pop(key, None)
        self._pinned.pop(key, None)
        if entry.users:
            self._forgotten.append(entry)
        else:
            self._free.append(entry.slot)
        return True

    def evict(self, entry: Entry) -> None:
        """As `forget`, of one that had to go; nothing when its key is another's by now."""
        if self._entries.get(entry.key) is entry:
            self.counters.evicted += self.forget(entry.key)

    def check(self) -> None:
        """Every slot is free or held once, every entry in one segment. Raises AssertionError."""
        held = [entry.slot for entry in (*self._entries.values(), *self._forgotten)]
        assert sorted([*self._free, *held]) == list(range(self.slots)), "host slots do not make up the arena"
        assert self._entries.keys() == self._cold.keys() | self._pinned.keys(), "entries and segments disagree"
        assert not self._cold.keys() & self._pinned.keys(), "an entry is cold and pinned"
        assert len(self._pinned) <= self._most_pinned, "more is pinned than may be"
        assert all(entry.users > 0 for entry in self._forgotten), "a forgotten entry without users keeps its slot"

    def _evict(self) -> bytes | None:
        for entry in self.coldest(1):
            self.evict(entry)
            return entry.key
        return None
