"""The control of a worker: everything around the step loop that must not share its interpreter.

It starts the rank process and watches it, serves the worker's Node service, carries the rank's questions to other
workers, keeps one frame queue per gateway, and publishes load reports and prefix-cache events. What can fail: the rank
dies or falls silent (it is killed then); every question is answered with UNAVAILABLE, every frame stream ends, and
`died` resolves, so that whoever owns this worker can start another. A gateway that leaves for good takes its requests
with it.

Start it from a thread that lives as long as the worker: the kernel ends the rank with the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from cluster.events import Publisher
from cluster.ipc import LAST_WORD, RankSettings, to_json
from cluster.node_client import NodeClient
from cluster.node_server import NodeServer
from engine.errors import TandemError
from tandem.messages import (
    Abort,
    Answer,
    Code,
    Commit,
    Declined,
    Expect,
    Follow,
    Forward,
    Frame,
    FrameFor,
    KvEvents,
    LoadReport,
    Question,
    WorkerInfo,
    WorkerRef,
)
from tandem.wire import decode_envelope, encode_envelope

log = logging.getLogger(__name__)


class WorkerDied(TandemError):
    """The rank process ended before it was ready; the message says how, and why as far as the rank could tell."""


class WorkerUnfit(WorkerDied):
    """It would end so again: its settings or its checkpoint are at fault."""


_LAST_WORD_S = 1.0
"""How much longer than a failed rank its last word may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """`host` is bound, `advertise` (default: the same) is told to others. Both for gRPC and for events."""

    secret: str
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    start_s: float = 180.0
    silence_s: float = 6.0
    """A rank that says nothing for this long, not even its heartbeat, is killed."""
    ask_s: float = 5.0
    """For questions that the rank asks of other workers; Commit, which waits for bytes, has twice that."""
    gateway_grace_s: float = 1.0
    """How long a gateway may be away before its requests are ended."""
    stop_s: float = 3.0


class Control:
    """One worker. `start`, then serve until `died`, then `stop`; one event loop."""

    def __init__(self, settings: ControlSettings, rank: RankSettings) -> None:
        self._settings = settings
        self._incarnation = rank.worker.incarnation or secrets.token_hex(6)
        self._name = rank.worker.name
        self._rank_settings = rank
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-"))
        self._server: NodeServer | None = None
        self._publisher: Publisher | None = None
        self._peers = NodeClient(settings.secret)
        self._context = zmq.asyncio.Context()
        self._pair = self._context.socket(zmq.PAIR)
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ask_ids = count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._gateways: dict[str, asyncio.Queue[Frame | None]] = {}
        self._requests: dict[str, set[str]] = defaultdict(set)
        self._heard_s = 0.0
        self._last_word: asyncio.Future[Declined] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self.info: WorkerInfo | None = None
        self.last_report: LoadReport | None = None
        self._reported: asyncio.Future[LoadReport] | None = None
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves to the reason when the rank is gone."""

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> WorkerInfo:
        """Start the rank and wait until it is ready. Raises WorkerDied when it does not get there."""
        settings = self._settings
        try:
            self._server = NodeServer(
                self, settings.secret, host=settings.host, port=settings.port, advertise=settings.advertise
            )
            self._publisher = Publisher(settings.secret, host=settings.host, advertise=settings.advertise)
            await self._spawn(self._server.address)
            info = await self._until_ready()
            await self._server.start()
        except BaseException:
            await self.stop()
            raise
        self._spawn_task(self._watch_silence())
        log.info("%s is ready at %s, pid %s", info.ref.peer, info.ref.address, self.pid)
        return info

    async def stop(self) -> None:
        """End the rank and everything else; safe to repeat."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), self._settings.stop_s)
            except TimeoutError:
                self.kill()
                await process.wait()
        self._lost("stopped")
        if self._server is not None:
            await self._server.stop()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peers.close()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._pair.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the rank as it is; works on a stopped process too."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    @property
    def pid(self) -> int | None:
        """Of the rank process."""
        return self._process.pid if self._process else None

    @property
    def events_address(self) -> str:
        """What `cluster.events.Subscriber.connect` wants."""
        assert self._publisher is not None, "not started"
        return self._publisher.address

    async def next_report(self) -> LoadReport:
        """The rank's next load report: at least one a heartbeat, while it lives."""
        if self._reported is None or self._reported.done():
            self._reported = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._reported)

    # -- questions to the rank ------------------------------------------------------------------------------------

    async def ask(self, question: Question) -> Answer:
        """The rank's answer; UNAVAILABLE when it is gone or goes before it has answered."""
        if self.died.done() or self.info is None:
            return self._unavailable(self.died.result() if self.died.done() else "it is still starting")
        ask_id = next(self._ask_ids)
        answer = self._waiting[ask_id] = asyncio.get_running_loop().create_future()
        if isinstance(question, Expect):
            self._requests[question.gateway_id].add(question.request.request_id)
        elif isinstance(question, Follow):
            self._requests[question.gateway_id].add(question.request_id)
        try:
            self._send(ask_id, question)
            result: Answer = await answer
            return result
        finally:
            self._waiting.pop(ask_id, None)

    def tell(self, question: Question) -> None:
        """Ask, and let nobody wait."""
        if not self.died.done():
            self._send(next(self._ask_ids), question)

    # -- frames ---------------------------------------------------------------------------------------------------

    def frames(self, gateway_id: str) -> AsyncIterator[Frame]:
        """This gateway's frames from now on, until the rank is gone or the gateway opens another stream."""
        before = self._gateways.get(gateway_id)
        if before is not None:
            before.put_nowait(None)
        queue: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._gateways[gateway_id] = queue
        if self.died.done():
            queue.put_nowait(None)
        return self._read(gateway_id, queue)

    async def _read(self, gateway_id: str, queue: asyncio.Queue[Frame | None]) -> AsyncIterator[Frame]:
        try:
            while (frame := await queue.get()) is not None:
                yield frame
        finally:
            if self._gateways.get(gateway_id) is queue:
                del self._gateways[gateway_id]
                self._spawn_task(self._end_requests_of(gateway_id))

    async def _end_requests_of(self, gateway_id: str) -> None:
        """Give a gateway that left a moment to come back, then end what it asked for."""
        await asyncio.sleep(self._settings.gateway_grace_s)
        if gateway_id in self._gateways:
            return
        orphans = self._requests.pop(gateway_id, set())
        if orphans:
            log.info("%s: gateway %s left %d requests", self._name, gateway_id, len(orphans))
        for request_id in orphans:
            self.tell(Abort(request_id))

    def _deliver(self, addressed: FrameFor) -> None:
        mine = self._requests[addressed.gateway_id]
        for delta in addressed.frame.deltas:
            if delta.finish is not None or delta.error is not None or delta.moved is not None:
                mine.discard(delta.request_id)
        if not mine:
            del self._requests[addressed.gateway_id]
        queue = self._gateways.get(addressed.gateway_id)
        if queue is not None:
            queue.put_nowait(addressed.frame)

    # -- the rank process -----------------------------------------------------------------------------------------

    async def _spawn(self, address: str) -> None:
        endpoint = f"ipc://{self._folder / 'rank'}"
        self._pair.setsockopt(zmq.SNDHWM, 0)
        self._pair.setsockopt(zmq.RCVHWM, 0)
        self._pair.bind(endpoint)
        rank = self._rank_settings
        worker = replace(rank.worker, incarnation=self._incarnation, address=address)
        settings = to_json(replace(rank, worker=worker, endpoint=endpoint))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cluster.rank",
            stdin=asyncio.subprocess.PIPE,
            env=_environment(rank),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(settings.encode())
        self._process.stdin.close()
        self._spawn_task(self._watch_exit(self._process))
        self._spawn_task(self._receive())

    async def _until_ready(self) -> WorkerInfo:
        either: set[asyncio.Future[Any]] = {self._ready, self.died}
        await asyncio.wait(either, timeout=self._settings.start_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            self.info = self._ready.result()
            return self.info
        why = self.died.result() if self.died.done() else f"not ready after {self._settings.start_s:g} s"
        unfit = self._last_word.done() and self._last_word.result().code is Code.INVALID
        raise (WorkerUnfit if unfit else WorkerDied)(f"worker {self._name} did not start: {why}")

    async def _watch_exit(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if code > 0:
            await asyncio.wait({self._last_word}, timeout=_LAST_WORD_S)
        why = f": {self._last_word.result().message}" if self._last_word.done() else ""
        self._lost(f"its rank process ended with {_exit_name(code)}{why}")

    async def _watch_silence(self) -> None:
        while not self.died.done():
            silent_s = time.monotonic() - self._heard_s
            if silent_s >= self._settings.silence_s:
                log.error("%s: no heartbeat for %.1f s, killing its rank", self._name, silent_s)
                self.kill()
                return
            await asyncio.sleep(self._settings.silence_s - silent_s)

    def _lost(self, why: str) -> None:
        if self.died.done():
            return
        self.died.set_result(why)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(self._unavailable(why))
        for queue in self._gateways.values():
            queue.put_nowait(None)

    def _unavailable(self, why: str) -> Declined:
        return Declined(Code.UNAVAILABLE, f"worker {self._name}: {why}", by=self._name)

    # -- what the rank says ---------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            data = await self._pair.recv()
            self._heard_s = now = time.monotonic()
            ask_id, value = decode_envelope(data, now)
            match value:
                case Forward(to=to, question=question):
                    self._spawn_task(self._forward(ask_id, to, question))
                case FrameFor():
                    self._deliver(value)
                case LoadReport() | KvEvents():
                    await self._publish(value)
                case WorkerInfo():
                    self._ready.set_result(value)
                case Declined() if ask_id == LAST_WORD:
                    self._last_word.set_result(value)
                case _:
                    asked = self._waiting.get(ask_id)
                    if asked is not None and not asked.done():
                        asked.set_result(value)

    async def _publish(self, event: LoadReport | KvEvents) -> None:
        if isinstance(event, LoadReport):
            self.last_report = event
            if self._reported is not None and not self._reported.done():
                self._reported.set_result(event)
        if self._publisher is not None:
            await self._publisher.publish(event)

    async def _forward(self, ask_id: int, to: WorkerRef, question: Question) -> None:
        timeout_s = self._settings.ask_s * (2 if isinstance(question, Commit) else 1)
        answer = await self._peers.ask(to, question, timeout_s)
        if not self.died.done():
            self._send(ask_id, answer)

    def _send(self, ask_id: int, value: object) -> None:
        self._pair.send(encode_envelope(ask_id, value, time.monotonic()))  # done at once: no high-water mark

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: control failed", self._name, exc_info=error)
            self.kill()  # half a control is worse than none: the owner starts another


def _environment(rank: RankSettings) -> dict[str, str]:
    """The rank's environment: ours, with its own thread counts from the first import on."""
    environment = dict(os.environ)
    if rank.engine.threads is not None:
        threads = str(rank.engine.threads)
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    return environment


def _exit_name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"
