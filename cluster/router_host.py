"""The router at work: its state, its ears, its clock and its hands, in one event loop. Ray only carries the calls here.

    workers ──load reports, KV events (ZeroMQ)──▶ state ◀──place, finished, suspect── gateways
    newborn workers ──turn, register──▶ supervisor ──kill──▶ processes        └──fences──▶ gateways

If it dies, a new one begins empty: workers notice that they are not known and register again, their reports bring the
live requests back into the ledger, gateways ask again, and a drained worker says that it is. Which prefixes a worker
holds is asked of itself whenever events were missed: after a restart, a lost message, or because a subscription takes a
moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from cluster.cluster_status import ClusterStatus, WorkerStatus
from cluster.config import ROLES, TandemConfig, worker_names
from cluster.evacuation import Move
from cluster.events import Subscriber
from cluster.node_client import NodeClient
from cluster.outcome import Outcome
from cluster.probe_turns import Pair
from cluster.processes import Process
from cluster.router import RouterState
from cluster.snapshot import Placement, Refusal, RequestView
from cluster.supervisor import Fenced, Supervisor
from cluster.wiring import role_of
from tandem.messages import (
    Answer,
    Code,
    Declined,
    LoadReport,
    Migrate,
    MigrationCounters,
    ProbeLink,
    ReplayPrefixes,
    SetDraining,
    WorkerInfo,
    WorkerRef,
)

log = logging.getLogger(__name__)

DECISIONS_SHOWN = 32
REPLAY_ASK_S = 3.0
PROBE_ASK_S = 3.0
DRAIN_ASK_S = 5.0
MIGRATE_ASK_S = 60.0
"""A move is answered when it is over; its lease ends it long before this."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a worker's process is: the node (Ray's id of it) and the process there."""

    node_id: str
    process: Process


class RouterHost:
    """`end` ends an actor's process for Ray to start it again, without waiting; of one that has told this router
    nothing yet nobody knows where it is. `clock` is monotonic seconds."""

    def __init__(
        self,
        config: TandemConfig,
        secret: str,
        end: Callable[[str, Whereabouts | None], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = RouterState(config)
        self._config = config
        self._clock = clock
        self._end_actor = end
        self._whereabouts: dict[str, Whereabouts] = {}
        self._events: dict[str, str] = {}
        self._drains: dict[str, bool] = {}
        """Whether a name is drained: as an operator said last, or else as the first worker of that name said, who may
        have heard it from the router before this one. A worker that starts anew is drained like the one before it."""
        self._subscriber = Subscriber(secret)
        self._workers = NodeClient(secret, clock=clock)
        self._asking: set[asyncio.Task[None]] = set()
        self._supervisor = Supervisor(self.state, self._end, clock)
        self._supervisor.expect(name for role in ROLES for name in worker_names(config, role))
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    async def start(self) -> None:
        self._tasks = (asyncio.create_task(self._listen()), asyncio.create_task(self._watch()))

    async def stop(self) -> None:
        tasks = (*self._tasks, *self._asking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._workers.close()
        self._subscriber.close()

    # -- workers -------------------------------------------------------------------------------------------------

    async def turn(self, name: str, where: Whereabouts) -> Declined | None:
        """A newborn worker asks whether it may start; see `cluster.supervisor`."""
        waiting = self._supervisor.turn(name)
        self._whereabouts[name] = where
        return await waiting

    def register(self, info: WorkerInfo, events: str, where: Whereabouts, *, draining: bool = False) -> Declined | None:
        """A worker is ready; its load reports and KV events come from `events`. `draining`: it takes nothing new."""
        declined = self.state.register(info, self._clock())
        if declined is None:
            name = info.ref.name
            self._whereabouts[name] = where
            self._supervisor.joined(name)
            self._hear(name, events)
            wanted = self._drains.setdefault(name, draining)
            if wanted:
                self.state.hold_back(name)
            if wanted != draining:
                self._spawn(self._ask_drain(info.ref, wanted))
            log.info("%s registered from %s", info.ref.peer, info.ref.address)
        return declined

    def failed(self, name: str, why: str, *, hopeless: bool = False) -> None:
        """A worker could not start, or ended, and says why before it goes. `hopeless`: it would fail again."""
        log.warning("%s: %s", name, why)
        ref = next((info.ref for info in self.state.workers() if info.ref.name == name), None)
        if ref is not None:
            self.state.lost(ref, why, self._clock())
        else:
            self.state.membership.exited(name, "", why, self._clock(), hopeless=hopeless)

    def knows(self, ref: WorkerRef) -> bool:
        """False: register again (the router is a new one) or end (it was fenced)."""
        return self.state.present(ref, self._clock())

    async def drain(self, name: str, draining: bool) -> str:
        """Let a worker take nothing new (or let it again); what it runs moves away while there is room elsewhere.
        One that is not there now is told when it is back. Why it could not be told; empty when it was or will be."""
        members = {member.name for member in self.state.membership.members()}
        if name not in members:
            return f"there is no worker {name} (there are: {', '.join(sorted(members)) or 'none'})"
        self._drains[name] = draining
        ref = next((info.ref for info in self.state.workers() if info.ref.name == name), None)
        if ref is None:
            return ""
        answer = await self._workers.ask(ref, SetDraining(draining), DRAIN_ASK_S)
        return answer.message if isinstance(answer, Declined) else ""

    # -- gateways ------------------------------------------------------------------------------------------------

    def place(self, view: RequestView, left_s: float | None, exclude: frozenset[str]) -> Placement | Refusal:
        """`left_s` until the request's deadline: clocks of two machines differ."""
        now = self._clock()
        here = replace(view, deadline_s=None if left_s is None else now + left_s)
        return self.state.place(here, exclude, now)

    def finished(self, request_id: str, outcome: Outcome) -> None:
        self.state.finished(request_id, outcome.report)

    def suspect(self, ref: WorkerRef, why: str) -> None:
        self.state.suspect(ref, why, self._clock())

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self.state.workers()

    async def fences(self, after: int) -> tuple[Fenced, ...]:
        """News of fenced workers with a number above `after`; waits for some."""
        return await self._supervisor.fences(after)

    def last_fence(self) -> int:
        return self._supervisor.last_fence

    def status(self) -> ClusterStatus:
        loads = self.state.loads()
        members = sorted(self.state.membership.members(), key=lambda member: member.name)
        workers = []
        for member in members:
            loaded = loads.get(member.name)
            where = self._whereabouts.get(member.name)
            workers.append(
                WorkerStatus(
                    name=member.name,
                    role=role_of(member.name),
                    health=str(member.health),
                    why=member.why,
                    incarnation=member.incarnation,
                    address=loaded.info.ref.address if loaded else "",
                    pid=where.process.pid if where else None,
                    load=loaded.load if loaded else None,
                    transfers_in_flight=loaded.transfers_in_flight if loaded else 0,
                    transfers=loaded.transfers if loaded else (),
                    fetches=loaded.fetches if loaded else (),
                    migrations=loaded.migrations if loaded else MigrationCounters(),
                    draining=loaded.draining if loaded else False,
                    links=loaded.links if loaded else (),
                )
            )
        ready, why = self.state.readiness()
        decisions = tuple(self.state.recent)[-DECISIONS_SHOWN:]
        placements = dict(self.state.placements)
        return ClusterStatus(
            not_ready="" if ready else why, workers=tuple(workers), placements=placements, decisions=decisions
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _hear(self, name: str, events: str) -> None:
        old = self._events.get(name)
        if old is not None and old != events:
            self._subscriber.disconnect(old)
        self._events[name] = events
        self._subscriber.connect(events)

    async def _listen(self) -> None:
        async for event in self._subscriber:
            if isinstance(event, LoadReport):
                self.state.report(event, self._clock())
            else:
                self.state.kv_events(event)

    async def _watch(self) -> None:
        while True:
            self._supervisor.tick()
            for ref in self.state.replays_due(self._clock()):
                self._spawn(self._ask_replay(ref))
            for pair in self.state.probes_due(self._clock()):
                self._spawn(self._ask_probe(pair))
            for move in self.state.evacuations(self._clock()):
                self._spawn(self._ask_migrate(move))
            await asyncio.sleep(self._config.timeouts.heartbeat_s / 2)

    def _spawn(self, asking: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(asking)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask_migrate(self, move: Move) -> None:
        answer: Answer = Declined(Code.UNAVAILABLE, "the question was given up")
        try:
            answer = await self._workers.ask(move.source, Migrate(move.request_id, move.to), MIGRATE_ASK_S)
        finally:
            self.state.moved(move, answer, self._clock())

    async def _ask_drain(self, ref: WorkerRef, draining: bool) -> None:
        answer = await self._workers.ask(ref, SetDraining(draining), DRAIN_ASK_S)
        if isinstance(answer, Declined):
            log.warning("%s did not hear whether its name is drained: %s", ref.peer, answer.message)

    async def _ask_probe(self, pair: Pair) -> None:
        """What it brings is in the source's reports; asked again later when it brings nothing."""
        answer = await self._workers.ask(pair.destination, ProbeLink(pair.source), PROBE_ASK_S)
        if isinstance(answer, Declined):
            log.info("no probe from %s to %s: %s", pair.source.name, pair.destination.name, answer.message)

    async def _ask_replay(self, ref: WorkerRef) -> None:
        """Asked again later when nothing comes of it."""
        answer = await self._workers.ask(ref, ReplayPrefixes(), REPLAY_ASK_S)
        await self._workers.forget(ref)
        if isinstance(answer, Declined):
            log.warning("%s did not tell its prefixes again: %s", ref.peer, answer.message)

    def _end(self, name: str) -> None:
        self._end_actor(name, self._whereabouts.pop(name, None))
