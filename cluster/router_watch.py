"""Watches the router, which watches everybody else. The gateway asks it where it is; Ray restarts a router that died,
but one that hangs (stopped, or stuck in a loop) would keep its name and answer nobody.

    heard ──missed──▶ 1 ──missed──▶ 2 ──missed──▶ its process is to be killed, once; then nothing is known

Questions are counted, not time: a gateway that was stopped itself finds one question unanswered, whatever the clock
says. An answer starts the count anew; a router that is away (dead, being restarted) is not the one to kill.
"""

from __future__ import annotations

from cluster.router_host import Whereabouts

MOST_MISSED = 3


class RouterWatch:
    """Pure: whoever owns it asks and kills."""

    def __init__(self) -> None:
        self._where: Whereabouts | None = None
        self._missed = 0

    def heard(self, where: Whereabouts) -> None:
        self._where, self._missed = where, 0

    def away(self) -> None:
        """It is known to be gone; Ray brings the next one."""
        self._where, self._missed = None, 0

    def missed(self) -> Whereabouts | None:
        """A question was not answered in time. The process to kill, when that is one too many."""
        self._missed += 1
        if self._where is None or self._missed < MOST_MISSED:
            return None
        hung = self._where
        self.away()
        return hung
