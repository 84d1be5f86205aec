"""Which running requests leave a draining decode worker, and for where: decided from values, carried out by others.

A worker that drains takes nothing new. What runs there is offered to other decode workers, a few at a time, the first
placed first: each goes to the one with the smallest batch among those that have room for what it is expected to become.
One that fits nowhere stays, and is finished where it is; so is one with several sequences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.ledger import Claim
from cluster.snapshot import WorkerView
from tandem.messages import Answer, Code, Declined, Migrated, WorkerRef

AT_ONCE = 2
"""Moves of one worker at a time: more would share its bandwidth and pause no sooner."""
REST_S = 1.0
"""Between two attempts to move the same request."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A request that decodes on a draining worker, and what the router has written down for it."""

    request_id: str
    source: WorkerRef
    claim: Claim


@dataclass(frozen=True, slots=True)
class Move:
    """One decision; `reason` is for people."""

    request_id: str
    source: WorkerRef
    to: WorkerRef
    reason: str

    def explain(self) -> str:
        return f"{self.request_id}: moves from {self.source.name} to {self.to.name}: {self.reason}"


def evacuate(residents: Iterable[Resident], decode: Iterable[WorkerView], moving: Counter[str]) -> tuple[Move, ...]:
    """The moves to begin now. `decode`: the workers that may be chosen; `moving`: moves under way, by their source."""
    views = tuple(decode)
    batches = Counter({view.name: view.batch for view in views})
    room = Counter({view.name: view.room_blocks for view in views})
    under_way = Counter(moving)
    moves: list[Move] = []
    for resident in residents:
        if under_way[resident.source.name] >= AT_ONCE or resident.claim.siblings:
            continue
        needed = max(1, resident.claim.blocks)
        fits = [
            view
            for view in views
            if view.info.ref != resident.source
            and room[view.name] >= needed
            and batches[view.name] < view.info.max_num_seqs
        ]
        if not fits:
            continue
        chosen = min(fits, key=lambda view: (not view.healthy, batches[view.name], -room[view.name], view.name))
        reason = f"batch {batches[chosen.name]}, {room[chosen.name]} blocks of room, needs up to {needed}"
        moves.append(Move(resident.request_id, resident.source, chosen.info.ref, reason))
        batches[chosen.name] += 1
        room[chosen.name] -= needed
        under_way[resident.source.name] += 1
    return tuple(moves)


class Evacuation:
    """Moves under way, and the rests after those that failed. Times are the router's clock."""

    def __init__(self) -> None:
        self._under_way: dict[str, Move] = {}
        self._rest_until_s: dict[str, float] = {}

    def due(self, residents: Iterable[Resident], decode: Iterable[WorkerView], now: float) -> tuple[Move, ...]:
        """The moves to ask for now; each ends with `over`."""
        residents = tuple(residents)
        known = {resident.request_id for resident in residents}
        self._rest_until_s = {one: until_s for one, until_s in self._rest_until_s.items() if one in known}
        wanting = [one for one in residents if self._may_move(one.request_id, now)]
        under_way = Counter(move.source.name for move in self._under_way.values())
        moves = evacuate(wanting, decode, under_way) if wanting else ()
        self._under_way.update((move.request_id, move) for move in moves)
        return moves

    def over(self, move: Move, answer: Answer, now: float) -> bool:
        """How a move went; whether it did. What can never move is not asked again."""
        self._under_way.pop(move.request_id, None)
        if isinstance(answer, Declined):
            rest_s = math.inf if answer.code is Code.INVALID else REST_S
            self._rest_until_s[move.request_id] = now + rest_s
        return isinstance(answer, Migrated)

    def _may_move(self, request_id: str, now: float) -> bool:
        return request_id not in self._under_way and now >= self._rest_until_s.get(request_id, -math.inf)
