"""One I/O thread for all links of a transport: sockets, calls from other threads, and a last look before it sleeps.

The thread blocks in the selector and costs nothing while nothing happens. `before_sleep` hooks exist for libraries with
their own progress (UCX): a hook does its work and says whether the thread may block.

It gives way: where a decode step wants the same core, it is the step that a reader waits for (`NICER`).

Waking a thread costs more than a short piece of work. So the loop's state belongs to whoever holds its turn: the
thread, but for the time that it sleeps in the selector, when `call_here` lets the caller do the work itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
NICER = 10
"""How much nicer than its process the thread is (Linux): a core that is wanted by both gives it a tenth. Owners should
also let Python switch threads after less than its 5 ms, or an owner waits so long for the interpreter. On 2 cores, with
a source at full rate and a decode loop of 15 ms a step, the 99th percentile rose with both by 4 and 10 % over shm, by
6 and 15 % over ucx, by 29 and 49 % over tcp (two runs); with neither by 18, 20 and 76 % (one run); with one of them by
more than with both."""


class HasFileno(Protocol):
    """What a selector can watch."""

    def fileno(self) -> int: ...


class IoLoop:
    """A selector on a thread. `call` and `call_here` work from any thread; everything else only within the turn."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], object]] = deque()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, self._woken)
        self._hooks: list[Callable[[], bool]] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._running = True
        self._turn = threading.Lock()
        self._asleep_knows = True
        """Nothing was added that a sleeping thread has to look at."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; call once."""
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Run it soon on the loop's thread."""
        self._calls.append(function)
        self._wake_thread()

    def call_here(self, function: Callable[[], object]) -> None:
        """Run it at once on this thread if the loop sleeps and nothing waits, else as `call` does."""
        if not self._turn.acquire(blocking=False):
            self.call(function)
            return
        try:
            if self._calls or not self._thread.is_alive():
                self._calls.append(function)
                self._asleep_knows = False
            else:
                self._guard(function)
        finally:
            knows, self._asleep_knows = self._asleep_knows, True
            self._turn.release()
        if not knows:
            self._wake_thread()

    def stop(self, last: Callable[[], None]) -> None:
        """Run `last` on the loop, then end its thread and wait for that. Idempotent."""
        if not self._running:
            return

        def finish() -> None:
            last()
            self._running = False

        self.call(finish)
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the thread {self._thread.name} did not end within {_STOP_TIMEOUT_S} s")
        self._selector.close()
        self._bell.close()
        self._ring.close()

    def watch(self, source: HasFileno | int, events: int, callback: Callable[[int], None]) -> None:
        """Call back with the ready events; a second `watch` of the same source replaces the first."""
        try:
            self._selector.modify(source, events, callback)
        except KeyError:
            self._selector.register(source, events, callback)

    def unwatch(self, source: HasFileno | int) -> None:
        """Forget a source; before it is closed."""
        self._selector.unregister(source)

    def before_sleep(self, hook: Callable[[], bool]) -> None:
        """Before each wait: `hook()` works and returns True if blocking is fine."""
        self._hooks.append(hook)
        self._asleep_knows = False

    def remove_hook(self, hook: Callable[[], bool]) -> None:
        """Undo `before_sleep`."""
        self._hooks.remove(hook)

    def after(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run it on the loop once `delay_s` has passed."""
        self._timers.append((time.monotonic() + delay_s, function))
        self._asleep_knows = False

    def _wake_thread(self) -> None:
        # A full pipe has rung already; a closed one has no thread to wake.
        with contextlib.suppress(OSError):
            self._ring.send(b"!")

    def _run(self) -> None:
        _give_way()
        self._turn.acquire()
        while self._running:
            may_sleep = [self._guard(hook) for hook in list(self._hooks)]
            timeout_s = self._timeout_s()  # after the hooks, which may set a timer
            if self._calls or False in may_sleep:
                timeout_s = 0.0
            self._asleep_knows = True
            self._turn.release()
            ready = self._selector.select(timeout_s)
            self._turn.acquire()
            for key, events in ready:
                self._guard(partial(key.data, events))
            while self._calls:
                self._guard(self._calls.popleft())
            self._run_timers()
        self._turn.release()

    def _run_timers(self) -> None:
        now = time.monotonic()
        due = [function for due_s, function in self._timers if due_s <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for function in due:
            self._guard(function)

    def _timeout_s(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(due_s for due_s, _ in self._timers) - time.monotonic())

    def _woken(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._bell.recv(4096)) == 4096:
                pass

    def _guard(self, function: Callable[[], Any]) -> Any:
        """A bug in one callback must not end the thread on which all links of this worker live."""
        try:
            return function()
        except Exception:
            logger.exception("a transfer callback failed")
            return None


def _give_way() -> None:
    """This thread alone, where threads have a niceness of their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own + NICER))
