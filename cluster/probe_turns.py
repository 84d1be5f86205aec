"""Which pairs to measure now: those that may move KV and have not yet, while both have nothing to do.

A pair is asked about a few times, some seconds apart, since either end may turn out to be busy; then traffic will tell.
A worker takes part in one probe of a turn. Pure: whoever hosts the router asks the destinations (`ProbeLink`), and
what was measured arrives with the sources' reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.messages import WorkerRef

AGAIN_S = 5.0
MOST_TRIES = 3


@dataclass(frozen=True, slots=True)
class Pair:
    source: WorkerRef
    destination: WorkerRef


@dataclass(frozen=True, slots=True)
class _Asked:
    times: int
    next_s: float


class ProbeTurns:
    """What was asked so far, by incarnations."""

    def __init__(self) -> None:
        self._asked: dict[Pair, _Asked] = {}

    def due(self, unmeasured: Iterable[Pair], now: float) -> tuple[Pair, ...]:
        """Those of `unmeasured` to be asked about now; they count as asked."""
        taken: set[WorkerRef] = set()
        due = []
        for pair in unmeasured:
            asked = self._asked.get(pair, _Asked(0, now))
            if asked.times >= MOST_TRIES or now < asked.next_s or not taken.isdisjoint((pair.source, pair.destination)):
                continue
            taken |= {pair.source, pair.destination}
            self._asked[pair] = _Asked(asked.times + 1, now + AGAIN_S)
            due.append(pair)
        return tuple(due)

    def forget(self, name: str) -> None:
        """A worker is gone; its next incarnation is measured anew."""
        self._asked = {
            pair: asked for pair, asked in self._asked.items() if name not in (pair.source.name, pair.destination.name)
        }
