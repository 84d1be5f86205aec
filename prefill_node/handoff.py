"""The source side of a hand-over, as a state machine without I/O.

It owns the *story* of one prompt on the prefill worker; the service (`prefill_node.service`) carries out its effects.

    QUEUED ─ Scheduled ─► ASKING ─ Granted ─► PUSHING ─ all pushed, first token ─► COMMITTING
       │                                                                               │ Committed
       └ max_tokens=1 ─► ALONE ─ first token ─► CLOSED ◄─ Quiet ─ ENDING ◄─ acked ─ SETTLING

Compute goes on until COMMITTING. What can fail: the lease is denied (the request goes back to dispatch, its blocks
stay as evictable prefix cache), the lease or a push is lost, decode dies, the client leaves, the deadline passes; each
is an exit from each stage. The submit is answered exactly once, on entering ENDING or CLOSED. ENDING is left only
when the transfer says `Quiet` and no lease question is open, so a late grant is given back. The blocks themselves are
counted by the service: one owner is the request, another each push in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from engine.types import FinishReason, Token
from kvtransfer.plan import Side, side_of
from tandem import machine
from tandem.messages import (
    Answer,
    AskLease,
    Code,
    Commit,
    Committed,
    Declined,
    Delta,
    DropLease,
    FinishedEarly,
    HandedOver,
    HandoffReport,
    LeaseGranted,
    LeaseRenewed,
    RenewLease,
    WorkerInfo,
    WorkerRef,
)

COMMIT_RETRY_S = 0.1
"""Pause before Commit is asked again; doubles with each lost answer, up to one second."""


class Stage(StrEnum):
    QUEUED = "queued"
    ALONE = "alone"
    ASKING = "asking"
    PUSHING = "pushing"
    COMMITTING = "committing"
    SETTLING = "settling"
    """Decode has the request; the last pushes are received but not yet acknowledged."""
    ENDING = "ending"
    CLOSED = "closed"


# -- events: what happened ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The prompt's first chunk is about to be computed."""


@dataclass(frozen=True, slots=True)
class Granted:
    grant: LeaseGranted


@dataclass(frozen=True, slots=True)
class Denied:
    declined: Declined


@dataclass(frozen=True, slots=True)
class Computed:
    """Positions 0 … `computed_tokens` - 1 are in the pool; `cached_tokens` of them came from the prefix cache."""

    computed_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prompt is computed. `tokens`: a first token for each sequence, of beams the likeliest ones. `ended`: what
    there is to tell when none of the sequences goes on."""

    tokens: tuple[Token, ...]
    ended: tuple[Delta, ...] = ()
    prompt_logprobs: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    error: str


@dataclass(frozen=True, slots=True)
class PushDone:
    num_pieces: int
    num_bytes: int
    duration_s: float


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
class AbortAsked:
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


@dataclass(frozen=True, slots=True)
class PeerLost:
    reason: str


@dataclass(frozen=True, slots=True)
class Quiet:
    """The transfer touches no memory of this hand-over any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: renew, ask Commit again, or see that the lease has run out."""


Event = (
    Scheduled
    | Granted
    | Denied
    | Computed
    | FirstToken
    | ComputeFailed
    | PushDone
    | PushFailed
    | CommitAnswered
    | RenewalAnswered
    | AbortAsked
    | DeadlinePassed
    | PeerLost
    | Quiet
    | Tick
)


# -- effects: what is to be done ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskDecode:
    question: AskLease | RenewLease | Commit | DropLease


@dataclass(frozen=True, slots=True)
class Push:
    """Send the prompt's pieces `first_piece` … + `num_pieces` - 1."""

    first_piece: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Stop pushing; `Quiet` follows."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the submit; comes exactly once."""

    answer: HandedOver | FinishedEarly | Declined


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """The request lets go of its blocks; full ones stay as prefix cache."""


@dataclass(frozen=True, slots=True)
class AbortSource:
    """Stop computing and let go of the blocks."""

    reason: FinishReason


Effect = AskDecode | Push | Withdraw | Reply | ReleaseSource | AbortSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """All that is known of one hand-over. Times are seconds on the worker's clock.

    A piece is what both ends count in: a block, of the smaller size if they have two (`kvtransfer.plan`).
    """

    request_id: str
    source: WorkerInfo
    decode: WorkerRef
    prompt_tokens: int
    alone: bool
    """max_tokens=1: the first token ends it, so decode is never asked."""
    submitted_s: float
    stage: Stage = Stage.QUEUED
    history: tuple[str, ...] = ()
    scheduled_s: float = 0.0
    computed_s: float = 0.0
    computed_tokens: int = 0
    cached_tokens: int = 0
    first: FirstToken | None = None
    grant: LeaseGranted | None = None
    side: Side | None = None
    """From the grant on."""
    lease_until_s: float = 0.0
    renewing: bool = False
    pushed_pieces: int = 0
    """Pieces of the prompt held by decode or handed to the transfer so far."""
    sent_pieces: int = 0
    sent_bytes: int = 0
    transfer_s: float = 0.0
    commit_open: bool = False
    commit_tries: int = 0
    commit_again_s: float = 0.0
    committed_s: float = 0.0
    awaits_grant: bool = False
    awaits_quiet: bool = False

    @property
    def num_pieces(self) -> int:
        return self.side.pieces(self.prompt_tokens) if self.side else 0

    @property
    def held_pieces(self) -> int:
        return self.side.pieces(self.grant.held_tokens) if self.side and self.grant else 0

    @property
    def final_pieces(self) -> int:
        """Those that no later chunk writes to; the last, partial one is final with the whole prompt."""
        whole = self.computed_tokens >= self.prompt_tokens
        return self.num_pieces if whole or not self.side else self.side.full_pieces(self.computed_tokens)


Step = tuple[Handoff, tuple[Effect, ...]]
Handler = Callable[[Handoff, Any, float], Step]


def advance(handoff: Handoff, event: Event, now: float) -> Step:
    """The next state and what to do about it. Raises `IllegalTransition` for an event the stage does not know."""
    name, since_s = f"hand-over {handoff.request_id}", handoff.submitted_s
    return machine.advance(handoff, event, now, _TABLE, name=name, since_s=since_s, usual=(Tick,))


# -- the stages ---------------------------------------------------------------------------------------------------


def _stay(handoff: Handoff, event: Event, now: float) -> Step:
    return handoff, ()


def _scheduled(handoff: Handoff, event: Scheduled, now: float) -> Step:
    if handoff.alone:
        return replace(handoff, stage=Stage.ALONE, scheduled_s=now), ()
    source = handoff.source
    question = AskLease(
        handoff.request_id, source.ref, source.transports, source.model_digest, source.layout, source.block_size
    )
    return replace(handoff, stage=Stage.ASKING, scheduled_s=now, awaits_grant=True), (AskDecode(question),)


def _granted(handoff: Handoff, event: Granted, now: float) -> Step:
    grant, side = event.grant, side_of(handoff.source, event.grant.block_size)
    leased = replace(
        handoff,
        stage=Stage.PUSHING,
        grant=grant,
        side=side,
        awaits_grant=False,
        lease_until_s=now + grant.expires_in_s,
        pushed_pieces=side.pieces(grant.held_tokens),
    )
    if grant.num_spans != (leased.num_pieces - leased.held_pieces) * side.spans_per_piece:
        counts = f"{grant.held_tokens} tokens held + {grant.num_spans} spans for {leased.prompt_tokens} tokens"
        return _fail(leased, Code.MISMATCH, f"lease does not fit the prompt: {counts}", now)
    return _push_and_commit(leased, now)


def _denied(handoff: Handoff, event: Denied, now: float) -> Step:
    declined = replace(event.declined, by=event.declined.by or handoff.decode.name)
    return _end(replace(handoff, awaits_grant=False), declined, AbortSource(FinishReason.ABORT))


def _computed(handoff: Handoff, event: Computed, now: float) -> Step:
    return (
        replace(handoff, computed_tokens=event.computed_tokens, cached_tokens=event.cached_tokens, computed_s=now),
        (),
    )


def _computed_and_push(handoff: Handoff, event: Computed, now: float) -> Step:
    computed, _ = _computed(handoff, event, now)
    pushed, effects = _push_and_commit(computed, now)
    renewed, renewal = _renew(pushed)
    return renewed, effects + renewal


def _first(handoff: Handoff, event: FirstToken, now: float) -> Step:
    first = replace(handoff, first=event)
    if not event.ended:
        return first, ()
    early = FinishedEarly(handoff.request_id, event.ended, _report(first, now), event.prompt_logprobs)
    return _end(first, early, ReleaseSource())


def _first_and_commit(handoff: Handoff, event: FirstToken, now: float) -> Step:
    first, effects = _first(handoff, event, now)
    return (first, effects) if effects else _push_and_commit(first, now)


def _push_and_commit(handoff: Handoff, now: float) -> Step:
    """Send what is final and not yet sent; when that was all and the first token is there, commit.

    Commit does not wait for the pushes' acknowledgements: decode accepts it only when every receive is complete.
    """
    effects: tuple[Effect, ...] = ()
    fresh = handoff.final_pieces - handoff.pushed_pieces
    if fresh > 0:
        effects = (Push(handoff.pushed_pieces, fresh),)
        handoff = replace(handoff, pushed_pieces=handoff.final_pieces)
    if handoff.first is None or handoff.pushed_pieces < handoff.num_pieces:
        return handoff, effects
    committing, commit = _commit(replace(handoff, stage=Stage.COMMITTING), now)
    return committing, effects + commit


def _commit(handoff: Handoff, now: float) -> Step:
    assert handoff.grant is not None
    assert handoff.first is not None
    question = Commit(
        handoff.request_id,
        handoff.grant.lease_id,
        handoff.grant.generation,
        handoff.source.ref,
        handoff.grant.destination,
        handoff.prompt_tokens,
        handoff.source.layout,
        handoff.first.tokens,
        handoff.cached_tokens,
    )
    return replace(handoff, commit_open=True, commit_tries=handoff.commit_tries + 1), (AskDecode(question),)


def _commit_answered(handoff: Handoff, event: CommitAnswered, now: float) -> Step:
    answered = replace(handoff, commit_open=False)
    match event.answer:
        case Committed():
            settling = replace(answered, stage=Stage.SETTLING, committed_s=now)
            ended, effects = _end_when_settled(settling, now)
            return ended, (ReleaseSource(), *effects)
        case Declined() if _is_lost(handoff, event.answer):
            pause = min(1.0, COMMIT_RETRY_S * 2 ** (handoff.commit_tries - 1))
            return replace(answered, commit_again_s=now + pause), ()
        case Declined(code=code, message=message, by=by):
            return _fail(answered, code, f"commit was declined: {message}", now, by=by)
    return _fail(answered, Code.INTERNAL, f"commit was answered with {type(event.answer).__name__}", now)


def _is_lost(handoff: Handoff, answer: Answer) -> bool:
    """Whether decode could not be asked (whoever carries questions says so in its name), rather than said no."""
    return isinstance(answer, Declined) and answer.code is Code.UNAVAILABLE and answer.by == handoff.decode.name


def _push_done(handoff: Handoff, event: PushDone, now: float) -> Step:
    return (
        replace(
            handoff,
            sent_pieces=handoff.sent_pieces + event.num_pieces,
            sent_bytes=handoff.sent_bytes + event.num_bytes,
            transfer_s=handoff.transfer_s + event.duration_s,
        ),
        (),
    )


def _settled_push(handoff: Handoff, event: PushDone, now: float) -> Step:
    return _end_when_settled(_push_done(handoff, event, now)[0], now)


def _end_when_settled(handoff: Handoff, now: float) -> Step:
    if handoff.sent_pieces < handoff.pushed_pieces - handoff.held_pieces:
        return handoff, ()
    return _handed_over(handoff, None, now)


def _handed_over(handoff: Handoff, event: object, now: float) -> Step:
    """Decode runs the request: whatever else happens here, that is how it ended."""
    assert handoff.first is not None
    answer = HandedOver(handoff.request_id, _report(handoff, now), handoff.first.prompt_logprobs)
    return _end(handoff, answer)


def _tick_settling(handoff: Handoff, event: Tick, now: float) -> Step:
    return _handed_over(handoff, event, now) if now >= handoff.lease_until_s else (handoff, ())


def _push_failed(handoff: Handoff, event: PushFailed, now: float) -> Step:
    return _fail(handoff, Code.UNAVAILABLE, f"the KV transfer failed: {event.reason}", now)


def _renew(handoff: Handoff) -> Step:
    if handoff.stage not in (Stage.PUSHING, Stage.COMMITTING) or handoff.grant is None or handoff.renewing:
        return handoff, ()
    question = RenewLease(handoff.grant.lease_id, handoff.grant.generation)
    return replace(handoff, renewing=True), (AskDecode(question),)


def _renewal_answered(handoff: Handoff, event: RenewalAnswered, now: float) -> Step:
    answered = replace(handoff, renewing=False)
    match event.answer:
        case LeaseRenewed(expires_in_s=expires_in_s):
            return replace(answered, lease_until_s=now + expires_in_s), ()
        case Declined() if _is_lost(handoff, event.answer):
            return answered, ()  # an answer may be lost; the lease's end decides, or the transport's word
        case Declined(code=code, message=message, by=by):
            return _fail(answered, code, f"the lease was not renewed: {message}", now, by=by)
    return _fail(answered, Code.INTERNAL, f"renewal was answered with {type(event.answer).__name__}", now)


def _tick_pushing(handoff: Handoff, event: Tick, now: float) -> Step:
    assert handoff.grant is not None
    if now >= handoff.lease_until_s:
        return _fail(handoff, Code.UNAVAILABLE, f"the lease ran out while {handoff.stage}", now)
    due = handoff.lease_until_s - handoff.grant.expires_in_s * 2 / 3
    return _renew(handoff) if now >= due else (handoff, ())


def _tick_committing(handoff: Handoff, event: Tick, now: float) -> Step:
    ticked, effects = _tick_pushing(handoff, event, now)
    if ticked.stage is not Stage.COMMITTING or ticked.commit_open or now < ticked.commit_again_s:
        return ticked, effects
    committing, commit = _commit(ticked, now)
    return committing, effects + commit


# -- the exits ----------------------------------------------------------------------------------------------------


def _abort(handoff: Handoff, event: AbortAsked, now: float) -> Step:
    code = Code.DEADLINE if event.reason is FinishReason.DEADLINE else Code.ABORTED
    return _fail(handoff, code, f"aborted while {handoff.stage}", now, by="", reason=event.reason)


def _deadline(handoff: Handoff, event: DeadlinePassed, now: float) -> Step:
    message = f"the deadline passed while {handoff.stage}"
    return _fail(handoff, Code.DEADLINE, message, now, by="", reason=FinishReason.DEADLINE)


def _peer_lost(handoff: Handoff, event: PeerLost, now: float) -> Step:
    return _fail(handoff, Code.UNAVAILABLE, f"decode worker {handoff.decode.peer} is lost: {event.reason}", now)


def _compute_failed(handoff: Handoff, event: ComputeFailed, now: float) -> Step:
    return _fail(handoff, Code.INTERNAL, f"prefill failed: {event.error}", now, by=handoff.source.ref.name)


def _fail(
    handoff: Handoff,
    code: Code,
    message: str,
    now: float,
    *,
    by: str | None = None,
    reason: FinishReason = FinishReason.ABORT,
) -> Step:
    declined = Declined(code, message, handoff.decode.name if by is None else by)
    return _end(handoff, declined, AbortSource(reason))


def _end(handoff: Handoff, answer: HandedOver | FinishedEarly | Declined, *source: ReleaseSource | AbortSource) -> Step:
    """Every way out: answer, let go of the source, tell decode unless it has the request, wait for quiet."""
    effects: list[Effect] = []
    if handoff.grant is not None:
        effects.append(Withdraw())
        if not isinstance(answer, HandedOver):
            why = answer.message if isinstance(answer, Declined) else "ended with its first token"
            effects.append(AskDecode(DropLease(handoff.grant.lease_id, handoff.grant.generation, why)))
    effects += [*source, Reply(answer)]
    ended = replace(handoff, stage=Stage.ENDING, awaits_quiet=handoff.grant is not None)
    return _close_when_done(ended), tuple(effects)


def _close_when_done(handoff: Handoff) -> Handoff:
    waits = handoff.awaits_grant or handoff.awaits_quiet
    return handoff if waits else replace(handoff, stage=Stage.CLOSED)


def _granted_too_late(handoff: Handoff, event: Granted, now: float) -> Step:
    drop = DropLease(event.grant.lease_id, event.grant.generation, "the request has ended")
    return _close_when_done(replace(handoff, awaits_grant=False)), (AskDecode(drop),)


def _denied_too_late(handoff: Handoff, event: Denied, now: float) -> Step:
    return _close_when_done(replace(handoff, awaits_grant=False)), ()


def _quiet(handoff: Handoff, event: Quiet, now: float) -> Step:
    return _close_when_done(replace(handoff, awaits_quiet=False)), ()


def _report(handoff: Handoff, now: float) -> HandoffReport:
    return HandoffReport(
        prefill_cached_tokens=handoff.cached_tokens,
        decode_held_tokens=handoff.grant.held_tokens if handoff.grant else 0,
        computed_tokens=handoff.computed_tokens - handoff.cached_tokens,
        kv_bytes=handoff.sent_bytes,
        kv_blocks=handoff.sent_pieces,
        transport=handoff.grant.scheme if handoff.grant and handoff.sent_pieces else "",
        queue_s=handoff.scheduled_s - handoff.submitted_s,
        prefill_s=handoff.computed_s - handoff.scheduled_s,
        transfer_s=handoff.transfer_s,
        exposed_s=max(0.0, handoff.committed_s - handoff.computed_s),
    )


_EXITS: dict[type[Event], Handler] = {
    AbortAsked: _abort,
    DeadlinePassed: _deadline,
    PeerLost: _peer_lost,
    ComputeFailed: _compute_failed,
}
_LEASED: dict[type[Event], Handler] = {
    PushDone: _push_done,
    PushFailed: _push_failed,
    RenewalAnswered: _renewal_answered,
}
_OVER: dict[type[Event], Handler] = dict.fromkeys(
    (
        Computed,
        FirstToken,
        PushDone,
        PushFailed,
        CommitAnswered,
        RenewalAnswered,
        AbortAsked,
        DeadlinePassed,
        PeerLost,
        ComputeFailed,
        Tick,
    ),
    _stay,
)

_TABLE: dict[Stage, dict[type[Event], Handler]] = {
    Stage.QUEUED: {Scheduled: _scheduled, Tick: _stay, **_EXITS},
    # Alone, the decode worker does not matter: its loss is no reason to stop.
    Stage.ALONE: {Computed: _computed, FirstToken: _first, Tick: _stay, **_EXITS, PeerLost: _stay},
    Stage.ASKING: {
        Granted: _granted,
        Denied: _denied,
        Computed: _computed,
        FirstToken: _first,
        Tick: _stay,
        **_EXITS,
    },
    Stage.PUSHING: {
        Computed: _computed_and_push,
        FirstToken: _first_and_commit,
        Tick: _tick_pushing,
        **_LEASED,
        **_EXITS,
    },
    Stage.COMMITTING: {CommitAnswered: _commit_answered, Tick: _tick_committing, **_LEASED, **_EXITS},
    Stage.SETTLING: {
        PushDone: _settled_push,
        RenewalAnswered: _stay,
        Tick: _tick_settling,
        **dict.fromkeys((PushFailed, *_EXITS), _handed_over),
    },
    Stage.ENDING: {Granted: _granted_too_late, Denied: _denied_too_late, Quiet: _quiet, **_OVER},
    Stage.CLOSED: dict(_OVER),
}
