"""Who waits for the disk, so that the owner of the tier does not.

Jobs are functions; urgent ones (reads) go first. A job that raises ends with its error, one whose deadline passed in
the queue is not begun, and all come back through `ended`. Should the thread itself die, `alive` says so: what it had
not ended it will never touch again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.tiers.faults import ThreadKilled


@dataclass(slots=True, eq=False)
class Job:
    """`work` is called once, on the I/O thread, unless `deadline_s` passed before. `done` is called by the owner."""

    work: Callable[[], None]
    deadline_s: float
    done: Callable[[Exception | None], None]
    urgent: bool = False
    lasting: bool = False
    """To be done again by another thread should this one die."""
    error: Exception | None = None
    late: bool = False
    """The owner gave it up; it may still be running."""


class Io(Protocol):
    """Runs jobs in the background, or pretends to."""

    @property
    def alive(self) -> bool: ...

    def submit(self, job: Job) -> None: ...

    def ended(self) -> list[Job]:
        """Jobs that ended since the last call, in the order in which they ended."""
        ...

    def close(self, timeout_s: float) -> None:
        """No more jobs. Waits for the one that is running, but not longer than this."""
        ...


def carry_out(job: Job, now: float) -> None:
    """One job, its error kept."""
    try:
        if now >= job.deadline_s:
            raise TimeoutError("its deadline passed in the queue")
        job.work()
    except Exception as error:  # Whatever a file system can raise: the owner counts it as a miss.
        job.error = error


class Inline:
    """Runs each job where it is submitted; for tests, and for those who have a thread of their own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.alive = True
        self._clock = clock
        self._ended: list[Job] = []

    def submit(self, job: Job) -> None:
        carry_out(job, self._clock())
        self._ended.append(job)

    def ended(self) -> list[Job]:
        ended, self._ended = self._ended, []
        return ended

    def close(self, timeout_s: float) -> None:
        self.alive = False


class IoThread:
    """One daemon thread; `wake` is called on it after each job."""

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock = clock
        self._wake = wake
        self._urgent: deque[Job] = deque()
        self._patient: deque[Job] = deque()
        self._finished: deque[Job] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-tier-io", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        with self._changed:
            (self._urgent if job.urgent else self._patient).append(job)
            self._changed.notify()

    def ended(self) -> list[Job]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                carry_out(job, self._clock())
                self._finished.append(job)
                self._wake()
        except ThreadKilled:
            self._wake()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._closed:
                for queue in (self._urgent, self._patient):
                    if queue:
                        return queue.popleft()
                self._changed.wait()
        return None
