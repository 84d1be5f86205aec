"""The HTTP front end, in the style of OpenAI's API.

    POST /v1/completions, /v1/chat/completions   GET /v1/models, /v1/models/{id}   POST /tokenize
    GET /health (the process answers; no key)    GET /ready (it would serve; else why not)    GET /metrics

Every answer that is not a 2xx has OpenAI's error object, whatever went wrong. With an API key set, everything but
`/health` wants it as a bearer token. The first piece of an answer is awaited before the status goes out, so a
request that fails before its first token has its own status; one that fails later ends its event stream with an error
object and without `[DONE]`. A client that leaves, streaming or not, aborts its requests at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.config import TlsSection
from cluster.gateway import Gateway, Job, Piece
from cluster.http_body import read_json, until_disconnect
from cluster.openai_bodies import ChatShape, Collected, CompletionShape, Shape, error_body, served_by, usage_body
from cluster.openai_types import ChatBody, CompletionBody, TokenizeBody, invalid
from cluster.outcome import Outcome
from cluster.validate import RequestFailed
from engine.errors import InvalidRequest
from engine.types import Token
from tandem.messages import Code
from tandem.status import HTTP_STATUS

log = logging.getLogger(__name__)

B = TypeVar("B", bound=BaseModel)

_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    499: "cancelled",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "content_type"}
_OPEN_PATHS = frozenset({"/health"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """`metrics` renders `/metrics`: (body, content type)."""

    api_key: str | None = None
    max_body_bytes: int = 64 << 20
    metrics: Callable[[], tuple[bytes, str]] = lambda: (b"", "text/plain; version=0.0.4; charset=utf-8")
    wall_clock: Callable[[], float] = time.time


def build_app(gateway: Gateway, settings: HttpSettings) -> ASGIApp:
    """The ASGI application."""
    api = _Api(gateway, settings)
    routes = [
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/metrics", api.metrics),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
    ]
    handlers: Mapping[Any, Any] = {
        HTTPException: lambda request, error: _error(error.status_code, error.detail, headers=error.headers),
        InvalidRequest: lambda request, error: _failed(RequestFailed(Code.INVALID, str(error), error.field)),
        RequestFailed: lambda request, error: _failed(error),
        Exception: lambda request, error: _error(500, "the server failed on this request"),
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return _with_key(app, settings.api_key) if settings.api_key else app


class _Api:
    def __init__(self, gateway: Gateway, settings: HttpSettings) -> None:
        self._gateway = gateway
        self._settings = settings

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        reason = await self._gateway.not_ready()
        return _error(503, reason) if reason else JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._settings.metrics()
        return Response(body, headers={"content-type": content_type})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [await self._model()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self._gateway.settings.model:
            raise RequestFailed(Code.NOT_FOUND, "model: unknown", "model")
        return JSONResponse(await self._model())

    async def _model(self) -> dict[str, Any]:
        limits = await self._gateway.limits()
        return {
            "id": self._gateway.settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "tandem",
            "max_model_len": limits.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeBody)
        prompts = await self._gateway.encode(body.ask())
        tokens = prompts[0] if len(prompts) == 1 else prompts
        return JSONResponse({"count": sum(map(len, prompts)), "tokens": tokens})

    async def completions(self, request: Request) -> Response:
        with self._gateway.refusals():
            body = await self._read(request, CompletionBody)
            ask = body.ask()
        job = await self._gateway.prepare(ask)
        text = self._gateway.text
        prompts = [text.decode(one.token_ids) if body.echo else "" for one in job.requests]
        echo = [prompt for prompt in prompts for _ in range(job.answers_each)]
        return await self._respond(request, body, job, CompletionShape(text, body.logprobs is not None, echo))

    async def chat_completions(self, request: Request) -> Response:
        with self._gateway.refusals():
            body = await self._read(request, ChatBody)
            ask = body.ask()
        job = await self._gateway.prepare(ask)
        return await self._respond(request, body, job, ChatShape(self._gateway.text, bool(body.logprobs)))

    async def _respond(self, request: Request, body: CompletionBody | ChatBody, job: Job, shape: Shape) -> Response:
        created = int(self._settings.wall_clock())
        writer = _Writer(job, shape, self._gateway.settings.model, created, body.wants_usage)
        pieces = self._gateway.answers(job)
        if not body.streams:
            whole = await until_disconnect(request.receive, writer.whole(pieces))
            return Response(status_code=499) if whole is None else JSONResponse(whole, headers=writer.headers())
        events = writer.events(pieces)
        first = await until_disconnect(request.receive, anext(events))
        return Response(status_code=499) if first is None else _EventStream(first, events, writer.headers())

    async def _read(self, request: Request, body: type[B]) -> B:
        try:
            return body.model_validate(await read_json(request, self._settings.max_body_bytes))
        except ValidationError as error:
            raise invalid(error) from None


class _Writer:
    """One job's answer as bodies: whole, or event by event."""

    def __init__(self, job: Job, shape: Shape, model: str, created: int, usage: bool) -> None:
        self._job = job
        self._shape = shape
        self._head = {"id": shape.id_prefix + job.group_id, "created": created, "model": model}
        self._usage = usage
        self._outcomes: dict[int, Outcome] = {}
        """By request, that is by prompt."""
        self._begun: set[int] = set()
        self._prompts: dict[int, tuple[Token, ...]] = {}

    def headers(self) -> dict[str, str]:
        """Of the first request, as far as known."""
        outcome = self._outcomes.get(0)
        known = {"x-request-id": self._job.group_id}
        return known | ({"tandem-prefill": outcome.prefill, "tandem-decode": outcome.decode} if outcome else {})

    async def whole(self, pieces: AsyncGenerator[tuple[int, Piece], None]) -> dict[str, Any]:
        answers = [Collected() for _ in range(len(self._job.requests) * self._job.answers_each)]
        async with aclosing(pieces):
            async for index, piece in pieces:
                answers[index].add(self._noted(index, piece))
        choices = [self._shape.whole(index, answer) for index, answer in enumerate(answers)]
        return {
            **self._head,
            "object": self._shape.object,
            "choices": choices,
            "usage": self._usage_body(),
            "tandem": served_by(self._outcomes[0], self._job.seed) | _scores(answers),
        }

    async def events(self, pieces: AsyncGenerator[tuple[int, Piece], None]) -> AsyncGenerator[bytes, None]:
        """Server-sent events. RequestFailed before the first one is raised, after it an event."""
        sent = False
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    first = index not in self._begun
                    for choice in self._choices(index, self._noted(index, piece), first):
                        yield self._chunk([choice], piece.outcome)
                        sent = True
        except RequestFailed as error:
            if not sent:
                raise
            yield _event(_failed_body(error))
            return
        if self._usage:
            yield _event({**self._head, "object": self._shape.chunk_object, "choices": [], "usage": self._usage_body()})
        yield b"data: [DONE]\n\n"

    def _choices(self, index: int, piece: Piece, first: bool) -> list[dict[str, Any]]:
        both = (self._shape.opening(index) if first else None, self._shape.piece(index, piece))
        return [choice for choice in both if choice is not None]

    def _chunk(self, choices: list[dict[str, Any]], outcome: Outcome | None) -> bytes:
        body: dict[str, Any] = {**self._head, "object": self._shape.chunk_object, "choices": choices}
        if self._usage:
            body["usage"] = None
        if outcome is not None:
            body["tandem"] = served_by(outcome, self._job.seed)
        return _event(body)

    def _noted(self, index: int, piece: Piece) -> Piece:
        """A prompt's log-probabilities come once, and each of its answers begins with them."""
        request, first = index // self._job.answers_each, index not in self._begun
        if piece.outcome is not None:
            self._outcomes[request] = piece.outcome
        self._begun.add(index)
        prompt = self._prompts.setdefault(request, piece.prompt_logprobs)
        return replace(piece, prompt_logprobs=prompt if first else ())

    def _usage_body(self) -> dict[str, Any]:
        return usage_body([self._outcomes[request] for request in sorted(self._outcomes)])


def _scores(answers: Sequence[Collected]) -> dict[str, Any]:
    """Of beam search and `best_of`: what they were chosen by."""
    scores = [answer.score for answer in answers]
    return {} if None in scores else {"scores": scores}


class _EventStream(Response):
    """Sends events until they end or the client leaves, and closes their source in either case."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


# -- errors and keys ---------------------------------------------------------------------------------------------


def _error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    kind = _KINDS.get(status, "invalid_request_error")
    extra = {"retry-after": "1"} if status in (429, 503) else {}
    body = error_body(message, kind, param, code or _CODES.get(status))
    return JSONResponse(body, status_code=status, headers={**extra, **(headers or {})})


def _failed(error: RequestFailed) -> JSONResponse:
    return _error(HTTP_STATUS[error.code], error.message, param=error.param, code=_code(error))


def _failed_body(error: RequestFailed) -> dict[str, Any]:
    status = HTTP_STATUS[error.code]
    return error_body(error.message, _KINDS.get(status, "invalid_request_error"), error.param, _code(error))


def _code(error: RequestFailed) -> str:
    return "model_not_found" if error.code is Code.NOT_FOUND and error.param == "model" else str(error.code)


def _with_key(app: ASGIApp, key: str) -> ASGIApp:
    """Lets a request through with `Authorization: Bearer <key>`, or to an open path."""
    expected = f"Bearer {key}".encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, expected):
                refusal = _error(
                    401, "a valid API key is needed: Authorization: Bearer KEY", headers={"www-authenticate": "Bearer"}
                )
                await refusal(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


# -- serving -----------------------------------------------------------------------------------------------------


class _Uvicorn(uvicorn.Server):
    """Leaves the process's signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """The application on a socket. `start` returns the port, `stop` lets answers in flight end."""

    def __init__(self, app: ASGIApp, host: str, port: int, *, tls: TlsSection | None = None) -> None:
        self._socket = _listen(host, port)
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                ssl_certfile=tls.cert if tls else None,
                ssl_keyfile=tls.key if tls else None,
                ssl_ca_certs=tls.client_ca if tls else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca else ssl.CERT_NONE,
            )
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    async def start(self) -> int:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self.port

    async def stop(self, grace_s: float = 5.0) -> None:
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener
