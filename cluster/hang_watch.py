"""Watches over a process that hangs: stopped, or stuck in a loop, it keeps its name and answers nobody, and Ray, which
restarts what died, sees nothing wrong. The gateway watches the router so, the router the gateway.

    heard ──missed──▶ 1 ──missed──▶ 2 ──missed──▶ it hangs, told once; then the next one is awaited

Turns are counted, not time: a watcher that was stopped itself finds one turn missed, whatever the clock says. Any news
starts the count anew. One that is away (dead, being restarted) has many turns to be heard again; but not for ever, for
it may hang before it ever said where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.router_host import Whereabouts

MOST_MISSED = 3
MOST_AWAITED = 25
"""Turns for one that was not heard since it was started."""


@dataclass(frozen=True, slots=True)
class Hung:
    """`where` its process is; None when it has never said."""

    where: Whereabouts | None


class HangWatch:
    """Pure: whoever owns it asks, waits and kills."""

    def __init__(self, most_missed: int = MOST_MISSED, most_awaited: int = MOST_AWAITED) -> None:
        self._most_missed = most_missed
        self._most_awaited = most_awaited
        self._where: Whereabouts | None = None
        self._missed = 0

    @property
    def knows(self) -> bool:
        """Whether it was heard since it was last away."""
        return self._where is not None

    def heard(self, where: Whereabouts) -> None:
        self._where, self._missed = where, 0

    def away(self) -> Hung | None:
        """A turn in which it is known not to run; Ray brings the next one. What hangs, when that takes too long."""
        if self.knows:
            self._where, self._missed = None, 0
        return self.missed()

    def missed(self) -> Hung | None:
        """A turn without news; what hangs, when that is one too many."""
        self._missed += 1
        bound = self._most_missed if self.knows else self._most_awaited
        if self._missed < bound:
            return None
        hung = Hung(self._where)
        self._where, self._missed = None, 0
        return hung
