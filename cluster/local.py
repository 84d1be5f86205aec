"""The whole cluster in one process and one event loop, without a socket: for tests, and to try things out.

Every room is the real one: gateway, dispatch, router, workers, engines, transfer over `inproc`. Only the roads differ:
questions, answers, frames and reports go through `tandem.wire` to bytes and back, and are handed over directly. A
worker's loop is a task that sleeps until something comes in. Workers can be killed (without a word, peers see them
gone), frozen (they fall silent, as under SIGSTOP) and restarted as a new incarnation; the router's decisions about them
are carried out as Ray's actors would. `check` proves afterwards that nobody holds anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cluster import tiers
from cluster.config import ROLES, TandemConfig, worker_names
from cluster.dispatch import Dispatch, Flight
from cluster.evacuation import Move
from cluster.gateway import Gateway
from cluster.ipc import RankSettings
from cluster.membership import Fence, Kill, Restart
from cluster.metrics import Metrics
from cluster.outcome import Outcome
from cluster.router import RouterState
from cluster.snapshot import Placement, Refusal, RequestView
from cluster.streams import FrameHub
from cluster.text import Text
from cluster.wiring import dispatch_limits, gateway_settings, hasher_for, rank_settings
from cluster.worker import Worker
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Request, Token
from kvtransfer.engine import TransferEngine
from kvtransfer.inproc import InprocHub, InprocTransport
from kvtransfer.staging import StagedTransfers
from kvtransfer.tiers.store import TierStore
from tandem.messages import (
    Answer,
    Code,
    Commit,
    Declined,
    Delta,
    Forward,
    FrameFor,
    KvEvents,
    LoadReport,
    Migrate,
    Question,
    ReplayPrefixes,
    SetDraining,
    WorkerInfo,
    WorkerRef,
)
from tandem.wire import decode_envelope, encode_envelope

log = logging.getLogger(__name__)

GATEWAY_ID = "local"
ASK_S = 5.0
MIGRATE_ASK_S = 60.0

OnAnswer = Callable[[Answer], None]


@dataclass(slots=True)
class Slot:
    """A worker's place: its present incarnation, and what keeps it going."""

    worker: Worker
    bell: asyncio.Event
    store: TierStore | None = None
    pump: asyncio.Task[None] | None = None
    frozen: bool = False
    asked: dict[int, OnAnswer] = field(default_factory=dict)
    """Questions that this worker has not answered yet."""

    @property
    def ref(self) -> WorkerRef:
        return self.worker.info.ref


class LocalCluster:
    """`async with LocalCluster(config, model) as cluster: …`; one event loop. `engine_of` may make other engines."""

    def __init__(
        self,
        config: TandemConfig,
        model: Path,
        *,
        engine_of: Callable[[EngineConfig], Engine] = Engine.open,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.router = RouterState(config)
        self.hub = FrameHub()
        self.slots: dict[str, Slot] = {}
        self.outcomes: list[Outcome] = []
        self.metrics = Metrics(config)
        self._model = model
        self._engine_of = engine_of
        self._clock = clock
        self._inproc = InprocHub()
        self._incarnations = count(1)
        self._ask_ids = count(1)
        self._closing = asyncio.Event()
        self._turned = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        roads = _Roads(self)
        self.dispatch = Dispatch(
            roads,
            roads,
            self.hub,
            GATEWAY_ID,
            limits=dispatch_limits(config),
            on_received=partial(self.metrics.received, config.model.name),
            on_outcome=self._ended,
            clock=clock,
            seed=seed,
        )
        self.gateway = Gateway(
            gateway_settings(config),
            Text.load(model),
            roads,
            self.dispatch,
            partial(hasher_for, config),
            clock=clock,
            on_refused=self._refused,
        )

    # -- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        for role in ROLES:
            for name in worker_names(self.config, role):
                self.start(name)
        self._watch = asyncio.create_task(self._watch_health())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End everything; what still runs is lost."""
        self._closing.set()
        for name in tuple(self.slots):
            self.kill(name)
        if self._watch is not None:
            await self._watch
        await self.dispatch.drained()

    def start(self, name: str) -> WorkerInfo:
        """A fresh worker, or a new incarnation of one. Raises ValueError when the router refuses it."""
        if name in self.slots:
            self.kill(name)
        settings = rank_settings(self.config, name, self._model, allow_faults=True)
        incarnation = f"i{next(self._incarnations)}"
        engine = self._engine_of(settings.engine)
        bell = asyncio.Event()
        loop = asyncio.get_running_loop()
        transfers = self._transfers(f"{name}#{incarnation}", engine, settings, partial(_ring, loop, bell))
        address = f"local/{name}/{incarnation}"
        store = None
        if settings.tiers is not None:
            wake = partial(_ring, loop, bell)
            store = tiers.attach(engine, settings.tiers, settings.worker.role, clock=self._clock, wake=wake)
        worker = Worker(replace(settings.worker, incarnation=incarnation, address=address), engine, transfers)
        declined = self.router.register(worker.info, self._clock())
        if declined is not None:
            transfers.shutdown()
            if store is not None:
                store.shutdown()
            raise ValueError(declined.message)
        slot = self.slots[name] = Slot(worker, bell, store)
        slot.pump = asyncio.create_task(self._pump(slot))
        return worker.info

    restart = start

    def kill(self, name: str, *, noticed: bool = True) -> None:
        """Without a word: its memory, its questions and its streams are gone at once. Unless `noticed` the router has
        to find out from those who ask in vain."""
        slot = self.slots.pop(name)
        assert slot.pump is not None
        slot.pump.cancel()
        slot.worker.transfers.shutdown()
        if slot.store is not None:
            slot.store.shutdown()
        gone = Declined(Code.UNAVAILABLE, f"worker {name} is gone", by=name)
        for on_answer in tuple(slot.asked.values()):
            on_answer(gone)
        self.hub.lost(name, slot.ref.incarnation, "it was killed")
        self.metrics.forget(name)
        if noticed:
            self.router.lost(slot.ref, "it was killed", self._clock())

    def restart_router(self) -> None:
        """A new router that knows nothing; the workers notice, and register again."""
        self.router = RouterState(self.config)
        for slot in self.slots.values():
            declined = self.router.register(slot.worker.info, self._clock())
            assert declined is None, declined
            if slot.worker.draining:
                self.router.hold_back(slot.ref.name)

    async def drain(self, name: str, draining: bool = True) -> None:
        """As an operator does it: nothing new goes there, and what runs moves away while there is room elsewhere."""
        answer = await self.ask(self.slots[name].ref, SetDraining(draining))
        assert not isinstance(answer, Declined), answer

    async def migrate(self, request_id: str, source: str, to: str) -> Answer:
        """Move one running request; the source's answer, once it has moved or stays."""
        return await self.ask(self.slots[source].ref, Migrate(request_id, self.slots[to].ref), MIGRATE_ASK_S)

    def freeze(self, name: str) -> None:
        """As under SIGSTOP: it is there and says nothing."""
        self.slots[name].frozen = True

    def thaw(self, name: str) -> None:
        self.slots[name].frozen = False
        self.slots[name].bell.set()

    # -- using it ------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> tuple[tuple[Token, ...], Outcome]:
        """Carry one request of token ids through the cluster. `deadline_s` defaults to the config's timeout."""
        deltas, outcome = await self.generate_several(request)
        return tuple(token for delta in deltas for token in delta.tokens), outcome

    async def generate_several(self, request: Request) -> tuple[tuple[Delta, ...], Outcome]:
        """The same for a request with several sequences, told apart by the deltas' index."""
        if request.deadline_s is None:
            request = replace(request, deadline_s=self._clock() + self.config.timeouts.request_s)
        flight = Flight(request=request, view=self.view(request))
        async with contextlib.aclosing(self.dispatch.run(flight)) as deltas:
            told = [delta async for delta in deltas]
        assert flight.outcome is not None
        return tuple(told), flight.outcome

    def view(self, request: Request) -> RequestView:
        """What the router is told of a request."""
        infos = self.router.workers()
        keys: tuple[bytes, ...] = ()
        if infos:
            keys = hasher_for(self.config, infos[0]).chain(request.token_ids, request.cache_salt)
        return RequestView.of(request, keys)

    async def ask(self, worker: WorkerRef, question: Question, timeout_s: float = ASK_S) -> Answer:
        """One question to one worker, as the gateway asks it."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._question(worker, question, timeout_s, partial(_settle, answered))
        return await answered

    def now(self) -> float:
        return self._clock()

    def info(self, name: str) -> WorkerInfo:
        return self.slots[name].worker.info

    async def until(self, condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
        """Wait until the condition holds; looked at after each turn of a worker. TimeoutError with who is busy."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._turned.clear()
                    await self._turned.wait()
        except TimeoutError as error:
            busy = {name: slot.worker.request_ids() for name, slot in self.slots.items() if not slot.worker.idle()}
            raise TimeoutError(f"not so after {timeout_s:g} s; busy are {busy}") from error

    async def settled(self, timeout_s: float = 15.0) -> None:
        """Wait until every worker that is not frozen is idle."""
        await self.dispatch.drained()
        await self.until(lambda: all(slot.frozen or slot.worker.idle() for slot in self.slots.values()), timeout_s)

    def check(self) -> None:
        """Invariants of every room; of an idle cluster also that nothing is held. Raises AssertionError."""
        self.router.check()
        for slot in self.slots.values():
            slot.worker.check()

    def _transfers(self, peer: str, engine: Engine, settings: RankSettings, wake: Callable[[], None]) -> TransferEngine:
        staged = settings.staging == "always"
        region = memoryview(bytearray(settings.staging_bytes)) if staged else engine.pool_bytes()
        transports = [InprocTransport(peer, region, self._inproc)]
        if staged:
            copies = engine.pool_spans()
            return StagedTransfers(peer, region, transports, copies, clock=self._clock, wake=wake, checksums=True)
        return TransferEngine(peer, region, transports, clock=self._clock, wake=wake, checksums=True)

    def _ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.metrics.observe_outcome(outcome)

    def _refused(self, code: Code) -> None:
        self.metrics.received(self.config.model.name, "")
        self.metrics.refused(code, "")

    # -- a worker's loop -------------------------------------------------------------------------------------------

    async def _pump(self, slot: Slot) -> None:
        worker = slot.worker
        while True:
            wait_s = None if slot.frozen else worker.wait_s(self._clock())
            if wait_s != 0.0:
                # Not by `wait_for`: up to Python 3.11 it may swallow the cancellation that ends this loop.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await slot.bell.wait()
            slot.bell.clear()
            if slot.frozen:
                continue
            worker.prepare(self._clock())
            self._carry(slot)
            worker.tick(self._clock())
            self._carry(slot)
            self._turned.set()
            await asyncio.sleep(0)  # everybody else's turn

    def _carry(self, slot: Slot) -> None:
        outbox, slot.worker.outbox = slot.worker.outbox, []
        now = self._clock()
        for ask_id, value in outbox:
            _, carried = decode_envelope(encode_envelope(ask_id, value, now), now)
            match carried:
                case Forward(to=to, question=question):
                    timeout_s = ASK_S * (2 if isinstance(question, Commit) else 1)
                    self._question(to, question, timeout_s, partial(self._answer_to, slot, ask_id))
                case FrameFor(frame=frame):
                    self.hub.deliver(frame)
                case LoadReport():
                    if self.router.report(carried, now):
                        self.metrics.observe_report(slot.worker.info.role, carried)
                case KvEvents():
                    self.router.kv_events(carried)
                case _:
                    on_answer = slot.asked.get(ask_id)
                    if on_answer is not None:
                        on_answer(carried)

    def _answer_to(self, slot: Slot, ask_id: int, answer: Answer) -> None:
        if self.slots.get(slot.ref.name) is slot:
            slot.worker.answered(ask_id, answer, self._clock())
            slot.bell.set()

    def _question(self, to: WorkerRef, question: Question, timeout_s: float, on_answer: OnAnswer) -> None:
        """Bring a question to a worker; `on_answer` is called exactly once."""
        slot = self.slots.get(to.name)
        if slot is None or slot.ref != to:
            on_answer(Declined(Code.UNAVAILABLE, f"worker {to.peer} is gone", by=to.name))
            return
        now = self._clock()
        ask_id, carried = decode_envelope(encode_envelope(next(self._ask_ids), question, now), now)
        silent = Declined(Code.UNAVAILABLE, f"worker {to.name} did not answer in {timeout_s:g} s", by=to.name)

        def answered(answer: Answer) -> None:
            if slot.asked.pop(ask_id, None) is not None:
                timer.cancel()
                on_answer(answer)

        timer = asyncio.get_running_loop().call_later(timeout_s, answered, silent)
        slot.asked[ask_id] = answered
        slot.worker.receive(ask_id, carried, now)
        slot.bell.set()

    # -- the router's hands ------------------------------------------------------------------------------------------

    async def _watch_health(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.timeouts.heartbeat_s / 2):
                    await self._closing.wait()
            for slot in self.slots.values():
                if not slot.frozen:
                    self.router.present(slot.ref, self._clock())
            for decision in self.router.tick(self._clock()):
                self._carry_out(decision)
            for ref in self.router.replays_due(self._clock()):
                self._question(ref, ReplayPrefixes(), ASK_S, lambda answer: None)
            for move in self.router.evacuations(self._clock()):
                question = Migrate(move.request_id, move.to)
                self._question(move.source, question, MIGRATE_ASK_S, partial(self._moved, move))

    def _moved(self, move: Move, answer: Answer) -> None:
        self.router.moved(move, answer, self._clock())

    def _carry_out(self, decision: Any) -> None:
        if self._closing.is_set():
            return
        match decision:
            case Fence(worker=name, incarnation=incarnation, why=why):
                self.hub.lost(name, incarnation, why)
            case Kill(worker=name, incarnation=incarnation):
                slot = self.slots.get(name)
                if slot is not None and incarnation in ("", slot.ref.incarnation):
                    self.kill(name)
            case Restart(worker=name):
                self.start(name)
            case _:
                log.error("%s", decision)


class _Roads:
    """The ports of dispatch and gateway, within the process."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    # -- Workers -------------------------------------------------------------------------------------------------

    async def ask(self, worker: WorkerRef, question: Question, timeout_s: float) -> Answer:
        return await self._cluster.ask(worker, question, timeout_s)

    async def open(self, worker: WorkerRef) -> None:
        """Frames flow from the start."""

    # -- Router --------------------------------------------------------------------------------------------------

    async def place(self, request: RequestView, exclude: frozenset[str]) -> Placement | Refusal:
        return self._cluster.router.place(request, exclude, self._cluster.now())

    async def finished(self, request_id: str, outcome: Outcome) -> None:
        self._cluster.router.finished(request_id, outcome.report)

    async def suspect(self, worker: WorkerRef, why: str) -> None:
        self._cluster.router.suspect(worker, why, self._cluster.now())

    async def workers(self) -> tuple[WorkerInfo, ...]:
        return self._cluster.router.workers()

    async def not_ready(self) -> str:
        ready, why = self._cluster.router.readiness()
        return "" if ready else why


def _settle(answered: asyncio.Future[Answer], answer: Answer) -> None:
    if not answered.done():  # whoever asked may have gone
        answered.set_result(answer)


def _ring(loop: asyncio.AbstractEventLoop, bell: asyncio.Event) -> None:
    """Wake a worker's loop, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to wake
        loop.call_soon_threadsafe(bell.set)
