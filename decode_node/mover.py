"""The hands of `decode_node.migration`: moves running requests of this worker to other decode workers.

Every decision is `migration.advance`; here its effects are carried out, and steps, answers and transfer events are
turned into its events. Blocks under way have an owner of their own, let go by `PushDone` or by the transfer's `Quiet`,
so neither the request's end nor its preemption gives them to anybody while they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from decode_node import migration as m
from decode_node.migration import Migration, MoveLimits, Stage
from engine.engine import Engine
from engine.types import Request, StepResult
from kvtransfer import types as kv
from kvtransfer.engine import TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.outgoing import Outgoing
from tandem.messages import (
    Answer,
    AskMove,
    Code,
    Commit,
    Declined,
    LeaseGranted,
    Migrated,
    MigrationCounters,
    Question,
    RenewLease,
    WorkerInfo,
    WorkerRef,
)

Ask = Callable[[WorkerRef, Question], int]
"""Send a question to another worker; its answer comes back under the number returned, exactly once."""
Reply = Callable[[int, Answer], None]
Leave = Callable[[str, WorkerRef, int, float], None]
"""This request runs on that worker from now on, by the move of this number."""


@dataclass(slots=True)
class _Move:
    """One move: its state machine, and the blocks that its pushes hold."""

    ask_id: int
    migration: Migration
    outgoing: Outgoing | None = None
    """From the grant on."""

    @property
    def request_id(self) -> str:
        return self.migration.request.request_id

    @property
    def key(self) -> kv.LeaseKey:
        assert self.migration.grant is not None
        return kv.LeaseKey(self.migration.grant.lease_id, self.migration.grant.generation)


class Mover:
    """One thread, the step loop's; no I/O of its own."""

    def __init__(
        self,
        info: WorkerInfo,
        engine: Engine,
        transfers: TransferEngine,
        *,
        ask: Ask,
        reply: Reply,
        leave: Leave,
        limits: MoveLimits,
    ) -> None:
        self._info = info
        self._engine = engine
        self._transfers = transfers
        self._ask = ask
        self._reply = reply
        self._leave = leave
        self._limits = limits
        self._unanswered: dict[str, _Move] = {}
        self._leased: dict[kv.LeaseKey, _Move] = {}
        self._asked: dict[int, tuple[_Move, type[Question]]] = {}
        self.counters = MigrationCounters()

    def migrate(self, ask_id: int, request: Request, gateway_id: str, to: WorkerRef, now: float) -> None:
        """Begin to move a request that runs here."""
        generated = self._engine.generated(request.request_id)
        why = self._refusal(request, to, decodes=generated is not None)
        if why is not None or generated is None:
            self._reply(ask_id, why or Declined(Code.UNAVAILABLE, "it does not decode", by=self._info.ref.name))
            return
        move = _Move(
            ask_id,
            Migration(
                request=request,
                gateway_id=gateway_id,
                source=self._info,
                to=to,
                started_s=now,
                limits=self._limits,
            ),
        )
        self._unanswered[request.request_id] = move
        self._carry_out(move, m.begin(move.migration, generated), now)

    def answered(self, ask_id: int, answer: Answer, now: float) -> bool:
        """The answer to a question of ours; False: it is somebody else's."""
        if ask_id not in self._asked:
            return False
        move, question = self._asked.pop(ask_id)
        if question is AskMove:
            self._advance(move, _lease_answer(answer), now)
        elif question is RenewLease:
            self._advance(move, m.RenewalAnswered(answer), now)
        elif question is Commit:
            self._advance(move, m.CommitAnswered(answer), now)
        return True

    # -- the step loop's calls ------------------------------------------------------------------------------------

    def stepped(self, result: StepResult, now: float) -> None:
        """After a step: how far the moving requests have come."""
        for request_id in result.plan.preempted:
            self.stopped(request_id, "it was preempted", now)
        for progress in result.progress:
            if (move := self._unanswered.get(progress.request_id)) is not None:
                self._advance(move, m.Stepped(progress.computed_tokens), now)

    def stopped(self, request_id: str, why: str, now: float) -> None:
        """A request does not decode here any more."""
        if (move := self._unanswered.get(request_id)) is not None:
            self._advance(move, m.Stopped(why), now)

    def transferred(self, event: kv.TransferEvent, now: float) -> bool:
        """An event of the transfer engine; False: not about a move of ours."""
        if isinstance(event, kv.PeerLost):
            for move in tuple(self._unanswered.values()):
                if move.migration.to.peer == event.peer:
                    self._advance(move, m.PeerLost(event.reason), now)
            return False
        found = self._leased.get(event.key)
        if found is None or found.outgoing is None:
            return False
        match event:
            case kv.PushDone(push_id=push_id):
                if found.outgoing.done(push_id):
                    self._advance(found, m.PushDone(), now)
            case kv.PushFailed(reason=reason):
                self._advance(found, m.PushFailed(reason), now)
            case kv.Quiet():
                found.outgoing.quiet()
                self._advance(found, m.Quiet(), now)
        return True

    def tick(self, now: float) -> None:
        """What time alone brings: deadlines, renewals, Commits to repeat, peers that never fall silent."""
        for move in tuple(self._unanswered.values()):
            deadline_s = move.migration.request.deadline_s
            late = deadline_s is not None and now >= deadline_s
            self._advance(move, m.DeadlinePassed() if late else m.Tick(), now)
        for move in tuple(self._leased.values()):
            self._outgoing(move).tick(now)

    # -- what others ask ------------------------------------------------------------------------------------------

    def leaves_by(self) -> str | None:
        """The transport that takes the last bytes of a request that is paused."""
        for move in self._leased.values():
            migration = move.migration
            if migration.stage is Stage.COMMITTING and migration.pushes and migration.grant is not None:
                return migration.grant.scheme
        return None

    def idle(self) -> bool:
        """Nothing to answer and nothing held for a transfer."""
        return not (self._unanswered or self._leased)

    def check(self) -> None:
        """Raises AssertionError when books and machines disagree."""
        for request_id, move in self._unanswered.items():
            stage = move.migration.stage
            assert stage not in (Stage.ENDING, Stage.CLOSED), f"the move of {request_id} is {stage} but unanswered"
            paused = self._engine.generated(request_id) is None
            assert paused == (stage is Stage.COMMITTING), f"{request_id} is {stage} and {paused=}"
        for key, move in self._leased.items():
            assert move.migration.stage is not Stage.CLOSED, f"{key} is closed but kept"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request, to: WorkerRef, *, decodes: bool) -> Declined | None:
        """INVALID: never; UNAVAILABLE: not now."""
        name, request_id = self._info.ref.name, request.request_id
        if request.branching is not None:
            return Declined(Code.INVALID, f"{request_id} has several sequences, which stay together", by=name)
        if to == self._info.ref:
            return Declined(Code.INVALID, f"{request_id} is here already", by=name)
        if request_id in self._unanswered:
            return Declined(Code.UNAVAILABLE, f"{request_id} is moving already", by=name)
        if not decodes:
            return Declined(Code.UNAVAILABLE, f"{request_id} does not decode at the moment", by=name)
        if (cooling_s := self._transfers.cooling_s(to.peer)) > 0:
            why = f"the link to {to.name} hung and is tried again in {cooling_s:.1f} s"
            return Declined(Code.UNAVAILABLE, why, by=to.name)
        return None

    def _advance(self, move: _Move, event: m.Event, now: float) -> None:
        self._carry_out(move, m.advance(move.migration, event, now), now)
        if isinstance(event, m.Granted) and move.migration.stage is not Stage.CLOSED and move.migration.grant:
            self._outgoing(move)
            self._leased.setdefault(move.key, move)
        if move.migration.stage is Stage.CLOSED and move.migration.grant is not None:
            self._leased.pop(move.key, None)

    def _carry_out(self, move: _Move, step: m.Step, now: float) -> None:
        """Do as the machine says. What comes of it at once is its next event."""
        move.migration, effects = step
        followed: list[m.Event] = []
        for effect in effects:
            match effect:
                case m.AskDestination(question=question):
                    self._asked[self._ask(move.migration.to, question)] = (move, type(question))
                case m.Push():
                    followed += self._push(move, effect)
                case m.Pause():
                    generated = self._engine.pause(move.request_id)
                    followed.append(m.Stopped("it stopped") if generated is None else m.Paused(generated))
                case m.Resume():
                    self._engine.resume(move.request_id)
                case m.Withdraw():
                    self._outgoing(move).withdraw(now, self._limits.quiet_patience_s)
                case m.Leave():
                    self._leave(move.request_id, move.migration.to, move.key.generation, now)
                case m.Reply(answer=answer):
                    self._answer(move, answer)
        for event in followed:
            self._advance(move, event, now)

    def _answer(self, move: _Move, answer: Migrated | Declined) -> None:
        del self._unanswered[move.request_id]
        counted = self.counters
        if isinstance(answer, Migrated):
            report = answer.report
            self.counters = replace(
                counted,
                moved=counted.moved + 1,
                kv_bytes=counted.kv_bytes + report.kv_bytes,
                pause_seconds=counted.pause_seconds + report.pause_s,
            )
        else:
            self.counters = replace(counted, failed=counted.failed + 1)
        self._reply(move.ask_id, answer)

    def _push(self, move: _Move, push: m.Push) -> Iterable[m.Event]:
        """Give the blocks to the transfer, which owns them too from here on."""
        blocks, patience_s = self._engine.block_table(move.request_id), self._limits.push_patience_s
        try:
            self._outgoing(move).push(blocks, push.first_piece, push.num_pieces, deadline_s=patience_s)
        except TransferError as error:
            return [m.PushFailed(str(error))]
        return []

    def _outgoing(self, move: _Move) -> Outgoing:
        if move.outgoing is None:
            grant, side = move.migration.grant, move.migration.side
            assert grant is not None
            assert side is not None
            move.outgoing = Outgoing(
                self._transfers,
                self._engine,
                side,
                move.key,
                grant.destination.peer,
                grant.scheme,
                grant.address,
                first_piece=move.migration.held_pieces,
            )
        return move.outgoing


def _lease_answer(answer: Answer) -> m.Event:
    match answer:
        case LeaseGranted():
            return m.Granted(answer)
        case Declined():
            return m.Denied(answer)
    return m.Denied(Declined(Code.INTERNAL, f"a lease was answered with {type(answer).__name__}"))
