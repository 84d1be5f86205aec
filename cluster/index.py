"""Which worker holds which prefix, learnt from the workers' KV events.

A key maps to a bit mask of workers, so that one walk over a prompt's keys finds the longest leading match of every
worker at once (the shape of Mooncake's Conductor: numbered events, one table per tier). What is believed must be true,
or a request waits for KV that is not there, so everything fails towards "no match":

* events of another incarnation than the registered one are refused;
* a gap in the numbers voids all that is known of that worker; what it stores afterwards counts again, and it is listed
  in `incomplete` until an event with `cleared` (a worker's full retelling starts with one) makes the picture whole;
* the numbers in load reports show a gap behind which no event has followed yet: the last one was lost, or the router is
  younger than the events, or its subscription was;
* a worker that leaves takes its keys along.

`Underway` counts the prefixes that dispatched requests are about to compute: they will be there before the next
request's turn in the same queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.hashing import GRANULE
from tandem.messages import KvEvents

DEVICE = "device"


class Slots:
    """A bit for every worker name, the same for as long as the router lives."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._slots: dict[str, int] = {}

    def bit(self, name: str) -> int:
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = len(self._names)
            self._names.append(name)
        return 1 << slot

    def names(self, mask: int) -> Iterable[str]:
        while mask:
            lowest = mask & -mask
            yield self._names[lowest.bit_length() - 1]
            mask ^= lowest

    def all(self) -> int:
        return (1 << len(self._names)) - 1


@dataclass(slots=True)
class _Source:
    """One worker's stream of events, and its keys by tier."""

    incarnation: str
    bit: int
    number: int = 0
    complete: bool = True
    keys: dict[str, set[bytes]] = field(default_factory=dict)


class PrefixIndex:
    """Keys → workers, per tier."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._sources: dict[str, _Source] = {}
        self._tiers: dict[str, dict[bytes, int]] = {DEVICE: {}}

    def add(self, worker: str, incarnation: str) -> None:
        """A worker (re)started: nothing of an earlier incarnation is believed."""
        self.remove(worker)
        self._sources[worker] = _Source(incarnation, self._slots.bit(worker))

    def remove(self, worker: str) -> None:
        source = self._sources.pop(worker, None)
        if source is not None:
            self._forget(source)

    def apply(self, events: KvEvents) -> bool:
        """Take in a worker's news. False: refused (unknown worker, old incarnation, or seen before)."""
        source = self._sources.get(events.worker)
        if source is None or source.incarnation != events.incarnation or events.number <= source.number:
            return False
        if events.number != source.number + 1:
            self._forget(source)
            source.complete = False
        source.number = events.number
        if events.cleared:
            self._forget(source)
            source.complete = True
        self._remove_keys(source, events.tier, events.removed)
        self._store_keys(source, events.tier, events.stored)
        return True

    def told_up_to(self, worker: str, incarnation: str, number: int) -> None:
        """The worker says that `number` was its last event so far; what we have not seen of them we have missed."""
        source = self._sources.get(worker)
        if source is not None and source.incarnation == incarnation and number > source.number:
            self._forget(source)
            source.number, source.complete = number, False

    def incomplete(self) -> tuple[str, ...]:
        """Workers of whose cache some part is unknown since an event was lost."""
        return tuple(name for name, source in self._sources.items() if not source.complete)

    def match(
        self, keys: Sequence[bytes], *, tier: str | None = DEVICE, underway: Mapping[bytes, int] | None = None
    ) -> dict[str, int]:
        """Leading keys held (or underway), by worker; a worker that lacks the first one is left out. `tier` None: each
        of them in any."""
        table, *others = self._tables(tier, underway)
        found: dict[str, int] = {}
        alive = self._slots.all()
        for depth, key in enumerate(keys):
            held = table.get(key, 0)
            for other in others:
                held |= other.get(key, 0)
            still = alive & held
            if still != alive and depth:
                found.update(dict.fromkeys(self._slots.names(alive & ~still), depth))
            alive = still
            if not alive:
                return found
        if keys:
            found.update(dict.fromkeys(self._slots.names(alive), len(keys)))
        return found

    def _tables(self, tier: str | None, underway: Mapping[bytes, int] | None) -> list[Mapping[bytes, int]]:
        """At least one, and after the first none that is empty."""
        lower = [table for name, table in self._tiers.items() if name != DEVICE] if tier is None else []
        return [self._tiers.get(tier or DEVICE, {}), *(table for table in (*lower, underway) if table)]

    def has_lower_tiers(self) -> bool:
        """Whether anything is known to lie in one."""
        return any(table for tier, table in self._tiers.items() if tier != DEVICE)

    def held(self, worker: str, tier: str = DEVICE) -> int:
        """How many keys this worker is known to hold."""
        source = self._sources.get(worker)
        return len(source.keys.get(tier, ())) if source else 0

    def check(self) -> None:
        """The table and the workers' own sets tell the same. Raises AssertionError with the difference."""
        for tier, table in self._tiers.items():
            told: dict[bytes, int] = {}
            for source in self._sources.values():
                for key in source.keys.get(tier, ()):
                    told[key] = told.get(key, 0) | source.bit
            assert told == table, f"tier {tier}: {len(table)} keys in the table, {len(told)} told by workers"

    def _store_keys(self, source: _Source, tier: str, keys: Iterable[bytes]) -> None:
        table, mine = self._tiers.setdefault(tier, {}), source.keys.setdefault(tier, set())
        for key in keys:
            mine.add(key)
            table[key] = table.get(key, 0) | source.bit

    def _remove_keys(self, source: _Source, tier: str, keys: Iterable[bytes]) -> None:
        table, mine = self._tiers.setdefault(tier, {}), source.keys.setdefault(tier, set())
        for key in keys:
            if key not in mine:
                continue
            mine.discard(key)
            rest = table[key] & ~source.bit
            if rest:
                table[key] = rest
            else:
                del table[key]

    def _forget(self, source: _Source) -> None:
        for tier, keys in source.keys.items():
            self._remove_keys(source, tier, tuple(keys))


class Underway:
    """Keys that dispatched requests are about to compute, counted, since several may share a prefix."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._counts: dict[tuple[str, bytes], int] = {}
        self.masks: dict[bytes, int] = {}

    def add(self, worker: str, keys: Iterable[bytes]) -> None:
        bit = self._slots.bit(worker)
        for key in keys:
            self._counts[worker, key] = self._counts.get((worker, key), 0) + 1
            self.masks[key] = self.masks.get(key, 0) | bit

    def remove(self, worker: str, keys: Iterable[bytes]) -> None:
        """Exactly what was added before; more raises KeyError."""
        bit = self._slots.bit(worker)
        for key in keys:
            left = self._counts[worker, key] - 1
            if left:
                self._counts[worker, key] = left
                continue
            del self._counts[worker, key]
            rest = self.masks[key] & ~bit
            if rest:
                self.masks[key] = rest
            else:
                del self.masks[key]

    def __len__(self) -> int:
        return len(self._counts)


def tokens_of(granules: int, prompt_tokens: int) -> int:
    """Prompt tokens covered by so many leading keys."""
    return min(granules * GRANULE, prompt_tokens)
