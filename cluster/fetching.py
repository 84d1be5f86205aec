"""Both ends of fetching a prefix from a peer, for workers of any role.

    destination                                  source
      engine: room ─▶ lease open ─▶ FetchPrefix ─▶ engine: which of these blocks are here? retain them
      prompt waits, others run    ◀─ PrefixComing ─┤
      blocks enter the cache      ◀══ pushes ══════┘ let go as they are acknowledged
      prompt goes on, lease closed  ◀─ DropLease ─── only when a push failed: wait no longer

Decisions of the destination are `fetch.advance`'s. The source sends in order, several blocks a push, so that what came
before a deadline counts, and after all hand-overs: those make somebody wait for a token. Blocks of either end that a
transfer may touch have it as an owner until it says that it is done (`PushDone`, `Quiet`); a peer that leaves us
waiting for `Quiet` is cut off. Nothing here can fail a request.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from cluster import fetch as f
from cluster.fetch import Arrival, Stage
from engine.engine import Engine
from engine.hashing import GRANULE
from kvtransfer import types as kv
from kvtransfer.engine import TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.outgoing import Outgoing, Parting
from kvtransfer.plan import Side, side_of, sizes_fit
from kvtransfer.select import choose
from tandem.messages import (
    Answer,
    Code,
    Declined,
    DropLease,
    Fetch,
    FetchCounters,
    FetchPrefix,
    PrefixComing,
    Question,
    WorkerInfo,
    WorkerRef,
)

log = logging.getLogger(__name__)

AFTER_HANDOVERS = 1
"""Priority of the pushes; smaller ones go first."""
REMEMBERED = 1024
"""Requests whose fetched tokens are kept for their report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    most_fetches: int = 8
    """At once, as a destination; more prompts are computed."""
    most_lent: int = 8
    """At once, as a source; more questions are declined."""
    push_bytes: int = 8 << 20
    quiet_patience_s: float = 5.0


@dataclass(slots=True)
class _Flight:
    """One fetch: its state machine, and the blocks that the transfer may write to."""

    key: kv.LeaseKey
    arrival: Arrival
    side: Side
    blocks: tuple[int, ...]
    given_up: str = ""
    """Why the source sends no more."""
    parting: Parting | None = None

    @property
    def arrived_pieces(self) -> int:
        return self.arrival.arrived_spans // self.side.spans_per_piece

    @property
    def arrived_blocks(self) -> int:
        return self.arrived_pieces * self.side.piece_tokens // self.side.cut.block_size


class FetchDestination:
    """One thread, the step loop's; no I/O of its own. `ask` sends a question and returns its number."""

    def __init__(
        self,
        info: WorkerInfo,
        engine: Engine,
        transfers: TransferEngine,
        *,
        ask: Callable[[WorkerRef, Question], int],
        limits: FetchLimits = FetchLimits(),
    ) -> None:
        self._info = info
        self._engine = engine
        self._transfers = transfers
        self._ask = ask
        self._limits = limits
        self._flights: dict[kv.LeaseKey, _Flight] = {}
        self._asked: dict[int, _Flight] = {}
        self._generations = count(1)
        self._counters: dict[str, FetchCounters] = {}
        self._brought: OrderedDict[str, int] = OrderedDict()

    # -- in -------------------------------------------------------------------------------------------------------

    def begin(self, request_id: str, fetch: Fetch, now: float) -> bool:
        """Ask for the prefix of a request that was just queued in the engine. False: it will be computed."""
        if len(self._flights) >= self._limits.most_fetches or fetch.source == self._info.ref:
            return False
        if not sizes_fit(fetch.block_size, self._info.block_size):
            return False
        if self._transfers.cooling_s(fetch.source.peer) > 0 or self._engine.fetching(request_id):
            return False
        for before in tuple(self._flights.values()):
            if before.arrival.request_id == request_id:  # what comes for one that was aborted is not this one's
                self._advance(before, f.RequestEnded(), now)
        room = self._engine.fetch(request_id, fetch.tokens)
        if room is None:
            return False
        me, side = self._info, side_of(self._info, fetch.block_size)
        here = room.held_blocks * me.block_size
        start = here // fetch.block_size * fetch.block_size
        key = kv.LeaseKey(f"{request_id}<{fetch.source.peer}@{me.ref.peer}", next(self._generations))
        spans = side.spans(room.block_ids, 0, side.pieces(len(room.block_ids) * me.block_size))
        try:
            self._transfers.open(key, fetch.source.peer, spans)
        except TransferError as error:
            log.info("%s: no fetch from %s: %s", request_id, fetch.source.name, error)
            self._engine.fetch_over(request_id)
            return False
        self._engine.retain(room.block_ids)
        arrival = Arrival(
            request_id=request_id,
            source=fetch.source,
            wanted_spans=len(spans),
            asked_s=now,
            deadline_s=now + fetch.patience_s,
        )
        flight = self._flights[key] = _Flight(key, arrival, side, room.block_ids)
        question = FetchPrefix(
            key.lease_id,
            key.generation,
            room.keys[start // GRANULE :],
            here - start,
            me.ref,
            self._transfers.addresses(),
            me.model_digest,
            me.layout,
            me.block_size,
            fetch.patience_s,
        )
        self._asked[self._ask(fetch.source, question)] = flight
        return True

    def answered(self, ask_id: int, answer: Answer, now: float) -> bool:
        """False: not an answer to a question of ours."""
        flight = self._asked.pop(ask_id, None)
        if flight is not None:
            self._advance(flight, f.Answered(answer), now)
        return flight is not None

    def dropped(self, drop: DropLease) -> bool:
        """The source gives up; what has come counts, so the transfer's events are heard first. False: not ours."""
        flight = self._flights.get(kv.LeaseKey(drop.lease_id, drop.generation))
        if flight is not None:
            flight.given_up = f"the source gave up: {drop.reason}"
        return flight is not None

    # -- the loop's calls -------------------------------------------------------------------------------------------

    def transferred(self, event: kv.TransferEvent, now: float) -> bool:
        """An event of the transfer engine; False: not about a lease of ours."""
        if isinstance(event, kv.PeerLost):
            for waiting in tuple(self._flights.values()):
                if waiting.arrival.source.peer == event.peer:
                    self._advance(waiting, f.PeerLost(event.reason), now)
            return False
        flight = self._flights.get(event.key)
        if flight is None:
            return False
        match event:
            case kv.Received(first=first, count=spans):
                self._advance(flight, f.Received(first, spans), now)
            case kv.ReceiveFailed(reason=reason):
                self._advance(flight, f.ReceiveFailed(reason), now)
            case kv.Quiet():
                self._engine.unretain(flight.blocks)
                del self._flights[flight.key]
                self._advance(flight, f.Quiet(), now)
        return True

    def tick(self, now: float) -> None:
        """What time alone brings, and what the engine ended without us."""
        for flight in tuple(self._flights.values()):
            waits = self._engine.fetching(flight.arrival.request_id)
            self._advance(flight, f.Tick() if waits else f.RequestEnded(), now)
            if flight.given_up and flight.parting is None:
                self._advance(flight, f.SourceGaveUp(flight.given_up), now)
            if flight.parting is not None:
                flight.parting.tick(now)

    # -- what others ask ------------------------------------------------------------------------------------------

    def counters(self) -> tuple[FetchCounters, ...]:
        """By source, since the start."""
        return tuple(self._counters.values())

    def brought_tokens(self, request_id: str) -> int:
        """What came for this request; told once."""
        return self._brought.pop(request_id, 0)

    def idle(self) -> bool:
        return not self._flights

    def check(self) -> None:
        """Raises AssertionError when books and machines disagree."""
        for key, flight in self._flights.items():
            stage = flight.arrival.stage
            assert stage is not Stage.CLOSED, f"{key} is closed but kept"
            assert (flight.parting is not None) == (stage is Stage.ENDING), f"{key} is {stage}, closed or not"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _advance(self, flight: _Flight, event: f.Event, now: float) -> None:
        flight.arrival, effects = f.advance(flight.arrival, event, now)
        for effect in effects:
            match effect:
                case f.Enter():
                    self._engine.fetched(flight.arrival.request_id, flight.arrived_blocks)
                case f.Resume():
                    self._engine.fetch_over(flight.arrival.request_id)
                    self._count(flight)
                case f.Close():
                    source, patience_s = flight.arrival.source.peer, self._limits.quiet_patience_s
                    flight.parting = Parting(self._transfers, source, now, patience_s)
                    self._transfers.close(flight.key)

    def _count(self, flight: _Flight) -> None:
        arrival, source, blocks = flight.arrival, flight.arrival.source.name, flight.arrived_blocks
        before = self._counters.get(source, FetchCounters(source))
        self._counters[source] = replace(
            before,
            fetches=before.fetches + (blocks > 0),
            blocks=before.blocks + blocks,
            kv_bytes=before.kv_bytes + flight.arrived_pieces * flight.side.piece_bytes,
            seconds=before.seconds + (arrival.arrived_s - arrival.asked_s if blocks else 0.0),
            failed=before.failed + (not arrival.whole),
        )
        if arrival.reason:
            told = f"{blocks} of {len(flight.blocks)} blocks came"
            log.info("%s: fetch from %s ended early, %s: %s", arrival.request_id, source, told, arrival.reason)
        self._brought[arrival.request_id] = blocks * self._engine.info.block_size
        while len(self._brought) > REMEMBERED:
            self._brought.popitem(last=False)


@dataclass(slots=True)
class _Loan:
    """A prefix on its way to one destination."""

    destination: WorkerRef
    outgoing: Outgoing
    failed: str = ""


class FetchSource:
    """One thread, the step loop's; no I/O of its own."""

    def __init__(
        self,
        info: WorkerInfo,
        engine: Engine,
        transfers: TransferEngine,
        *,
        ask: Callable[[WorkerRef, Question], int],
        reply: Callable[[int, Answer], None],
        limits: FetchLimits = FetchLimits(),
    ) -> None:
        self._info = info
        self._engine = engine
        self._transfers = transfers
        self._ask = ask
        self._reply = reply
        self._limits = limits
        self._told: set[int] = set()
        self._loans: dict[kv.LeaseKey, _Loan] = {}

    def fetch_prefix(self, ask_id: int, question: FetchPrefix, now: float) -> None:
        """Send what is here of it, or say at once why not."""
        self._reply(ask_id, self._refuse(question) or self._lend(question, now))

    def answered(self, ask_id: int) -> bool:
        """False: not an answer to a question of ours."""
        told = ask_id in self._told
        self._told.discard(ask_id)
        return told

    def transferred(self, event: kv.TransferEvent, now: float) -> bool:
        """An event of the transfer engine; False: not about a push of ours."""
        if isinstance(event, kv.PeerLost):
            return False
        loan = self._loans.get(event.key)
        if loan is None:
            return False
        match event:
            case kv.PushDone(push_id=push_id):
                loan.outgoing.done(push_id)
                if not loan.outgoing and not loan.outgoing.withdrawn:
                    del self._loans[event.key]
            case kv.PushFailed(reason=reason):
                loan.failed = loan.failed or reason
                loan.outgoing.withdraw(now, self._limits.quiet_patience_s)
            case kv.Quiet():
                loan.outgoing.quiet()
                del self._loans[event.key]
                self._tell(event.key, loan)
        return True

    def tick(self, now: float) -> None:
        """Cut off who never falls silent."""
        for loan in tuple(self._loans.values()):
            loan.outgoing.tick(now)

    def idle(self) -> bool:
        return not self._loans

    def check(self) -> None:
        """Raises AssertionError when something is kept for nobody."""
        for key, loan in self._loans.items():
            assert loan.outgoing or loan.outgoing.withdrawn, f"{key} is lent nothing and kept"

    def _refuse(self, question: FetchPrefix) -> Declined | None:
        me = self._info
        for what, theirs, ours in (
            ("model digest", question.model_digest, me.model_digest),
            ("layout", question.layout, me.layout),
        ):
            if theirs != ours:
                message = f"{what} is {theirs} there but {ours} here"
                return Declined(Code.MISMATCH, message, by=me.ref.name)
        if not sizes_fit(question.block_size, me.block_size):
            message = f"blocks of {question.block_size} tokens there do not fit blocks of {me.block_size} here"
            return Declined(Code.MISMATCH, message, by=me.ref.name)
        if len(self._loans) >= self._limits.most_lent:
            return Declined(Code.NO_ROOM, f"{len(self._loans)} prefixes are being sent already", by=me.ref.name)
        if kv.LeaseKey(question.fetch_id, question.generation) in self._loans:
            return Declined(Code.STALE, f"{question.fetch_id} is being sent already", by=me.ref.name)
        return None

    def _lend(self, question: FetchPrefix, now: float) -> Answer:
        name, peer, theirs = self._info.ref.name, question.destination.peer, dict(question.transports)
        try:
            scheme = choose(dict(self._transfers.addresses()), theirs)
        except TransferError as error:
            return Declined(Code.UNAVAILABLE, f"no way to {question.destination.name}: {error}", by=name)
        side, per_block = side_of(self._info, question.block_size), self._info.block_size // GRANULE
        blocks = self._engine.retain_prefix(question.keys[per_block - 1 :: per_block])
        begin, end = side.pieces(question.skipped_tokens), side.full_pieces(len(blocks) * self._info.block_size)
        if begin >= end:
            self._engine.unretain(blocks)
            return Declined(Code.NOT_FOUND, "none of these blocks is here any more", by=name)
        key = kv.LeaseKey(question.fetch_id, question.generation)
        outgoing = Outgoing(self._transfers, self._engine, side, key, peer, scheme, theirs[scheme], first_piece=begin)
        most, patience_s = max(1, self._limits.push_bytes // side.piece_bytes), question.patience_s
        try:
            for first in range(begin, end, most):
                count = min(most, end - first)
                outgoing.push(blocks, first, count, priority=AFTER_HANDOVERS, deadline_s=patience_s)
        except TransferError as error:  # none can go when one cannot
            if outgoing:
                outgoing.withdraw(now, self._limits.quiet_patience_s)
            return Declined(Code.UNAVAILABLE, f"no way to {question.destination.name}: {error}", by=name)
        finally:
            self._engine.unretain(blocks)
            if outgoing:
                self._loans[key] = _Loan(question.destination, outgoing)
        return PrefixComing(question.fetch_id, (end - begin) * side.spans_per_piece)

    def _tell(self, key: kv.LeaseKey, loan: _Loan) -> None:
        """Whoever waits for what failed; whether it hears that makes no difference here."""
        if loan.failed:
            self._told.add(self._ask(loan.destination, DropLease(key.lease_id, key.generation, loan.failed)))
