"""The client of a running cluster, over gRPC: `Client` for threads, `AsyncClient` for asyncio.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        for piece in client.chat("Hello", stream=True):
            print(piece.text, end="")

A prompt is a text, token ids, or messages. Everything else is optional and has the server's defaults; see
`Options`. Leaving a stream early (`close`, or the end of a `with`) aborts the request. Errors are those of
`tandem.errors`, by what the caller can do about them.

Both clients are thin: what a call says and what an answer means is in the functions below, shared by both.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack, overload

import grpc
import grpc.aio

from tandem.errors import InvalidRequestError, RequestError, TlsError, UnavailableError, error_for
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as rpc

__all__ = ["Answer", "AsyncClient", "Client", "Logprob", "Model", "Options", "Piece", "Prompt", "ServedBy", "Usage"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or messages with `role` and `content`."""
Chat = str | Sequence[Mapping[str, str]]

_OWN_GRACE_S = 5.0
"""How much later than the server's deadline ours comes, so that the server's message arrives."""


class Options(TypedDict, total=False):
    """What may be asked for besides the prompt; `proto/tandem/v1/inference.proto` says what each means."""

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    logprobs: int
    prompt_logprobs: int
    sla_class: str
    priority: int
    cache_salt: str
    timeout_s: float
    ttft_s: float
    itl_s: float
    request_id: str
    n: int
    best_of: int
    beam_width: int
    length_penalty: float
    early_stopping: str


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token with its log-probability (None: the first of a prompt) and the best candidates, best first."""

    token_id: int
    text: str
    logprob: float | None
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedBy:
    """Which workers did the work and how long each part took; durations in seconds."""

    prefill_worker: str = ""
    decode_worker: str = ""
    transport: str = ""
    kv_bytes: int = 0
    kv_blocks: int = 0
    prefill_cached_tokens: int = 0
    decode_held_tokens: int = 0
    computed_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    attempts: int = 0
    placement: str = ""
    seed: int = 0
    fetched_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """News of an answer. The last piece of each of the `n` answers has a `finish_reason` ("stop", "length", "abort"),
    the very last `usage` and `served_by`. `index` says which answer; after beam search and `best_of` its rank, and
    `score` what it was chosen by."""

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    finish_reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    served_by: ServedBy = field(default_factory=ServedBy)
    index: int = 0
    score: float | None = None
    choices: tuple[Piece, ...] = ()
    """Of a whole answer: all `n` of them, itself the first."""


Answer = Piece
"""A whole answer is a piece that says everything."""
Pieces = Generator[Piece, None, None]
AsyncPieces = AsyncGenerator[Piece, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A served model; `sla_classes` by name."""

    id: str
    max_model_len: int
    vocab_size: int
    sla_classes: Mapping[str, Mapping[str, float]]


class Client:
    """Blocking; may be shared by threads.

    `target` is host:port. `api_key` goes along as a bearer token. `tls_ca`: a PEM file of the authority that signed
    the server's certificate; without it the connection is plain. `tls_cert` and `tls_key`: PEM files of the
    certificate to show to a server that wants to see one.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
    ) -> None:
        credentials = _credentials(tls_ca, tls_cert, tls_key)
        self._channel = (
            grpc.secure_channel(target, credentials, options=_CHANNEL)
            if credentials
            else grpc.insecure_channel(target, options=_CHANNEL)
        )
        self._stub: Any = rpc.InferenceStub(self._channel)
        self._metadata = _metadata(api_key)

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[Options]) -> Answer: ...

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[Options]) -> Pieces: ...

    def generate(self, prompt: Prompt, *, stream: bool = False, **options: Unpack[Options]) -> Answer | Pieces:
        """The answer, or with `stream` its pieces as they come. RequestError as in `tandem.errors`. Of `n` answers the
        first, with all in its `choices`."""
        pieces = self._pieces(_request(prompt, options), options.get("timeout_s"))
        return pieces if stream else _joined(list(pieces))

    @overload
    def chat(self, messages: Chat, *, stream: Literal[False] = False, **options: Unpack[Options]) -> Answer: ...

    @overload
    def chat(self, messages: Chat, *, stream: Literal[True], **options: Unpack[Options]) -> Pieces: ...

    def chat(self, messages: Chat, *, stream: bool = False, **options: Unpack[Options]) -> Answer | Pieces:
        """`generate` with the model's chat template; a text is the one message of a user."""
        prompt = _conversation(messages)
        return self.generate(prompt, stream=True, **options) if stream else self.generate(prompt, **options)

    def abort(self, request_id: str) -> bool:
        """End a request from elsewhere; False when it is not running."""
        return bool(self._ask(self._stub.Abort, pb.AbortRequest(request_id=request_id)).known)

    def models(self) -> tuple[Model, ...]:
        """The models that the cluster serves."""
        return _models(self._ask(self._stub.ListModels, pb.ListModelsRequest()))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _pieces(self, request: pb.GenerateRequest, timeout_s: float | None) -> Pieces:
        call = self._stub.Generate(request, timeout=_own_timeout_s(timeout_s), metadata=self._metadata)
        try:
            for response in call:
                yield _piece(response)
        except grpc.RpcError as error:
            raise _error(error, request.request_id) from None
        finally:
            call.cancel()

    def _ask(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=_ASK_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error(error, "") from None


class AsyncClient:
    """The same for asyncio: answers are awaited, pieces iterated with `async for`."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
    ) -> None:
        credentials = _credentials(tls_ca, tls_cert, tls_key)
        self._channel = (
            grpc.aio.secure_channel(target, credentials, options=_CHANNEL)
            if credentials
            else grpc.aio.insecure_channel(target, options=_CHANNEL)
        )
        self._stub: Any = rpc.InferenceStub(self._channel)
        self._metadata = _metadata(api_key)

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[Options]
    ) -> Awaitable[Answer]: ...

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[Options]) -> AsyncPieces: ...

    def generate(
        self, prompt: Prompt, *, stream: bool = False, **options: Unpack[Options]
    ) -> Awaitable[Answer] | AsyncPieces:
        """The answer, or with `stream` its pieces as they come. RequestError as in `tandem.errors`."""
        pieces = self._pieces(_request(prompt, options), options.get("timeout_s"))
        return pieces if stream else self._whole(pieces)

    @overload
    def chat(
        self, messages: Chat, *, stream: Literal[False] = False, **options: Unpack[Options]
    ) -> Awaitable[Answer]: ...

    @overload
    def chat(self, messages: Chat, *, stream: Literal[True], **options: Unpack[Options]) -> AsyncPieces: ...

    def chat(
        self, messages: Chat, *, stream: bool = False, **options: Unpack[Options]
    ) -> Awaitable[Answer] | AsyncPieces:
        """`generate` with the model's chat template; a text is the one message of a user."""
        prompt = _conversation(messages)
        return self.generate(prompt, stream=True, **options) if stream else self.generate(prompt, **options)

    async def _whole(self, pieces: AsyncPieces) -> Answer:
        async with aclosing(pieces):
            return _joined([piece async for piece in pieces])

    async def _pieces(self, request: pb.GenerateRequest, timeout_s: float | None) -> AsyncPieces:
        call = self._stub.Generate(request, timeout=_own_timeout_s(timeout_s), metadata=self._metadata)
        try:
            async for response in call:
                yield _piece(response)
        except grpc.RpcError as error:
            raise _error(error, request.request_id) from None
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        """End a request from elsewhere; False when it is not running."""
        return bool((await self._ask(self._stub.Abort, pb.AbortRequest(request_id=request_id))).known)

    async def models(self) -> tuple[Model, ...]:
        """The models that the cluster serves."""
        return _models(await self._ask(self._stub.ListModels, pb.ListModelsRequest()))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _ask(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=_ASK_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error(error, "") from None


# -- what a call says --------------------------------------------------------------------------------------------

_ASK_TIMEOUT_S = 10.0
_CHANNEL = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
"""The server sets the limits."""
_SAMPLING = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def _request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    sampling = {name: given.pop(name) for name in tuple(given) if name in _SAMPLING}
    try:
        return pb.GenerateRequest(sampling=pb.SamplingParams(**sampling), **_prompt(prompt), **given)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"this cannot be sent: {error}") from None


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    items: Sequence[Any] = prompt
    if items and isinstance(items[0], Mapping):
        return {"chat": pb.Chat(messages=[pb.ChatMessage(**message) for message in items])}
    return {"token_ids": pb.TokenIds(ids=items)}


def _conversation(messages: Chat) -> Sequence[Mapping[str, str]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _credentials(tls_ca: str | None, tls_cert: str | None, tls_key: str | None) -> Any:
    if tls_ca is None:
        if tls_cert or tls_key:
            raise ValueError("tls_cert and tls_key need tls_ca, the authority that signed the server's certificate")
        return None
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("tls_cert and tls_key go together")
    _check_pem(tls_ca)
    ca, key, cert = (Path(path).read_bytes() if path else None for path in (tls_ca, tls_key, tls_cert))
    return grpc.ssl_channel_credentials(ca, key, cert)


def _check_pem(path: str) -> None:
    """gRPC would say no more than that a handshaker cannot be made."""
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        raise ValueError(f"tls_ca: {path} holds no certificate in PEM form") from error


def _own_timeout_s(timeout_s: float | None) -> float | None:
    return timeout_s + _OWN_GRACE_S if timeout_s is not None and timeout_s > 0 else None


# -- what an answer means ----------------------------------------------------------------------------------------


def _piece(response: pb.GenerateResponse) -> Piece:
    ended = response.finish_reason != pb.FINISH_REASON_UNSPECIFIED
    return Piece(
        request_id=response.request_id,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(map(_logprob, response.logprobs)),
        prompt_logprobs=tuple(map(_logprob, response.prompt_logprobs)),
        finish_reason=pb.FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
        if ended
        else None,
        usage=Usage(**_fields(response.usage)),
        served_by=ServedBy(**_fields(response.served_by)),
        index=response.index,
        score=response.score if response.HasField("score") else None,
    )


def _logprob(logprob: Any) -> Logprob:
    return Logprob(
        logprob.token_id,
        logprob.text,
        logprob.logprob if logprob.HasField("logprob") else None,
        tuple(Logprob(top.token_id, top.text, top.logprob) for top in logprob.top),
    )


def _fields(message: Any) -> dict[str, Any]:
    return {descriptor.name: value for descriptor, value in message.ListFields()}


def _joined(pieces: Sequence[Piece]) -> Answer:
    answers = [_whole([piece for piece in pieces if piece.index == index]) for index in range(_answers(pieces))]
    if not answers or any(answer.finish_reason is None for answer in answers):
        raise UnavailableError("the stream broke off before its end")
    told = pieces[-1]
    choices = tuple(replace(answer, usage=told.usage, served_by=told.served_by) for answer in answers)
    return replace(choices[0], choices=choices)


def _answers(pieces: Sequence[Piece]) -> int:
    return 1 + max((piece.index for piece in pieces), default=-1)


def _whole(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one answer as one."""
    last = pieces[-1] if pieces else Piece(request_id="")
    return replace(
        last,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        prompt_logprobs=tuple(logprob for piece in pieces for logprob in piece.prompt_logprobs),
    )


def _models(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(
        Model(
            id=model.id,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            sla_classes={sla.name: {k: v for k, v in _fields(sla).items() if k != "name"} for sla in model.sla_classes},
        )
        for model in response.models
    )


def _error(error: grpc.RpcError, request_id: str) -> RequestError:
    call: Any = error  # grpc's errors are also the calls that failed
    said = call.details() or ""
    remedy = next((remedy for sign, remedy in _TLS_REMEDIES.items() if sign in said), None)
    if remedy is not None and call.code() is grpc.StatusCode.UNAVAILABLE:
        return TlsError(f"{remedy} ({said})", request_id=request_id)
    if _HUNG_UP in said:
        said += "; if the server wants TLS, name tls_ca, and tls_cert and tls_key if it wants to see a certificate"
    return error_for(call.code().name, said, request_id=request_id)


_TLS_REMEDIES = {
    "CERTIFICATE_VERIFY_FAILED": "tls_ca did not sign the server's certificate: name the PEM file of who did",
    "Hostname Verification Check failed": "the server's certificate is for other names: connect by one that it names",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS: leave tls_ca out",
}
"""By what gRPC says of a failed connection."""
_HUNG_UP = "all addresses; last error: UNAVAILABLE"
"""So does a server that goes away just then."""
