"""The gateway at work: both front ends, dispatch, metrics, and the news of fenced workers, in one event loop.

Who is fenced is followed by a long poll, so that the streams of a worker that is stopped rather than dead end at once;
a worker that dies is noticed by its broken frame stream before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster import dispatch as dispatching
from cluster.cluster_status import ClusterStatus
from cluster.config import TandemConfig
from cluster.dispatch import Dispatch
from cluster.gateway import Gateway
from cluster.http_server import HttpServer, HttpSettings, build_app
from cluster.inference_server import GrpcSettings, InferenceServer
from cluster.membership import Health
from cluster.metrics import CONTENT_TYPE, Metrics
from cluster.node_client import NodeClient
from cluster.streams import FrameHub
from cluster.supervisor import Fenced
from cluster.text import Text
from cluster.wiring import dispatch_limits, gateway_settings, hasher_for
from tandem.messages import Answer, Code, Question, WorkerRef

log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.5
ROUTER_AWAY_S = 0.5
ROUTER_ANSWERS_S = 5.0
"""A router that is silent for longer is no reason to call oneself ready."""


class Router(dispatching.Router, Protocol):
    """The router, as a gateway knows it. The last four raise `RouterAway` while it cannot be asked."""

    async def fences(self, after: int) -> tuple[Fenced, ...]: ...

    async def last_fence(self) -> int: ...

    async def status(self) -> ClusterStatus: ...

    async def drain(self, name: str, draining: bool) -> str:
        """Why the worker could not be told to; empty when it was."""
        ...


class RouterAway(Exception):
    """The router is being restarted."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of both front ends."""

    grpc: str
    http: str


class GatewayHost:
    """`api_key` None: anybody who reaches the ports may ask."""

    def __init__(
        self, config: TandemConfig, secret: str, router: Router, model: Path, *, api_key: str | None = None
    ) -> None:
        self._config = config
        self._router = router
        self._metrics = Metrics(config)
        self._hub = FrameHub()
        gateway_id = f"gateway-{secrets.token_hex(4)}"
        self._workers = Workers(NodeClient(secret, hub=self._hub, gateway_id=gateway_id))
        self.dispatch = Dispatch(
            router,
            self._workers,
            self._hub,
            gateway_id,
            limits=dispatch_limits(config),
            on_received=partial(self._metrics.received, config.model.name),
            on_outcome=self._metrics.observe_outcome,
            seed=secrets.randbits(32),
        )
        self.gateway = Gateway(
            gateway_settings(config),
            Text.load(model),
            router,
            self.dispatch,
            partial(hasher_for, config),
            on_refused=self._refused,
        )
        section = config.gateway
        http = HttpSettings(api_key=api_key, max_body_bytes=section.max_message_bytes, metrics=self._expose)
        app = with_operator(build_app(self.gateway, http), router, api_key)
        self._http = HttpServer(app, section.host, section.http_port, tls=section.tls)
        grpc = GrpcSettings(api_key=api_key, max_message_bytes=section.max_message_bytes, tls=section.tls)
        self._grpc = InferenceServer(self.gateway, grpc, section.host, section.grpc_port)
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    async def start(self) -> Addresses:
        """Serve from now on; until workers have registered, requests are refused as UNAVAILABLE."""
        host = self._config.gateway.host
        grpc, http = await self._grpc.start(), await self._http.start()
        self._tasks = (_task(self._follow_fences()), _task(self._follow_status()))
        return Addresses(f"{host}:{grpc}", f"{host}:{http}")

    async def stop(self, grace_s: float) -> None:
        """Let answers in flight end within the grace time, then close everything."""
        await self._grpc.show_health(False)
        await self.gateway.drain(grace_s)
        await asyncio.gather(self._grpc.stop(1.0), self._http.stop(1.0))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.dispatch.drained(), 2.0)
        await self._workers.close()

    # -- what the router tells ---------------------------------------------------------------------------------

    async def _follow_fences(self) -> None:
        after = -1
        while True:
            try:
                if after < 0:
                    after = await self._router.last_fence()
                for news in await self._router.fences(after):
                    log.warning("%s#%s was fenced: %s", news.worker, news.incarnation, news.why)
                    self._hub.lost(news.worker, news.incarnation, news.why)
                    await self._workers.forget(news.worker, news.incarnation)
                    after = news.number
            except RouterAway:
                after = -1  # a new router counts anew
                await asyncio.sleep(ROUTER_AWAY_S)

    async def _follow_status(self) -> None:
        """Workers' series for `/metrics`, and what the health service says."""
        shown: frozenset[str] = frozenset()
        serving: bool | None = None
        while True:
            try:
                async with asyncio.timeout(ROUTER_ANSWERS_S):
                    status = await self._router.status()
            except RouterAway:
                status = ClusterStatus(not_ready="the router is being restarted")
            except TimeoutError:
                status = ClusterStatus(not_ready="the router does not answer")
            self._observe(status)
            present = frozenset(worker.name for worker in status.workers)
            for name in shown - present:
                self._metrics.forget(name)
            shown = present
            if serving is not (not status.not_ready):
                serving = not status.not_ready
                await self._grpc.show_health(serving)
            await asyncio.sleep(STATUS_EVERY_S)

    def _observe(self, status: ClusterStatus) -> None:
        for worker in status.workers:
            if worker.load is None:
                self._metrics.forget(worker.name)
            self._metrics.observe_health(worker.name, worker.role, Health(worker.health))
            if (report := worker.report()) is not None:
                self._metrics.observe_report(worker.role, report)

    # -- metrics -----------------------------------------------------------------------------------------------

    def _refused(self, code: Code) -> None:
        """Received and ended at once: nobody knows its class."""
        self._metrics.received(self._config.model.name, "")
        self._metrics.refused(code, "")

    def _expose(self) -> tuple[bytes, str]:
        return self._metrics.expose(), CONTENT_TYPE


def with_operator(app: ASGIApp, router: Router, api_key: str | None) -> ASGIApp:
    """The application with `GET /status`, the cluster at a glance, and `POST /drain/<worker>` and `/undrain/<worker>`,
    under the same key as the rest."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_operators(scope):
            await app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if api_key is not None and not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
            answer = _problem(401, "a valid API key is needed: Authorization: Bearer KEY")
        else:
            try:
                answer = await _operate(scope, router)
            except RouterAway:
                answer = _problem(503, "the router is being restarted")
        await answer(scope, receive, send)

    return guarded


def _is_operators(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == "/status" or (scope["method"] == "POST" and path.startswith(("/drain/", "/undrain/")))


async def _operate(scope: Scope, router: Router) -> JSONResponse:
    if scope["path"] == "/status":
        return JSONResponse((await router.status()).to_json())
    what, name = scope["path"].removeprefix("/").split("/", 1)
    why = await router.drain(name, what == "drain")
    return _problem(409, why) if why else JSONResponse({"worker": name, "draining": what == "drain"})


def _problem(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status)


class Workers:
    """The gRPC way to the workers, which remembers whom it reached, so that it can let go of the fenced."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client
        self._seen: dict[tuple[str, str], WorkerRef] = {}

    async def ask(self, worker: WorkerRef, question: Question, timeout_s: float) -> Answer:
        self._seen[worker.name, worker.incarnation] = worker
        return await self._client.ask(worker, question, timeout_s)

    async def open(self, worker: WorkerRef) -> None:
        self._seen[worker.name, worker.incarnation] = worker
        await self._client.open(worker)

    async def forget(self, name: str, incarnation: str) -> None:
        ref = self._seen.pop((name, incarnation), None)
        if ref is not None:
            await self._client.forget(ref)

    async def close(self) -> None:
        await self._client.close()


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_complain)
    return task


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task of the gateway failed", exc_info=error)
