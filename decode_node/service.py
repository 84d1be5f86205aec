"""The decode service of a worker: expected requests, leases on blocks, token streams.

`Expect` registers a request: a reservation, which is a number. `AskLease` turns it into real blocks if admission says
yes; the prefill worker's bytes and its Commit then start the decoding. Every decision is `lease.advance` or
`admission.decide`; here their effects are carried out. Blocks of a lease have two owners, the sequence and the
transfer; the second is let go only by the transfer's `Quiet`, and a peer that leaves us waiting for it is cut off. With
`prefill=None` the engine computes the prompt itself, and what a lost worker had generated, and the rest is the same.

New tokens leave as one frame per gateway and step, numbered without holes. Of a request with several sequences each is
counted by itself; the request ends with the last one, or with the first that fails.

A running request may move to another worker (`Migrate`, see `decode_node.migration`) and come from one (`AskMove`, then
as from prefill). What is told of one that came counts once its source has said that it has (`decode_node.unheard`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from decode_node import admission
from decode_node import lease as d
from decode_node.admission import Claim, Room, Wish
from decode_node.lease import Intake, Moving, Stage
from decode_node.migration import MoveLimits
from decode_node.mover import Ask, Mover
from decode_node.unheard import Unheard
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.types import BlockLease, FinishReason, Progress, Request, StepResult, Token
from kvtransfer import types as kv
from kvtransfer.engine import TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.outgoing import Parting
from kvtransfer.plan import side_of
from kvtransfer.select import choose
from tandem.messages import (
    ENDS_ALL,
    Answer,
    AskLease,
    AskMove,
    Code,
    Commit,
    Declined,
    Delta,
    DropLease,
    Dropped,
    Expect,
    Expected,
    Follow,
    Followed,
    Frame,
    FrameFor,
    LeaseGranted,
    LeaseRenewed,
    Migrate,
    MigrationCounters,
    RenewLease,
    WorkerInfo,
    WorkerRef,
)

Reply = Callable[[int, Answer], None]
REMEMBERED_LEASES = 1024
"""Ended leases whose Commit is still answered as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    max_expected: int = 1024
    reservation_s: float = 120.0
    """An expected request that nobody brings ends after this, if it has no earlier deadline."""
    lease_s: float = 6.0
    watermark: float = 0.95
    """Share of the pool that leases may fill, forecast growth included."""
    growth_horizon_tokens: int = 64
    claim_s: float = 3.0
    """How long a denied request keeps its place when nobody says that it is over; dispatch asks again within half."""
    quiet_patience_s: float = 5.0


@dataclass(slots=True)
class Guest:
    """One expected request: its state machine, and what it holds here."""

    request: Request
    gateway_id: str
    intake: Intake
    open: set[int]
    """The sequences that are yet to end, by index."""
    told: dict[int, int] = field(default_factory=dict)
    """Tokens of each sequence that the gateway was told of."""
    grant: LeaseGranted | None = None
    key: kv.LeaseKey | None = None
    pinned: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    """Of one that moves here: its tokens when it asked for room, and how many more it asked room for."""
    spare_tokens: int = 0
    parting: Parting | None = None


class DecodeNode:
    """One thread, the step loop's; no I/O of its own."""

    def __init__(
        self,
        info: WorkerInfo,
        engine: Engine,
        transfers: TransferEngine,
        *,
        ask: Ask,
        reply: Reply,
        limits: DecodeLimits = DecodeLimits(),
    ) -> None:
        self._info = info
        self._engine = engine
        self._transfers = transfers
        self._reply = reply
        self._limits = limits
        moves = MoveLimits(quiet_patience_s=limits.quiet_patience_s)
        self._mover = Mover(info, engine, transfers, ask=ask, reply=reply, leave=self._moved, limits=moves)
        self._unheard = Unheard()
        self._guests: dict[str, Guest] = {}
        self._by_lease: dict[str, Guest] = {}
        self._ended: OrderedDict[str, Intake] = OrderedDict()
        self._claims: tuple[Claim, ...] = ()
        self._generations = count(1)
        self._news: dict[str, list[Delta]] = {}
        self._frame_numbers: dict[str, int] = {}

    # -- from the gateway -----------------------------------------------------------------------------------------

    def expect(self, ask_id: int, expect: Expect, now: float) -> None:
        """Register the request, or say at once why not."""
        request = expect.request
        if refusal := self._refuse(expect):
            self._reply(ask_id, refusal)
            return
        intake = self._intake(request, expect.prefill, now)
        guest = Guest(request, expect.gateway_id, intake, set(range(request.answers)))
        guest.told[0] = len(expect.generated)
        self._guests[request.request_id] = guest
        self._reply(ask_id, Expected(request.request_id))

    def abort(self, request_id: str, reason: FinishReason, now: float) -> bool:
        guest = self._guests.get(request_id)
        live = guest is not None and guest.intake.stage is not Stage.ENDING
        if guest is not None:
            self._advance(guest, d.AbortAsked(reason), now)
        self._unheard.drop(request_id)  # with its last word: whoever wanted to hear it has given up
        return live

    def waive(self, request_id: str) -> None:
        """The request behind this attempt does not come back: younger ones need not wait for it."""
        self._claims = admission.without(self._claims, admission.claim_key(request_id))

    def abort_sequence(self, request_id: str, index: int, now: float) -> bool:
        """End one sequence of a request that runs, without a word; False when it has ended, or cannot end alone."""
        guest = self._guests.get(request_id)
        if guest is None or guest.intake.stage is not Stage.RUNNING:
            return False
        if not self._engine.abort(request_id, index=index):
            return False
        self._sequence_ended(guest, index, now)
        return True

    # -- moves ----------------------------------------------------------------------------------------------------

    def migrate(self, ask_id: int, question: Migrate, now: float) -> None:
        """Move a running request elsewhere; the answer comes when it has moved, or has not."""
        guest = self._guests.get(question.request_id)
        if guest is None or guest.intake.stage is not Stage.RUNNING or question.request_id in self._unheard:
            message = f"request {question.request_id} does not run here (yet, or any more)"
            self._reply(ask_id, Declined(Code.UNAVAILABLE, message, by=self._info.ref.name))
            return
        self._mover.migrate(ask_id, guest.request, guest.gateway_id, question.to, now)

    def ask_move(self, ask_id: int, ask: AskMove, now: float) -> None:
        """Real blocks for a request that runs elsewhere and wants to move here; not by a claim on room, for it can stay
        where it is."""
        request_id = ask.request.request_id
        if refusal := self._refuse_move(ask):
            self._reply(ask_id, refusal)
            return
        guest = Guest(ask.request, ask.gateway_id, self._intake(ask.request, ask.source, now), {0})
        guest.generated, guest.spare_tokens = ask.generated, ask.spare_tokens
        guest.told[0] = len(ask.generated)
        answer = self._grant(guest, ask, now)
        if isinstance(answer, LeaseGranted):
            self._guests[request_id] = guest
            self._unheard.begin(request_id)
        self._reply(ask_id, answer)

    def follow(self, ask_id: int, follow: Follow, now: float) -> None:
        """The gateway knows that the request has moved here: what was told before is told again."""
        guest = self._guests.get(follow.request_id)
        kept = self._unheard.follow(follow.request_id)
        if kept is None and (guest is None or follow.request_id in self._unheard):
            why = f"request {follow.request_id} has not moved here, or was not asked for in time"
            self._reply(ask_id, self._stale(why))
            return
        if kept:
            self._news.setdefault(follow.gateway_id, []).extend(kept)
        self._reply(ask_id, Followed(follow.request_id))

    def answered(self, ask_id: int, answer: Answer, now: float) -> bool:
        """The answer to a question of ours to another worker; False: it is somebody else's."""
        return self._mover.answered(ask_id, answer, now)

    # -- from prefill ---------------------------------------------------------------------------------------------

    def ask_lease(self, ask_id: int, ask: AskLease, now: float) -> None:
        """Real blocks for an expected request. Asked again by the same source, the same lease is the answer."""
        guest = self._guests.get(ask.request_id)
        if refusal := self._refuse_lease(guest, ask):
            self._reply(ask_id, refusal)
            return
        assert guest is not None
        self._reply(ask_id, guest.grant or self._grant(guest, ask, now))

    def renew(self, ask_id: int, renew: RenewLease, now: float) -> None:
        guest = self._by_lease.get(renew.lease_id)
        intake = guest.intake if guest is not None else self._ended.get(renew.lease_id)
        if guest is None or guest.key is None or guest.intake.stage is Stage.ENDING:
            end = intake.end if intake is not None else None
            self._reply(ask_id, end or self._stale(f"lease {renew.lease_id} has ended here"))
        elif guest.key.generation != renew.generation:
            both = f"generation is {renew.generation} at prefill but {guest.key.generation} at decode"
            self._reply(ask_id, self._stale(both))
        else:
            self._advance(guest, d.Renewed(now + self._limits.lease_s), now)
            self._reply(ask_id, LeaseRenewed(self._limits.lease_s))

    def commit(self, ask_id: int, commit: Commit, now: float) -> None:
        """The answer comes when every receive is complete, or never will be."""
        guest = self._by_lease.get(commit.lease_id)
        if guest is not None:
            self._advance(guest, d.CommitArrived(commit, ask_id), now)
        elif (intake := self._ended.get(commit.lease_id)) is not None:
            for effect in d.advance(intake, d.CommitArrived(commit, ask_id), now)[1]:
                assert isinstance(effect, d.AnswerCommit)
                self._reply(effect.ask_id, effect.answer)
        else:
            self._reply(ask_id, self._stale(f"lease {commit.lease_id} is unknown here"))

    def drop(self, ask_id: int, drop: DropLease, now: float) -> None:
        guest = self._by_lease.get(drop.lease_id)
        if guest is not None and guest.key is not None and guest.key.generation == drop.generation:
            self._advance(guest, d.DropAsked(drop.reason), now)
            if guest.request.request_id in self._unheard:  # It was taken back by its source, whatever became of Commit.
                self.abort(guest.request.request_id, FinishReason.ABORT, now)
        self._reply(ask_id, Dropped(drop.lease_id))

    # -- the step loop's calls ------------------------------------------------------------------------------------

    def stepped(self, result: StepResult, now: float) -> None:
        """After a step: news for the gateways."""
        for progress in result.progress:
            guest = self._guests.get(progress.request_id)
            if guest is not None and guest.intake.stage is Stage.RUNNING:
                self._progressed(guest, progress, now)
        self._mover.stepped(result, now)

    def transferred(self, event: kv.TransferEvent, now: float) -> bool:
        """An event of the transfer engine; False: not about a lease of ours."""
        if self._mover.transferred(event, now):
            return True
        if isinstance(event, kv.PeerLost):
            for waiting in tuple(self._guests.values()):
                if waiting.intake.prefill is not None and waiting.intake.prefill.peer == event.peer:
                    self._advance(waiting, d.PeerLost(event.reason), now)
            return False
        guest = self._by_lease.get(event.key.lease_id)
        if guest is None or guest.key != event.key:
            return False
        match event:
            case kv.Received(count=spans):
                self._advance(guest, d.Received(spans), now)
            case kv.ReceiveFailed(reason=reason):
                self._advance(guest, d.ReceiveFailed(reason), now)
            case kv.Quiet():
                self._engine.unretain(guest.pinned)
                guest.pinned, guest.parting = (), None
                self._advance(guest, d.Quiet(), now)
        return True

    def leaves_by(self) -> str | None:
        """The transport that takes the last bytes of a request that is paused here, to go on elsewhere."""
        return self._mover.leaves_by()

    def arrives_by(self) -> str | None:
        """The transport that brings the last bytes of a request that is paused elsewhere, to go on here."""
        for guest in self._by_lease.values():
            if guest.generated and guest.intake.stage is Stage.COMMITTED and guest.grant is not None:
                return guest.grant.scheme
        return None

    def tick(self, now: float) -> None:
        """What time alone brings: deadlines, ends of leases, peers that never fall silent."""
        self._claims = admission.still_claimed(self._claims, now)
        for guest in tuple(self._guests.values()):
            self._advance(guest, d.Tick(), now)
            if guest.parting is not None:
                guest.parting.tick(now)
        self._mover.tick(now)
        for request_id in self._unheard.expired(now):
            self.abort(request_id, FinishReason.ABORT, now)

    def take_frames(self) -> list[FrameFor]:
        """The news since the last call, one frame per gateway."""
        news, self._news = self._news, {}
        return [FrameFor(gateway_id, self._frame(gateway_id, deltas)) for gateway_id, deltas in news.items()]

    # -- what others ask ------------------------------------------------------------------------------------------

    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._guests)

    @property
    def migrations(self) -> MigrationCounters:
        return self._mover.counters

    def idle(self) -> bool:
        return not self._guests and self._mover.idle() and not self._unheard

    def check(self) -> None:
        """Raises AssertionError when books and machines disagree."""
        for request_id, guest in self._guests.items():
            assert guest.intake.stage is not Stage.DONE, f"{request_id} is done but kept"
        for lease_id, guest in self._by_lease.items():
            assert guest.request.request_id in self._guests, f"lease {lease_id} has no request"
        self._mover.check()

    # -- inside: admission ----------------------------------------------------------------------------------------

    def _intake(self, request: Request, source: WorkerRef | None, now: float) -> Intake:
        return d.expected(
            request.request_id,
            me=self._info,
            prefill=source,
            prompt_tokens=len(request.token_ids),
            deadline_s=request.deadline_s,
            now=now,
            reservation_s=self._limits.reservation_s,
            sequences=request.sequences,
            beams=request.branching is not None and request.branching.beam_width > 0,
        )

    def _refuse(self, expect: Expect) -> Declined | None:
        name, request = self._info.ref.name, expect.request
        if request.request_id in self._guests:
            return Declined(Code.INVALID, f"request {request.request_id} is already here", by=name)
        if len(self._guests) >= self._limits.max_expected:
            return Declined(Code.NO_ROOM, f"{self._limits.max_expected} requests are expected already", by=name)
        try:
            if expect.prefill is None:
                self._engine.submit(request, expect.generated)
            elif expect.generated:
                raise InvalidRequest("generated", "goes with no prefill worker")
            else:
                self._engine.check_request(request)
        except InvalidRequest as error:
            return Declined(Code.INVALID, str(error), by=name)
        return None

    def _refuse_move(self, ask: AskMove) -> Declined | None:
        name, request = self._info.ref.name, ask.request
        if request.request_id in self._guests or request.request_id in self._unheard:
            return Declined(Code.UNAVAILABLE, f"request {request.request_id} is already here", by=name)
        if request.branching is not None or not ask.generated:
            return Declined(Code.INVALID, f"{request.request_id} does not decode as one sequence", by=name)
        if len(self._guests) >= self._limits.max_expected:
            return Declined(Code.NO_ROOM, f"{self._limits.max_expected} requests are expected already", by=name)
        try:
            self._engine.check_request(request)
        except InvalidRequest as error:
            return Declined(Code.INVALID, str(error), by=name)
        return self._mismatch(ask)

    def _mismatch(self, ask: AskLease | AskMove) -> Declined | None:
        me = self._info
        for what, theirs, ours in (
            ("model digest", ask.model_digest, me.model_digest),
            ("layout", ask.layout, me.layout),
        ):
            if theirs != ours:
                message = f"{what} is {theirs} at {ask.source.name} but {ours} at {me.ref.name}"
                return Declined(Code.MISMATCH, message, by=me.ref.name)
        try:
            side_of(me, ask.block_size)
        except ValueError as error:
            return Declined(Code.MISMATCH, f"{ask.source.name} and {me.ref.name} have {error}", by=me.ref.name)
        return None

    def _refuse_lease(self, guest: Guest | None, ask: AskLease) -> Declined | None:
        if guest is None:
            return self._stale(f"request {ask.request_id} is not expected here (any more)")
        if mismatch := self._mismatch(ask):
            return mismatch
        lease = guest.intake.lease
        if guest.intake.stage is Stage.EXPECTED or (guest.grant and lease and lease.source == ask.source):
            return None
        return self._stale(f"request {ask.request_id} is already {guest.intake.stage} here")

    def _grant(self, guest: Guest, ask: AskLease | AskMove, now: float) -> Answer:
        ours, theirs = dict(self._transfers.addresses()), dict(ask.transports)
        try:
            scheme = choose(ours, theirs)
        except TransferError as error:
            return Declined(Code.MISMATCH, str(error), by=self._info.ref.name)
        try:
            self._transfers.connect(ask.source.peer, scheme, theirs[scheme])
        except TransferError as error:
            return Declined(Code.UNAVAILABLE, f"cannot reach {ask.source.name} back: {error}", by=ask.source.name)
        wish = self._wish(guest, ask.block_size)
        if refusal := self._no_landing(guest, wish, now):
            return refusal
        blocks = self._room_for(guest, wish, now)
        return blocks if isinstance(blocks, Declined) else self._open(guest, ask, blocks, scheme, now)

    def _no_landing(self, guest: Guest, wish: Wish, now: float) -> Declined | None:
        """Where KV arrives by way of other memory than the pool, it must have room for all of the lease, and for those
        of older requests that found none."""
        name, num_bytes, most = self._info.ref.name, wish.landing_bytes, self._transfers.most_lease_bytes()
        if num_bytes > most:
            tokens = len(guest.request.token_ids) + len(guest.generated)
            why = (
                f"the KV of {tokens} tokens takes {num_bytes} bytes of staging memory, and {name} has {most:.0f} for it"
            )
            return Declined(Code.INVALID, f"{why}: shorten the prompt, or raise transfer.staging_memory")
        ahead = admission.landing_ahead(wish, admission.still_claimed(self._claims, now))
        if not self._transfers.has_room(num_bytes + ahead):
            self._claim(guest, wish, now)
            return Declined(Code.NO_ROOM, f"the staging memory of {name} is full", by=name)
        return None

    def _claim(self, guest: Guest, wish: Wish, now: float) -> None:
        """Whoever moves here can stay where it is, and claims nothing."""
        others, until_s = admission.without(self._claims, wish.key), now + self._limits.claim_s
        if guest.request.deadline_s is not None:
            until_s = min(until_s, guest.request.deadline_s)
        self._claims = others if guest.generated else (*others, Claim(wish, until_s))

    def _room_for(self, guest: Guest, wish: Wish, now: float) -> BlockLease | Declined:
        """Blocks if admission and pool agree; else the request keeps a claim, so that younger ones wait for it."""
        claims = admission.without(admission.still_claimed(self._claims, now), wish.key)
        verdict = admission.decide(wish, self._room(now), claims, watermark=self._limits.watermark)
        leased = None
        if verdict.granted:
            size, context = self._info.block_size, len(guest.request.token_ids) + len(guest.generated)
            spare_blocks = -(-(context + guest.spare_tokens) // size) - -(-context // size)
            leased = self._engine.lease(guest.request, guest.generated, spare_blocks=spare_blocks)
        if leased is not None:
            self._claims = claims
            return leased
        self._claim(guest, wish, now)
        why = "no free blocks" if verdict.granted else verdict.reason
        return Declined(Code.NO_ROOM, f"the decode pool is full: {why}", by=self._info.ref.name)

    def _wish(self, guest: Guest, source_block_size: int) -> Wish:
        size, context = self._engine.info.block_size, len(guest.request.token_ids) + len(guest.generated)
        key, side = admission.claim_key(guest.request.request_id), side_of(self._info, source_block_size)
        room = -(-(context + guest.spare_tokens) // size) * size if guest.generated else context
        landing_bytes = side.pieces(room) * side.piece_bytes
        return Wish(key, guest.request.arrival_s, -(-context // size), self._growth(guest), landing_bytes)

    def _room(self, now: float) -> Room:
        load = self._engine.load(now)
        growth = sum(self._growth(guest) for guest in self._guests.values() if guest.intake.stage in _HOLDING)
        return Room(load.total_blocks, load.live_blocks, growth)

    def _growth(self, guest: Guest) -> int:
        """Of sequences that are told at their end nobody knows how far they are: each counts as at its start."""
        request, branching = guest.request, guest.request.branching
        together = branching is not None and branching.withheld
        return admission.growth_of_several(
            len(request.token_ids),
            [0] * request.sequences if together else [guest.told.get(index, 0) for index in guest.open],
            request.sampling.max_tokens,
            horizon_tokens=self._limits.growth_horizon_tokens,
            block_size=self._engine.info.block_size,
        )

    def _open(self, guest: Guest, ask: AskLease | AskMove, leased: BlockLease, scheme: str, now: float) -> LeaseGranted:
        """Open the lease for this source, and give the transfer its own reference on the blocks to be filled."""
        size, me, request_id = self._engine.info.block_size, self._info.ref, guest.request.request_id
        side = side_of(self._info, ask.block_size)
        held = side.pieces(leased.held_tokens)
        room = len(leased.block_ids) * size if guest.generated else len(guest.request.token_ids)
        blocks = leased.block_ids[leased.held_tokens // size :]
        key = kv.LeaseKey(f"{request_id}@{me.peer}", next(self._generations))
        if guest.generated:
            moving = Moving(len(guest.generated), leased.held_tokens, side)
            guest.intake = replace(guest.intake, moving=moving)
        spans = side.spans(leased.block_ids, held, side.pieces(room) - held)
        self._engine.retain(blocks)
        self._transfers.open(key, ask.source.peer, spans)
        guest.key, guest.pinned = key, blocks
        guest.grant = LeaseGranted(
            request_id,
            key.lease_id,
            key.generation,
            leased.held_tokens,
            len(spans),
            self._limits.lease_s,
            me,
            scheme,
            dict(self._transfers.addresses())[scheme],
            size,
        )
        self._by_lease[key.lease_id] = guest
        opened = d.LeaseOpened(key.lease_id, key.generation, ask.source, len(spans), now + self._limits.lease_s)
        self._advance(guest, opened, now)
        return guest.grant

    def _stale(self, message: str) -> Declined:
        return Declined(Code.STALE, message, by=self._info.ref.name)

    # -- inside: the machine's effects ----------------------------------------------------------------------------

    def _advance(self, guest: Guest, event: d.Event, now: float) -> None:
        guest.intake, effects = d.advance(guest.intake, event, now)
        request_id = guest.request.request_id
        for effect in effects:
            match effect:
                case d.AnswerCommit(ask_id=ask_id, answer=answer):
                    self._reply(ask_id, answer)
                case d.Adopt(first=first, cached_tokens=cached_tokens):
                    self._adopt(guest, first, cached_tokens, now)
                case d.CloseLease():
                    self._close(guest, now)
                case d.AbortEngine(reason=reason):
                    self._engine.abort(request_id, reason)
                case d.Tell(finish=finish, error=error):
                    self._emit(guest, finish=finish, error=error)
        if guest.intake.stage in (Stage.ENDING, Stage.DONE):
            self._mover.stopped(request_id, f"it has ended: {type(event).__name__}", now)
        if guest.intake.stage is Stage.DONE:
            self._forget(guest)

    def _moved(self, request_id: str, to: WorkerRef, move: int, now: float) -> None:
        """It runs there from now on: the gateway is told so, and that is all it hears from here."""
        guest = self._guests[request_id]
        self._emit(guest, moved=to, moved_by=move)
        self._engine.abort(request_id, FinishReason.ABORT)
        self._advance(guest, d.EngineEnded(), now)

    def _adopt(self, guest: Guest, first: tuple[Token, ...], cached_tokens: int, now: float) -> None:
        try:
            told = self._engine.adopt(guest.request, first)
        except ValueError as error:  # the two ends disagree on whether the first token ends the request
            self._engine.abort(guest.request.request_id, FinishReason.ERROR)
            self._emit(guest, error=Declined(Code.MISMATCH, str(error), by=self._info.ref.name))
            self._unheard.drop(guest.request.request_id)
            self._advance(guest, d.EngineEnded(), now)
            return
        if guest.generated:
            guest.told[0] = len(first)
            self._unheard.arrived(guest.request.request_id, now + self._limits.lease_s)
        elif guest.request.branching is None:
            self._emit(guest, tokens=first, cached_tokens=cached_tokens)
        for progress in told:
            self._progressed(guest, replace(progress, cached_tokens=cached_tokens), now)

    def _forget(self, guest: Guest) -> None:
        self._guests.pop(guest.request.request_id, None)
        if not guest.intake.committed:
            self._unheard.drop(guest.request.request_id)
        if guest.key is None:
            return
        self._by_lease.pop(guest.key.lease_id, None)
        self._ended[guest.key.lease_id] = guest.intake
        while len(self._ended) > REMEMBERED_LEASES:
            self._ended.popitem(last=False)

    def _progressed(self, guest: Guest, progress: Progress, now: float) -> None:
        failed = progress.finish is FinishReason.ERROR
        error = Declined(Code.INTERNAL, progress.error or "the engine failed", by=self._info.ref.name)
        if progress.tokens or progress.finish is not None or progress.prompt_logprobs:
            self._emit(
                guest,
                tokens=progress.tokens,
                finish=None if failed else progress.finish,
                error=error if failed else None,
                cached_tokens=progress.cached_tokens,
                prompt_logprobs=progress.prompt_logprobs,
                index=progress.index,
                score=progress.score,
            )
        if progress.finish in ENDS_ALL:
            self._engine.abort(progress.request_id, FinishReason.ABORT)  # its siblings, if they go on
            self._advance(guest, d.EngineEnded(), now)
        elif progress.finish is not None:
            self._sequence_ended(guest, progress.index, now)

    def _sequence_ended(self, guest: Guest, index: int, now: float) -> None:
        guest.open.discard(index)
        if not guest.open:
            self._advance(guest, d.EngineEnded(), now)

    def _emit(
        self,
        guest: Guest,
        *,
        tokens: tuple[Token, ...] = (),
        finish: FinishReason | None = None,
        error: Declined | None = None,
        cached_tokens: int = 0,
        prompt_logprobs: tuple[Token, ...] = (),
        index: int = 0,
        score: float | None = None,
        moved: WorkerRef | None = None,
        moved_by: int = 0,
    ) -> None:
        seq = guest.told.get(index, 0)
        guest.told[index] = seq + len(tokens)
        request_id = guest.request.request_id
        cached = 0 if guest.generated else cached_tokens  # Of one that moved here its source has told.
        move = moved_by or (guest.key.generation if guest.generated and guest.key is not None else 0)
        delta = Delta(request_id, seq, tokens, finish, error, cached, prompt_logprobs, index, score, moved, move)
        self._unheard.keep(delta)
        self._news.setdefault(guest.gateway_id, []).append(delta)

    def _frame(self, gateway_id: str, deltas: list[Delta]) -> Frame:
        number = self._frame_numbers[gateway_id] = self._frame_numbers.get(gateway_id, 0) + 1
        return Frame(self._info.ref.name, self._info.ref.incarnation, number, tuple(deltas))

    def _close(self, guest: Guest, now: float) -> None:
        assert guest.key is not None
        assert guest.intake.lease is not None
        source = guest.intake.lease.source.peer
        guest.parting = Parting(self._transfers, source, now, self._limits.quiet_patience_s)
        self._transfers.close(guest.key)


_HOLDING = (Stage.LEASED, Stage.RECEIVED, Stage.COMMITTED, Stage.RUNNING)
