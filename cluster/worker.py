"""A worker's core: one engine, one transfer engine and the two node services around them.

It lives in the rank process (`cluster.rank`) or, in tests, in anybody's. It is single-threaded and does no I/O of its
own: questions and answers are put in, and what has to go out lies in `outbox` as (ask_id, value) pairs, the arguments
of `tandem.wire.encode_envelope`. The loop around it is: put in what came, `prepare`, send the outbox, `tick`, send the
outbox; `prepare` comes first so that a lease is asked for while the first chunk is computed.

A worker's role says which service accepts work; the rest is the same. Prompts may come with a hint where their prefix
lies: then it is fetched while they wait (`cluster.fetching`). The heartbeat, the load report, is written here: a hung
step loop has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from cluster.fetching import FetchDestination, FetchLimits, FetchSource
from cluster.index import DEVICE
from cluster.link_probe import LinkProbe
from decode_node.service import DecodeLimits, DecodeNode
from engine.engine import Engine
from kvtransfer.engine import TransferEngine
from kvtransfer.faults import Fault
from kvtransfer.lingering import Lingering
from kvtransfer.rates import PeerRate
from kvtransfer.types import TransferStats
from prefill_node.service import PrefillLimits, PrefillNode
from tandem.messages import (
    Abort,
    Aborted,
    Answer,
    AskLease,
    AskMove,
    Code,
    Commit,
    Declined,
    DrainingSet,
    DropLease,
    Dropped,
    Expect,
    FaultInjected,
    Fetch,
    FetchPrefix,
    FinishedEarly,
    Follow,
    Forward,
    FrameFor,
    HandedOver,
    InjectFault,
    KvEvents,
    LinkRate,
    LoadReport,
    Migrate,
    PrefixCacheReset,
    ProbeLink,
    Question,
    RenewLease,
    Replaying,
    ReplayPrefixes,
    ResetPrefixCache,
    SendProbe,
    SetDraining,
    Submit,
    TransferCounters,
    WorkerInfo,
    WorkerRef,
)

Outgoing = Answer | Forward | FrameFor | LoadReport | KvEvents

ROLES: dict[str, frozenset[type[Question]]] = {
    "prefill": frozenset({Submit}),
    "decode": frozenset({Expect, AskLease, RenewLease, Commit, Migrate, AskMove, Follow}),
}
"""Work that a role accepts. What ends something, and the router's and operator's questions, are for everybody."""
TAIL_S = 0.002
"""How long a step waits for the last bytes of a request that moves and is paused meanwhile. They are few, and without
them its reader would wait for a whole step more; the source's wait leaves the core to those who carry them."""
KEYS_PER_EVENT = 4096
"""Prefix keys in one `KvEvents`; a larger change takes several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Who this worker is. `address` is host:port of its Node service."""

    name: str
    incarnation: str
    role: str
    address: str
    site: str = "local"
    model: str = ""
    """The name that clients use; empty: the engine's."""
    max_num_seqs: int = 64
    prefill: PrefillLimits = field(default_factory=PrefillLimits)
    decode: DecodeLimits = field(default_factory=DecodeLimits)
    fetch: FetchLimits = field(default_factory=FetchLimits)
    allow_faults: bool = False
    heartbeat_s: float = 0.5
    report_gap_s: float = 0.02
    """Load reports on change are at least this far apart."""


class Worker:
    """See the module's head. `now` is seconds on the clock that engine and requests use."""

    def __init__(self, settings: WorkerSettings, engine: Engine, transfers: TransferEngine) -> None:
        self.settings = settings
        self.engine = engine
        self.transfers = transfers
        self.info = describe(settings, engine, transfers)
        self.outbox: list[tuple[int, Outgoing]] = []
        self.draining = False
        self._looking = Lingering()
        self._ask_ids = count(1)
        self._reports = _Reports(self)
        self.kv_events = 0
        """Number of the last `KvEvents`."""
        self.prefill = PrefillNode(
            self.info, engine, transfers, ask=self._ask, reply=self._reply, limits=settings.prefill
        )
        self.decode = DecodeNode(self.info, engine, transfers, ask=self._ask, reply=self._reply, limits=settings.decode)
        self.fetches = FetchDestination(self.info, engine, transfers, ask=self._ask, limits=settings.fetch)
        self.loans = FetchSource(self.info, engine, transfers, ask=self._ask, reply=self._reply, limits=settings.fetch)
        self.links = LinkProbe(
            self.info, engine, transfers, ask=self._ask, reply=self._reply, busy=lambda: not self._free()
        )
        self._handlers: dict[type, Callable[[int, Any, float], None]] = {
            Expect: self._expect,
            AskLease: self.decode.ask_lease,
            RenewLease: self.decode.renew,
            Commit: self.decode.commit,
            DropLease: self._drop_lease,
            Migrate: self.decode.migrate,
            AskMove: self.decode.ask_move,
            Follow: self.decode.follow,
            Submit: self._submit,
            FetchPrefix: self.loans.fetch_prefix,
            ProbeLink: self.links.probe_link,
            SendProbe: self.links.send_probe,
            Abort: self._abort,
            ReplayPrefixes: self._replay_prefixes,
            SetDraining: self._set_draining,
            ResetPrefixCache: self._reset_prefix_cache,
            InjectFault: self._inject_fault,
        }

    # -- in -------------------------------------------------------------------------------------------------------

    def receive(self, ask_id: int, question: Question, now: float) -> None:
        """A question; its answer will lie in the outbox under the same number, now or later."""
        if refusal := self._refuse(question):
            self._reply(ask_id, refusal)
        else:
            self._handlers[type(question)](ask_id, question, now)

    def answered(self, ask_id: int, answer: Answer, now: float) -> None:
        """The answer to a `Forward` from the outbox. Each gets exactly one; a lost one is Declined(UNAVAILABLE)."""
        if self.decode.answered(ask_id, answer, now) or self.links.answered(ask_id, answer, now):
            return
        if not (self.loans.answered(ask_id) or self.fetches.answered(ask_id, answer, now)):
            self.prefill.answered(ask_id, answer, now)

    # -- the loop -------------------------------------------------------------------------------------------------

    def prepare(self, now: float) -> None:
        """Before a step: transfer events, time, the leases of the prompts that come next, and the news of all that: a
        first token, or that a request has moved, is not to wait for the step's end."""
        self._give_way()
        self._hear(now)
        self._look_for(self.decode.arrives_by, now)
        for room in (*self._rooms, self.links):
            room.tick(now)
        self.prefill.prepare(now)
        self._tell_gateways()

    def tick(self, now: float) -> None:
        """One step, if there is work, and the news of it."""
        self._look_for(self.decode.leaves_by, now)
        deadline = self.engine.next_deadline()
        if self.engine.has_work() or (deadline is not None and deadline <= now):
            result = self.engine.step(now)
            if result is not None:
                now += result.duration_s
                self.prefill.stepped(result, now)
                self.decode.stepped(result, now)
        self._give_way()
        self._tell_gateways()
        self._publish_kv_events()
        self._reports.publish_if_due(now)

    def wait_s(self, now: float) -> float:
        """How long the loop may sleep unless something comes in or a transfer wakes it."""
        if self.engine.has_work():
            return 0.0
        timers = self._reports.due_in_s(now)
        # Requests that wait have renewals, retries and deadlines, for which this is fine enough.
        return timers if self.idle() else min(timers, 0.02)

    # -- what others ask ------------------------------------------------------------------------------------------

    def request_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.prefill.request_ids(), *self.decode.request_ids())))

    def idle(self) -> bool:
        return self._free() and self.links.idle() and not self.transfers.in_flight()

    def check(self) -> None:
        """Every room's invariants, and that nothing is held when nothing runs. Raises AssertionError."""
        self.engine.check()
        self.transfers.check()
        for room in (*self._rooms, self.links):
            room.check()
        if self.idle():
            load = self.engine.load(0.0)
            assert load.live_blocks == 0, f"{self.info.ref.name} is idle with {load.live_blocks} live blocks"

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _rooms(self) -> tuple[PrefillNode, DecodeNode, FetchDestination, FetchSource]:
        return self.prefill, self.decode, self.fetches, self.loans

    def _hear(self, now: float) -> None:
        """What has become of transfers."""
        rooms = (*self._rooms, self.links)
        for event in self.transfers.poll():
            any(room.transferred(event, now) for room in rooms)  # the first to know it takes it

    def _look_for(self, tail: Callable[[], str | None], now: float) -> None:
        """Let a step wait for the last bytes of a move, `TAIL_S` at most, and less often where that was in vain."""
        if tail() is None or self._looking.spared():
            return
        until_s = time.monotonic() + TAIL_S
        while (scheme := tail()) is not None and self.transfers.look(scheme, until_s):
            self._hear(now)
        self._looking.ended(well=tail() is None)

    def _give_way(self) -> None:
        """Transfers go gently while there are steps to do with this machine's own cores."""
        self.transfers.give_way(self.engine.on_host and self.engine.has_work())

    def _free(self) -> bool:
        """Nothing to do for anybody."""
        return not self.engine.has_work() and all(room.idle() for room in self._rooms)

    def _refuse(self, question: Question) -> Declined | None:
        name, role = self.settings.name, self.settings.role
        theirs = next((other for other, kinds in ROLES.items() if type(question) in kinds), role)
        if theirs != role:
            return Declined(Code.UNAVAILABLE, f"{name} is a {role} worker, not a {theirs} worker", by=name)
        if self.draining and isinstance(question, Submit | Expect | AskMove):
            return Declined(Code.UNAVAILABLE, f"{name} is draining", by=name)
        return None

    def _ask(self, to: WorkerRef, question: Question) -> int:
        ask_id = next(self._ask_ids)
        self.outbox.append((ask_id, Forward(to, question)))
        return ask_id

    def _reply(self, ask_id: int, answer: Answer) -> None:
        if isinstance(answer, HandedOver | FinishedEarly):
            brought = self.fetches.brought_tokens(answer.request_id)
            answer = replace(answer, report=replace(answer.report, fetched_tokens=brought))
        self.outbox.append((ask_id, answer))

    def _submit(self, ask_id: int, submit: Submit, now: float) -> None:
        self.prefill.submit(ask_id, submit, now)
        self._fetch(submit.request.request_id, submit.fetch, now)

    def _expect(self, ask_id: int, expect: Expect, now: float) -> None:
        self.decode.expect(ask_id, expect, now)
        if expect.prefill is None:
            self._fetch(expect.request.request_id, expect.fetch, now)

    def _fetch(self, request_id: str, fetch: Fetch | None, now: float) -> None:
        if fetch is not None:
            self.fetches.begin(request_id, fetch, now)

    def _abort(self, ask_id: int, abort: Abort, now: float) -> None:
        if abort.index is None:
            known = [node.abort(abort.request_id, abort.reason, now) for node in (self.prefill, self.decode)]
            if not abort.again:
                self.decode.waive(abort.request_id)
        else:
            known = [self.decode.abort_sequence(abort.request_id, abort.index, now)]
        self._reply(ask_id, Aborted(abort.request_id, any(known)))

    def _drop_lease(self, ask_id: int, drop: DropLease, now: float) -> None:
        if self.fetches.dropped(drop):
            self._reply(ask_id, Dropped(drop.lease_id))
        else:
            self.decode.drop(ask_id, drop, now)

    def _replay_prefixes(self, ask_id: int, question: ReplayPrefixes, now: float) -> None:
        self._reply(ask_id, Replaying(self.engine.retell_kv_events()))

    def _set_draining(self, ask_id: int, question: SetDraining, now: float) -> None:
        self.draining = question.draining
        self._reply(ask_id, DrainingSet(self.draining))

    def _reset_prefix_cache(self, ask_id: int, question: ResetPrefixCache, now: float) -> None:
        self._reply(ask_id, PrefixCacheReset(self.engine.reset_prefix_cache()))

    def _inject_fault(self, ask_id: int, question: InjectFault, now: float) -> None:
        if not self.settings.allow_faults:
            self._reply(ask_id, Declined(Code.INVALID, "start the worker with faults allowed", by=self.settings.name))
            return
        self.transfers.faults.add(Fault(question.kind.value), question.nth, delay_s=question.seconds)
        self._reply(ask_id, FaultInjected())

    def _tell_gateways(self) -> None:
        self.outbox += [(0, frame) for frame in self.decode.take_frames()]

    def _publish_kv_events(self) -> None:
        """What changed, in parts of bounded size: each part alone leaves nothing untrue in the router's index."""
        self._tell_keys(DEVICE, *self.engine.drain_kv_events())
        for tier, changes in self.engine.drain_tier_events().items():
            self._tell_keys(tier, *changes)

    def _tell_keys(self, tier: str, stored: tuple[bytes, ...], removed: tuple[bytes, ...], cleared: bool) -> None:
        ref = self.info.ref
        while stored or removed or cleared:
            self.kv_events += 1
            part, stored = stored[:KEYS_PER_EVENT], stored[KEYS_PER_EVENT:]
            self.outbox.append((0, KvEvents(ref.name, ref.incarnation, self.kv_events, part, removed, cleared, tier)))
            removed, cleared = (), False


class _Reports:
    """When a load report is due, and what it says."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._last: LoadReport | None = None
        self._last_s = float("-inf")

    def due_in_s(self, now: float) -> float:
        settings = self._worker.settings
        wait_s = settings.report_gap_s if self._changed() else settings.heartbeat_s
        return max(0.0, self._last_s + wait_s - now)

    def publish_if_due(self, now: float) -> None:
        if now < self._last_s + self._worker.settings.report_gap_s or self.due_in_s(now) > 0:
            return
        report = self._report()
        self._last, self._last_s = report, now
        self._worker.outbox.append((0, report))

    def _changed(self) -> bool:
        return self._last is None or replace(self._report(), number=self._last.number) != self._last

    def _report(self) -> LoadReport:
        worker = self._worker
        ref = worker.info.ref
        number = self._last.number + 1 if self._last else 1
        load = worker.engine.load(0.0)
        return LoadReport(
            ref.name,
            ref.incarnation,
            number,
            load,
            worker.request_ids(),
            worker.transfers.in_flight(),
            worker.draining,
            worker.kv_events,
            tuple([counters_of(stats) for stats in worker.transfers.stats()]),
            worker.fetches.counters(),
            worker.decode.migrations,
            link_rates(worker.transfers.rates(), worker.transfers.stats()[0].limit_bytes_per_s),
        )


def counters_of(stats: TransferStats) -> TransferCounters:
    """The transfer engine's counters as a message."""
    return TransferCounters(
        scheme=stats.scheme,
        pushes=stats.pushes,
        push_bytes=stats.push_bytes,
        push_seconds=stats.push_seconds,
        receives=stats.receives,
        receive_bytes=stats.receive_bytes,
        in_flight=stats.in_flight,
        failed=stats.failed,
        staged_bytes=stats.staged_bytes,
    )


def link_rates(rates: Iterable[PeerRate], limit_bytes_per_s: float) -> tuple[LinkRate, ...]:
    """Pairs' measured rates (in the order in which they became known) as messages. These tell workers apart by name,
    so of two incarnations only the later one is told."""
    told: dict[tuple[str, str], LinkRate] = {}
    for rate in rates:
        name = rate.peer.rpartition("#")[0]
        told[name, rate.scheme] = LinkRate(name, rate.scheme, rate.last, rate.best, limit_bytes_per_s)
    return tuple(told.values())


def describe(settings: WorkerSettings, engine: Engine, transfers: TransferEngine) -> WorkerInfo:
    """What the worker says of itself when it registers."""
    info = engine.info
    return WorkerInfo(
        ref=WorkerRef(settings.name, settings.incarnation, settings.address),
        role=settings.role,
        model=settings.model or info.model,
        model_digest=info.model_digest,
        layout=info.layout,
        numerics=info.numerics,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        block_bytes=info.block_bytes,
        total_blocks=info.total_blocks,
        max_num_seqs=settings.max_num_seqs,
        block_size=info.block_size,
        kv_heads=info.kv_heads,
        layers=info.layers,
        site=settings.site,
        transports=transfers.addresses(),
    )
