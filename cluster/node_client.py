"""The way to workers over gRPC: for the gateway (questions and token frames) and between workers (questions).

A worker that cannot be reached, does not answer in time, or is another incarnation is not an exception but an answer:
`Declined(UNAVAILABLE, by=its name)`. Channels are kept per incarnation. The frame stream of a worker feeds the
gateway's hub; when it breaks, every request that this worker was serving hears so at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import grpc
from google.protobuf.message import Message

from tandem.messages import Answer, Code, Declined, Frame, Question, WorkerInfo, WorkerRef
from tandem.v1 import node_pb2, node_pb2_grpc
from tandem.wire import WireError, from_wire, to_wire

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
OPEN_TIMEOUT_S = 2.0


class Hub(Protocol):
    """Where frames go: the gateway's `FrameHub`."""

    def deliver(self, frame: Frame) -> None: ...

    def lost(self, worker: str, incarnation: str, why: str) -> None: ...


class NodeClient:
    """One event loop. `hub` and `gateway_id` are needed for `open` alone."""

    def __init__(
        self,
        secret: str,
        *,
        hub: Hub | None = None,
        gateway_id: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metadata = (("authorization", f"Bearer {secret}"),)
        self._hub = hub
        self._gateway_id = gateway_id
        self._clock = clock
        self._channels: dict[WorkerRef, grpc.aio.Channel] = {}
        self._streams: dict[WorkerRef, asyncio.Task[None]] = {}
        self._opening: dict[WorkerRef, asyncio.Future[bool]] = {}

    async def ask(self, worker: WorkerRef, question: Question, timeout_s: float) -> Answer:
        """Ask and wait. Never raises for what a worker or the network does."""
        rpc = getattr(self._stub(worker), type(question).__name__)
        try:
            reply: Message = await rpc(
                to_wire(question, now=self._clock()), timeout=timeout_s, metadata=self._metadata_for(worker)
            )
            answer: Answer = from_wire(reply, now=self._clock())
            return answer
        except grpc.aio.AioRpcError as error:
            return _declined(worker, error)
        except WireError as error:
            return Declined(Code.INTERNAL, f"{worker.name} answered what cannot be read: {error}", by=worker.name)

    async def open(self, worker: WorkerRef) -> None:
        """Make sure that frames from this worker flow into the hub: returns when they do, or cannot (then the hub is
        told, and questions will say why)."""
        if worker in self._streams:
            await asyncio.wait({self._opening[worker]}, timeout=OPEN_TIMEOUT_S)
            return
        opened: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._opening[worker] = opened
        self._streams[worker] = asyncio.create_task(self._read_frames(worker, opened))
        await asyncio.wait({opened}, timeout=OPEN_TIMEOUT_S)

    async def describe(self, address: str, timeout_s: float = 5.0) -> WorkerInfo:
        """Who serves at this address. Raises grpc.RpcError when nobody can be asked."""
        nobody = WorkerRef("", "", address)
        try:
            reply = await self._stub(nobody).Describe(
                node_pb2.DescribeRequest(), timeout=timeout_s, metadata=self._metadata
            )
            info: WorkerInfo = from_wire(reply, now=self._clock())
            return info
        finally:
            await self.forget(nobody)

    async def forget(self, worker: WorkerRef) -> None:
        """This incarnation is gone for good: close what is open to it."""
        stream = self._streams.pop(worker, None)
        if stream is not None:
            stream.cancel()
        channel = self._channels.pop(worker, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        for worker in tuple(self._channels):
            await self.forget(worker)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _stub(self, worker: WorkerRef) -> node_pb2_grpc.NodeStub:
        channel = self._channels.get(worker)
        if channel is None:
            channel = self._channels[worker] = grpc.aio.insecure_channel(worker.address, options=CHANNEL_OPTIONS)
        return node_pb2_grpc.NodeStub(channel)

    def _metadata_for(self, worker: WorkerRef) -> tuple[tuple[str, str], ...]:
        """With the incarnation that is meant, so that a successor on the same address says no."""
        return (*self._metadata, ("x-tandem-incarnation", worker.incarnation))

    async def _read_frames(self, worker: WorkerRef, opened: asyncio.Future[bool]) -> None:
        assert self._hub is not None, "a client without a hub opens no streams"
        why = "its frame stream ended"
        try:
            request = node_pb2.FramesRequest(gateway_id=self._gateway_id)
            call = self._stub(worker).Frames(request, metadata=self._metadata_for(worker))
            await call.initial_metadata()
            opened.set_result(True)
            async for message in call:
                self._hub.deliver(from_wire(message, now=self._clock()))
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        except WireError as error:
            why = f"a frame cannot be read: {error}"
        finally:
            self._streams.pop(worker, None)
            if not opened.done():
                opened.set_result(False)
            self._opening.pop(worker, None)
            self._hub.lost(worker.name, worker.incarnation, why)


def _declined(worker: WorkerRef, error: grpc.aio.AioRpcError) -> Declined:
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Declined(Code.INTERNAL, f"{worker.name} does not accept this cluster's secret", by=worker.name)
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return Declined(Code.INVALID, f"{worker.name}: {error.details()}", by=worker.name)
    why = f"{error.code().name}: {error.details()}"
    return Declined(Code.UNAVAILABLE, f"worker {worker.name} cannot be asked ({why})", by=worker.name)
