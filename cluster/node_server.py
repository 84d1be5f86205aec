"""The Node service of a worker: gRPC in front of its control. Every call carries the cluster's secret.

Thin: a question is translated, given to control, and its answer translated back. A `Submit` whose caller goes away is
aborted, a frame stream whose gateway goes away is reported to control, which ends that gateway's requests.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from cluster.node_client import MAX_MESSAGE_BYTES
from tandem.messages import Abort, Answer, Frame, Question, Submit, WorkerInfo
from tandem.v1 import node_pb2, node_pb2_grpc
from tandem.wire import WireError, from_wire, reply_to_wire, to_wire

SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class Control(Protocol):
    """What the service stands in front of."""

    @property
    def info(self) -> WorkerInfo | None: ...

    async def ask(self, question: Question) -> Answer: ...

    def tell(self, question: Question) -> None:
        """Ask, and let nobody wait for the answer."""
        ...

    def frames(self, gateway_id: str) -> AsyncIterator[Frame]: ...


class NodeServer:
    """`address` is known from the start, calls are served after `start`."""

    def __init__(
        self, control: Control, secret: str, *, host: str = "127.0.0.1", port: int = 0, advertise: str | None = None
    ) -> None:
        self._server = grpc.aio.server(interceptors=(_Gate(secret),), options=SERVER_OPTIONS)
        node_pb2_grpc.add_NodeServicer_to_server(NodeService(control), self._server)
        bound = self._server.add_insecure_port(f"{host}:{port}")
        self.address = f"{advertise or host}:{bound}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float = 0.2) -> None:
        await self._server.stop(grace_s)


class NodeService(node_pb2_grpc.NodeServicer):
    """One method per rpc; all questions take the same road."""

    def __init__(self, control: Control, clock: Callable[[], float] = time.monotonic) -> None:
        self._control = control
        self._clock = clock

    async def Expect(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def Submit(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def AskLease(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def RenewLease(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def Commit(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def DropLease(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def FetchPrefix(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def ProbeLink(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def SendProbe(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def Abort(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def Migrate(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def AskMove(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def Follow(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def ReplayPrefixes(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def SetDraining(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def ResetPrefixCache(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def InjectFault(self, request: Message, context: Any) -> Any:
        return await self._ask(request, context)

    async def Describe(self, request: node_pb2.DescribeRequest, context: Any) -> Any:
        info = self._control.info
        if info is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is still starting")
        return to_wire(info, now=self._clock())

    async def Frames(self, request: node_pb2.FramesRequest, context: Any) -> AsyncIterator[Any]:
        await self._refuse_strangers(context)
        frames = self._control.frames(request.gateway_id)
        await context.send_initial_metadata(())  # from here on no frame of this gateway is missed
        async for frame in frames:
            yield to_wire(frame, now=self._clock())

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _ask(self, request: Message, context: Any) -> Message:
        await self._refuse_strangers(context)
        try:
            question: Question = from_wire(request, now=self._clock())
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        try:
            answer = await self._control.ask(question)
        except asyncio.CancelledError:
            if isinstance(question, Submit):
                self._control.tell(Abort(question.request.request_id))
            raise
        return reply_to_wire(question, answer, now=self._clock())

    async def _refuse_strangers(self, context: Any) -> None:
        """A call that was meant for another incarnation on this address is not ours to answer."""
        info = self._control.info
        if info is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is still starting")
            return
        meant = dict(context.invocation_metadata()).get("x-tandem-incarnation", "")
        if meant and meant != info.ref.incarnation:
            why = f"incarnation {meant} is no more, this is {info.ref.incarnation}"
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)


class _Gate(grpc.aio.ServerInterceptor):
    """No secret, no service."""

    def __init__(self, secret: str) -> None:
        self._wanted = f"Bearer {secret}".encode()

        async def refuse(request: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this cluster's secret is wanted as a bearer token")

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)
        self._refuse_stream = grpc.unary_stream_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        value = given if isinstance(given, bytes) else str(given).encode()
        if hmac.compare_digest(value, self._wanted):
            return await continuation(handler_call_details)
        handler = await continuation(handler_call_details)
        return self._refuse_stream if handler is not None and handler.response_streaming else self._refuse
