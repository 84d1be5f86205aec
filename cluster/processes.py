"""Processes of this machine by number, from /proc: who descends from whom, and waiting until they are gone.

A process is named by its id and its start time together: ids are given out again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """`started_ticks`: the kernel's ticks since boot."""

    pid: int
    started_ticks: int

    def alive(self) -> bool:
        return start_ticks(self.pid) == self.started_ticks

    def send(self, number: signal.Signals) -> None:
        """Does nothing when it is gone."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def this_process() -> Process:
    return Process(os.getpid(), start_ticks(os.getpid()) or 0)


def start_ticks(pid: int) -> int | None:
    """When the process started; None when there is no such process, or only its remains."""
    found = _stat(pid)
    return None if found is None or found[0] in "ZX" else int(found[19])


def descendants(pid: int) -> tuple[Process, ...]:
    """Children, their children, and so on, parents first."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _stat(int(entry.name))) is not None:
            children.setdefault(int(found[1]), []).append(Process(int(entry.name), int(found[19])))
    family: list[Process] = []
    queue = [pid]
    while queue:
        born = children.get(queue.pop(0), [])
        family += born
        queue += [child.pid for child in born]
    return tuple(family)


def kill_family(process: Process) -> None:
    """SIGKILL to the process and its descendants; stopped ones die of it, too."""
    if process.alive():
        for member in (process, *descendants(process.pid)):
            member.send(signal.SIGKILL)


def end(processes: Iterable[Process], *, grace_s: float) -> tuple[Process, ...]:
    """Wait for processes that have been told to end; kill and return those that have not within `grace_s`."""
    stubborn = _wait(processes, time.monotonic() + grace_s)
    for process in stubborn:
        process.send(signal.SIGKILL)
    _wait(stubborn, time.monotonic() + grace_s)
    return stubborn


def _wait(processes: Iterable[Process], deadline_s: float) -> tuple[Process, ...]:
    return tuple(process for process in processes if not _gone_by(process, deadline_s))


def _gone_by(process: Process, deadline_s: float) -> bool:
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not process.alive():
            return True
        wait_ms = max(0.0, deadline_s - time.monotonic()) * 1000
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        return bool(poller.poll(wait_ms))
    finally:
        os.close(handle)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
