"""Starts and ends of workers, carried out: the hands of `cluster.membership`.

Ray restarts the process of an actor that died, at once and for ever. Here it is made to wait: a newborn worker first
asks for its *turn*, which comes when membership says so (at once the first time, after a back-off later, never again
when it failed to start too often, or in a way that another start would repeat). A newborn under a name that still
counts as alive is news by itself: the process of the old incarnation is gone.

    newborn ──turn()──▶ waits ──Restart──▶ starts its rank, registers       Kill ──▶ `kill(name)`, Ray restarts it
                          └──GiveUp──▶ Declined, stays idle                 Fence ─▶ numbered news for the gateways

Gateways follow the fences by a long poll, so that streams of a worker that is stopped, not dead, end too.
One event loop; `tick` is called by whoever hosts it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.membership import Decision, Fence, GiveUp, Health, Kill, Restart
from cluster.router import RouterState
from tandem.messages import Code, Declined

FENCES_KEPT = 256


@dataclass(frozen=True, slots=True)
class Fenced:
    """News for gateways; `number` rises by one."""

    number: int
    worker: str
    incarnation: str
    why: str


class Supervisor:
    """See the module. `kill(name)` ends the process of a worker's actor, however it is; it must not block."""

    def __init__(self, state: RouterState, kill: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._state = state
        self._kill = kill
        self._clock = clock
        self._granted: set[str] = set()
        self._waiting: dict[str, asyncio.Future[Declined | None]] = {}
        self._fences: deque[Fenced] = deque(maxlen=FENCES_KEPT)
        self._number = 0
        self._news = asyncio.Event()

    def expect(self, names: Iterable[str]) -> None:
        """These workers are being started."""
        for name in names:
            self._state.membership.expect(name, self._clock())

    async def turn(self, name: str) -> Declined | None:
        """A newborn's question: may I start? None, sooner or later: yes. Declined: no, for good."""
        now = self._clock()
        self._note_death(name, now)
        self._state.membership.expect(name, now)
        if self._state.membership.health(name) is Health.STARTING and name not in self._granted:
            self._granted.add(name)
            return None
        if self._state.membership.health(name) is Health.FAILED:
            return self._declined(name)
        previous = self._waiting.pop(name, None)
        if previous is not None and not previous.done():
            previous.cancel()
        future: asyncio.Future[Declined | None] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        return await future

    def joined(self, name: str) -> None:
        """It registered; its next turn is another start."""
        self._granted.discard(name)

    def tick(self) -> None:
        """Time passes: carry out what membership decides."""
        for decision in self._state.tick(self._clock()):
            _HANDLERS[type(decision)](self, decision)

    async def fences(self, after: int) -> tuple[Fenced, ...]:
        """The news with a number above `after`; waits until there is some."""
        while self._number <= after:
            self._news.clear()
            await self._news.wait()
        return tuple(news for news in self._fences if news.number > after)

    @property
    def last_fence(self) -> int:
        return self._number

    # -- inside ----------------------------------------------------------------------------------------------

    def _note_death(self, name: str, now: float) -> None:
        """A newborn is here, so whatever had this name before is gone."""
        ref = next((info.ref for info in self._state.workers() if info.ref.name == name), None)
        if ref is not None:
            self._state.lost(ref, "its process ended", now)
        elif name in self._granted and self._state.membership.health(name) is Health.STARTING:
            self._state.membership.exited(name, "", "its process ended before it was ready", now)

    def _fence(self, fence: Fence) -> None:
        self._number += 1
        self._fences.append(Fenced(self._number, fence.worker, fence.incarnation, fence.why))
        self._news.set()

    def _end(self, kill: Kill) -> None:
        """A newborn that waits for its turn is not the one to be killed: the old process is gone already."""
        self._granted.discard(kill.worker)
        if kill.worker not in self._waiting:
            self._kill(kill.worker)

    def _start(self, restart: Restart) -> None:
        future = self._waiting.pop(restart.worker, None)
        if future is not None and not future.done():
            self._granted.add(restart.worker)
            future.set_result(None)

    def _give_up(self, give_up: GiveUp) -> None:
        future = self._waiting.pop(give_up.worker, None)
        if future is not None and not future.done():
            future.set_result(self._declined(give_up.worker))

    def _declined(self, name: str) -> Declined:
        why = self._state.membership.why(name)
        return Declined(Code.UNAVAILABLE, f"{name} does not start and is given up: {why}", by=name)


_HANDLERS: dict[type[Decision], Callable[..., None]] = {
    Fence: Supervisor._fence,
    Kill: Supervisor._end,
    Restart: Supervisor._start,
    GiveUp: Supervisor._give_up,
}
