"""The story of one request: every way through it ends once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from scripted import IMPATIENT, NOBODY, REPORT, Bench, ScriptedRouter, bench, ids, until, worker

from cluster.dispatch import Flight, Limits
from cluster.snapshot import Placement, Refusal, RequestView
from cluster.validate import Ask
from engine.types import FinishReason, SamplingParams, Token
from tandem.messages import Abort, Code, Declined, Delta, Expect, Follow, Submit

PAIRS = ScriptedRouter(
    infos=(
        worker("prefill-0", "prefill"),
        worker("prefill-1", "prefill"),
        worker("decode-0", "decode"),
        worker("decode-1", "decode"),
    )
)
SLOW = Limits(backoff_s=0.001, max_backoff_s=0.002)


def _two_pairs() -> ScriptedRouter:
    return replace(PAIRS, placed=[], done=[], suspects=[])


async def _flight(made: Bench, *, prompt_logprobs: int | None = None, **fields: object) -> Flight:
    sampling = SamplingParams(max_tokens=12, prompt_logprobs=prompt_logprobs)
    job = await made.gateway.prepare(Ask(prompts=("hello",), sampling=sampling, **fields))  # type: ignore[arg-type]
    return Flight(job.requests[0], job.views[0])


async def _run(made: Bench, flight: Flight) -> list[Delta]:
    async with asyncio.timeout(5):
        return [delta async for delta in made.dispatch.run(flight)]


async def _bereft(
    made: Bench, worker: str = "decode-0", *, tokens: int = 1, refusal: Refusal | None = None, **fields: Any
) -> tuple[Flight, asyncio.Task[list[Delta]]]:
    """A request that has told so many tokens when it loses its decode worker; others hold after their first token, or
    the router refuses them."""
    made.workers.hold = True
    flight = await _flight(made, **fields)
    running = asyncio.create_task(_run(made, flight))
    await until(lambda: flight.tokens == tokens)
    made.router.refusal = refusal
    made.hub.lost(worker, "1", "killed")
    return flight, running


def _ids(deltas: list[Delta]) -> list[int]:
    return [token.token_id for delta in deltas for token in delta.tokens]


async def test_a_request_goes_to_decode_first_then_to_prefill_and_comes_back() -> None:
    async with bench() as made:
        flight = await _flight(made)
        deltas = await _run(made, flight)
        assert _ids(deltas) == ids("Hello, world")
        assert made.workers.kinds() == [("decode-0", "Expect"), ("prefill-0", "Submit")]
        outcome = flight.outcome
        assert outcome is not None
        assert made.outcomes == [outcome]
        assert (outcome.code, outcome.finish, outcome.completion_tokens) == (None, FinishReason.LENGTH, 12)
        assert (outcome.prefill, outcome.decode, outcome.attempts) == ("prefill-0", "decode-0", 1)
        assert (outcome.report, outcome.cached_tokens) == (REPORT, 16)
        assert outcome.ttft_s is not None
        assert 0 <= outcome.ttft_s <= outcome.e2e_s
        assert len(outcome.itl_s) == 11
    assert [request_id for request_id, _ in made.router.done] == ["r0"]


async def test_local_prefill_asks_decode_alone() -> None:
    async with bench(router=ScriptedRouter(local_prefill=True)) as made:
        flight = await _flight(made)
        assert _ids(await _run(made, flight)) == ids("Hello, world")
        assert made.workers.kinds() == [("decode-0", "Expect")]
        assert flight.outcome is not None
        assert (flight.outcome.prefill, flight.outcome.decode) == ("", "decode-0")


async def test_a_request_that_ends_with_its_first_token_never_starts_decode() -> None:
    async with bench() as made:
        made.workers.early = True
        flight = await _flight(made)
        assert _ids(await _run(made, flight)) == ids("H")
        assert flight.outcome is not None
        assert (flight.outcome.decode, flight.outcome.completion_tokens) == ("", 1)
        await made.dispatch.drained()
        assert ("decode-0", Abort("r0")) in made.workers.asked
        assert not made.workers.running


async def test_prompt_logprobs_come_with_the_first_delta_whichever_road_is_faster() -> None:
    async with bench() as made:
        deltas = await _run(made, await _flight(made, prompt_logprobs=0))
        assert [token.token_id for token in deltas[0].prompt_logprobs] == ids("hello")
        assert not any(delta.prompt_logprobs for delta in deltas[1:])


@pytest.mark.parametrize(
    ("who", "question", "code"),
    [
        ("decode-0", Expect, Code.UNAVAILABLE),
        ("decode-0", Expect, Code.NO_ROOM),
        ("prefill-0", Submit, Code.UNAVAILABLE),
        ("prefill-0", Submit, Code.STALE),
        ("prefill-0", Submit, Code.NO_ROOM),
    ],
)
async def test_before_the_first_token_another_worker_is_tried(who: str, question: type, code: Code) -> None:
    async with bench(router=_two_pairs()) as made:
        made.workers.declines[who, question] = [Declined(code, "no")]
        flight = await _flight(made)
        assert _ids(await _run(made, flight)) == ids("Hello, world")
        assert flight.outcome is not None
        served = {flight.outcome.prefill, flight.outcome.decode}
        assert who not in served
        assert flight.outcome.attempts == 2
        assert made.router.suspects == ([] if code is Code.NO_ROOM else [who])
        await made.dispatch.drained()
        assert [request_id for request_id, _ in made.router.done] == ["r0", "r0~1"]
    assert [outcome.code for outcome in made.outcomes] == [None]


async def test_prefill_that_passes_on_decodes_refusal_is_not_blamed() -> None:
    async with bench(router=_two_pairs()) as made:
        made.workers.declines["prefill-0", Submit] = [Declined(Code.NO_ROOM, "pool full", by="decode-0")]
        flight = await _flight(made)
        await _run(made, flight)
        assert flight.outcome is not None
        assert (flight.outcome.prefill, flight.outcome.decode) == ("prefill-0", "decode-1")
        await made.dispatch.drained()
        told = [question for name, question in made.workers.asked if name == "decode-0" and isinstance(question, Abort)]
        assert told == [Abort("r0", again=True), Abort("r0")], "it comes back; it is served elsewhere"


async def test_a_failed_link_between_the_two_is_tried_again_and_accuses_nobody() -> None:
    async with bench() as made:
        broke = Declined(Code.UNAVAILABLE, "the transfer broke", by="decode-0")
        made.workers.declines["prefill-0", Submit] = [broke, broke]
        flight = await _flight(made)
        assert _ids(await _run(made, flight)) == ids("Hello, world")
        assert flight.outcome is not None
        assert flight.outcome.attempts == 3
        assert made.router.suspects == []


async def test_what_decode_says_of_prefill_accuses_nobody_either() -> None:
    async with bench() as made:
        made.workers.declines["decode-0", Expect] = [Declined(Code.UNAVAILABLE, "checksum of span 0", by="prefill-0")]
        flight = await _flight(made)
        assert _ids(await _run(made, flight)) == ids("Hello, world")
        assert made.router.suspects == []


async def test_a_link_that_stays_broken_fails_the_request_after_a_few_tries() -> None:
    async with bench(limits=Limits(attempts=2)) as made:
        broke = Declined(Code.UNAVAILABLE, "the transfer broke", by="decode-0")
        made.workers.declines["prefill-0", Submit] = [broke] * 5
        flight = await _flight(made)
        assert await _run(made, flight) == []
        assert flight.outcome is not None
        assert (flight.outcome.code, flight.outcome.attempts) == (Code.UNAVAILABLE, 2)
        assert "the transfer broke" in flight.outcome.message


async def test_when_every_worker_failed_again_and_again_the_client_hears_unavailable_and_why() -> None:
    async with bench(limits=SLOW) as made:
        made.workers.declines["prefill-0", Submit] = [Declined(Code.UNAVAILABLE, "the transfer broke")] * 5
        flight = await _flight(made)
        assert await _run(made, flight) == []
        assert flight.outcome is not None
        assert (flight.outcome.code, flight.outcome.attempts) == (Code.UNAVAILABLE, 4)
        assert "the transfer broke" in flight.outcome.message


@pytest.mark.parametrize(("who", "question"), [("decode-0", Expect), ("prefill-0", Submit)])
async def test_the_only_worker_of_its_pool_is_asked_again_after_a_moments_silence(who: str, question: type) -> None:
    async with bench(limits=SLOW) as made:
        made.workers.declines[who, question] = [Declined(Code.UNAVAILABLE, "it cannot be asked")] * 2
        flight = await _flight(made)
        assert _ids(await _run(made, flight)) == ids("Hello, world")
        assert flight.outcome is not None
        assert (flight.outcome.attempts, made.router.suspects) == (3, [who, who])


async def test_a_worker_that_did_not_answer_is_not_asked_again_while_another_has_not_been() -> None:
    async with bench(router=_two_pairs(), limits=SLOW) as made:
        made.workers.declines["decode-0", Expect] = [Declined(Code.UNAVAILABLE, "it cannot be asked")]
        made.workers.declines["decode-1", Expect] = [Declined(Code.NO_ROOM, "full")] * 3
        flight = await _flight(made)
        assert _ids(await _run(made, flight)) == ids("Hello, world")
        assert flight.outcome is not None
        assert (flight.outcome.decode, flight.outcome.attempts) == ("decode-1", 5)


async def test_a_request_that_has_told_nothing_does_not_wait_for_dead_workers() -> None:
    async with bench(router=ScriptedRouter(refusal=NOBODY), limits=SLOW) as made:
        flight = await _flight(made)
        assert await _run(made, flight) == []
        assert (len(made.router.placed), flight.rests) == (1, 0)


async def test_when_every_worker_is_full_the_request_waits_for_room() -> None:
    async with bench(limits=SLOW) as made:
        made.workers.declines["decode-0", Expect] = [Declined(Code.NO_ROOM, "full")] * 5
        flight = await _flight(made)
        assert _ids(await _run(made, flight)) == ids("Hello, world")
        assert flight.outcome is not None
        assert flight.outcome.attempts == 6


async def test_waiting_for_room_uses_up_no_attempt_and_each_wait_is_longer() -> None:
    waits: list[float] = []

    async def rest(wait_s: float) -> None:
        waits.append(wait_s)

    async with bench(limits=Limits()) as made:
        made.dispatch._sleep = rest
        made.workers.declines["decode-0", Expect] = [
            *[Declined(Code.NO_ROOM, "the link hung, it is tried again soon")] * 8,
            Declined(Code.UNAVAILABLE, "the transfer broke", by="prefill-0"),
        ]
        flight = await _flight(made)
        assert _ids(await _run(made, flight)) == ids("Hello, world")
        assert flight.outcome is not None
        assert (flight.outcome.attempts, flight.faults) == (10, 1)
    assert waits[0] < 0.04
    assert sum(waits) > 1.0, "eight of the first would be a quarter of a second"


async def test_waiting_for_room_ends_with_the_deadline() -> None:
    async with bench(limits=SLOW) as made:
        made.workers.declines["decode-0", Expect] = [Declined(Code.NO_ROOM, "full")] * 10_000
        flight = await _flight(made, timeout_s=0.1)
        assert await _run(made, flight) == []
        assert flight.outcome is not None
        assert flight.outcome.code is Code.DEADLINE


async def test_workers_that_are_gone_are_tried_a_few_times_only() -> None:
    async with bench(router=_two_pairs(), limits=Limits(attempts=2)) as made:
        made.workers.declines["decode-0", Expect] = [Declined(Code.UNAVAILABLE, "gone")]
        made.workers.declines["decode-1", Expect] = [Declined(Code.UNAVAILABLE, "gone")]
        flight = await _flight(made)
        assert await _run(made, flight) == []
        assert flight.outcome is not None
        assert (flight.outcome.code, flight.outcome.attempts) == (Code.UNAVAILABLE, 2)


@pytest.mark.parametrize("code", [Code.INVALID, Code.MISMATCH, Code.INTERNAL])
async def test_what_another_worker_would_not_mend_is_not_tried_again(code: Code) -> None:
    async with bench(router=_two_pairs()) as made:
        made.workers.declines["prefill-0", Submit] = [Declined(code, "no")]
        flight = await _flight(made)
        assert await _run(made, flight) == []
        assert flight.outcome is not None
        assert (flight.outcome.code, flight.outcome.attempts) == (code, 1)


async def test_a_worker_lost_before_the_first_token_is_replaced() -> None:
    async with bench(router=_two_pairs()) as made:
        made.workers.silent = True
        flight = await _flight(made)
        running = asyncio.create_task(_run(made, flight))
        await until(lambda: "r0" in made.workers.running)
        made.workers.silent = False
        made.hub.lost("decode-0", "1", "killed")
        assert _ids(await running) == ids("Hello, world")
        assert flight.outcome is not None
        assert (flight.outcome.decode, flight.outcome.attempts) == ("decode-1", 2)


async def test_an_answer_whose_worker_is_lost_goes_on_at_another_behind_the_tokens_that_are_out() -> None:
    async with bench(router=_two_pairs()) as made:
        flight, running = await _bereft(made, prompt_logprobs=0)
        await until(lambda: flight.tokens == 2)
        made.workers.go.set()
        assert _ids(await running) == ids("Hello, world")
        assert flight.outcome is not None
        assert (flight.outcome.code, flight.outcome.decode, flight.outcome.attempts) == (None, "decode-1", 2)
        expect = next(question for name, question in made.workers.asked if name == "decode-1")
        assert isinstance(expect, Expect)
        assert (expect.prefill, expect.generated) == (None, tuple(ids("H")))
        assert expect.request.sampling.prompt_logprobs is None, "they have been told"
        first, again = made.router.placed
        assert again == replace(first.resume(1), request_id="r0~1")
    assert made.router.suspects == ["decode-0"]


async def test_what_is_cached_where_an_answer_goes_on_does_not_count_as_prompt() -> None:
    async with bench() as made:
        flight = await _flight(made)
        flight.saw(Delta("r0", 0, (Token(72),), cached_tokens=3), 1.0)
        flight.saw(Delta("r0", 1, (Token(101),), cached_tokens=16), 2.0)
        assert flight.cached_tokens == 3


async def test_an_answer_goes_on_at_a_worker_that_had_declined_it_before_its_first_token() -> None:
    async with bench(router=_two_pairs()) as made:
        made.workers.declines["decode-0", Expect] = [Declined(Code.UNAVAILABLE, "decode-0 is draining")]
        flight, running = await _bereft(made, "decode-1")
        made.workers.go.set()
        assert _ids(await running) == ids("Hello, world")
        assert flight.outcome is not None
        assert (flight.outcome.decode, flight.outcome.attempts) == ("decode-0", 3)


async def test_an_answer_whose_only_worker_is_lost_goes_on_when_that_is_back() -> None:
    async with bench(limits=SLOW) as made:
        flight, running = await _bereft(made, refusal=NOBODY)
        await until(lambda: flight.rests > 3)
        made.router.refusal = None
        made.workers.go.set()
        assert _ids(await running) == ids("Hello, world")
        assert flight.outcome is not None
        assert (flight.outcome.code, flight.outcome.decode, flight.outcome.attempts) == (None, "decode-0", 2)


async def test_an_abort_ends_the_wait_for_a_worker_to_go_on_at() -> None:
    async with bench(limits=SLOW) as made:
        flight, running = await _bereft(made, refusal=NOBODY)
        await until(lambda: flight.rests > 3)
        assert made.dispatch.abort("r0")
        assert _ids(await running) == ids("H")
        assert flight.outcome is not None
        assert flight.outcome.code is Code.ABORTED


async def test_an_answer_that_nobody_is_left_to_go_on_with_is_an_error_and_keeps_what_it_has() -> None:
    async with bench(limits=IMPATIENT) as made:
        flight, running = await _bereft(made, refusal=NOBODY)
        assert _ids(await running) == ids("H")
        assert flight.outcome is not None
        assert flight.outcome.code is Code.UNAVAILABLE
        assert "killed" in flight.outcome.message


async def test_several_sequences_whose_worker_is_lost_after_the_first_token_are_an_error_never_other_text() -> None:
    async with bench(router=_two_pairs()) as made:
        flight, running = await _bereft(made, tokens=2, n=2)
        assert _ids(await running) == ids("HH")
        assert flight.outcome is not None
        assert (flight.outcome.code, flight.outcome.attempts) == (Code.UNAVAILABLE, 1)


async def test_closing_the_stream_aborts_on_both_workers() -> None:
    async with bench() as made:
        made.workers.silent = True
        flight = await _flight(made)
        deltas = made.dispatch.run(flight)
        reader = asyncio.create_task(anext(deltas))
        await until(lambda: "r0" in made.workers.running)
        reader.cancel()
        await asyncio.wait({reader})
        await made.dispatch.drained()
        assert flight.outcome is not None
        assert flight.outcome.code is Code.ABORTED
        assert ("decode-0", Abort("r0")) in made.workers.asked
    assert [outcome.code for outcome in made.outcomes] == [Code.ABORTED]


async def test_a_stream_closed_while_prefill_works_aborts_on_prefill_too() -> None:
    async with bench() as made:
        blocked = asyncio.Event()

        async def never(question: Submit) -> Declined:
            await blocked.wait()
            return Declined(Code.ABORTED, "late")

        made.workers._submitted = never  # type: ignore[method-assign, assignment]
        flight = await _flight(made)
        async with aclosing(made.dispatch.run(flight)) as deltas:
            reader = asyncio.create_task(anext(deltas))
            await until(lambda: ("prefill-0", "Submit") in made.workers.kinds())
            reader.cancel()
            await asyncio.wait({reader})
        await made.dispatch.drained()
        told = [name for name, question in made.workers.asked if isinstance(question, Abort)]
        assert sorted(told) == ["decode-0", "prefill-0"]


async def test_a_request_can_be_aborted_by_its_id() -> None:
    async with bench() as made:
        made.workers.hold = True
        flight = await _flight(made)
        running = asyncio.create_task(_run(made, flight))
        await until(lambda: flight.tokens == 1)
        assert made.dispatch.abort("r0") is True
        await running
        assert flight.outcome is not None
        assert flight.outcome.code is Code.ABORTED
        assert made.dispatch.abort("r0") is False


async def test_an_abort_while_no_worker_has_room_is_heard() -> None:
    async with bench(limits=SLOW) as made:
        made.workers.declines["decode-0", Expect] = [Declined(Code.NO_ROOM, "full")] * 10_000
        flight = await _flight(made)
        running = asyncio.create_task(_run(made, flight))
        await until(lambda: flight.attempts > 2)
        assert made.dispatch.abort("r0")
        assert await running == []
        assert flight.outcome is not None
        assert flight.outcome.code is Code.ABORTED


async def _waiting_for_room(made: Bench, **fields: object) -> tuple[Flight, asyncio.Task[list[Delta]]]:
    """Between two attempts, with a place kept by both decode workers."""
    for name in ("decode-0", "decode-1"):
        made.workers.declines[name, Expect] = [Declined(Code.NO_ROOM, "full")] * 10_000
    flight = await _flight(made, **fields)
    running = asyncio.create_task(_run(made, flight))
    await until(lambda: flight.resting is not None)
    assert made.workers.claims == {("decode-0", "r0"), ("decode-1", "r0")}
    return flight, running


FOR_LONG = Limits(backoff_s=60.0, max_backoff_s=60.0)


async def test_a_client_that_leaves_between_two_attempts_gives_up_its_places() -> None:
    async with bench(router=_two_pairs(), limits=FOR_LONG) as made:
        _, running = await _waiting_for_room(made)
        running.cancel()
        await asyncio.wait({running})
        await made.dispatch.drained()
        assert not made.workers.claims


@pytest.mark.parametrize(("fields", "code"), [({}, Code.ABORTED), ({"timeout_s": 0.1}, Code.DEADLINE)])
async def test_an_abort_or_a_deadline_between_two_attempts_ends_the_wait_and_gives_up_the_places(
    fields: dict[str, object], code: Code
) -> None:
    async with bench(router=_two_pairs(), limits=FOR_LONG) as made:
        flight, running = await _waiting_for_room(made, **fields)
        if code is Code.ABORTED:
            assert made.dispatch.abort("r0")
        assert await running == []
        assert flight.outcome is not None
        assert flight.outcome.code is code
        await made.dispatch.drained()
        assert not made.workers.claims


async def test_a_request_that_is_refused_for_good_gives_up_its_places() -> None:
    async with bench(router=_two_pairs(), limits=SLOW) as made:
        flight, running = await _waiting_for_room(made)
        made.workers.declines["decode-0", Expect] = [Declined(Code.INVALID, "too long")]
        assert await running == []
        assert flight.outcome is not None
        assert flight.outcome.code is Code.INVALID
        await made.dispatch.drained()
        assert not made.workers.claims


async def test_a_request_that_is_served_gives_up_its_other_places_before_it_ends() -> None:
    async with bench(router=_two_pairs()) as made:
        made.workers.declines["decode-0", Expect] = [Declined(Code.NO_ROOM, "full")]
        made.workers.hold = True
        flight = await _flight(made)
        running = asyncio.create_task(_run(made, flight))
        await until(lambda: flight.tokens == 1 and not made.workers.claims)
        made.workers.go.set()
        assert _ids(await running) == ids("Hello, world")


async def test_an_abort_while_the_router_chooses_starts_nothing() -> None:
    class Slow(ScriptedRouter):
        async def place(self, request: RequestView, exclude: frozenset[str]) -> Placement | Refusal:
            made.dispatch.abort("r0")
            return await super().place(request, exclude)

    async with bench(router=Slow()) as made:
        flight = await _flight(made)
        assert await _run(made, flight) == []
        assert flight.outcome is not None
        assert flight.outcome.code is Code.ABORTED
        await made.dispatch.drained()
        assert not made.workers.asked
    assert [request_id for request_id, _ in made.router.done] == ["r0"]


@pytest.mark.parametrize("hold", [True, False])
async def test_the_deadline_ends_a_request_before_and_after_its_first_token(hold: bool) -> None:
    async with bench() as made:
        made.workers.hold, made.workers.silent = hold, not hold
        flight = await _flight(made, timeout_s=0.1)
        assert _ids(await _run(made, flight)) == (ids("H") if hold else [])
        assert flight.outcome is not None
        assert flight.outcome.code is Code.DEADLINE
        await made.dispatch.drained()
        assert ("decode-0", Abort("r0", FinishReason.DEADLINE)) in made.workers.asked


async def test_a_deadline_that_a_worker_notices_first_is_no_answer() -> None:
    async with bench() as made:
        made.workers.finish = FinishReason.DEADLINE
        flight = await _flight(made)
        await _run(made, flight)
        assert flight.outcome is not None
        assert (flight.outcome.code, flight.outcome.finish) == (Code.DEADLINE, None)


async def test_a_router_that_refuses_is_believed_at_once() -> None:
    async with bench(router=ScriptedRouter(refusal=Refusal(Code.NO_ROOM, "overloaded"))) as made:
        flight = await _flight(made)
        assert await _run(made, flight) == []
        assert flight.outcome is not None
        assert (flight.outcome.code, flight.outcome.message) == (Code.NO_ROOM, "overloaded")
        assert len(made.router.placed) == 1
        assert not made.workers.asked


@pytest.mark.parametrize(
    ("timeout_s", "router_timeout_s", "code"), [(0.05, 10.0, Code.DEADLINE), (20.0, 0.05, Code.UNAVAILABLE)]
)
async def test_a_silent_router_is_waited_for_until_its_bound_or_the_deadline(
    timeout_s: float, router_timeout_s: float, code: Code
) -> None:
    class Silent(ScriptedRouter):
        async def place(self, request: object, exclude: object) -> Refusal:
            await asyncio.Event().wait()
            raise AssertionError

    async with bench(router=Silent(), limits=Limits(router_timeout_s=router_timeout_s)) as made:
        flight = await _flight(made, timeout_s=timeout_s)
        assert await _run(made, flight) == []
        assert flight.outcome is not None
        assert flight.outcome.code is code


async def test_an_error_of_our_own_is_an_outcome_too_and_leaves_nothing() -> None:
    async with bench() as made:

        async def broken(worker: object) -> None:
            raise RuntimeError("bug")

        made.workers.open = broken  # type: ignore[method-assign]
        flight = await _flight(made)
        with pytest.raises(RuntimeError, match="bug"):
            await _run(made, flight)
        assert flight.outcome is not None
        assert flight.outcome.code is Code.INTERNAL


async def test_times_between_tokens_are_counted_by_token() -> None:
    async with bench() as made:
        flight = await _flight(made)
        flight.saw(Delta("r0", 0, (Token(1), Token(2))), now=10.0)
        flight.saw(Delta("r0", 2, (Token(3),)), now=11.0)
        flight.saw(Delta("r0", 3, (Token(4), Token(5))), now=13.0)
        outcome = flight.ended(now=14.0)
        assert outcome.itl_s == (0.0, 1.0, 1.0, 1.0)
        assert (outcome.itl_quantile(0.0), outcome.itl_quantile(1.0)) == (0.0, 1.0)


async def test_times_between_tokens_are_those_of_each_sequence() -> None:
    async with bench() as made:
        flight = await _flight(made, n=2)
        flight.saw(Delta("r0", 0, (Token(1),)), now=10.0)
        flight.saw(Delta("r0", 0, (Token(2),), index=1), now=10.5)
        flight.saw(Delta("r0", 1, (Token(3),), FinishReason.STOP), now=12.0)
        assert not flight.over
        flight.saw(Delta("r0", 1, (Token(4),), FinishReason.LENGTH, index=1), now=13.0)
        outcome = flight.ended(now=14.0)
        assert (outcome.code, outcome.finish, outcome.completion_tokens) == (None, FinishReason.STOP, 4)
        assert outcome.itl_s == (2.0, 2.5)


async def test_a_lost_worker_before_any_sequences_first_token_costs_another_attempt_and_no_double_text() -> None:
    async with bench(router=_two_pairs()) as made:
        made.workers.silent = True
        flight = await _flight(made, n=3)
        running = asyncio.create_task(_run(made, flight))
        await until(lambda: "r0" in made.workers.running)
        made.workers.running.pop("r0").cancel()
        made.workers.silent = False
        made.hub.lost("decode-0", "1", "killed")
        deltas = await running
        for index in range(3):
            assert _ids([delta for delta in deltas if delta.index == index]) == ids("Hello, world")
        assert flight.outcome is not None
        assert (flight.outcome.decode, flight.outcome.attempts) == ("decode-1", 2)


# -- moves --------------------------------------------------------------------------------------------------------


async def test_a_moved_request_is_followed_and_ends_over_there() -> None:
    async with bench(router=_two_pairs()) as made:
        made.workers.hold = True
        flight = await _flight(made)
        here, there = (info.ref for info in PAIRS.infos[2:])
        async with asyncio.timeout(5), aclosing(made.dispatch.run(flight)) as deltas:
            told = [await anext(deltas)]
            made.workers.deliver(there, Delta("r0", 1, (Token(7),), move=3))
            made.workers.deliver(here, Delta("r0", 1, moved=there, move=3))
            made.workers.deliver(there, Delta("r0", 2, (Token(8),), FinishReason.LENGTH, move=3))
            told += [delta async for delta in deltas]
        assert _ids(told) == [*ids("H"), 7, 8]
        assert all(delta.tokens for delta in told)
        assert flight.outcome is not None
        assert (flight.outcome.decode, flight.outcome.moves, flight.outcome.code) == ("decode-1", 1, None)
        await made.dispatch.drained()
        assert ("decode-1", Follow("r0", made.dispatch._gateway_id)) in made.workers.asked
        made.workers.running.pop("r0").cancel()


async def test_a_client_that_leaves_after_a_move_is_told_to_the_new_worker() -> None:
    async with bench(router=_two_pairs()) as made:
        made.workers.hold = True
        flight = await _flight(made)
        here, there = (info.ref for info in PAIRS.infos[2:])
        async with asyncio.timeout(5), aclosing(made.dispatch.run(flight)) as deltas:
            await anext(deltas)
            made.workers.deliver(here, Delta("r0", 1, moved=there, move=3))
            made.workers.deliver(there, Delta("r0", 1, (Token(7),), move=3))
            assert (await anext(deltas)).tokens == (Token(7),)
        await made.dispatch.drained()
        assert ("decode-1", Abort("r0")) in made.workers.asked
        assert ("decode-0", Abort("r0")) not in made.workers.asked


async def test_an_answer_whose_move_cannot_be_followed_goes_on_elsewhere() -> None:
    async with bench(router=_two_pairs()) as made:
        made.workers.declines["decode-1", Follow] = [Declined(Code.STALE, "not asked for in time")]
        made.workers.hold = True
        flight = await _flight(made)
        here, there = (info.ref for info in PAIRS.infos[2:])
        async with asyncio.timeout(5), aclosing(made.dispatch.run(flight)) as deltas:
            assert _ids([await anext(deltas)]) == ids("H")
            made.workers.deliver(here, Delta("r0", 1, moved=there, move=3))
            made.workers.go.set()
            assert _ids([delta async for delta in deltas]) == ids("ello, world")
        assert flight.outcome is not None
        assert (flight.outcome.code, flight.outcome.decode) == (None, "decode-0")
    assert made.router.suspects == ["decode-1"]
