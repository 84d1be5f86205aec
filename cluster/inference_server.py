"""The gRPC front end: `tandem.v1.Inference`, health and reflection.

A thin translator between protobuf and the gateway's values. Errors end a call with the status of `tandem.status` and
details that name the field or the remedy; what nobody foresaw ends it with INTERNAL and no story. Cancelling a call, or
its deadline, closes the gateway's generator, which aborts the request on every worker.

Messages are parsed here and not by grpc, so that bytes that are no message are the caller's fault
(INVALID_ARGUMENT) and not ours. With an API key set, every method but `grpc.health.v1.Health` wants it as a bearer
token in the `authorization` metadata.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection

from cluster.config import TlsSection
from cluster.gateway import Gateway, Job, Piece
from cluster.outcome import Outcome
from cluster.text import Text
from cluster.validate import Ask, RequestFailed
from engine.errors import InvalidRequest
from engine.types import FinishReason, SamplingParams, Token
from tandem.messages import Code
from tandem.status import GRPC_STATUS
from tandem.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = "tandem.v1.Inference"
_HEALTH = "/grpc.health.v1.Health/"
_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_PLAIN_SAMPLING = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    api_key: str | None = None
    max_message_bytes: int = 64 << 20
    tls: TlsSection | None = None


class InferenceService:
    """The three methods, on raw bytes in and messages out."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def generate(self, data: bytes, context: Context) -> None:
        """Writes the stream itself: a generator would not be closed when the call is cancelled in the middle of a
        write."""
        try:
            with self._gateway.refusals():
                ask = ask_from(_parse(pb.GenerateRequest, data), context.time_remaining())
            job = await self._gateway.prepare(ask)
            await context.send_initial_metadata((("x-request-id", job.group_id),))
            async with aclosing(self._gateway.answer(job, 0)) as pieces:
                async for piece in pieces:
                    await context.write(response(self._gateway.text, job, piece))
        except RequestFailed as error:
            await _abort(context, error)

    async def abort(self, data: bytes, context: Context) -> pb.AbortResponse:
        try:
            request = _parse(pb.AbortRequest, data)
        except InvalidRequest as error:
            await _abort(context, error)
        return pb.AbortResponse(known=self._gateway.abort(request.request_id))

    async def list_models(self, data: bytes, context: Context) -> pb.ListModelsResponse:
        try:
            limits = await self._gateway.limits()
        except RequestFailed as error:
            await _abort(context, error)
        settings = self._gateway.settings
        classes = [
            pb.SlaClass(name=name, ttft_s=sla.ttft_s, itl_s=sla.itl_s, priority=sla.priority, timeout_s=sla.timeout_s)
            for name, sla in sorted(settings.classes.items())
        ]
        model = pb.Model(
            id=settings.model,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            sla_classes=classes,
        )
        return pb.ListModelsResponse(models=[model])


# -- protobuf to values ------------------------------------------------------------------------------------------


def ask_from(request: pb.GenerateRequest, left_s: float | None) -> Ask:
    """The ask in a message; `left_s` is what the call's own deadline leaves. InvalidRequest names the field."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
    timeouts = [given.pop("timeout_s", None), None if left_s is None or math.isinf(left_s) else max(left_s, 1e-3)]
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "one of text, token_ids and chat must be set")
    messages = tuple({"role": message.role, "content": message.content} for message in request.chat.messages)
    prompt = request.text if kind == "text" else tuple(request.token_ids.ids)
    sampling = request.sampling
    return Ask(
        model=request.model,
        prompts=() if kind == "chat" else (prompt,),
        messages=messages if kind == "chat" else None,
        sampling=_sampling(sampling),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        fill_context=kind == "chat",
        seed=sampling.seed if sampling.HasField("seed") else None,
        request_id=request.request_id,
        sla_class=request.sla_class,
        timeout_s=_earlier(timeouts),
        **given,
    )


_BRANCHING = ("n", "best_of", "beam_width", "length_penalty", "early_stopping")
_OPTIONAL = ("priority", "cache_salt", "timeout_s", "ttft_s", "itl_s", *_BRANCHING)


def _earlier(timeouts: Sequence[float | None]) -> float | None:
    """The smallest; one that is no number is kept, so that it is refused by name."""
    given = [timeout for timeout in timeouts if timeout is not None]
    return next((timeout for timeout in given if math.isnan(timeout)), min(given, default=None))


def _sampling(sampling: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        **{name: getattr(sampling, name) for name in _PLAIN_SAMPLING if sampling.HasField(name)},
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        logit_bias=tuple(sampling.logit_bias.items()),
    )


def _parse(message: type[M], data: bytes) -> M:
    try:
        return message.FromString(data)
    except DecodeError:
        raise InvalidRequest("message", f"is no {message.DESCRIPTOR.full_name}") from None


# -- values to protobuf ------------------------------------------------------------------------------------------


def response(text: Text, job: Job, piece: Piece) -> pb.GenerateResponse:
    """One message of the stream; usage and who served it come with the very last."""
    wanted = job.requests[0].sampling.logprobs is not None
    message = pb.GenerateResponse(
        request_id=job.group_id,
        text=piece.text,
        token_ids=[token.token_id for token in piece.tokens],
        logprobs=[_logprobs(text, token) for token in piece.tokens] if wanted else (),
        prompt_logprobs=[_logprobs(text, token) for token in piece.prompt_logprobs],
        index=piece.index,
        score=piece.score,
    )
    if piece.finish is not None:
        message.finish_reason = _FINISH[piece.finish]
    if piece.outcome is not None:
        message.usage.CopyFrom(_usage(piece.outcome))
        message.served_by.CopyFrom(_served_by(piece.outcome, job.seed))
    return message


def _logprobs(text: Text, token: Token) -> pb.TokenLogprobs:
    top = [
        pb.TopLogprob(token_id=token_id, text=text.token_text(token_id), logprob=logprob)
        for token_id, logprob in token.top
    ]
    return pb.TokenLogprobs(
        token_id=token.token_id, text=text.token_text(token.token_id), logprob=token.logprob, top=top
    )


def _usage(outcome: Outcome) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=outcome.prompt_tokens,
        completion_tokens=outcome.completion_tokens,
        cached_tokens=outcome.cached_tokens,
    )


def _served_by(outcome: Outcome, seed: int) -> pb.ServedBy:
    report = outcome.report
    return pb.ServedBy(
        prefill_worker=outcome.prefill,
        decode_worker=outcome.decode,
        transport=report.transport,
        kv_bytes=report.kv_bytes,
        kv_blocks=report.kv_blocks,
        prefill_cached_tokens=report.prefill_cached_tokens,
        fetched_tokens=report.fetched_tokens,
        decode_held_tokens=report.decode_held_tokens,
        computed_tokens=report.computed_tokens,
        queue_s=report.queue_s,
        prefill_s=report.prefill_s,
        transfer_s=report.transfer_s,
        exposed_s=report.exposed_s,
        ttft_s=outcome.ttft_s or 0.0,
        total_s=outcome.e2e_s,
        attempts=outcome.attempts,
        placement=outcome.placement_reason,
        seed=seed,
    )


async def _abort(context: Context, error: RequestFailed | InvalidRequest) -> NoReturn:
    code = error.code if isinstance(error, RequestFailed) else Code.INVALID
    await context.abort(getattr(grpc.StatusCode, GRPC_STATUS[code]), str(error))
    raise AssertionError("abort raises")


# -- serving -----------------------------------------------------------------------------------------------------

Method = Callable[[bytes, Context], Awaitable[Any]]


class InferenceServer:
    """The services on a port. `start` returns the port; `stop` lets calls in flight end within the grace time."""

    def __init__(self, gateway: Gateway, settings: GrpcSettings, host: str, port: int) -> None:
        self._gateway = gateway
        self._health = health_aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[_Guard(settings.api_key)],
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", settings.max_message_bytes),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._server.add_generic_rpc_handlers((_handlers(InferenceService(gateway)),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.port: int = _bind(self._server, address, settings.tls)

    async def start(self) -> int:
        await self._server.start()
        await self.show_health(True)
        return self.port

    async def show_health(self, serving: bool) -> None:
        """What the health service says of `tandem.v1.Inference`; of the process itself it always says SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(SERVICE, status)

    async def stop(self, grace_s: float = 5.0) -> None:
        await self.show_health(False)
        await self._server.stop(grace_s)


def _bind(server: grpc.aio.Server, address: str, tls: TlsSection | None) -> int:
    if tls is None:
        return int(server.add_insecure_port(address))
    pair = (Path(tls.key).read_bytes(), Path(tls.cert).read_bytes())
    client_ca = Path(tls.client_ca).read_bytes() if tls.client_ca else None
    credentials = grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)
    return int(server.add_secure_port(address, credentials))


def _handlers(service: InferenceService) -> Any:
    def unary(method: Method, answer: type[Message]) -> Any:
        return grpc.unary_unary_rpc_method_handler(_foreseen(method), response_serializer=answer.SerializeToString)

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Generate": grpc.unary_stream_rpc_method_handler(
                _foreseen(service.generate), response_serializer=pb.GenerateResponse.SerializeToString
            ),
            "Abort": unary(service.abort, pb.AbortResponse),
            "ListModels": unary(service.list_models, pb.ListModelsResponse),
        },
    )


def _foreseen(method: Method) -> Method:
    """An error that nobody foresaw is INTERNAL, told in the log alone."""

    async def call(data: bytes, context: Context) -> Any:
        try:
            return await method(data, context)
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("a call failed")
            await context.abort(grpc.StatusCode.INTERNAL, "the server failed on this request")

    return call


class _Guard(grpc.aio.ServerInterceptor):
    """Wants the bearer token on every method but health checks."""

    def __init__(self, api_key: str | None) -> None:
        self._expected = f"Bearer {api_key}".encode() if api_key else None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if self._expected is None or handler_call_details.method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        if hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected):
            return await continuation(handler_call_details)
        return await _refuse(continuation, handler_call_details)


async def _refuse(
    continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
    details: grpc.HandlerCallDetails,
) -> grpc.RpcMethodHandler:
    """A handler of the called method's kind that refuses."""

    async def unauthenticated(request: Any, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid API key is needed as bearer token")

    handler: Any = await continuation(details)
    streams = (handler.request_streaming, handler.response_streaming) if handler else (False, False)
    return _REFUSING[streams](unauthenticated)


_REFUSING: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
