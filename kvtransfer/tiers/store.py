"""The two tiers as one store: what is put in goes to the host tier, what is full there moves to disk, and a load
brings blocks back from wherever they are.

    put ─▶ host ─(above the high watermark, written behind)─▶ disk ─▶ forgotten
    open ─▶ deliver, deliver, … (in order, as they arrive) ─▶ close

A load keeps its host entries from being evicted, and reads its disk blocks into a few staging buffers, ahead of
delivery, so that the disk and whoever takes the blocks work at the same time. It ends when all is delivered, or at the
first block that fails. A read that ends after its load was closed gives its staging buffer back and nothing else: it
never held anybody's memory. Single-threaded but for the disk tier's own thread.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtransfer.tiers import disk as disk_tier
from kvtransfer.tiers import host as host_tier
from kvtransfer.tiers.block_file import MOST_KEY_BYTES
from kvtransfer.tiers.complaints import Complaints
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.faults import TierFaults
from kvtransfer.tiers.host import Entry, HostTier
from kvtransfer.tiers.io_thread import Io, IoThread
from kvtransfer.tiers.types import TierCounters, TierSettings

HIGH, LOW = 0.9, 0.8
"""Shares of the host tier: above the first, its coldest blocks are written to disk until it is at the second."""
STAGING_BLOCKS = 16
SPILLED_TOGETHER = 64
EXPECTED_BLOCKS = 8
"""How far ahead of a read the system is told what will be read."""

TierChanges = tuple[list[bytes], list[bytes]]
"""Keys stored and removed."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Load:
    """`entries` are host blocks (acquired), `staged` the buffers with disk blocks that have arrived, by index."""

    keys: tuple[bytes, ...]
    deadline_s: float
    entries: dict[int, Entry]
    wanted: list[int]
    """Indexes still to be read from disk."""
    staged: dict[int, int] = field(default_factory=dict)
    reads: int = 0
    delivered: int = 0
    failed: set[int] = field(default_factory=set)
    closed: bool = False

    @property
    def ended(self) -> bool:
        return self.delivered == len(self.keys) or self.delivered in self.failed


class TierStore:
    """Blocks of `block_bytes` each, under byte keys. `fingerprint` says what they are: what another one wrote to disk
    is never served. `wake` is called from the I/O thread when `poll` has something to take in."""

    def __init__(
        self,
        block_bytes: int,
        settings: TierSettings,
        *,
        fingerprint: str,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
        make_io: Callable[[], Io] | None = None,
        faults: TierFaults | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self.settings = settings
        self.faults = faults or TierFaults()
        """Test-only."""
        self._clock = clock
        self._host = HostTier(settings.host_bytes, block_bytes)
        self._disk: DiskTier | None = None
        if settings.disk_path is not None:
            self._disk = DiskTier(
                Path(settings.disk_path),
                settings.disk_bytes,
                block_bytes,
                fingerprint,
                make_io=make_io or (lambda: IoThread(clock, wake)),
                clock=clock,
                timeout_s=settings.io_timeout_s,
                fsync=settings.fsync,
                faults=self.faults,
                changed=self._note,
                elsewhere=self._host.__contains__,
            )
        staging = STAGING_BLOCKS if self._disk is not None else 0
        self._staging = memoryview(mmap.mmap(-1, max(1, staging * block_bytes)))
        self._free_staging = list(range(staging))
        self._loads: dict[int, _Load] = {}
        self._load_number = 0
        self._spilling: dict[bytes, Entry] = {}
        self._dirty: set[bytes] = set()
        self._known: dict[bytes, str] = {}
        """The tier of each key, as it was told last."""
        self._complaints = Complaints(_log, clock)
        self.poll(clock())

    # -- what others ask -----------------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._host or (self._disk is not None and self._disk.has(key))

    def where(self, keys: Iterable[bytes]) -> tuple[str, ...]:
        """The tier of each leading key that can be loaded now."""
        found = []
        for key in keys:
            if key in self._host:
                found.append(host_tier.NAME)
            elif self._disk is not None and key in self._disk:
                found.append(disk_tier.NAME)
            else:
                break
        return tuple(found)

    def counters(self) -> tuple[TierCounters, ...]:
        self._host.counters.used_bytes = self._host.used * self.block_bytes
        tiers = [self._host.counters] if self._host.slots else []
        return (*tiers, *([self._disk.counters] if self._disk is not None else []))

    def drain_changes(self) -> dict[str, TierChanges]:
        """What each tier holds now and did not at the last call, and the other way round; a key counts for the first
        tier that has it, and one that went to disk is told by both. Tiers without changes are left out."""
        changes: dict[str, TierChanges] = {}
        for key in self._dirty:
            before, now = self._known.pop(key, None), self._tier_of(key)
            if now is not None:
                self._known[key] = now
            if before != now:
                for tier, side in ((now, 0), (before, 1)):
                    if tier is not None:
                        changes.setdefault(tier, ([], []))[side].append(key)
        self._dirty.clear()
        return changes

    # -- in ------------------------------------------------------------------------------------------------------

    def put(self, key: bytes, data: memoryview) -> bool:
        """Copy a block in before returning; False when there is no room. ValueError for another size, or for a key of
        more bytes than a file's header holds."""
        if len(data) != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {len(data)}")
        if not 0 < len(key) <= MOST_KEY_BYTES:
            raise ValueError(f"a key has 1 to {MOST_KEY_BYTES} bytes, not {len(key)}")
        try:
            corrupt = self.faults.rules and self.faults.pass_through("put")
        except OSError as error:
            self._host_failed(str(error))
            return False
        if self._disk is not None and self._host.full:
            self._disk.poll(self._clock())  # Writes that have ended make room that costs nobody anything.
        stored, victim = self._host.put(key, data)
        if stored and corrupt:
            entry = self._host.acquire(key)
            self._host.view(entry)[0] ^= 0xFF
            self._host.release(entry)
        self._note(key)
        if victim is not None:
            self._host.counters.dropped += victim not in self
            self._note(victim)
        self._spill()
        return stored

    def touch(self, key: bytes) -> None:
        """It was just used elsewhere: keep it longer."""
        self._host.touch(key)
        if self._disk is not None:
            self._disk.touch(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Never serve these again, nor to loads that wait for them."""
        for key in keys:
            for load in self._loads.values():
                load.failed.update(index for index in range(load.delivered, len(load.keys)) if load.keys[index] == key)
            self._host.forget(key)
            if self._disk is not None:
                self._disk.forget(key)
            self._note(key)

    def clear(self) -> None:
        """Forget everything; loads end where they are."""
        for load in self._loads.values():
            load.failed.update(range(load.delivered, len(load.keys)))
        keys = self._host.keys()
        for key in keys:
            self._host.forget(key)
        if self._disk is not None:
            self._disk.clear()
        self._dirty.update(keys)

    # -- out -----------------------------------------------------------------------------------------------------

    def open(self, keys: Sequence[bytes], deadline_s: float) -> int:
        """Begin to load the blocks of these keys; the number of the load. A key that is gone ends it there."""
        self._load_number += 1
        entries: dict[int, Entry] = {}
        wanted: list[int] = []
        load = _Load(tuple(keys), deadline_s, entries, wanted)
        for index, key in enumerate(load.keys):
            if key in self._host:
                entries[index] = self._host.acquire(key)
            elif self._disk is not None and key in self._disk:
                wanted.append(index)
            else:
                load.failed.add(index)
                break
        self._loads[self._load_number] = load
        self._read_ahead()
        return self._load_number

    def deliver(self, number: int, write: Callable[[int, memoryview], None], most: int) -> int:
        """Hand over up to `most` blocks that are there, in order, as `write(index, bytes)`; how many."""
        load = self._loads[number]
        done = 0
        while done < most and not load.ended:
            index = load.delivered
            if index in load.entries:
                if not self._from_host(load, index, write):
                    break
            elif index in load.staged:
                self._from_disk(load, index, write)
            else:
                break
            load.delivered += 1
            done += 1
        self._read_ahead()
        return done

    def delivered(self, number: int) -> int:
        return self._loads[number].delivered

    def ended(self, number: int) -> bool:
        """Whether nothing more will come: all was delivered, or the next block failed."""
        return self._loads[number].ended

    def ready(self, number: int) -> bool:
        """Whether `deliver` would do something, or the load has ended."""
        load = self._loads[number]
        return load.ended or load.delivered in load.entries or load.delivered in load.staged

    def close(self, number: int) -> None:
        """Done with it, whatever is still under way."""
        load = self._loads.pop(number)
        load.closed = True
        for entry in load.entries.values():
            self._host.release(entry)
        self._free_staging.extend(load.staged.values())
        for index in range(load.delivered, len(load.keys)):
            counters = self._host.counters if index in load.entries or self._disk is None else self._disk.counters
            counters.misses += 1
        load.entries.clear()
        load.staged.clear()
        self._read_ahead()

    # -- time ----------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Take in what the disk has done."""
        if self._disk is not None:
            self._disk.poll(now)
            self._read_ahead()

    def shutdown(self) -> None:
        """End the I/O thread. What is on disk stays for the next start."""
        if self._disk is not None:
            self._disk.close()

    def busy(self) -> bool:
        """Whether the disk has anything under way."""
        return self._disk is not None and self._disk.busy

    def check(self) -> None:
        """Bounds and books of both tiers. Raises AssertionError."""
        self._host.check()
        assert len(self._free_staging) == len(set(self._free_staging)), "a staging buffer is free twice"
        if self._disk is not None:
            self._disk.check()
            if not self._disk.busy and not self._loads:
                assert len(self._free_staging) == STAGING_BLOCKS, "staging buffers are lost"
                assert not self._spilling, "an entry is on its way to disk and nothing is under way"

    # -- inside --------------------------------------------------------------------------------------------------

    def _from_host(self, load: _Load, index: int, write: Callable[[int, memoryview], None]) -> bool:
        entry = load.entries.pop(index)
        started_s = time.perf_counter()
        data = self._host.verified(entry)
        if data is None:
            load.failed.add(index)
            self._note(entry.key)
            self._complaints.say("host", "a block in host memory is not what was put there, it is computed instead")
        else:
            write(index, data)
            self._host.hit(entry)
            _count_hit(self._host.counters, self.block_bytes, time.perf_counter() - started_s)
        self._host.release(entry)
        return data is not None

    def _from_disk(self, load: _Load, index: int, write: Callable[[int, memoryview], None]) -> None:
        assert self._disk is not None
        buffer = load.staged.pop(index)
        started_s = time.perf_counter()
        write(index, self._buffer(buffer))
        _count_hit(self._disk.counters, self.block_bytes, time.perf_counter() - started_s)
        self._free_staging.append(buffer)

    def _read_ahead(self) -> None:
        """Give free staging buffers to loads that wait for the disk, the oldest first."""
        for load in self._loads.values():
            while load.wanted and self._free_staging and not load.ended and self._disk is not None:
                self._read(load, self._free_staging.pop())

    def _read(self, load: _Load, buffer: int) -> None:
        assert self._disk is not None
        index, *later = load.wanted[: 1 + EXPECTED_BLOCKS]
        del load.wanted[0]
        if load.reads:
            later = later[EXPECTED_BLOCKS - 1 :]
        load.reads += 1

        def done(arrived: bool) -> None:
            if load.closed or not arrived:
                self._free_staging.append(buffer)
                load.failed.add(index)
                load.wanted.clear()
            else:
                load.staged[index] = buffer

        self._disk.read(
            load.keys[index], self._buffer(buffer), load.deadline_s, done, next_keys=[load.keys[i] for i in later]
        )

    def _buffer(self, number: int) -> memoryview:
        return self._staging[number * self.block_bytes : (number + 1) * self.block_bytes]

    def _spill(self) -> None:
        """Above the high watermark, write the coldest to disk until, once that is done, the low one is reached."""
        disk, host = self._disk, self._host
        if disk is None or host.used <= HIGH * host.slots:
            return
        for entry in host.coldest(SPILLED_TOGETHER):
            if host.used - len(self._spilling) <= LOW * host.slots or not disk.takes_writes:
                return
            if disk.has(entry.key):
                host.evict(entry)
                self._note(entry.key)
            else:
                self._write_behind(disk, entry)

    def _write_behind(self, disk: DiskTier, entry: Entry) -> None:
        key = entry.key
        self._host.acquire(key)
        entry.leaving = True
        self._spilling[key] = entry

        def done(written: bool) -> None:
            del self._spilling[key]
            self._host.release(entry)
            if written and entry.leaving and self._host.used > LOW * self._host.slots:
                self._host.evict(entry)
                self._note(key)
            entry.leaving = False

        if not disk.write(key, self._host.view(entry), entry.checksum, done):
            done(False)

    def _tier_of(self, key: bytes) -> str | None:
        if key in self._host:
            return host_tier.NAME
        return disk_tier.NAME if self._disk is not None and self._disk.has(key) else None

    def _note(self, key: bytes) -> None:
        self._dirty.add(key)

    def _host_failed(self, why: str) -> None:
        self._host.counters.failed += 1
        self._complaints.say("put", f"a block could not be kept in host memory: {why}")


def _count_hit(counters: TierCounters, size: int, seconds: float) -> None:
    counters.hits += 1
    counters.loaded_bytes += size
    counters.load_seconds += seconds
