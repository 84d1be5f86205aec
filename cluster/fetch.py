"""The story of one prefix on its way from a peer, told at its destination: a state machine without I/O.

    ASKED ─ PrefixComing ─► COMING ─ the last block, or no more ─► ENDING ─ Quiet ─► CLOSED
      └─ declined, no answer, deadline, source lost or giving up, a failed block, the request's end ─►┘

The room is there and the lease open before the question is asked, so blocks may arrive before its answer. What is
complete from the first block on is entered at once (`Enter`); runs that overtook others wait. Whatever ends it,
the prompt goes on with what came (`Resume`) and the lease is closed (`Close`): blocks that did not arrive stay with the
transfer until it says `Quiet`. A fetch fails quietly: the worst that it does to a request is to let it compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tandem import machine
from tandem.messages import Answer, Declined, PrefixComing, WorkerRef


class Stage(StrEnum):
    ASKED = "asked"
    COMING = "coming"
    ENDING = "ending"
    CLOSED = "closed"


# -- events: what happened ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    answer: Answer


@dataclass(frozen=True, slots=True)
class Received:
    """Spans `first` … + `count` - 1 of the lease are complete and verified."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class SourceGaveUp:
    """Nothing more will come."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    reason: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """Nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """The transfer touches no memory of this fetch any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Answered | Received | ReceiveFailed | SourceGaveUp | PeerLost | RequestEnded | Quiet | Tick


# -- effects: what is to be done ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enter:
    """The first `spans` of the lease are complete: let prompts find what they hold."""

    spans: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Let the prompt go on."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the lease; `Quiet` follows."""


Effect = Enter | Resume | Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """All that is known of one fetch. Times are seconds on the worker's clock."""

    request_id: str
    source: WorkerRef
    wanted_spans: int
    asked_s: float
    deadline_s: float
    stage: Stage = Stage.ASKED
    coming_spans: int | None = None
    """What the source has promised."""
    ahead: tuple[tuple[int, int], ...] = ()
    """Runs (first, count) that arrived before those in front of them."""
    arrived_spans: int = 0
    """The first ones, without a hole."""
    arrived_s: float = 0.0
    reason: str = ""
    """Why it ended before all that was wanted had come."""
    history: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return self.arrived_spans == self.wanted_spans


Step = tuple[Arrival, tuple[Effect, ...]]
Handler = Callable[[Arrival, Any, float], Step]


def advance(arrival: Arrival, event: Event, now: float) -> Step:
    """The next state and what to do about it. Raises `IllegalTransition` for an event the stage does not know."""
    name, since_s = f"fetch for {arrival.request_id}", arrival.asked_s
    return machine.advance(arrival, event, now, _TABLE, name=name, since_s=since_s, usual=(Tick,))


# -- the stages ---------------------------------------------------------------------------------------------------


def _stay(arrival: Arrival, event: Event, now: float) -> Step:
    return arrival, ()


def _answered(arrival: Arrival, event: Answered, now: float) -> Step:
    match event.answer:
        case PrefixComing(num_spans=spans) if 0 < spans <= arrival.wanted_spans:
            return _end_when_there(replace(arrival, stage=Stage.COMING, coming_spans=spans))
        case Declined(code=code, message=message):
            return _end(arrival, f"declined ({code}): {message}")
    return _end(arrival, f"answered with {event.answer!r:.80}")


def _received(arrival: Arrival, event: Received, now: float) -> Step:
    first, runs = arrival.arrived_spans, dict(sorted((*arrival.ahead, (event.first, event.count))))
    while first in runs:
        first += runs.pop(first)
    after = replace(arrival, ahead=tuple(runs.items()), arrived_spans=first, arrived_s=now)
    if first == arrival.arrived_spans:
        return after, ()
    ended, effects = _end_when_there(after)
    return ended, (Enter(first), *effects)


def _end_when_there(arrival: Arrival) -> Step:
    if arrival.whole:  # whatever the answer, which others may overtake
        return _end(arrival, "")
    if arrival.coming_spans is None or arrival.arrived_spans < arrival.coming_spans:
        return arrival, ()
    return _end(arrival, "the source had no more")


def _failed(arrival: Arrival, event: ReceiveFailed | SourceGaveUp | PeerLost, now: float) -> Step:
    return _end(arrival, event.reason)


def _request_ended(arrival: Arrival, event: RequestEnded, now: float) -> Step:
    return _end(arrival, "the request has ended")


def _tick(arrival: Arrival, event: Tick, now: float) -> Step:
    return _end(arrival, "it took too long") if now >= arrival.deadline_s else (arrival, ())


def _quiet(arrival: Arrival, event: Quiet, now: float) -> Step:
    return replace(arrival, stage=Stage.CLOSED), ()


def _end(arrival: Arrival, reason: str) -> Step:
    return replace(arrival, stage=Stage.ENDING, reason=reason), (Resume(), Close())


_LIVE: dict[type, Handler] = {
    Received: _received,
    ReceiveFailed: _failed,
    SourceGaveUp: _failed,
    PeerLost: _failed,
    RequestEnded: _request_ended,
    Tick: _tick,
}
_LATE: dict[type, Handler] = dict.fromkeys(
    (Answered, Received, ReceiveFailed, SourceGaveUp, PeerLost, RequestEnded, Tick), _stay
)
"""What was under way when the end was decided."""
_TABLE: dict[Stage, dict[type, Handler]] = {
    Stage.ASKED: {**_LIVE, Answered: _answered},
    Stage.COMING: _LIVE,
    Stage.ENDING: {**_LATE, Quiet: _quiet},
    Stage.CLOSED: _LATE,
}
