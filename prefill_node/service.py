"""The prefill service of a worker: admission, and the hands of the hand-over's state machine.

A submit is queued in the engine with `hold`, so that its blocks outlive its first token. Just before the step that may
compute its first chunk, its lease is asked for, so the answer overlaps that chunk. After each step finished blocks are
pushed while the next step computes. Every decision is `handoff.advance`; here its effects are carried out, answers and
transfer events are turned into its events, and blocks are counted: the request is one owner, each push in flight
another, let go by `PushDone` or, after a failure, only by the transfer's `Quiet`. A peer that leaves us waiting
for `Quiet` is cut off: what is under way with it ends, and the next hand-over connects anew.

When the lease is denied the prompt goes back to dispatch with NO_ROOM: its full blocks stay as evictable prefix cache,
so that the next attempt computes little, and nothing behind it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.types import FinishReason, Progress, Request, StepResult
from kvtransfer import types as kv
from kvtransfer.engine import TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.outgoing import Outgoing
from prefill_node import handoff as h
from prefill_node.handoff import Handoff, Stage
from tandem.messages import (
    Answer,
    AskLease,
    Code,
    Commit,
    Declined,
    Delta,
    LeaseGranted,
    Question,
    RenewLease,
    Submit,
    WorkerInfo,
    WorkerRef,
)

Ask = Callable[[WorkerRef, Question], int]
"""Send a question to another worker; its answer comes back under the number returned, exactly once."""
Reply = Callable[[int, Answer], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    max_queued: int = 512
    """Submits that are not through; more are declined with NO_ROOM."""
    tokens_per_step: int = 512
    """The engine's budget: a prompt with fewer tokens than this ahead of it may be computed in the next step."""
    push_patience_s: float = 5.0
    """A push that is not acknowledged by then has failed, and with it the attempt: dispatch tries another."""
    quiet_patience_s: float = 5.0


@dataclass(slots=True)
class Flight:
    """One submit: its state machine, and the blocks that its pushes hold."""

    ask_id: int
    request: Request
    handoff: Handoff
    outgoing: Outgoing | None = None
    """From the grant on."""

    @property
    def key(self) -> kv.LeaseKey:
        assert self.handoff.grant is not None
        return kv.LeaseKey(self.handoff.grant.lease_id, self.handoff.grant.generation)


class PrefillNode:
    """One thread, the step loop's; no I/O of its own."""

    def __init__(
        self,
        info: WorkerInfo,
        engine: Engine,
        transfers: TransferEngine,
        *,
        ask: Ask,
        reply: Reply,
        limits: PrefillLimits = PrefillLimits(),
    ) -> None:
        self._info = info
        self._engine = engine
        self._transfers = transfers
        self._ask = ask
        self._reply = reply
        self._limits = limits
        self._unanswered: dict[str, Flight] = {}
        self._leased: dict[kv.LeaseKey, Flight] = {}
        self._asked: dict[int, tuple[Flight, type[Question]]] = {}

    # -- questions and answers ------------------------------------------------------------------------------------

    def submit(self, ask_id: int, submit: Submit, now: float) -> None:
        """Queue the prompt, or say at once why not."""
        if refusal := self._refuse(submit):
            self._reply(ask_id, refusal)
            return
        request = submit.request
        handoff = Handoff(
            request_id=request.request_id,
            source=self._info,
            decode=submit.decode,
            prompt_tokens=len(request.token_ids),
            alone=request.sampling.max_tokens == 1,
            submitted_s=now,
        )
        self._unanswered[request.request_id] = Flight(ask_id, request, handoff)

    def abort(self, request_id: str, reason: FinishReason, now: float) -> bool:
        flight = self._unanswered.get(request_id)
        if flight is not None:
            self._advance(flight, h.AbortAsked(reason), now)
        return flight is not None

    def answered(self, ask_id: int, answer: Answer, now: float) -> None:
        """The answer to a question of ours; a lost one arrives as `Declined(UNAVAILABLE)`."""
        flight, question = self._asked.pop(ask_id)
        if question is AskLease:
            self._advance(flight, _lease_answer(answer), now)
        elif question is RenewLease:
            self._advance(flight, h.RenewalAnswered(answer), now)
        elif question is Commit:
            self._advance(flight, h.CommitAnswered(answer), now)

    # -- the step loop's calls ------------------------------------------------------------------------------------

    def prepare(self, now: float) -> None:
        """Before a step: ask for the leases of the prompts that it may begin."""
        ahead = 0
        for flight in sorted(self._unanswered.values(), key=_urgency):
            if ahead >= self._limits.tokens_per_step:
                return
            ahead += flight.handoff.prompt_tokens - flight.handoff.computed_tokens
            if flight.handoff.stage is Stage.QUEUED:
                self._advance(flight, h.Scheduled(), now)

    def stepped(self, result: StepResult, now: float) -> None:
        """After a step: push what became final, note first tokens."""
        for request_id in result.plan.preempted:
            if (preempted := self._unanswered.get(request_id)) is not None:
                self._advance(preempted, h.Computed(0), now)  # its block table is void until it is computed again
        for request_id, told in _by_request(result.progress).items():
            flight = self._unanswered.get(request_id)
            if flight is not None:
                self._progressed(flight, told, now)

    def transferred(self, event: kv.TransferEvent, now: float) -> bool:
        """An event of the transfer engine; False: not about a push of ours."""
        if isinstance(event, kv.PeerLost):
            for waiting in tuple(self._unanswered.values()):
                if waiting.handoff.decode.peer == event.peer:
                    self._advance(waiting, h.PeerLost(event.reason), now)
            return False
        flight = self._leased.get(event.key)
        if flight is None or flight.outgoing is None:
            return False
        match event:
            case kv.PushDone(push_id=push_id, num_bytes=num_bytes, duration_s=duration_s):
                self._advance(flight, h.PushDone(flight.outgoing.done(push_id), num_bytes, duration_s), now)
            case kv.PushFailed(reason=reason):
                self._advance(flight, h.PushFailed(reason), now)
            case kv.Quiet():
                flight.outgoing.quiet()
                self._advance(flight, h.Quiet(), now)
        return True

    def tick(self, now: float) -> None:
        """What time alone brings: deadlines, renewals, Commits to repeat, peers that never fall silent."""
        for flight in tuple(self._unanswered.values()):
            late = flight.request.deadline_s is not None and now >= flight.request.deadline_s
            self._advance(flight, h.DeadlinePassed() if late else h.Tick(), now)
        for flight in tuple(self._leased.values()):
            self._outgoing(flight).tick(now)

    # -- what others ask ------------------------------------------------------------------------------------------

    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._unanswered)

    def idle(self) -> bool:
        """Nothing to answer and nothing held for a transfer."""
        return not (self._unanswered or self._leased)

    def check(self) -> None:
        """Raises AssertionError when books and machines disagree."""
        for request_id, flight in self._unanswered.items():
            stage = flight.handoff.stage
            assert stage not in (Stage.ENDING, Stage.CLOSED), f"{request_id} is {stage} but unanswered"
        for key, flight in self._leased.items():
            assert flight.handoff.stage is not Stage.CLOSED, f"{key} is closed but kept"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _refuse(self, submit: Submit) -> Declined | None:
        name, request = self._info.ref.name, submit.request
        if len(self._unanswered) >= self._limits.max_queued:
            return Declined(Code.NO_ROOM, f"the prefill queue is full ({self._limits.max_queued})", by=name)
        if (cooling_s := self._transfers.cooling_s(submit.decode.peer)) > 0:
            why = f"the link to {submit.decode.name} hung and is tried again in {cooling_s:.1f} s"
            return Declined(Code.NO_ROOM, why, by=submit.decode.name)
        if request.request_id in self._unanswered:
            return Declined(Code.INVALID, f"request {request.request_id} is already being computed", by=name)
        try:
            self._engine.submit(request, hold=True)
        except InvalidRequest as error:
            return Declined(Code.INVALID, str(error), by=name)
        return None

    def _progressed(self, flight: Flight, told: list[Progress], now: float) -> None:
        """`told` is more than one when a request of several sequences ended with its first tokens."""
        progress = told[0]
        if flight.handoff.stage is Stage.QUEUED:
            self._advance(flight, h.Scheduled(), now)
        if progress.tokens or progress.finish is None:
            self._advance(flight, h.Computed(progress.computed_tokens, progress.cached_tokens), now)
        if progress.tokens:
            ended = tuple(_told(one) for one in told if one.finish is not None)
            self._advance(flight, h.FirstToken(progress.tokens, ended, progress.prompt_logprobs), now)
        elif progress.finish is not None:
            self._advance(flight, _ending(progress), now)

    def _advance(self, flight: Flight, event: h.Event, now: float) -> None:
        """Let the machine decide, then do as it says. A push that fails at once is its next event."""
        failed: list[h.Event] = []
        flight.handoff, effects = h.advance(flight.handoff, event, now)
        for effect in effects:
            match effect:
                case h.AskDecode(question=question):
                    ask_id = self._ask(flight.handoff.decode, question)
                    self._asked[ask_id] = (flight, type(question))
                case h.Push():
                    failed += self._push(flight, effect)
                case h.Withdraw():
                    self._outgoing(flight).withdraw(now, self._limits.quiet_patience_s)
                case h.Reply(answer=answer):
                    del self._unanswered[flight.request.request_id]
                    self._reply(flight.ask_id, answer)
                case h.ReleaseSource():
                    self._engine.release(flight.request.request_id)
                case h.AbortSource(reason=reason):
                    self._engine.abort(flight.request.request_id, reason)
        if isinstance(event, h.Granted) and flight.handoff.grant is not None:
            self._outgoing(flight)
            self._leased.setdefault(flight.key, flight)
        if flight.handoff.stage is Stage.CLOSED and flight.handoff.grant is not None:
            self._leased.pop(flight.key, None)
        for failure in failed:
            self._advance(flight, failure, now)

    def _push(self, flight: Flight, push: h.Push) -> Iterable[h.Event]:
        """Give the blocks to the transfer, which owns them too from here on."""
        blocks = self._engine.block_table(flight.request.request_id)
        priority, patience_s = -flight.request.priority, self._limits.push_patience_s
        try:
            outgoing = self._outgoing(flight)
            outgoing.push(blocks, push.first_piece, push.num_pieces, priority=priority, deadline_s=patience_s)
        except TransferError as error:
            return [h.PushFailed(str(error))]
        return []

    def _outgoing(self, flight: Flight) -> Outgoing:
        if flight.outgoing is None:
            handoff = flight.handoff
            assert handoff.grant is not None
            assert handoff.side is not None
            flight.outgoing = Outgoing(
                self._transfers,
                self._engine,
                handoff.side,
                flight.key,
                handoff.grant.destination.peer,
                handoff.grant.scheme,
                handoff.grant.address,
                first_piece=handoff.held_pieces,
            )
        return flight.outgoing


def _urgency(flight: Flight) -> tuple[int, float]:
    return -flight.request.priority, flight.handoff.submitted_s


def _lease_answer(answer: Answer) -> h.Event:
    match answer:
        case LeaseGranted():
            return h.Granted(answer)
        case Declined():
            return h.Denied(answer)
    return h.Denied(Declined(Code.INTERNAL, f"a lease was answered with {type(answer).__name__}"))


def _by_request(progress: Iterable[Progress]) -> dict[str, list[Progress]]:
    told: dict[str, list[Progress]] = {}
    for one in progress:
        told.setdefault(one.request_id, []).append(one)
    return told


def _told(progress: Progress) -> Delta:
    """How a sequence that ended with its first token is told."""
    return Delta(progress.request_id, 0, progress.tokens, progress.finish, index=progress.index, score=progress.score)


def _ending(progress: Progress) -> h.Event:
    """How a sequence ended that has no token."""
    match progress.finish:
        case FinishReason.DEADLINE:
            return h.DeadlinePassed()
        case FinishReason.ABORT:
            return h.AbortAsked()
    return h.ComputeFailed(progress.error or f"the engine ended it with {progress.finish}")
