"""The Ray actors: router, workers, gateway. Each is a thin shell around its host; Ray places, watches and restarts it.

All are named, detached and live in one namespace. A worker claims one of its role's slots (a custom resource) and no
CPU, since its rank sets its own thread counts. A dead one is restarted by Ray at once and then waits for its turn with
the router (`cluster.supervisor`). Nobody is asked through Ray for a token: a request costs one call, `place`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster import models, processes
from cluster.cluster_status import ClusterStatus
from cluster.config import ROLES, TandemConfig, worker_names
from cluster.gateway_host import Addresses, GatewayHost, RouterAway
from cluster.hang_watch import MOST_MISSED, HangWatch
from cluster.outcome import Outcome
from cluster.router_host import RouterHost, Whereabouts
from cluster.snapshot import Placement, Refusal, RequestView
from cluster.supervisor import Fenced
from cluster.wiring import LOOPBACK, model_source
from cluster.worker_host import GivenUp, WorkerHost
from engine.errors import TandemError
from tandem.messages import Code, Declined, WorkerInfo, WorkerRef

log = logging.getLogger(__name__)

T = TypeVar("T")

ROUTER, GATEWAY = "router", "gateway"
ASK_S = 10.0
"""For a call between actors that should take a millisecond."""
LEAST_TURN_S = 1.0
"""Of the watch over the gateway, however short the fence is."""
AWAIT_S = 0.5
"""Between two questions to a router that is being restarted."""
END_NOW = 70
"""Exit code by which a worker's process makes way for the next."""


class NotStarted(TandemError):
    """An actor ended while it was being made; the message says why."""


class RouterActor:
    """Owns a `RouterHost`."""

    async def __init__(self, config: TandemConfig, secret: str) -> None:  # type: ignore[misc]  # Ray awaits it
        _log_to_stderr(ROUTER)
        self._node_id = ray.get_runtime_context().get_node_id()
        self.host = RouterHost(config, secret, self._end)
        await self.host.start()
        # It asks once in a turn of ours or two, and takes its answers along when it is killed: so with more patience.
        turn_s = max(config.timeouts.fence_s / MOST_MISSED, LEAST_TURN_S)
        self._gateway = HangWatch(2 * MOST_MISSED, math.ceil(config.timeouts.start_s / turn_s))
        self._watching = asyncio.get_running_loop().create_task(self._watch_gateway(turn_s))
        with contextlib.suppress(ValueError):  # no gateway yet; that asks by itself when it has started
            ray.get_actor(GATEWAY).router_started.remote(_here())

    async def turn(self, name: str, where: Whereabouts) -> Declined | None:
        return await self.host.turn(name, where)

    async def register(self, info: WorkerInfo, events: str, where: Whereabouts, draining: bool) -> Declined | None:
        return self.host.register(info, events, where, draining=draining)

    async def failed(self, name: str, why: str, hopeless: bool) -> None:
        self.host.failed(name, why, hopeless=hopeless)

    async def knows(self, ref: WorkerRef) -> bool:
        return self.host.knows(ref)

    async def place(self, view: RequestView, left_s: float | None, exclude: frozenset[str]) -> Placement | Refusal:
        return self.host.place(view, left_s, exclude)

    async def finished(self, request_id: str, outcome: Outcome) -> None:
        self.host.finished(request_id, outcome)

    async def suspect(self, ref: WorkerRef, why: str) -> None:
        self.host.suspect(ref, why)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        return self.host.workers()

    async def fences(self, after: int) -> tuple[Fenced, ...]:
        return await self.host.fences(after)

    async def last_fence(self) -> int:
        return self.host.last_fence()

    async def status(self) -> ClusterStatus:
        return self.host.status()

    async def drain(self, name: str, draining: bool) -> str:
        return await self.host.drain(name, draining)

    async def whereabouts(self, gateway: Whereabouts) -> Whereabouts:
        """Asked by the gateway, again and again, so that each knows where the other is and that it is well."""
        self._gateway.heard(gateway)
        return _here()

    async def _watch_gateway(self, turn_s: float) -> None:
        """Ends a gateway that hangs; Ray starts the next one."""
        while True:
            await asyncio.sleep(turn_s)
            hung = self._gateway.missed()
            if hung is not None:
                log.error("the gateway has been silent for too long; it is killed (%s)", hung.where)
                self._end(GATEWAY, hung.where)

    def _end(self, name: str, where: Whereabouts | None) -> None:
        _end(name, where, self._node_id)


class WorkerActor:
    """Owns a `WorkerHost`; its process ends with it."""

    async def __init__(self, config: TandemConfig, secret: str, name: str, local: bool, allow_faults: bool) -> None:  # type: ignore[misc]  # Ray awaits it
        _log_to_stderr(name)
        where = _here()
        host = LOOPBACK if local else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self.host = WorkerHost(config, secret, name, RayDesk(where), host=host, allow_faults=allow_faults)
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End the rank in an orderly way; the actor is killed by whoever asked."""
        self._running.cancel()
        await self.host.stop()

    async def _run(self) -> None:
        try:
            why = await self.host.run()
        except GivenUp as error:
            log.error("%s", error)
            return
        except Exception:
            log.exception("%s failed", self.host.name)
            os._exit(END_NOW)
        log.warning("%s ends: %s", self.host.name, why)
        os._exit(END_NOW)


class GatewayActor:
    """Owns a `GatewayHost`."""

    async def __init__(self, config: TandemConfig, secret: str, api_key: str | None) -> None:  # type: ignore[misc]  # Ray awaits it
        _log_to_stderr(GATEWAY)
        model = await asyncio.to_thread(models.resolve, model_source(config))
        self._grace_s = config.timeouts.drain_s
        self._router = HangWatch()
        self.host = GatewayHost(config, secret, RayRouter(), model, api_key=api_key)
        self._addresses = await self.host.start()
        self._watching = asyncio.get_running_loop().create_task(self._watch_router(config.timeouts.fence_s))

    async def _watch_router(self, fence_s: float) -> None:
        """Ends a router that hangs; Ray starts the next one."""
        watch, router = self._router, RayRouter()
        own = _here()
        while True:
            try:
                async with asyncio.timeout(fence_s / MOST_MISSED):
                    watch.heard(await router.whereabouts(own))
                hung = None
            except RouterAway:
                hung = watch.away()
            except TimeoutError:
                hung = watch.missed()
            if hung is not None:
                log.error("the router does not answer; it is killed (%s)", hung.where)
                _end(ROUTER, hung.where, own.node_id)
            await asyncio.sleep(fence_s / MOST_MISSED if watch.knows else AWAIT_S)

    async def router_started(self, where: Whereabouts) -> None:
        """Told by the router itself: it may hang before it is asked."""
        self._router.heard(where)

    async def addresses(self) -> Addresses:
        return self._addresses

    async def stop(self, grace_s: float | None = None) -> None:
        await self.host.stop(self._grace_s if grace_s is None else grace_s)
        self._watching.cancel()


# -- ways to the router --------------------------------------------------------------------------------------------


class RayDesk:
    """`cluster.worker_host.Desk` by actor calls. While the router is away, turns and registrations wait for it."""

    def __init__(self, where: Whereabouts) -> None:
        self._where = where

    async def turn(self, name: str) -> Declined | None:
        while True:
            try:
                answer: Declined | None = await _router().turn.remote(name, self._where)
                return answer
            except (RayError, ValueError):
                await asyncio.sleep(0.5)

    async def register(self, info: WorkerInfo, events: str, draining: bool) -> Declined | None:
        while True:
            try:
                answer: Declined | None = await _router().register.remote(info, events, self._where, draining)
                return answer
            except (RayError, ValueError):
                await asyncio.sleep(0.5)

    async def failed(self, name: str, why: str, hopeless: bool) -> None:
        try:
            await asyncio.wait_for(_router().failed.remote(name, why, hopeless), ASK_S)
        except (RayError, ValueError, TimeoutError):
            log.warning("the router could not be told that %s ends: %s", name, why)

    async def knows(self, ref: WorkerRef) -> bool | None:
        try:
            return bool(await asyncio.wait_for(_router().knows.remote(ref), ASK_S))
        except (RayError, ValueError, TimeoutError):
            return None


class RayRouter:
    """`cluster.gateway_host.Router` by actor calls."""

    async def place(self, request: RequestView, exclude: frozenset[str]) -> Placement | Refusal:
        left_s = None if request.deadline_s is None else request.deadline_s - time.monotonic()
        try:
            answer: Placement | Refusal = await self._ask("place", replace(request, deadline_s=None), left_s, exclude)
            return answer
        except RouterAway:
            return Refusal(Code.UNAVAILABLE, "the router is being restarted; ask again a little later")

    async def finished(self, request_id: str, outcome: Outcome) -> None:
        await self._tell("finished", request_id, outcome)

    async def suspect(self, worker: WorkerRef, why: str) -> None:
        await self._tell("suspect", worker, why)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        try:
            workers: tuple[WorkerInfo, ...] = await self._ask("workers")
            return workers
        except RouterAway:
            return ()

    async def not_ready(self) -> str:
        try:
            return (await self.status()).not_ready
        except RouterAway:
            return "the router is being restarted"

    async def fences(self, after: int) -> tuple[Fenced, ...]:
        news: tuple[Fenced, ...] = await self._ask("fences", after)
        return news

    async def last_fence(self) -> int:
        return int(await self._ask("last_fence"))

    async def status(self) -> ClusterStatus:
        status: ClusterStatus = await self._ask("status")
        return status

    async def drain(self, name: str, draining: bool) -> str:
        return str(await self._ask("drain", name, draining))

    async def whereabouts(self, own: Whereabouts) -> Whereabouts:
        where: Whereabouts = await self._ask("whereabouts", own)
        return where

    async def _ask(self, method: str, *args: object) -> Any:
        try:
            return await getattr(_router(), method).remote(*args)
        except (RayError, ValueError) as error:
            raise RouterAway(str(error)) from error

    async def _tell(self, method: str, *args: object) -> None:
        try:
            await asyncio.wait_for(self._ask(method, *args), ASK_S)
        except (RouterAway, TimeoutError):
            log.warning("the router could not be told %s%r", method, args[:1])


_handles: dict[str, Any] = {}


def _router() -> Any:
    """The router's handle stays good over its restarts. ValueError while there is no such actor."""
    if ROUTER not in _handles:
        _handles[ROUTER] = ray.get_actor(ROUTER)
    return _handles[ROUTER]


# -- making and ending them ----------------------------------------------------------------------------------------


def create_router(config: TandemConfig, secret: str, node_id: str) -> None:
    _actor(RouterActor, ROUTER, scheduling_strategy=_on(node_id))(config, secret)


def create_workers(config: TandemConfig, secret: str, *, local: bool, allow_faults: bool = False) -> None:
    for role in ROLES:
        for name in worker_names(config, role):
            _actor(WorkerActor, name, resources={slot_of(role): 1})(config, secret, name, local, allow_faults)


def create_gateway(config: TandemConfig, secret: str, node_id: str, api_key: str | None) -> None:
    _actor(GatewayActor, GATEWAY, scheduling_strategy=_on(node_id))(config, secret, api_key)


def slots(config: TandemConfig) -> Mapping[str, int]:
    """The custom resources that a cluster of this config takes."""
    return {slot_of(role): config.pools.of(role).count for role in ROLES if config.pools.of(role).count}


def slot_of(role: str) -> str:
    return f"{role}_slot"


def addresses(timeout_s: float) -> Addresses | None:
    """The gateway's, once it listens; None when that takes longer. Raises NotStarted."""
    try:
        return _within(Addresses, ray.get_actor(GATEWAY).addresses.remote(), timeout_s)
    except ValueError as error:  # Ray has forgotten its name
        raise NotStarted("the gateway has ended while it started; its log says why") from error
    except (RayActorError, RayTaskError) as error:
        raise NotStarted(f"the gateway does not start: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The line of Ray's long story that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line or ":" in line), "unknown")


def status(timeout_s: float) -> ClusterStatus | None:
    return _within(ClusterStatus, ray.get_actor(ROUTER).status.remote(), timeout_s)


def end_all(workers: Iterable[str], grace_s: float) -> None:
    """Drain the gateway, stop the ranks, and let go of every actor; those that hang are killed."""
    names = tuple(workers)
    _stop([GATEWAY], grace_s + 3.0, grace_s)
    _stop(names, ASK_S)
    for name in (*names, GATEWAY, ROUTER):
        try:
            ray.kill(ray.get_actor(name), no_restart=True)
        except ValueError:
            log.debug("%s was not there", name)


def _stop(names: Sequence[str], timeout_s: float, *args: object) -> None:
    stopping: list[Any] = []
    for name in names:
        try:
            stopping.append(ray.get_actor(name).stop.remote(*args))
        except ValueError:
            log.debug("%s was not there", name)
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=timeout_s)


def _within(kind: type[T], ref: Any, timeout_s: float) -> T | None:
    """The answer of an actor; None when it takes longer."""
    try:
        answer = ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        return None
    assert isinstance(answer, kind)
    return answer


def _actor(kind: type, name: str, **options: object) -> Any:
    return (
        ray.remote(kind)
        .options(name=name, lifetime="detached", num_cpus=0, max_restarts=-1, max_task_retries=0, **options)
        .remote
    )


def _on(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _here() -> Whereabouts:
    return Whereabouts(ray.get_runtime_context().get_node_id(), processes.this_process())


def _kill(where: Whereabouts, here: str) -> None:
    """SIGKILL works on a stopped process too, and at once; Ray's own way of killing an actor asks first."""
    if where.node_id == here:
        processes.kill_family(where.process)
    else:
        _kill_there.options(scheduling_strategy=_on(where.node_id)).remote(where.process)


def _end(name: str, where: Whereabouts | None, here: str) -> None:
    """For Ray to start it again. Of one that never said where it is Ray knows the process: it asks that to end, and
    kills it after some seconds."""
    if where is not None:
        _kill(where, here)
    else:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(ray.get_actor(name), no_restart=False)


@ray.remote(num_cpus=0, max_retries=0)
def _kill_there(process: processes.Process) -> None:
    processes.kill_family(process)


def _log_to_stderr(name: str) -> None:
    """Ray keeps an actor's stderr in its session's logs."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s", force=True)
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness > 0:
        log.warning("niceness %d: others on this machine go first; start Ray with RAY_worker_niceness=0", niceness)
