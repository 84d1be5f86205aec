"""The source side of a running request's move to another decode worker, as a state machine without I/O.

Pre-copy, as Llumnix does it: full blocks are copied while the request goes on decoding here, in stages, each of which
sends what became full during the one before. When little is left (or the room over there is full) the request pauses,
the tail is sent, and Commit carries all generated tokens.

    ASKING ─ Granted ─► COPYING ─ stage, stage, … little left ─► COMMITTING ─ Committed ─► ENDING ─ Quiet ─► CLOSED
       └───────────────────┴────── anything else: it goes on here as if nothing had been ──────┘

Until the gateway is told by this side that the request has moved, what the other side tells of it counts for nothing
(`decode_node.unheard`). That word is the switch: whatever was lost or died on the way, this side may take the request
back and go on, and no token is told twice, or by two. While Commit's answer is unknown the request stays paused, but
no longer than the lease lasts. What can end a move: no room, a failed push, a lost peer, the lease's end, the request's
own end, its preemption; each is an exit from each stage. The question is answered exactly once, on entering ENDING,
which is left when the transfer says `Quiet` and no lease question is open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from engine.types import Request, Token
from kvtransfer.plan import Side, side_of
from tandem import machine
from tandem.messages import (
    Answer,
    AskMove,
    Code,
    Commit,
    Committed,
    Declined,
    DropLease,
    LeaseGranted,
    LeaseRenewed,
    Migrated,
    MigrationReport,
    RenewLease,
    WorkerInfo,
    WorkerRef,
)

COMMIT_RETRY_S = 0.05
"""Pause before Commit is asked again; doubles with each lost answer, up to one second."""


class Stage(StrEnum):
    ASKING = "asking"
    COPYING = "copying"
    COMMITTING = "committing"
    """Paused, until it is known who goes on."""
    ENDING = "ending"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLimits:
    last_stage_blocks: int = 1
    """The request pauses when no more full blocks (pieces) than this are left to send."""
    max_stages: int = 8
    spare_blocks: int = 4
    """Room asked for beyond what there is, for what becomes full during the copy."""
    push_patience_s: float = 5.0
    """A push that is not acknowledged by then has failed, and with it the move: the request runs on where it is."""
    quiet_patience_s: float = 5.0


# -- events: what happened ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    grant: LeaseGranted


@dataclass(frozen=True, slots=True)
class Denied:
    declined: Declined


@dataclass(frozen=True, slots=True)
class Stepped:
    """Positions 0 … `computed_tokens` - 1 are in the pool."""

    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Paused:
    """All tokens so far; the last of them is not in the pool."""

    generated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """It does not decode here any more: it has ended, or was preempted."""

    reason: str


@dataclass(frozen=True, slots=True)
class PushDone:
    pass


@dataclass(frozen=True, slots=True)
class PushFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class CommitAnswered:
    answer: Answer


@dataclass(frozen=True, slots=True)
class RenewalAnswered:
    answer: Answer


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


@dataclass(frozen=True, slots=True)
class PeerLost:
    reason: str


@dataclass(frozen=True, slots=True)
class Quiet:
    """The transfer touches no memory of this move any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: renew, ask Commit again, or see that the lease has run out."""


Event = (
    Granted
    | Denied
    | Stepped
    | Paused
    | Stopped
    | PushDone
    | PushFailed
    | CommitAnswered
    | RenewalAnswered
    | DeadlinePassed
    | PeerLost
    | Quiet
    | Tick
)


# -- effects: what is to be done ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskDestination:
    question: AskMove | RenewLease | Commit | DropLease


@dataclass(frozen=True, slots=True)
class Push:
    """Send the request's pieces `first_piece` … + `num_pieces` - 1."""

    first_piece: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Take it out of the batch; `Paused` follows at once, or `Stopped` when it does not decode."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Back into the batch, if it has not ended."""


@dataclass(frozen=True, slots=True)
class Leave:
    """It runs over there: tell the gateway so, and let go of it here."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Stop pushing; `Quiet` follows."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the question to move it; comes exactly once."""

    answer: Migrated | Declined


Effect = AskDestination | Push | Pause | Resume | Leave | Withdraw | Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """All that is known of one move. Times are seconds on the worker's clock.

    A piece is what both ends count in: a block, of the smaller size if they have two (`kvtransfer.plan`).
    """

    request: Request
    gateway_id: str
    source: WorkerInfo
    to: WorkerRef
    started_s: float
    limits: MoveLimits = MoveLimits()
    stage: Stage = Stage.ASKING
    history: tuple[str, ...] = ()
    grant: LeaseGranted | None = None
    side: Side | None = None
    """From the grant on."""
    granted_s: float = 0.0
    lease_until_s: float = 0.0
    renewing: bool = False
    computed_tokens: int = 0
    generated: tuple[int, ...] = ()
    stages: int = 0
    pushed_pieces: int = 0
    """Pieces held over there or handed to the transfer so far."""
    tail_pieces: int = 0
    pushes: int = 0
    """Not acknowledged yet."""
    paused_s: float | None = None
    commit_open: bool = False
    commit_tries: int = 0
    commit_again_s: float = 0.0
    awaits_grant: bool = True
    awaits_quiet: bool = False

    @property
    def held_pieces(self) -> int:
        return self.side.pieces(self.grant.held_tokens) if self.side and self.grant else 0

    @property
    def room_tokens(self) -> int:
        """Tokens that the lease has room for, those held already included."""
        if self.side is None or self.grant is None:
            return 0
        return (self.held_pieces + self.grant.num_spans // self.side.spans_per_piece) * self.side.piece_tokens

    @property
    def full_pieces(self) -> int:
        """Those that no later step writes to."""
        return self.side.full_pieces(self.computed_tokens) if self.side else 0


Step = tuple[Migration, tuple[Effect, ...]]
Handler = Callable[[Migration, Any, float], Step]


def begin(migration: Migration, generated: tuple[int, ...]) -> Step:
    """Ask for room. `generated`: the ids of all tokens so far."""
    source, request = migration.source, migration.request
    written = len(request.token_ids) + len(generated)
    left = len(request.token_ids) + request.sampling.max_tokens - written
    spare = max(0, min(migration.limits.spare_blocks * source.block_size, left))
    question = AskMove(
        request,
        migration.gateway_id,
        source.ref,
        source.transports,
        source.model_digest,
        source.layout,
        source.block_size,
        generated,
        spare,
    )
    return replace(migration, computed_tokens=written - 1), (AskDestination(question),)


def advance(migration: Migration, event: Event, now: float) -> Step:
    """The next state and what to do about it. Raises `IllegalTransition` for an event the stage does not know."""
    name, since_s = f"move of {migration.request.request_id}", migration.started_s
    return machine.advance(migration, event, now, _TABLE, name=name, since_s=since_s, usual=(Tick, Stepped))


# -- the stages ---------------------------------------------------------------------------------------------------


def _stay(migration: Migration, event: Event, now: float) -> Step:
    return migration, ()


def _stepped(migration: Migration, event: Stepped, now: float) -> Step:
    return replace(migration, computed_tokens=event.computed_tokens), ()


def _granted(migration: Migration, event: Granted, now: float) -> Step:
    grant, side = event.grant, side_of(migration.source, event.grant.block_size)
    leased = replace(
        migration,
        stage=Stage.COPYING,
        grant=grant,
        side=side,
        awaits_grant=False,
        granted_s=now,
        lease_until_s=now + grant.expires_in_s,
        pushed_pieces=side.pieces(grant.held_tokens),
    )
    return (leased, (Pause(),)) if _is_full(leased) else _next_stage(leased)


def _denied(migration: Migration, event: Denied, now: float) -> Step:
    declined = replace(event.declined, by=event.declined.by or migration.to.name)
    return _end(replace(migration, awaits_grant=False), declined)


def _next_stage(migration: Migration) -> Step:
    """Send what became full since the last stage; when that is little, pause and send the rest."""
    fresh = migration.full_pieces - migration.pushed_pieces
    if fresh <= migration.limits.last_stage_blocks or migration.stages >= migration.limits.max_stages:
        return migration, (Pause(),)
    sent, effects = _push(migration, fresh)
    return replace(sent, stages=sent.stages + 1), effects


def _push(migration: Migration, count: int) -> Step:
    first = migration.pushed_pieces
    return replace(migration, pushed_pieces=first + count, pushes=migration.pushes + 1), (Push(first, count),)


def _stepped_on(migration: Migration, event: Stepped, now: float) -> Step:
    """It goes on while its blocks are copied, until the next token has no room over there."""
    stepped, _ = _stepped(migration, event, now)
    return stepped, ((Pause(),) if _is_full(stepped) else ())


def _is_full(migration: Migration) -> bool:
    return migration.computed_tokens + 1 > migration.room_tokens


def _stage_sent(migration: Migration, event: PushDone, now: float) -> Step:
    sent = replace(migration, pushes=migration.pushes - 1)
    return (sent, ()) if sent.pushes else _next_stage(sent)


def _push_done(migration: Migration, event: PushDone, now: float) -> Step:
    return replace(migration, pushes=migration.pushes - 1), ()


def _paused(migration: Migration, event: Paused, now: float) -> Step:
    """Send the tail and commit at once: Commit is accepted when everything has been received."""
    computed = len(migration.request.token_ids) + len(event.generated) - 1
    paused = replace(
        migration, stage=Stage.COMMITTING, paused_s=now, computed_tokens=computed, generated=event.generated
    )
    if computed > paused.room_tokens or paused.side is None:
        message = f"it has outgrown its lease of {paused.room_tokens} tokens"
        return _fail(paused, Code.INTERNAL, message, by=migration.source.ref.name)
    effects: tuple[Effect, ...] = ()
    if tail := paused.side.pieces(computed) - paused.pushed_pieces:
        paused, effects = _push(replace(paused, tail_pieces=tail), tail)
    committing, commit = _commit(paused)
    return committing, effects + commit


def _commit(migration: Migration) -> Step:
    assert migration.grant is not None
    question = Commit(
        migration.request.request_id,
        migration.grant.lease_id,
        migration.grant.generation,
        migration.source.ref,
        migration.grant.destination,
        len(migration.request.token_ids),
        migration.source.layout,
        tuple(Token(token_id) for token_id in migration.generated),
    )
    return replace(migration, commit_open=True, commit_tries=migration.commit_tries + 1), (AskDestination(question),)


def _commit_answered(migration: Migration, event: CommitAnswered, now: float) -> Step:
    answered = replace(migration, commit_open=False)
    match event.answer:
        case Committed():
            answer = Migrated(migration.request.request_id, _report(answered, now))
            return _end(answered, answer, Leave())
        case Declined() if _is_lost(migration, event.answer):
            pause = min(1.0, COMMIT_RETRY_S * 2 ** (migration.commit_tries - 1))
            return replace(answered, commit_again_s=now + pause), ()
        case Declined(code=code, message=message, by=by):
            return _fail(answered, code, f"commit was declined: {message}", by=by)
    return _fail(answered, Code.INTERNAL, f"commit was answered with {type(event.answer).__name__}")


def _is_lost(migration: Migration, answer: Answer) -> bool:
    """Whether it could not be asked (whoever carries questions says so in its name), rather than said no."""
    return isinstance(answer, Declined) and answer.code is Code.UNAVAILABLE and answer.by == migration.to.name


def _push_failed(migration: Migration, event: PushFailed, now: float) -> Step:
    return _fail(migration, Code.UNAVAILABLE, f"the KV transfer failed: {event.reason}")


def _renewal_answered(migration: Migration, event: RenewalAnswered, now: float) -> Step:
    answered = replace(migration, renewing=False)
    match event.answer:
        case LeaseRenewed(expires_in_s=expires_in_s):
            return replace(answered, lease_until_s=now + expires_in_s), ()
        case Declined() if _is_lost(migration, event.answer):
            return answered, ()  # an answer may be lost; the lease's end decides, or the transport's word
        case Declined(code=code, message=message, by=by):
            return _fail(answered, code, f"the lease was not renewed: {message}", by=by)
    return _fail(answered, Code.INTERNAL, f"renewal was answered with {type(event.answer).__name__}")


def _tick_leased(migration: Migration, event: Tick, now: float) -> Step:
    if now >= migration.lease_until_s:
        return _fail(migration, Code.UNAVAILABLE, f"the lease ran out while {migration.stage}")
    return migration, ()


def _tick_copying(migration: Migration, event: Tick, now: float) -> Step:
    ticked, effects = _tick_leased(migration, event, now)
    grant = migration.grant
    assert grant is not None
    if effects or migration.renewing or now < migration.lease_until_s - grant.expires_in_s * 2 / 3:
        return ticked, effects
    return replace(ticked, renewing=True), (AskDestination(RenewLease(grant.lease_id, grant.generation)),)


def _tick_committing(migration: Migration, event: Tick, now: float) -> Step:
    ticked, effects = _tick_leased(migration, event, now)
    if effects or ticked.commit_open or now < ticked.commit_again_s:
        return ticked, effects
    return _commit(ticked)


# -- the exits ----------------------------------------------------------------------------------------------------


def _stopped(migration: Migration, event: Stopped, now: float) -> Step:
    return _fail(migration, Code.ABORTED, event.reason, by="")


def _deadline(migration: Migration, event: DeadlinePassed, now: float) -> Step:
    """Its end comes from whoever runs it: here, from the next step on."""
    return _fail(migration, Code.DEADLINE, f"its deadline passed while {migration.stage}", by="")


def _peer_lost(migration: Migration, event: PeerLost, now: float) -> Step:
    return _fail(migration, Code.UNAVAILABLE, f"decode worker {migration.to.peer} is lost: {event.reason}")


def _fail(migration: Migration, code: Code, message: str, *, by: str | None = None) -> Step:
    return _end(migration, Declined(code, message, migration.to.name if by is None else by))


def _end(migration: Migration, answer: Migrated | Declined, *leave: Leave) -> Step:
    """Every way out: take the request back unless it has moved, tell the other side so, answer, wait for quiet."""
    effects: list[Effect] = [*leave]
    if not leave and migration.paused_s is not None:
        effects.append(Resume())
    if migration.grant is not None:
        effects.append(Withdraw())
        if isinstance(answer, Declined):
            drop = DropLease(migration.grant.lease_id, migration.grant.generation, answer.message)
            effects.append(AskDestination(drop))
    effects.append(Reply(answer))
    ended = replace(migration, stage=Stage.ENDING, awaits_quiet=migration.grant is not None)
    return _close_when_done(ended), tuple(effects)


def _close_when_done(migration: Migration) -> Migration:
    waits = migration.awaits_grant or migration.awaits_quiet
    return migration if waits else replace(migration, stage=Stage.CLOSED)


def _granted_too_late(migration: Migration, event: Granted, now: float) -> Step:
    drop = DropLease(event.grant.lease_id, event.grant.generation, "the request does not move any more")
    return _close_when_done(replace(migration, awaits_grant=False)), (AskDestination(drop),)


def _denied_too_late(migration: Migration, event: Denied, now: float) -> Step:
    return _close_when_done(replace(migration, awaits_grant=False)), ()


def _quiet(migration: Migration, event: Quiet, now: float) -> Step:
    return _close_when_done(replace(migration, awaits_quiet=False)), ()


def _report(migration: Migration, now: float) -> MigrationReport:
    assert migration.grant is not None
    assert migration.side is not None
    assert migration.paused_s is not None
    pieces = migration.pushed_pieces - migration.held_pieces
    return MigrationReport(
        stages=migration.stages,
        kv_blocks=pieces,
        kv_bytes=pieces * migration.side.piece_bytes,
        tail_blocks=migration.tail_pieces,
        transport=migration.grant.scheme,
        copy_s=migration.paused_s - migration.granted_s,
        pause_s=now - migration.paused_s,
    )


_EXITS: dict[type[Event], Handler] = {Stopped: _stopped, DeadlinePassed: _deadline, PeerLost: _peer_lost}
_LEASED: dict[type[Event], Handler] = {PushFailed: _push_failed, RenewalAnswered: _renewal_answered, **_EXITS}
_OVER: dict[type[Event], Handler] = dict.fromkeys(
    (Stepped, Paused, PushDone, PushFailed, CommitAnswered, RenewalAnswered, *_EXITS, Tick), _stay
)

_TABLE: dict[Stage, dict[type[Event], Handler]] = {
    Stage.ASKING: {Granted: _granted, Denied: _denied, Stepped: _stepped, Tick: _stay, **_EXITS},
    Stage.COPYING: {
        Stepped: _stepped_on,
        PushDone: _stage_sent,
        Paused: _paused,
        Tick: _tick_copying,
        **_LEASED,
    },
    Stage.COMMITTING: {
        CommitAnswered: _commit_answered,
        PushDone: _push_done,
        Stepped: _stay,
        Tick: _tick_committing,
        **_LEASED,
    },
    Stage.ENDING: {Granted: _granted_too_late, Denied: _denied_too_late, Quiet: _quiet, **_OVER},
    Stage.CLOSED: dict(_OVER),
}
