"""The destination side of a hand-over, as a state machine without I/O: one `Intake` per expected request.

    EXPECTED ─ LeaseOpened ─► LEASED ─ all received ─► RECEIVED ─ Commit ─┐
        │                        └── Commit ─► COMMITTED ─ all received ──┴─► RUNNING ─► ENDING ─ Quiet ─► DONE
        └ local prefill ──────────────────────────────────────────────────────►┘

Commit and bytes take different roads, so their order is not given; decoding starts when both are in. A Commit that is
early waits for the bytes, one that is repeated gets the same answer again, also after the request has ended. What can
fail: the lease runs out by our own clock, a receive fails, prefill is lost or gives up, the client leaves, the deadline
passes; each is an exit from each stage, and tells the gateway. After it the blocks stay in quarantine (ENDING)
until the transfer says `Quiet`; the service keeps its own reference on them until then.

A request that moves here from another decode worker (`decode_node.migration`) takes the same road; what is called
prefill here is then its source, and its lease has room to spare: Commit says how much of it was used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from engine.types import FinishReason, Token
from kvtransfer.plan import Side
from tandem import machine
from tandem.messages import Code, Commit, Committed, Declined, WorkerInfo, WorkerRef


class Stage(StrEnum):
    EXPECTED = "expected"
    LEASED = "leased"
    RECEIVED = "received"
    COMMITTED = "committed"
    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"


# -- events: what happened ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseOpened:
    lease_id: str
    generation: int
    source: WorkerRef
    num_spans: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Renewed:
    until_s: float


@dataclass(frozen=True, slots=True)
class Received:
    num_spans: int


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class CommitArrived:
    """`ask_id` is what the answer has to name."""

    commit: Commit
    ask_id: int


@dataclass(frozen=True, slots=True)
class DropAsked:
    reason: str


@dataclass(frozen=True, slots=True)
class AbortAsked:
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The prefill worker of this request is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The last sequence has ended by itself; its last delta is the service's."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """The transfer touches no memory of this lease any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: see what has run out."""


Event = (
    LeaseOpened
    | Renewed
    | Received
    | ReceiveFailed
    | CommitArrived
    | DropAsked
    | AbortAsked
    | DeadlinePassed
    | PeerLost
    | EngineEnded
    | Quiet
    | Tick
)


# -- effects: what is to be done ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerCommit:
    ask_id: int
    answer: Committed | Declined


@dataclass(frozen=True, slots=True)
class Adopt:
    """The prompt's KV is complete: decode on from these first tokens."""

    first: tuple[Token, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class CloseLease:
    """No more bytes, please; `Quiet` follows."""


@dataclass(frozen=True, slots=True)
class AbortEngine:
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Tell:
    """The gateway's last news of this request."""

    finish: FinishReason | None = None
    error: Declined | None = None


Effect = AnswerCommit | Adopt | CloseLease | AbortEngine | Tell


@dataclass(frozen=True, slots=True)
class Moving:
    """What the lease of a request that moves here was made for."""

    generated: int
    """Tokens that it had generated then."""
    held_tokens: int
    side: Side

    def spans_for(self, computed_tokens: int) -> int:
        pieces = self.side.pieces(computed_tokens) - self.side.pieces(self.held_tokens)
        return pieces * self.side.spans_per_piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """All that is known of one expected request. Times are seconds on the worker's clock."""

    request_id: str
    me: WorkerInfo
    prefill: WorkerRef | None
    prompt_tokens: int
    expected_s: float
    until_s: float
    """End of the reservation, then of the lease; renewed. Running requests have none."""
    deadline_s: float | None = None
    sequences: int = 1
    beams: bool = False
    """Whether the sequences are chosen from the first tokens, of which there may then be more."""
    moving: Moving | None = None
    stage: Stage = Stage.EXPECTED
    history: tuple[str, ...] = ()
    lease: LeaseOpened | None = None
    received_spans: int = 0
    commit: Commit | None = None
    committed: bool = False
    open_commits: tuple[int, ...] = ()
    awaits_quiet: bool = False
    end: Declined | None = None
    """Why it ended before it ran; whoever of the other side still asks is told the same."""

    @property
    def complete(self) -> bool:
        if self.lease is None or (self.moving is not None and self.commit is None):
            return False
        return self.received_spans >= self.wanted_spans(self.commit)

    def wanted_spans(self, commit: Commit | None) -> int:
        """Spans of the lease that are to be filled."""
        if self.moving is not None and commit is not None:
            return self.moving.spans_for(self.prompt_tokens + len(commit.candidates) - 1)
        return self.lease.num_spans if self.lease is not None else 0


Step = tuple[Intake, tuple[Effect, ...]]
Handler = Callable[[Intake, Any, float], Step]


def expected(
    request_id: str,
    *,
    me: WorkerInfo,
    prefill: WorkerRef | None,
    prompt_tokens: int,
    deadline_s: float | None,
    now: float,
    reservation_s: float,
    sequences: int = 1,
    beams: bool = False,
) -> Intake:
    """A fresh intake; with local prefill (`prefill` None) the engine has the request already."""
    return Intake(
        request_id=request_id,
        me=me,
        prefill=prefill,
        prompt_tokens=prompt_tokens,
        expected_s=now,
        until_s=now + reservation_s,
        deadline_s=deadline_s,
        sequences=sequences,
        beams=beams,
        stage=Stage.EXPECTED if prefill is not None else Stage.RUNNING,
    )


def advance(intake: Intake, event: Event, now: float) -> Step:
    """The next state and what to do about it. Raises `IllegalTransition` for an event the stage does not know."""
    name, since_s = f"intake {intake.request_id}", intake.expected_s
    return machine.advance(intake, event, now, _TABLE, name=name, since_s=since_s, usual=(Tick,))


# -- the stages ---------------------------------------------------------------------------------------------------


def _stay(intake: Intake, event: Event, now: float) -> Step:
    return intake, ()


def _lease_opened(intake: Intake, event: LeaseOpened, now: float) -> Step:
    stage = Stage.LEASED if event.num_spans else Stage.RECEIVED
    return replace(intake, stage=stage, lease=event, until_s=event.until_s, awaits_quiet=True), ()


def _renewed(intake: Intake, event: Renewed, now: float) -> Step:
    return replace(intake, until_s=event.until_s), ()


def _received(intake: Intake, event: Received, now: float) -> Step:
    received = replace(intake, received_spans=intake.received_spans + event.num_spans)
    if not received.complete:
        return received, ()
    return _run(received) if intake.stage is Stage.COMMITTED else (replace(received, stage=Stage.RECEIVED), ())


def _commit_arrived(intake: Intake, event: CommitArrived, now: float) -> Step:
    if refusal := refuse(intake, event.commit):
        return intake, (AnswerCommit(event.ask_id, refusal),)
    parked = replace(
        intake, stage=Stage.COMMITTED, commit=event.commit, open_commits=(*intake.open_commits, event.ask_id)
    )
    return _run(parked) if parked.complete else (parked, ())


def _run(intake: Intake) -> Step:
    assert intake.commit is not None
    answers = _answers(intake, Committed(intake.request_id))
    running = replace(intake, stage=Stage.RUNNING, committed=True, open_commits=())
    return running, (Adopt(intake.commit.candidates, intake.commit.cached_tokens), CloseLease(), *answers)


def _commit_again(intake: Intake, event: CommitArrived, now: float) -> Step:
    refusal = refuse(intake, event.commit)
    if refusal is None and not intake.committed:
        refusal = intake.end
    return intake, (AnswerCommit(event.ask_id, refusal or Committed(intake.request_id)),)


def _quiet(intake: Intake, event: Quiet, now: float) -> Step:
    return _done_when_quiet(replace(intake, awaits_quiet=False)), ()


def _ended(intake: Intake, event: EngineEnded, now: float) -> Step:
    return _done_when_quiet(replace(intake, stage=Stage.ENDING)), ()


def _done_when_quiet(intake: Intake) -> Intake:
    over = intake.stage is Stage.ENDING and not intake.awaits_quiet
    return replace(intake, stage=Stage.DONE) if over else intake


def refuse(intake: Intake, commit: Commit) -> Declined | None:
    """Why this Commit does not belong to this intake's lease; None when it does."""
    lease, me = intake.lease, intake.me
    if lease is None:
        return Declined(Code.STALE, f"request {intake.request_id} has no lease here", by=me.ref.name)
    first = len(commit.candidates)
    first = min(first, intake.sequences) if intake.beams else first
    if intake.moving is not None:
        first = 1 if first >= max(1, intake.moving.generated) else first
    pairs = (
        (Code.STALE, "destination", commit.destination.peer, me.ref.peer),
        (Code.STALE, "source", commit.source.peer, lease.source.peer),
        (Code.STALE, "lease", commit.lease_id, lease.lease_id),
        (Code.STALE, "generation", commit.generation, lease.generation),
        (Code.MISMATCH, "layout", commit.layout, me.layout),
        (Code.MISMATCH, "prompt tokens", commit.prompt_tokens, intake.prompt_tokens),
        (Code.MISMATCH, "first tokens", first, intake.sequences),
        (Code.MISMATCH, "spans beyond the lease", max(0, intake.wanted_spans(commit) - lease.num_spans), 0),
    )
    for code, what, theirs, ours in pairs:
        if theirs != ours:
            return Declined(code, f"{what} is {theirs} at prefill but {ours} at decode", by=me.ref.name)
    return None


# -- the exits ----------------------------------------------------------------------------------------------------


def _tick(intake: Intake, event: Tick, now: float) -> Step:
    if intake.deadline_s is not None and now >= intake.deadline_s:
        return _deadline(intake, DeadlinePassed(), now)
    if now < intake.until_s:
        return intake, ()
    if intake.lease is None:
        return _fail(intake, Declined(Code.DEADLINE, "no prefill worker asked for the reserved room in time"))
    message = f"the lease ran out with {intake.received_spans} of {intake.lease.num_spans} spans received"
    return _fail(intake, Declined(Code.UNAVAILABLE, message, by=intake.lease.source.name))


def _abort(intake: Intake, event: AbortAsked, now: float) -> Step:
    return _end(intake, Tell(finish=event.reason), Declined(Code.ABORTED, "the request was aborted"), event.reason)


def _deadline(intake: Intake, event: DeadlinePassed, now: float) -> Step:
    late = Declined(Code.DEADLINE, f"the deadline passed while {intake.stage}")
    return _end(intake, Tell(finish=FinishReason.DEADLINE), late, FinishReason.DEADLINE)


def _peer_lost(intake: Intake, event: PeerLost, now: float) -> Step:
    name = intake.prefill.name if intake.prefill else ""
    return _fail(intake, Declined(Code.UNAVAILABLE, f"the prefill worker is lost: {event.reason}", by=name))


def _receive_failed(intake: Intake, event: ReceiveFailed, now: float) -> Step:
    name = intake.prefill.name if intake.prefill else ""
    return _fail(intake, Declined(Code.UNAVAILABLE, f"the KV transfer failed: {event.reason}", by=name))


def _dropped(intake: Intake, event: DropAsked, now: float) -> Step:
    """Prefill gives up. It tells dispatch why, in the answer to the submit, so the gateway hears of it there."""
    why = Declined(Code.ABORTED, f"prefill gave up: {event.reason}", by=intake.me.ref.name)
    return _end(intake, None, why, FinishReason.ABORT)


def _fail(intake: Intake, error: Declined) -> Step:
    return _end(intake, Tell(error=error), error, FinishReason.ERROR)


def _end(intake: Intake, tell: Tell | None, to_commits: Declined, reason: FinishReason) -> Step:
    """Every way out: tell the gateway, answer a waiting Commit, let go of blocks, quarantine the lease."""
    close = (CloseLease(),) if intake.lease is not None and not intake.committed else ()
    engine = (AbortEngine(reason),) if intake.stage is not Stage.EXPECTED else ()
    tells = (tell,) if tell is not None else ()
    ended = replace(intake, stage=Stage.ENDING, open_commits=(), end=to_commits)
    return _done_when_quiet(ended), (*close, *engine, *tells, *_answers(intake, to_commits))


def _answers(intake: Intake, answer: Committed | Declined) -> tuple[Effect, ...]:
    return tuple(AnswerCommit(ask_id, answer) for ask_id in intake.open_commits)


_EXITS: dict[type[Event], Handler] = {
    AbortAsked: _abort,
    DeadlinePassed: _deadline,
    PeerLost: _peer_lost,
}
_LEASED: dict[type[Event], Handler] = {
    CommitArrived: _commit_arrived,
    Renewed: _renewed,
    Received: _received,
    ReceiveFailed: _receive_failed,
    DropAsked: _dropped,
    Tick: _tick,
    **_EXITS,
}
_OVER: dict[type[Event], Handler] = {
    CommitArrived: _commit_again,
    **dict.fromkeys(
        (
            Renewed,
            Received,
            ReceiveFailed,
            DropAsked,
            AbortAsked,
            DeadlinePassed,
            PeerLost,
            EngineEnded,
            Tick,
        ),
        _stay,
    ),
}

_TABLE: dict[Stage, dict[type[Event], Handler]] = {
    Stage.EXPECTED: {
        LeaseOpened: _lease_opened,
        CommitArrived: _commit_again,
        DropAsked: _stay,
        Tick: _tick,
        **_EXITS,
    },
    Stage.LEASED: _LEASED,
    Stage.RECEIVED: _LEASED,
    Stage.COMMITTED: _LEASED,
    Stage.RUNNING: {
        # Decode has all it needs: neither prefill's loss nor its second thoughts end the request.
        CommitArrived: _commit_again,
        EngineEnded: _ended,
        Quiet: _quiet,
        **dict.fromkeys((Renewed, Received, ReceiveFailed, DropAsked, PeerLost, Tick), _stay),
        AbortAsked: _abort,
        DeadlinePassed: _deadline,
    },
    Stage.ENDING: {Quiet: _quiet, **_OVER},
    Stage.DONE: dict(_OVER),
}
