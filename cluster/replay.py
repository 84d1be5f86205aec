"""When to ask a worker for its prefixes again: at once when news were missed, then ever less often until it has told.

A retelling that is lost itself (the router's subscription is not up yet) shows as another gap, so asking again is all
that is needed. Pure: whoever hosts the router asks whoever is due.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.messages import WorkerRef

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 15.0


@dataclass(frozen=True, slots=True)
class _Asked:
    next_s: float
    wait_s: float


class Replays:
    """Who was asked, and when the next time is."""

    def __init__(self) -> None:
        self._asked: dict[WorkerRef, _Asked] = {}

    def due(self, stale: Iterable[WorkerRef], now: float) -> tuple[WorkerRef, ...]:
        """Those of `stale` to be asked now; they count as asked. Whoever is not stale any more is forgotten."""
        before, self._asked = self._asked, {}
        due = []
        for ref in stale:
            asked = before.get(ref)
            if asked is None or now >= asked.next_s:
                due.append(ref)
                wait_s = FIRST_WAIT_S if asked is None else min(2 * asked.wait_s, MAX_WAIT_S)
                asked = _Asked(now + wait_s, wait_s)
            self._asked[ref] = asked
        return tuple(due)
