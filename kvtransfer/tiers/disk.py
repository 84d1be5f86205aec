"""The disk tier: which keys are on disk, what is on its way there or back, and what to do when the disk fails.

    opening ─▶ open ─▶ (a failed write) resting ─▶ open        the thread's death: open, with a new thread, after a rest
       └▶ (cannot be opened) resting ─▶ opening                the folder's loss: opening, with nothing, after a rest

The index lives here and is changed by the owner's thread only; the I/O thread gets finished decisions (`block_file`)
and never touches memory that was given back: a job keeps its buffer until it has really ended, however late. While one
is overdue the disk is not asked for anything new, so that nobody queues behind a hung mount.

Room is made before it is needed: the files that a new one displaces are removed by its own job, first. One process
owns a folder at a time (`flock`); a killed owner's lock falls with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtransfer.tiers import block_file
from kvtransfer.tiers.complaints import Complaints
from kvtransfer.tiers.faults import TierFaults
from kvtransfer.tiers.io_thread import Io, Job
from kvtransfer.tiers.types import TierCounters

NAME = "disk"
LOCK = "lock"
MOST_WRITES = 32
"""Writes under way; more are refused, and the block stays where it is or is lost."""
REMOVED_TOGETHER = 256
_FIRST_REST_S, _LONGEST_REST_S = 0.5, 60.0

_log = logging.getLogger(__name__)

Done = Callable[[bool], None]
"""Called when a read or write has ended and its buffer is free again: whether it brought what it should."""


class Late(TimeoutError):
    """It ended after it was given up (and counted)."""


class Lost(OSError):
    """The folder is not the one that was opened: it was removed or moved, or something is mounted over it."""


class DiskTier:
    """At most `capacity_bytes` of files under `root`, of blocks of one size and one `fingerprint`.

    `changed` is told every key that came or went; `elsewhere` says whether a key that goes is kept without it.
    """

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        block_bytes: int,
        fingerprint: str,
        *,
        make_io: Callable[[], Io],
        clock: Callable[[], float],
        timeout_s: float,
        fsync: bool = False,
        faults: TierFaults | None = None,
        changed: Callable[[bytes], None] = lambda key: None,
        elsewhere: Callable[[bytes], bool] = lambda key: False,
    ) -> None:
        self.counters = TierCounters(NAME, capacity_bytes=capacity_bytes)
        self.faults = faults or TierFaults()
        self._root = root
        self._block_bytes = block_bytes
        self._file_bytes = block_file.HEADER_BYTES + block_bytes
        self._most_files = capacity_bytes // self._file_bytes
        self._fingerprint = block_file.digest_of(fingerprint)
        self._make_io = make_io
        self._io = make_io()
        self._clock = clock
        self._timeout_s = timeout_s
        self._fsync = fsync
        self._changed = changed
        self._elsewhere = elsewhere
        self._complaints = Complaints(_log, clock)
        self._index: OrderedDict[bytes, None] = OrderedDict()
        self._writing: set[bytes] = set()
        self._unwanted: set[bytes] = set()
        """Being written, and forgotten meanwhile."""
        self._jobs: dict[Job, None] = {}
        self._late = 0
        self._lock: int | None = None
        self._open = False
        self._rest_until_s = clock()
        self._rest_s = _FIRST_REST_S
        self._closed = False

    # -- what others ask -----------------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        """Whether a read could bring it now."""
        return key in self._index and self.answering

    def has(self, key: bytes) -> bool:
        """Whether it is on disk or on its way, answering or not."""
        return key in self._index or key in self._writing

    def __len__(self) -> int:
        return len(self._index)

    @property
    def answering(self) -> bool:
        return self._open and self._io.alive and not self._late

    @property
    def takes_writes(self) -> bool:
        room = len(self._writing) < min(MOST_WRITES, self._most_files)
        return room and self.answering and self._clock() >= self._rest_until_s

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    # -- in, out -------------------------------------------------------------------------------------------------

    def write(self, key: bytes, data: memoryview, digest: int, done: Done) -> bool:
        """Begin to write a block; False when the disk takes none now (then `done` is not called). `data` must stay as
        it is until `done`."""
        if not self.takes_writes or self.has(key):
            return False
        victims = self._make_room()
        self._writing.add(key)

        def work() -> None:
            self._check_folder()
            for victim in victims:
                block_file.remove(self._root, victim)
            corrupt = self.faults.pass_through("write")
            block_file.write(
                self._root, key, data, digest ^ 1 if corrupt else digest, self._fingerprint, fsync=self._fsync
            )

        def ended(error: Exception | None) -> None:
            self._writing.discard(key)
            if error is not None:  # It may never have begun: what it was to remove goes all the same.
                self._leave([victim for victim in victims if not self.has(victim)])
            self._wrote(key, error)
            done(error is None)

        self._submit(Job(work, self._clock() + self._timeout_s, ended))
        return True

    def read(
        self, key: bytes, into: memoryview, deadline_s: float, done: Done, *, next_keys: Sequence[bytes] = ()
    ) -> None:
        """Begin to fill `into`, which is the reader's again with `done`. `next_keys` will be asked for soon."""
        took_s = [0.0]

        def work() -> None:
            started_s = time.perf_counter()
            corrupt = self.faults.pass_through("read")
            for later in next_keys:
                block_file.expect(self._root, later)
            block_file.read(self._root, key, into, self._fingerprint)
            if corrupt:
                raise block_file.Damaged("was corrupted on purpose")
            block_file.note_use(self._root, key)
            took_s[0] = time.perf_counter() - started_s

        def ended(error: Exception | None) -> None:
            self.counters.load_seconds += took_s[0]
            self._read(key, error)
            done(error is None)

        self._submit(Job(work, min(deadline_s, self._clock() + self._timeout_s), ended, urgent=True))

    def touch(self, key: bytes) -> None:
        if key in self._index:
            self._index.move_to_end(key)

    def forget(self, key: bytes) -> None:
        """Never serve it again."""
        if key in self._writing:
            self._unwanted.add(key)
        if key in self._index:
            self._leave([key])

    def clear(self) -> None:
        self._unwanted |= self._writing
        self._leave(list(self._index))

    def poll(self, now: float) -> None:
        """Take in what has ended, give up what is late, try again what has rested."""
        for job in self._io.ended():
            if job in self._jobs:
                self._over(job, Late() if job.late else job.error)
        for job in self._jobs:
            if not job.late and now >= job.deadline_s:
                job.late = True
                self._late += 1
                self._failed("late", f"the disk under {self._root} has not answered in time")
        if self._closed:
            return
        if not self._io.alive:
            self._bury(now)
        if not self._open and not self._jobs and now >= self._rest_until_s:
            self._begin_open()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread and let the folder go. Files stay for the next owner."""
        self._closed = True
        self._io.close(timeout_s)
        self._open = False
        if self._lock is not None and not self._io.alive:
            os.close(self._lock)
            self._lock = None

    def check(self) -> None:
        """Bounds and books. Raises AssertionError."""
        files = len(self._index.keys() | self._writing)
        assert files <= self._most_files, f"{files} files, {self._most_files} allowed"
        assert not self._index.keys() & self._writing, "a key is on disk and on its way there"
        assert self._unwanted <= self._writing, "a key is unwanted that nobody writes"

    # -- inside --------------------------------------------------------------------------------------------------

    def _submit(self, job: Job) -> None:
        self._jobs[job] = None
        self._io.submit(job)

    def _over(self, job: Job, error: Exception | None) -> None:
        del self._jobs[job]
        self._late -= job.late
        job.done(error)

    def _make_room(self) -> list[bytes]:
        victims = []
        while self._index and len(self._index) + len(self._writing) >= self._most_files:
            victim, _ = self._index.popitem(last=False)
            victims.append(victim)
            self._changed(victim)
        self._evicted(victims)
        self._count()
        return victims

    def _wrote(self, key: bytes, error: Exception | None) -> None:
        unwanted = key in self._unwanted
        self._unwanted.discard(key)
        if error is not None:
            if not isinstance(error, Late):
                self._failed("write", f"a block could not be written under {self._root}: {error}")
            self._rest()
            self._changed(key)
            self._leave([key])
            if isinstance(error, Lost):
                self._let_go()
            return
        self._rest_s = _FIRST_REST_S
        self.counters.stored += 1
        self.counters.stored_bytes += self._block_bytes
        self._index[key] = None
        self._changed(key)
        self._count()
        if unwanted:
            self._leave([key])

    def _read(self, key: bytes, error: Exception | None) -> None:
        if error is None:
            self.touch(key)
            return
        if not isinstance(error, TimeoutError):
            self._leave([key])
        if not isinstance(error, Late):
            self._failed("read", f"a block could not be read under {self._root}, it is computed instead: {error}")

    def _leave(self, keys: list[bytes]) -> None:
        """Out of the index, and their files away as soon as the thread comes to it."""
        for key in keys:
            if key in self._index:
                del self._index[key]
                self._changed(key)
        self._count()
        for begin in range(0, len(keys), REMOVED_TOGETHER):
            self._submit(self._removal(keys[begin : begin + REMOVED_TOGETHER]))

    def _removal(self, keys: list[bytes]) -> Job:
        def work() -> None:
            for key in keys:
                block_file.remove(self._root, key)

        # Late or not: a file that stays is taken in by nobody but the next scan.
        return Job(work, float("inf"), lambda error: None, urgent=True, lasting=True)

    def _begin_open(self) -> None:
        found: list[bytes] = []

        def work() -> None:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = _locked(self._root / LOCK)
            found[:] = block_file.scan(self._root, self._block_bytes, self._fingerprint)

        def ended(error: Exception | None) -> None:
            if error is not None:
                meanwhile = "KV is kept in host memory alone and it is tried again"
                self._failed("open", f"the disk tier under {self._root} cannot be opened, {meanwhile}: {error}")
                self._rest()
                return
            self._open = True
            self._rest_s = _FIRST_REST_S
            surplus = found[: max(0, len(found) - self._most_files)]
            for key in found[len(surplus) :]:
                self._index[key] = None
                self._changed(key)
            self._count()
            self._evicted(surplus)
            self._leave(surplus)

        self._submit(Job(work, float("inf"), ended, lasting=True))

    def _check_folder(self) -> None:
        """Whether the lock that is held is the folder's. Raises Lost."""
        try:
            if self._lock is not None and os.path.samestat(os.fstat(self._lock), os.stat(self._root / LOCK)):
                return
        except OSError as error:
            raise Lost(error.errno, f"the folder is gone ({error.strerror})") from error
        raise Lost(errno.ESTALE, "the folder is not the one that was opened")

    def _let_go(self) -> None:
        """Forget the lost folder with all that was in it; whatever stands in its place is opened after the rest."""
        self._open = False
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        keys, self._index = list(self._index), OrderedDict()
        for key in keys:
            self._changed(key)
        self._count()

    def _bury(self, now: float) -> None:
        """The thread is gone: what it had not ended has failed, and another takes its place after a rest."""
        lost = [job for job in self._jobs if not job.lasting]
        if lost:
            self._failed("thread", f"the disk tier's thread under {self._root} died")
            self._rest()
        for job in lost:
            self._over(job, Late() if job.late else TimeoutError("the thread died"))
        if now >= self._rest_until_s:
            self._io = self._make_io()
            for job in self._jobs:
                self._io.submit(job)

    def _rest(self) -> None:
        if self._clock() < self._rest_until_s:
            return  # Failures that come together are one reason to rest.
        self._rest_until_s = self._clock() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)

    def _failed(self, kind: str, message: str) -> None:
        self.counters.failed += 1
        self._complaints.say(kind, message)

    def _evicted(self, keys: list[bytes]) -> None:
        self.counters.evicted += len(keys)
        self.counters.dropped += sum(not self._elsewhere(key) for key in keys)

    def _count(self) -> None:
        self.counters.used_bytes = len(self._index) * self._file_bytes


def _locked(path: Path) -> int:
    """A descriptor that holds the folder's lock. Raises OSError when another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise OSError(error.errno, "another process uses this folder") from error
        raise
    return descriptor
