"""One I/O thread for all links of a transport: sockets, calls from other threads, and a last look before it sleeps.

The thread blocks in the selector and costs nothing while nothing happens. `before_sleep` hooks exist for libraries with
their own progress (UCX): a hook does its work and says whether the thread may block.

It gives way: where a decode step wants the same core, it is the step that a reader waits for (`NICER`, `SLICE_S`,
`REST`).

Waking a thread costs more than a short piece of work. So the loop's state belongs to whoever holds its turn: the
thread, but for the time that it sleeps in the selector or waits for a core, when `call_here` and `turn_here` let the
caller do the work itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kvtransfer.lingering import LINGER_S, Lingering

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
GENTLE_BYTES = 256 * 1024
"""Of payload in one turn while its owner works: what is small goes at once, and bulk takes no long turn, which a kernel
may not interrupt."""
NICER = 5
"""How much nicer than its process the thread is (Linux): of a core that both want it has a quarter. Nicer is no better:
with 10 a thread that has copied waits for tens of milliseconds, the messages of a small push with it, and a request
that moves over ucx pauses for 1.5 steps, in the worst of 16 moves for 2.7, instead of 0.8 and 1.6; with 2 a step beside
tcp at full rate takes twice as long. Owners should also let Python switch threads after less than its 5 ms, or an owner
waits so long for the interpreter."""
SLICE_S = 0.0001
"""After so long at work the thread offers its core to whoever waits, and for so long it may keep one (Linux 6.12;
before, the kernel's choice): a step loses no whole turn of the kernel's, and a short message does not wait for one."""
REST, MAX_REST_S = 0.5, 0.001
"""While its owner works on this machine's cores and memory the thread rests after a turn longer than a slice, for this
part of it: what it moves comes and goes through the memory that a step reads the model from. Longer rests cost those
who wait for little: with 2.0 and 5 ms a step beside tcp at full rate takes 1.12 to 1.28 times as long in the p99
instead of 1.18 to 1.34, but of the moves over tcp one in ten pauses for more than two steps instead of one in fifty."""


Timer = tuple[float, Callable[[], None]]
"""When, in seconds of the machine's clock, and what."""


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
        self._alarm = selectors.DefaultSelector()
        """What the thread sleeps in: the bell, and the selector unless somebody else looks at that one."""
        self._alarm.register(self._bell, selectors.EVENT_READ)
        self._alarm.register(self._selector, selectors.EVENT_READ)
        self._hooks: list[Callable[[], bool]] = []
        self._timers: list[Timer] = []
        self._afterwards: dict[Callable[[], None], None] = {}
        self._running = True
        self._turn = threading.Lock()
        self._asleep_knows = True
        """Nothing was added that a sleeping thread has to look at."""
        self._hooks_wait = False
        """A hook that was asked outside the thread has more to do."""
        self.owner_works = False
        """Set by the owner: see `REST`."""
        self._lingering = Lingering()
        self._lingers_until_s = 0.0
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
                self._run_afterwards()
        finally:
            self._give_back()

    def turn_here(self, but: Callable[[], None]) -> None:
        """Do what is ready on this thread, if the loop's own has not come to it: where cores are scarce that one may
        wait for longer than a decode step. Of what was asked for `afterwards` all `but` one is done."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._thread.is_alive() and not self._calls:
                self._look(but)
        finally:
            self._give_back()

    def _look(self, but: Callable[[], None]) -> None:
        ready = self._selector.select(0)
        if ready or self._hooks_wait:
            self._handle(ready)
            self._hooks_wait = not self._hooks_done()
            self._afterwards.pop(but, None)
            self._run_afterwards()

    def linger(self, until: Callable[[], bool], but: Callable[[], None]) -> None:
        """Look on this thread until `until()`, behind whoever wants the core, while the loop's own thread sleeps on:
        for moments only. `but` is that of `turn_here`."""
        while not self._turn.acquire(blocking=False):  # the loop's own thread is about to tell, or to sleep
            if until():
                return
            yield_core()
        try:
            self._alarm.modify(self._selector, 0)
            self._hooks_wait = True  # the thread may have been about to ask them once more
            while not until() and self._thread.is_alive() and not self._calls:
                yield_core()
                self._look(but)
        finally:
            self._alarm.modify(self._selector, selectors.EVENT_READ)
            self._give_back()

    def is_owners_turn(self) -> bool:
        """Whether a thread that has a step to do has this turn."""
        return self.owner_works and threading.current_thread() is not self._thread

    def at_most(self, num_bytes: int) -> int:
        """Of payload to be moved in this turn, of so much that it may be when the owner rests."""
        return min(num_bytes, GENTLE_BYTES) if self.owner_works else num_bytes

    def more_is_likely(self) -> None:
        """Before it sleeps next, the thread looks for a while whether there is news."""
        if not self._lingering.spared():
            self._lingers_until_s = time.monotonic() + LINGER_S

    def _give_back(self) -> None:
        """The turn, which this thread holds; the loop's own is woken if there is something new to look at."""
        knows = self._asleep_knows and not self._hooks_wait
        self._asleep_knows, self._hooks_wait = True, False
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
        self._alarm.close()
        self._selector.close()
        self._bell.close()
        self._ring.close()

    def watch(self, source: HasFileno | int, events: int, callback: Callable[[int], None]) -> None:
        """Call back with the ready events; a second `watch` of the same source replaces the first, with no events (0)
        too."""
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

    def after(self, delay_s: float, function: Callable[[], None]) -> Timer:
        """Run it on the loop once `delay_s` has passed."""
        timer = (time.monotonic() + delay_s, function)
        self._timers.append(timer)
        self._asleep_knows = False
        return timer

    def cancel(self, timer: Timer) -> None:
        """Undo `after`; nothing happens if it has run."""
        with contextlib.suppress(ValueError):
            self._timers.remove(timer)

    def afterwards(self, function: Callable[[], None]) -> None:
        """Run it when the work at hand is done, once however often it is asked for.

        For waking others: who is woken in the middle of it waits once more, for the interpreter.
        """
        self._afterwards[function] = None

    def _wake_thread(self) -> None:
        # A full pipe has rung already; a closed one has no thread to wake.
        with contextlib.suppress(OSError):
            self._ring.send(b"!")

    def _run(self) -> None:
        _give_way()
        self._turn.acquire()
        began_s = time.monotonic()
        while self._running:
            may_sleep = self._hooks_done()
            self._run_afterwards()
            timeout_s = self._timeout_s()  # after the hooks, which may set a timer
            if self._calls or not may_sleep:
                timeout_s = 0.0
            self._asleep_knows = True
            self._turn.release()
            self._rest(time.monotonic() - began_s)
            woken = self._wait(timeout_s)
            self._turn.acquire()
            began_s = time.monotonic()
            for key, _ in woken:
                if key.fileobj is self._bell:
                    self._empty_bell()
            self._handle(self._selector.select(0))
            while self._calls:
                self._guard(self._calls.popleft())
            self._run_timers()
            self._run_afterwards()
        self._turn.release()

    def _rest(self, worked_s: float) -> None:
        """After a turn of so long, while others may have the next one."""
        if worked_s > SLICE_S and self.owner_works:
            time.sleep(min(REST * worked_s, MAX_REST_S))
        elif worked_s > SLICE_S:
            yield_core()

    def _wait(self, timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """For news, at first by looking again and again if they are likely."""
        if timeout_s == 0.0 or self._lingers_until_s <= time.monotonic():
            return self._alarm.select(timeout_s)
        while not (woken := self._alarm.select(0)) and time.monotonic() < self._lingers_until_s:
            yield_core()
        self._lingers_until_s = 0.0
        self._lingering.ended(well=bool(woken))
        return woken or self._alarm.select(timeout_s)

    def _handle(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, events in ready:
            self._guard(partial(key.data, events))

    def _hooks_done(self) -> bool:
        """Whether none of them has more to do."""
        return False not in [self._guard(hook) for hook in list(self._hooks)]

    def _run_afterwards(self) -> None:
        while self._afterwards:
            self._guard(self._afterwards.popitem()[0])

    def _run_timers(self) -> None:
        if not self._timers:
            return
        now = time.monotonic()
        due = [function for due_s, function in self._timers if due_s <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for function in due:
            self._guard(function)

    def _timeout_s(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(due_s for due_s, _ in self._timers) - time.monotonic())

    def _empty_bell(self) -> None:
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


yield_core = ctypes.CDLL(None).sched_yield
"""`os.sched_yield` would keep the interpreter meanwhile."""


def _give_way() -> None:
    """This thread alone, where threads have a niceness of their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            nice = min(19, own + NICER)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
            _take_short_turns(nice)


class _Scheduling(ctypes.Structure):
    """struct sched_attr of sched_setattr(2). `runtime` is the slice in nanoseconds."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


_KEEP_POLICY = 0x08
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The number of the system call, which few C libraries wrap."""


def _take_short_turns(nice: int) -> None:
    """This thread alone. A kernel that does not know it leaves all as it is."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        wanted = _Scheduling(flags=_KEEP_POLICY, nice=nice, runtime=round(SLICE_S * 1e9))
        wanted.size = ctypes.sizeof(wanted)
        ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0)
