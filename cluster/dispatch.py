"""The story of one request, from its placement to its end.

    place ─▶ Expect (decode) ─▶ Submit (prefill) ─┐
      ▲                             │             ├─▶ one TokenStream ─▶ client
      │                             └─ answer ────┘
      └──── declined or lost: place again, without the worker at fault

1. The router names a pair, or decode alone (local prefill), or refuses.
2. Decode is told to expect the request; from then on its frames feed the request's stream. Prefill is told to compute
   it and answers when it is through. Its answer joins the same stream: a request that ended with its first token ends
   there, a refusal ends the stream with an error. So do a lost worker, the deadline and an abort: whatever
   happens to a request is an item of its stream, and `run` is one loop over it. A request may have several sequences:
   they come in one stream, told apart by their index, and it ends with the last of them.
3. UNAVAILABLE and STALE are tried elsewhere a few times, NO_ROOM until the deadline, with back-off once nobody else is
   left; then those that did not answer are asked again, too, for a moment's silence is no death. What one worker says
   of the other (a failed transfer) is about their link: the other is passed over for a while, not accused. A request
   that has tokens already takes them along: another decode worker computes prompt and answer so far and goes on, and
   since everything follows from the tokens, the text is the same. When none is alive it waits a while for one to be
   started again. Several sequences cannot do so; there an error after the first token is an error, never a 200 with
   other text.
4. A running request may move to another decode worker. Its old one's last delta says so; the new one is asked for the
   rest (`Follow`), and is from then on the one to abort, to suspect and to name in the outcome.
5. In the `finally`, exactly one of finished, aborted, failed becomes the `Outcome`; workers that still hold the
   request are told to drop it, and the router hears that the reservation is over. A decode worker that had no room
   keeps the request's place until it comes again (`Abort.again`), is served elsewhere, or is over: it is told of each.
   If we die, leases, claims and deadlines on the workers end by themselves.

Each attempt has its own id (`id`, then `id~1`, …), so that news of an old attempt cannot be taken for the new one's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cluster.outcome import Outcome
from cluster.snapshot import Placement, Refusal, RequestView
from cluster.streams import FrameHub, TokenStream
from engine.types import FinishReason, Request, Token
from tandem.messages import (
    Abort,
    Answer,
    Code,
    Declined,
    Delta,
    Expect,
    Expected,
    FinishedEarly,
    Follow,
    Followed,
    HandedOver,
    HandoffReport,
    Question,
    Submit,
    WorkerInfo,
    WorkerRef,
)

__all__ = ["Dispatch", "Flight", "Limits", "Outcome", "Router", "Workers"]

log = logging.getLogger(__name__)


class Workers(Protocol):
    """The way to the workers: within this process, or over gRPC."""

    async def ask(self, worker: WorkerRef, question: Question, timeout_s: float) -> Answer:
        """Ask and wait for the answer. A lost, dead or silent worker answers `Declined(UNAVAILABLE, by=name)`."""
        ...

    async def open(self, worker: WorkerRef) -> None:
        """Make sure that frames from this worker flow into the gateway's `FrameHub`. Cheap when they do already."""
        ...


class Router(Protocol):
    """The way to the router."""

    async def place(self, request: RequestView, exclude: frozenset[str]) -> Placement | Refusal: ...

    async def finished(self, request_id: str, outcome: Outcome) -> None:
        """The attempt `request_id` is over: what was reserved for it is free."""
        ...

    async def suspect(self, worker: WorkerRef, why: str) -> None:
        """A worker did not answer as a live one would."""
        ...

    async def workers(self) -> tuple[WorkerInfo, ...]: ...

    async def not_ready(self) -> str:
        """Why any request would be refused now; empty when it would not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of dispatch, in seconds where so named."""

    control_timeout_s: float = 5.0
    """For the answers to Expect and Abort."""
    router_timeout_s: float = 10.0
    """For the router's answer; a router that hangs must not hold requests until their deadline."""
    report_timeout_s: float = 1.0
    """How long a finished request waits for prefill's report."""
    attempts: int = 4
    """For workers that are gone; a full pool is asked until the deadline."""
    resume_s: float = 30.0
    """How long after its latest token an answer waits for a decode worker to go on at, when none is alive."""
    backoff_s: float = 0.02
    max_backoff_s: float = 1.0


RETRYABLE = frozenset({Code.UNAVAILABLE, Code.NO_ROOM, Code.STALE})
_CODE_OF_FINISH = {
    FinishReason.DEADLINE: Code.DEADLINE,
    FinishReason.ABORT: Code.ABORTED,
    FinishReason.ERROR: Code.INTERNAL,
}


@dataclass(slots=True)
class Attempt:
    """One placement of a request: its stream, and what has been asked for it."""

    request_id: str
    placement: Placement
    stream: TokenStream
    deadline: asyncio.TimerHandle
    submit: asyncio.Task[Answer] | None = None
    expected: bool = False
    ended: set[int] = field(default_factory=set)
    """The sequences that ended, as decode has told."""
    decode_ended: bool = False
    moves: int = 0
    """How often it went on at another decode worker, which is then the placement's."""

    def at_fault(self, error: Declined) -> WorkerRef:
        """The worker of the pair that the error names; decode when it names none."""
        prefill = self.placement.prefill
        return prefill if prefill is not None and prefill.name == error.by else self.placement.decode

    def hearsay(self, error: Declined) -> bool:
        """Whether one worker told of the other: their link failed, which says nothing of the other's health."""
        answer = _result(self.submit) if self.submit is not None else None
        told_by_prefill = isinstance(answer, Declined) and replace(answer, by=error.by) == error
        accused_prefill = self.at_fault(error) is self.placement.prefill
        return told_by_prefill != accused_prefill

    def still_holding(self) -> tuple[WorkerRef, ...]:
        """The workers that may still hold something for this attempt and have to be told."""
        prefill = self.placement.prefill
        decode = () if self.decode_ended or not self.expected else (self.placement.decode,)
        waiting = prefill is not None and self.submit is not None and not self.submit.done()
        return (*decode, prefill) if waiting and prefill is not None else decode


@dataclass(slots=True)
class Flight:
    """What is known of one request so far. The gateway makes it, `Dispatch.run` fills it in; `outcome` is its end.

    `request.arrival_s` and `request.deadline_s` are on the dispatch's clock; there is always a deadline.
    """

    request: Request
    view: RequestView
    attempts: int = 0
    attempt: Attempt | None = None
    gone: frozenset[str] = frozenset()
    passed_over: frozenset[str] = frozenset()
    """Workers without room, or whose link to their peer failed: asked again when nobody else is left."""
    declined: Declined | None = None
    """The last attempt's."""
    faults: int = 0
    """Attempts that failed for another reason than want of room."""
    rests: int = 0
    """How often it waited for room: each time twice as long, or a full pool would be asked without a pause."""
    resting: asyncio.Future[None] | None = None
    """The latest such wait."""
    claims: dict[WorkerRef, str] = field(default_factory=dict)
    """The decode workers that keep a place for it, and the attempt that they know it by."""
    placed_s: float | None = None
    first_s: float | None = None
    last_s: dict[int, float] = field(default_factory=dict)
    """Each sequence's latest news."""
    itl_s: list[float] = field(default_factory=list)
    tokens: int = 0
    """Of all sequences."""
    generated: list[int] = field(default_factory=list)
    """The tokens of a request with one sequence: what it goes on behind when its worker is lost."""
    cached_tokens: int = 0
    report: HandoffReport = field(default_factory=HandoffReport)
    early: bool = False
    """Prefill ended it with its first token; decode was never started."""
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    """Of each sequence that has ended as it should."""
    failure: Declined | None = None
    outcome: Outcome | None = None

    @property
    def over(self) -> bool:
        """Whether all of its sequences have ended as they should."""
        return len(self.finishes) == self.request.answers

    @property
    def may_go_on(self) -> bool:
        """Whether another decode worker can take it up where it is."""
        return self.request.branching is None or not self.tokens

    @property
    def before(self) -> str:
        """What the last attempt ended with, to be added to why there is none any more."""
        return f" (before: {self.declined.message})" if self.declined else ""

    def stopped(self, index: int) -> None:
        """The gateway met a stop string. When that was the last sequence, closing the stream is an end, no abort."""
        self.finishes[index] = FinishReason.STOP
        if self.over:
            self.failure = None

    def saw(self, delta: Delta, now: float) -> None:
        if not self.generated:  # where it goes on, answer and prompt may be cached
            self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.tokens:  # who declined before may be well by the time that this worker is lost
            self.gone = self.passed_over = frozenset()
        if self.request.branching is None:
            self.generated += [token.token_id for token in delta.tokens]
        self._count(delta.index, len(delta.tokens), now)
        if delta.finish in _CODE_OF_FINISH:
            self.failure = Declined(_CODE_OF_FINISH[delta.finish], f"the request ended with {delta.finish}")
        elif delta.finish is not None:
            self.finishes[delta.index] = delta.finish

    def _count(self, index: int, tokens: int, now: float) -> None:
        if not tokens:
            return
        self.first_s = now if self.first_s is None else self.first_s
        self.tokens += tokens
        since_s = self.last_s.get(index)
        self.last_s[index] = now
        branching = self.request.branching
        if branching is not None and branching.withheld:
            return  # told all at once, at the end
        gaps = tokens - 1 if since_s is None else tokens
        self.itl_s.extend([(now - (now if since_s is None else since_s)) / max(1, gaps)] * gaps)

    def ended(self, now: float) -> Outcome:
        """The outcome as of `now`. Neither finished nor failed means that the client went away."""
        failure = self.failure
        if failure is None and not self.over:
            failure = Declined(Code.ABORTED, "the client went away")
        start = self.request.arrival_s
        placement = self.attempt.placement if self.attempt else None
        remote = placement is not None and placement.prefill is not None
        return Outcome(
            request_id=self.request.request_id,
            sla_class=self.request.sla_class,
            code=failure.code if failure else None,
            message=failure.message if failure else "",
            finish=None if failure else self.finishes[0],
            prompt_tokens=len(self.request.token_ids),
            completion_tokens=self.tokens,
            cached_tokens=self.report.prefill_cached_tokens if remote else self.cached_tokens,
            prefill=placement.prefill.name if placement and placement.prefill else "",
            decode=placement.decode.name if placement and not self.early else "",
            moves=self.attempt.moves if self.attempt else 0,
            placement_reason=placement.reason if placement else "",
            placement_detail=placement.detail if placement else "",
            fetch=_fetch_decision(placement),
            attempts=self.attempts,
            placed_s=None if self.placed_s is None else self.placed_s - start,
            ttft_s=None if self.first_s is None else self.first_s - start,
            itl_s=tuple(self.itl_s),
            e2e_s=now - start,
            report=self.report,
        )


class Dispatch:
    """Carries requests of one gateway to the workers and their tokens back. One event loop."""

    def __init__(
        self,
        router: Router,
        workers: Workers,
        hub: FrameHub,
        gateway_id: str,
        *,
        limits: Limits = Limits(),
        on_received: Callable[[str], None] = lambda sla_class: None,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        seed: int = 0,
    ) -> None:
        self._router = router
        self._workers = workers
        self._hub = hub
        self._gateway_id = gateway_id
        self._limits = limits
        self._on_received = on_received
        self._on_outcome = on_outcome
        self._clock = clock
        self._sleep = sleep
        self._random = random.Random(seed)
        self._flights: dict[str, Flight] = {}
        self._goodbyes: set[asyncio.Task[None]] = set()

    async def run(self, flight: Flight) -> AsyncGenerator[Delta, None]:
        """Yield the request's deltas. When it is over, for whatever reason, `flight.outcome` tells how it went.

        Closing the generator (`contextlib.aclosing`) aborts the request. Failures are outcomes, not exceptions.
        """
        self._flights[flight.request.request_id] = flight
        self._on_received(flight.request.sla_class)
        try:
            while flight.failure is None and await self._start(flight):
                assert flight.attempt is not None
                async for delta in flight.attempt.stream:
                    if delta.error is not None:
                        await self._declined(flight, flight.attempt, delta.error)
                        break
                    if delta.moved is not None:
                        self._moved(flight.attempt, delta.moved)
                        continue
                    self._waive(flight)
                    delta = await self._with_report(flight, flight.attempt, delta)
                    flight.saw(delta, self._clock())
                    yield delta
                else:
                    return
        except Exception:
            flight.failure = Declined(Code.INTERNAL, "the gateway failed on this request")
            raise
        finally:
            del self._flights[flight.request.request_id]
            flight.outcome = flight.ended(self._clock())
            if flight.attempt is not None:
                self._leave(flight.attempt, flight.outcome)
            self._waive(flight)
            self._on_outcome(flight.outcome)

    def abort(self, request_id: str) -> bool:
        """End a request by its id, in whatever state; False: not one of ours (any more)."""
        flight = self._flights.get(request_id)
        if flight is None:
            return False
        flight.failure = Declined(Code.ABORTED, "the request was aborted")
        if flight.attempt is not None:
            flight.attempt.stream.end(flight.failure)
        if flight.resting is not None:
            flight.resting.cancel()
        return True

    def stop(self, flight: Flight, index: int) -> None:
        """A stop string ended this sequence: its worker is told, the request's others run on. For the last one that is
        left to whoever closes the stream."""
        told = index in flight.finishes
        flight.stopped(index)
        attempt = flight.attempt
        if flight.over or told or attempt is None:
            return
        attempt.stream.skip(index)
        abort = Abort(attempt.request_id, FinishReason.ABORT, index)
        self._later(self._tell(attempt.request_id, (attempt.placement.decode,), abort))

    async def drained(self) -> None:
        """Wait until every worker and the router have been told of every request that ended."""
        while self._goodbyes:
            await asyncio.wait(set(self._goodbyes))

    # -- one attempt: place, expect, submit ------------------------------------------------------------------

    async def _start(self, flight: Flight) -> bool:
        """Place the request and set both nodes to work; False: refused, and the flight says why."""
        placement = await self._place(flight)
        if placement is None:
            return False
        attempt = flight.attempt = self._open(flight, placement)
        if flight.failure is not None:  # aborted while the router chose
            return False
        request = _request_of(flight, attempt.request_id)
        await self._workers.open(placement.decode)
        attempt.expected = True
        local = placement.prefill is None
        fetch, generated = placement.fetch if local else None, tuple(flight.generated)
        expect = Expect(request, self._gateway_id, placement.prefill, fetch, generated)
        answer = await self._workers.ask(placement.decode, expect, self._limits.control_timeout_s)
        if not isinstance(answer, Expected):
            attempt.stream.end(_refusal(answer, placement.decode))
        elif placement.prefill is not None:
            submit = Submit(request, placement.decode, placement.fetch)
            asked = self._workers.ask(placement.prefill, submit, self._left_s(flight))
            attempt.submit = asyncio.create_task(_answer(asked))
            attempt.submit.add_done_callback(lambda task: _prefill_answered(attempt, task))
        return True

    async def _place(self, flight: Flight) -> Placement | None:
        """Ask the router, and again after a rest where waiting may help."""
        attempt_id = flight.request.request_id + (f"~{flight.attempts}" if flight.attempts else "")
        view = replace(flight.view, request_id=attempt_id)
        if flight.generated:
            view = view.resume(len(flight.generated))
        while flight.failure is None and self._left_s(flight) > 0:
            try:
                async with asyncio.timeout(min(self._left_s(flight), self._limits.router_timeout_s)):
                    placed = await self._router.place(view, flight.gone | flight.passed_over)
            except TimeoutError:
                if self._left_s(flight) > 0:
                    flight.failure = Declined(Code.UNAVAILABLE, "the router does not answer; try again soon")
                break
            if isinstance(placed, Placement):
                flight.placed_s = flight.placed_s if flight.tokens else self._clock()
                return placed
            if not self._readmits(flight, placed):
                flight.failure = Declined(placed.code, placed.reason + flight.before)
                return None
            await self._rest(flight)
        late = Declined(Code.DEADLINE, "the deadline passed before a worker took the request" + flight.before)
        flight.failure = flight.failure or late
        return None

    def _readmits(self, flight: Flight, refusal: Refusal) -> bool:
        """After a refusal, exclude no longer who had no room, and then who did not answer. True where asking again
        after a rest may help: then, or when an answer has stopped in its middle, whose worker may come back."""
        if flight.passed_over:
            flight.passed_over = frozenset()
            return True
        if refusal.code is not Code.UNAVAILABLE:
            return False
        if flight.gone:
            flight.gone = frozenset()
            return True
        return bool(flight.generated) and self._clock() - flight.last_s[0] < self._limits.resume_s

    async def _rest(self, flight: Flight) -> None:
        """Longer each time; an abort ends it."""
        backoff_s = min(self._limits.backoff_s * 2.0 ** min(flight.rests, 16), self._limits.max_backoff_s)
        flight.rests += 1
        rest_s = min(backoff_s * (0.5 + self._random.random()), self._left_s(flight))
        flight.resting = asyncio.ensure_future(self._sleep(rest_s))
        try:
            await asyncio.wait({flight.resting})
        finally:
            flight.resting.cancel()

    def _open(self, flight: Flight, placement: Placement) -> Attempt:
        attempt_id = flight.request.request_id + (f"~{flight.attempts}" if flight.attempts else "")
        flight.attempts += 1
        stream = self._hub.expect(attempt_id, placement.decode, flight.request.answers, len(flight.generated))
        late = Declined(Code.DEADLINE, "the deadline passed: it is the request's timeout_s, else its class's timeout")
        timer = asyncio.get_running_loop().call_later(self._left_s(flight), stream.end, late)
        return Attempt(attempt_id, placement, stream, timer)

    def _left_s(self, flight: Flight) -> float:
        assert flight.request.deadline_s is not None
        return max(0.0, flight.request.deadline_s - self._clock())

    # -- news ------------------------------------------------------------------------------------------------

    async def _with_report(self, flight: Flight, attempt: Attempt, delta: Delta) -> Delta:
        """Note prefill's report, waiting for it at the end, and before anything when it brings the prompt's
        log-probabilities (frames and answer take different roads)."""
        if delta.finish is not None:
            attempt.ended.add(delta.index)
        attempt.decode_ended = delta.ends_request or len(attempt.ended) == flight.request.answers
        if attempt.submit is None:
            return delta
        wants_prompt = flight.request.sampling.prompt_logprobs is not None and not flight.tokens
        last = delta.ends_request or len(attempt.ended | set(flight.finishes)) == flight.request.answers
        if wants_prompt or last:
            await asyncio.wait({attempt.submit}, timeout=self._limits.report_timeout_s)
        answer = _result(attempt.submit)
        if isinstance(answer, FinishedEarly):
            flight.early, attempt.decode_ended = True, False
        if not isinstance(answer, HandedOver | FinishedEarly):
            return delta
        flight.report = answer.report
        prompt: tuple[Token, ...] = answer.prompt_logprobs if wants_prompt else ()
        return replace(delta, prompt_logprobs=delta.prompt_logprobs or prompt)

    def _moved(self, attempt: Attempt, to: WorkerRef) -> None:
        """The request goes on at another decode worker."""
        attempt.placement = replace(attempt.placement, decode=to)
        attempt.moves += 1
        self._later(self._follow(attempt, to))

    async def _follow(self, attempt: Attempt, to: WorkerRef) -> None:
        """Make sure that nothing it told was missed, and that it knows that somebody listens."""
        await self._workers.open(to)
        follow = Follow(attempt.request_id, self._gateway_id)
        answer = await self._workers.ask(to, follow, self._limits.control_timeout_s)
        if not isinstance(answer, Followed):
            refusal = _refusal(answer, to)
            attempt.stream.end(replace(refusal, code=Code.UNAVAILABLE) if refusal.code is Code.STALE else refusal)

    async def _declined(self, flight: Flight, attempt: Attempt, error: Declined) -> None:
        """Try elsewhere if that can help; else the request has failed."""
        fault = attempt.at_fault(error)
        flight.declined = error
        if error.code is Code.NO_ROOM or attempt.hearsay(error):
            flight.passed_over |= {fault.name}
        elif error.code in (Code.UNAVAILABLE, Code.STALE):
            flight.gone |= {fault.name}
            await self._router.suspect(fault, error.message)
        flight.faults += error.code is not Code.NO_ROOM
        exhausted = flight.faults >= self._limits.attempts
        if error.code not in RETRYABLE or exhausted or not flight.may_go_on:
            flight.failure = flight.failure or error
            return
        log.info("%s: %s declined (%s: %s), placing again", attempt.request_id, fault.name, error.code, error.message)
        outcome = replace(flight.ended(self._clock()), code=error.code, message=error.message)
        flight.attempt = None
        if error.code is Code.NO_ROOM and fault == attempt.placement.decode:
            flight.claims[fault] = attempt.request_id
        self._leave(attempt, outcome, again=True)

    # -- the end ---------------------------------------------------------------------------------------------

    def _leave(self, attempt: Attempt, outcome: Outcome, *, again: bool = False) -> None:
        """Close the attempt. No await, so that no cancellation can cut it short: the telling is a task of its own."""
        attempt.deadline.cancel()
        holding = attempt.still_holding()
        if attempt.submit is not None:
            attempt.submit.cancel()
        self._hub.release(attempt.request_id)
        reason = FinishReason.DEADLINE if outcome.code is Code.DEADLINE else FinishReason.ABORT
        over = self._router.finished(attempt.request_id, outcome)
        abort = Abort(attempt.request_id, reason, again=again)
        self._later(self._tell(attempt.request_id, holding, abort, over))

    def _waive(self, flight: Flight) -> None:
        """It is served, or over: who keeps a place for it need not."""
        for worker, attempt_id in flight.claims.items():
            self._later(self._tell(attempt_id, (worker,), Abort(attempt_id)))
        flight.claims.clear()

    def _later(self, telling: Coroutine[Any, Any, None]) -> None:
        goodbye = asyncio.get_running_loop().create_task(telling)
        self._goodbyes.add(goodbye)
        goodbye.add_done_callback(self._goodbyes.discard)

    async def _tell(
        self, request_id: str, holding: tuple[WorkerRef, ...], abort: Abort, *others: Awaitable[None]
    ) -> None:
        told = [self._workers.ask(worker, abort, self._limits.control_timeout_s) for worker in holding]
        results = await asyncio.gather(*told, *others, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                log.error("%s: could not tell of its end: %r", request_id, result)


def _request_of(flight: Flight, attempt_id: str) -> Request:
    """The request as this attempt asks it; what it has been told it does not ask again."""
    sampling = flight.request.sampling
    if flight.generated:
        sampling = replace(sampling, prompt_logprobs=None)
    return replace(flight.request, request_id=attempt_id, sampling=sampling)


def _fetch_decision(placement: Placement | None) -> str:
    if placement is None or not (placement.fetch or placement.fetch_forgone):
        return ""
    return "chosen" if placement.fetch else "forgone"


async def _answer(asked: Awaitable[Answer]) -> Answer:
    return await asked


def _result(task: asyncio.Task[Answer]) -> Answer | None:
    return task.result() if task.done() and not task.cancelled() and task.exception() is None else None


def _prefill_answered(attempt: Attempt, task: asyncio.Task[Answer]) -> None:
    """Prefill's answer joins the stream of tokens."""
    prefill = attempt.placement.prefill
    if task.cancelled() or prefill is None:
        return
    if error := task.exception():
        log.error("%s: asking prefill failed: %r", attempt.request_id, error)
        attempt.stream.end(Declined(Code.INTERNAL, "asking the prefill worker failed", by=prefill.name))
        return
    answer = task.result()
    if isinstance(answer, FinishedEarly):
        for delta in answer.deltas:
            attempt.stream.put(delta)
    elif not isinstance(answer, HandedOver):
        attempt.stream.end(_refusal(answer, prefill))


def _refusal(answer: Answer, worker: WorkerRef) -> Declined:
    """Any answer that is not the one asked for, as a refusal by `worker`."""
    if not isinstance(answer, Declined):
        return Declined(Code.INTERNAL, f"worker {worker.name} answered {type(answer).__name__}", by=worker.name)
    return answer if answer.by else replace(answer, by=worker.name)
