"""The gateway: one service behind both front ends.

It turns an `Ask` into requests (limits, tokens, seed, deadline, prefix keys), hands each to `Dispatch`, and turns
the deltas that come back into text: `prepare` says no before anything has started, `answer` streams the `Piece`s of one
request, of all its sequences as they come. What a client can be told goes wrong is a `RequestFailed`, raised by either.
The front ends take the first piece before they commit to a status, so an error before the first token has its own
status code.

Stop strings end a sequence here: the text is cut and the workers are told, and the request's other sequences run on.
They are looked for in the text after the first `min_tokens` tokens. Beams and `best_of` are chosen by all their tokens;
stop strings cut the text of those that were chosen.

Limits: `max_streams` sequences at once, then NO_ROOM; while draining UNAVAILABLE, and what runs may finish.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

from cluster.config import SlaClass
from cluster.detokenize import StopMatcher
from cluster.dispatch import Dispatch, Flight, Router
from cluster.outcome import Outcome
from cluster.snapshot import RequestView
from cluster.text import Text
from cluster.validate import (
    Ask,
    Given,
    Messages,
    ModelLimits,
    RequestFailed,
    check_ask,
    pick_class,
    requests_for,
)
from engine.errors import InvalidRequest
from engine.hashing import PrefixHasher
from engine.types import FinishReason, Request, SamplingParams, Token
from tandem.messages import Code, Delta, WorkerInfo

log = logging.getLogger(__name__)

_SHORT_TEXT = 4096
"""Characters that are tokenized at once, on the event loop; longer texts go to a thread."""
_OURS = frozenset({Code.INTERNAL, Code.MISMATCH, Code.STALE})
"""Faults whose story is for the log; the client gets the request's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What the gateway is told at the entrance. `model`: the name that clients use."""

    model: str
    classes: Mapping[str, SlaClass]
    default_class: str = "default"
    max_streams: int = 256
    router_timeout_s: float = 2.0
    facts_s: float = 5.0
    """For how long what the workers say of themselves is taken as known."""


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one answer. `text` and `tokens` need not match one to one: text that may become a stop string waits.

    `index`: which of the request's answers. The last piece of each has a `finish`, the last of all the `outcome`.
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    prompt_logprobs: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    outcome: Outcome | None = None
    index: int = 0
    score: float | None = None
    """Of beam search and `best_of`."""


_News = tuple[int, Piece] | Exception | None


@dataclass(frozen=True, slots=True)
class Job:
    """Requests that are ready to run, one for each prompt. `group_id`: what the client calls it, and Abort names.

    The requests' own ids are never used again, as a client's may be: news of an earlier request of that name, or an end
    told late, would be taken for this one's.
    """

    group_id: str
    requests: tuple[Request, ...]
    views: tuple[RequestView, ...]
    include_stop: bool = False

    @property
    def seed(self) -> int:
        return self.requests[0].sampling.seed

    @property
    def answers_each(self) -> int:
        """Answers to each prompt."""
        return self.requests[0].answers


class Gateway:
    """See the module. One event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        text: Text,
        router: Router,
        dispatch: Dispatch,
        hasher_for: Callable[[WorkerInfo], PrefixHasher],
        *,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = lambda: secrets.token_hex(12),
        new_seed: Callable[[], int] = lambda: secrets.randbits(31),
        on_refused: Callable[[Code], None] = lambda code: None,
    ) -> None:
        self.settings = settings
        self.text = text
        self._router = router
        self._dispatch = dispatch
        self._hasher_for = hasher_for
        self._clock = clock
        self._new_id = new_id
        self._new_seed = new_seed
        self._on_refused = on_refused
        self._running: dict[str, _Running] = {}
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._facts: _Facts | None = None

    # -- asking ----------------------------------------------------------------------------------------------

    async def prepare(self, ask: Ask) -> Job:
        """Everything that can be refused is refused here: RequestFailed, with the field where one is at fault."""
        with self.refusals():
            return await self._prepare(ask)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Counts refusals, and makes an InvalidRequest a RequestFailed. The front ends read their bodies in it."""
        try:
            yield
        except InvalidRequest as error:
            self._on_refused(Code.INVALID)
            raise RequestFailed(Code.INVALID, str(error), error.field) from error
        except RequestFailed as error:
            self._on_refused(error.code)
            raise

    async def _prepare(self, ask: Ask) -> Job:
        arrival_s = self._clock()
        self._check_ask(ask)
        self._check_open(ask.sequences)
        if ask.request_id in self._running:
            raise _is_running()
        facts = await self._known_facts()
        class_name = pick_class(ask.sla_class, self.settings.classes, self.settings.default_class)
        sla = self.settings.classes[class_name]
        prompts = await self._encode(ask, facts.limits)
        unique = self._new_id()
        given = Given(
            request_id=f"{ask.request_id}.{unique}" if ask.request_id else unique,
            seed=self._new_seed() if ask.seed is None else ask.seed,
            arrival_s=arrival_s,
            model=self.settings.model,
            class_name=class_name,
            sla=sla,
        )
        requests = requests_for(ask, prompts, given, facts.limits)
        views = tuple(_view(request, facts.hasher) for request in requests)
        return Job(ask.request_id or unique, requests, views, ask.include_stop)

    async def encode(self, ask: Ask) -> tuple[tuple[int, ...], ...]:
        """Token ids only, for the tokenize route. InvalidRequest names the field."""
        self._check_ask(ask)
        return await self._encode(ask, await self.limits())

    def _check_ask(self, ask: Ask) -> None:
        if ask.model not in ("", self.settings.model):
            raise RequestFailed(Code.NOT_FOUND, f"model: unknown; this server has {self.settings.model}", "model")
        check_ask(ask)

    async def _encode(self, ask: Ask, limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
        length = sum(len(part) for message in ask.messages or () for part in message.values())
        length += sum(len(prompt) for prompt in ask.prompts if isinstance(prompt, str))
        if length <= _SHORT_TEXT:
            return _encode(self.text, ask, limits.max_model_len)
        return await asyncio.to_thread(_encode, self.text, ask, limits.max_model_len)

    # -- answering -------------------------------------------------------------------------------------------

    async def answer(self, job: Job, index: int) -> AsyncGenerator[Piece, None]:
        """The pieces of the job's request `index`. Close the generator (`aclosing`) to abort.

        RequestFailed when the request fails or when too many run; of a request that was aborted by its id the answers
        that ran end with `finish` ABORT.
        """
        request = job.requests[index]
        flight = Flight(request, job.views[index])
        writers = [_Writer(self.text, request.sampling, job.include_stop) for _ in range(request.answers)]
        last = Piece()
        with self.refusals():
            self._check_open(request.sequences)
            self._enter(job, request)
        try:
            async with aclosing(self._dispatch.run(flight)) as deltas:
                async for delta in deltas:
                    writer = writers[delta.index]
                    piece = writer.take(delta)
                    if writer.stopped:
                        self._dispatch.stop(flight, delta.index)
                    piece = replace(piece, finish=flight.finishes.get(delta.index))
                    if flight.over or delta.ends_request:
                        last = piece
                        break
                    yield piece
            for piece in _ended(last, writers, flight):
                yield piece
        finally:
            self._leave(job, request)

    async def answers(self, job: Job) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces of all of the job's answers as they come, each with the index of the client's choice: prompt by
        prompt. Ends at the first failure."""
        if len(job.requests) == 1:
            async with aclosing(self.answer(job, 0)) as pieces:
                async for piece in pieces:
                    yield piece.index, piece
            return
        news: asyncio.Queue[_News] = asyncio.Queue(maxsize=len(job.requests))
        readers = [asyncio.create_task(self._read(job, index, news)) for index in range(len(job.requests))]
        try:
            running = len(readers)
            while running:
                item = await news.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, job: Job, index: int, news: asyncio.Queue[_News]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(self.answer(job, index)) as pieces:
                async for piece in pieces:
                    await news.put((index * job.answers_each + piece.index, piece))
        except Exception as error:  # raised again by whoever reads the news
            end = error
        await news.put(end)

    def abort(self, group_id: str) -> bool:
        """End all requests of a job; False when it is not running."""
        running = self._running.get(group_id)
        aborted = [self._dispatch.abort(request_id) for request_id in (running.request_ids if running else ())]
        return any(aborted)

    def _enter(self, job: Job, request: Request) -> None:
        running = self._running.setdefault(job.group_id, _Running(job))
        if running.job is not job:
            raise _is_running()
        running.request_ids.add(request.request_id)
        self._streams += request.sequences
        self._idle.clear()

    def _leave(self, job: Job, request: Request) -> None:
        running = self._running[job.group_id]
        running.request_ids.discard(request.request_id)
        if not running.request_ids:
            del self._running[job.group_id]
        self._streams -= request.sequences
        if not self._streams:
            self._idle.set()

    # -- state -----------------------------------------------------------------------------------------------

    async def not_ready(self) -> str:
        """Why requests would be refused now; empty when they would not."""
        if self._draining:
            return "draining"
        try:
            return await asyncio.wait_for(self._router.not_ready(), self.settings.router_timeout_s)
        except TimeoutError:
            return "the router does not answer"

    async def limits(self) -> ModelLimits:
        """What can be served. RequestFailed (UNAVAILABLE) without workers."""
        return (await self._known_facts()).limits

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and wait for the running ones; True when all ended within `grace_s`."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            log.warning("still %d answers running after %.1f s of draining", self._streams, grace_s)
        return not self._streams

    def _check_open(self, wanted: int) -> None:
        if self._draining:
            raise RequestFailed(Code.UNAVAILABLE, "the server is draining; ask another one")
        if self._streams + wanted > self.settings.max_streams:
            raise RequestFailed(
                Code.NO_ROOM, f"at most {self.settings.max_streams} answers run at once; ask again a little later"
            )

    async def _known_facts(self) -> _Facts:
        """From the registered workers, asked at most every `facts_s`."""
        now = self._clock()
        if self._facts is None or now > self._facts.until_s:
            try:
                workers = await asyncio.wait_for(self._router.workers(), self.settings.router_timeout_s)
            except TimeoutError:
                raise RequestFailed(Code.UNAVAILABLE, "the router does not answer; try again soon") from None
            if not workers:
                raise RequestFailed(Code.UNAVAILABLE, "no worker is registered; ask again a little later")
            self._facts = _Facts(_limits(workers), self._hasher_for(workers[0]), now + self.settings.facts_s)
        return self._facts


@dataclass(slots=True)
class _Running:
    """A job, and its requests that run."""

    job: Job
    request_ids: set[str] = field(default_factory=set)


def _is_running() -> InvalidRequest:
    return InvalidRequest("request_id", "is that of a running request")


@dataclass(frozen=True, slots=True)
class _Facts:
    limits: ModelLimits
    hasher: PrefixHasher
    until_s: float


def _limits(workers: tuple[WorkerInfo, ...]) -> ModelLimits:
    """The largest decode pool counts: what does not fit there can run nowhere."""
    deciding = [worker for worker in workers if worker.role == "decode"] or workers
    return ModelLimits(
        vocab_size=min(worker.vocab_size for worker in workers),
        max_model_len=min(worker.max_model_len for worker in workers),
        kv_tokens=max(worker.total_blocks * worker.block_size for worker in deciding),
    )


def _encode(text: Text, ask: Ask, most: int) -> tuple[tuple[int, ...], ...]:
    """The ids of every prompt; InvalidRequest for a text that is far above `most` tokens, before it is tokenized."""
    if ask.messages is not None:
        _check_length("messages", text, _said(ask.messages), most)
        return (text.encode_chat(ask.messages),)
    for prompt in ask.prompts:
        if isinstance(prompt, str):
            _check_length("prompt", text, prompt, most)
    return tuple(text.encode(prompt) if isinstance(prompt, str) else prompt for prompt in ask.prompts)


def _said(messages: Messages) -> str:
    return "\n".join(part for message in messages for part in message.values())


def _check_length(field: str, text: Text, prompt: str, most: int) -> None:
    if text.exceeds(prompt, most):
        raise InvalidRequest(field, f"more prompt tokens than fit the model's context of {most} tokens")


def _view(request: Request, hasher: PrefixHasher) -> RequestView:
    """What the router sees. Prompt log-probabilities need every position computed, so no prefix counts for them."""
    cacheable = request.sampling.prompt_logprobs is None
    return RequestView.of(request, hasher.chain(request.token_ids, request.cache_salt) if cacheable else ())


class _Writer:
    """Deltas of one sequence to pieces of text. `stopped`: a stop string was met, and nothing may follow."""

    def __init__(self, text: Text, sampling: SamplingParams, include_stop: bool) -> None:
        self._sampling = sampling
        self._eos = text.eos_id
        self._detokenizer = text.detokenizer()
        self._matcher = StopMatcher(sampling.stop, include=include_stop)
        self._tokens = 0
        self.stopped = False

    def take(self, delta: Delta) -> Piece:
        written: list[str] = []
        count = 0
        for token in delta.tokens:
            count += 1
            silent = delta.finish is FinishReason.STOP and count == len(delta.tokens) and self._ends(token)
            written.append("" if silent else self._write(self._detokenizer.push((token.token_id,)), 1))
            if self.stopped:
                break
        if delta.finish is not None and not self.stopped:
            written.append(self.rest())
        told = "".join(written)
        return Piece(told, delta.tokens[:count], delta.prompt_logprobs, index=delta.index, score=delta.score)

    def rest(self) -> str:
        """What was kept back, once no more tokens come."""
        return self._write(self._detokenizer.flush(), 0) + ("" if self.stopped else self._matcher.flush())

    def _write(self, text: str, tokens: int) -> str:
        self._tokens += tokens
        if self._tokens <= self._sampling.min_tokens:
            return text
        matched = self._matcher.push(text)
        self.stopped = matched.stop is not None
        return matched.text

    def _ends(self, token: Token) -> bool:
        """Whether this token is why the engine stopped; such a token is no text."""
        return token.token_id == self._eos or token.token_id in self._sampling.stop_token_ids


def _ended(last: Piece, writers: list[_Writer], flight: Flight) -> tuple[Piece, ...]:
    """The last pieces of a request's answers, or why there are none."""
    outcome = flight.outcome
    assert outcome is not None
    if outcome.code is None:
        return (replace(last, outcome=outcome),)
    if outcome.code is Code.ABORTED:
        running = [index for index in range(len(writers)) if index not in flight.finishes] or [last.index]
        cut = [last if last.index == index else Piece(index=index) for index in running]
        cut = [replace(one, text=one.text + writers[one.index].rest(), finish=FinishReason.ABORT) for one in cut]
        return (*cut[:-1], replace(cut[-1], outcome=outcome))
    if outcome.code in _OURS:
        log.error("%s failed: %s: %s", outcome.request_id, outcome.code, outcome.message)
        raise RequestFailed(outcome.code, f"the server failed on request {outcome.request_id}")
    raise RequestFailed(outcome.code, outcome.message)
