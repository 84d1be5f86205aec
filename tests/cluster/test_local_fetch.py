"""A worker that lacks a prefix gets it from one that has it: less to compute, the same text, whatever goes wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.local import LocalCluster
from cluster.snapshot import FETCHED, Placement, Refusal, RequestView, WorkerView
from engine.types import Request
from kvtransfer.faults import Fault
from tandem.messages import (
    Abort,
    Aborted,
    Code,
    Declined,
    FaultInjected,
    FaultKind,
    Fetch,
    FetchCounters,
    FetchPrefix,
    FinishedEarly,
    InjectFault,
    PrefixComing,
    Submit,
)
from tests.cluster.local_rig import config, ids, request, running
from tests.router.worlds import TIMES

Alone = Callable[[Request], list[int]]
PATIENT_S = 10.0


def steer(
    cluster: LocalCluster,
    *,
    away_from: str = "",
    source: str = "",
    tokens: int = 0,
    patience_s: float = PATIENT_S,
) -> None:
    """Place past a worker; wait as long as told for what is fetched; `source`: fetch from there, whatever is known."""
    place = cluster.router.place
    slow_down(cluster)

    def steered(view: RequestView, exclude: frozenset[str], now: float) -> Placement | Refusal:
        decision = place(view, exclude | {away_from}, now)
        if isinstance(decision, Refusal):
            return decision
        if source and source in cluster.slots:
            lender = cluster.info(source)
            fetch = Fetch(lender.ref, tokens, patience_s, lender.block_size)
            return replace(decision, fetch=fetch)
        return replace(decision, fetch=decision.fetch and replace(decision.fetch, patience_s=patience_s))

    cluster.router.place = steered  # type: ignore[method-assign]


def slow_down(cluster: LocalCluster) -> None:
    """Let the router think that a token takes a millisecond: on so small a model computing is always faster."""
    view_of = cluster.router._view

    def slow(*known: Any) -> WorkerView:
        view = view_of(*known)
        return replace(view, load=replace(view.load, step_times=TIMES))

    cluster.router._view = slow  # type: ignore[method-assign]


def counters(cluster: LocalCluster, worker: str) -> FetchCounters:
    """Of a worker that has fetched from one other."""
    (counted,) = cluster.slots[worker].worker.fetches.counters()
    return counted


def computed(cluster: LocalCluster, worker: str) -> int:
    return cluster.slots[worker].worker.engine.load(0.0).prompt_tokens


async def warmed(cluster: LocalCluster, req: Request) -> str:
    """Let one prefill worker compute a prompt; the router knows of it. The worker's name."""
    _, outcome = await cluster.generate(req)
    await cluster.settled()
    await cluster.until(lambda: cluster.router.index.held(outcome.prefill) > 0)
    return outcome.prefill


def hold_back(cluster: LocalCluster, worker: str) -> None:
    """It neither answers nor sends."""
    cut_soon(cluster, worker)
    cluster.slots[worker].worker.transfers.faults.add(Fault.DROP)
    cluster.freeze(worker)


def cut_soon(cluster: LocalCluster, worker: str) -> None:
    loans = cluster.slots[worker].worker.loans
    loans._limits = replace(loans._limits, quiet_patience_s=0.1)


def other_than(prefill: str) -> str:
    return "prefill-1" if prefill == "prefill-0" else "prefill-0"


FIRST = request("first", 160)
AGAIN = replace(request("again"), token_ids=FIRST.token_ids[:150] + tuple(range(30)))
"""Shares nine blocks."""


async def test_another_prefill_worker_fetches_what_the_first_has_computed(toy: Path, alone: Alone) -> None:
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        other = other_than(holder)
        steer(cluster, away_from=holder)
        tokens, outcome = await cluster.generate(AGAIN)
        assert ids(tokens) == alone(AGAIN)
        assert (outcome.prefill, outcome.placement_reason) == (other, FETCHED)
        assert (outcome.report.fetched_tokens, outcome.cached_tokens) == (144, 144)
        assert computed(cluster, other) == len(AGAIN.token_ids) - 144
        assert (counters(cluster, other).blocks, counters(cluster, other).failed) == (9, 0)
        await cluster.until(lambda: cluster.router.index.held(other) >= 9)
        told = re.compile(rf'tandem_worker_fetched_tokens_total{{[^}}]*worker="{other}"}} 144.0')
        await cluster.until(lambda: told.search(cluster.metrics.expose().decode()) is not None)
        assert "fetch=144 tokens from" in cluster.router.recent[-1]


async def test_the_next_turn_of_a_chat_is_fetched_from_where_the_answer_was_decoded(toy: Path, alone: Alone) -> None:
    first = request("turn1", 64, max_tokens=80, ignore_eos=True)
    async with running(toy, config()) as cluster:
        answer, _ = await cluster.generate(first)
        await cluster.settled()
        await cluster.until(lambda: cluster.router.index.held("decode-0") >= 8)
        steer(cluster)
        second = replace(request("turn2"), token_ids=(*first.token_ids, *ids(answer), *range(20)))
        tokens, outcome = await cluster.generate(second)
        assert ids(tokens) == alone(second)
        assert (outcome.report.fetched_tokens, outcome.cached_tokens) == (64, 128)
        assert outcome.report.decode_held_tokens == 128


async def test_a_decode_worker_that_computes_a_prompt_itself_fetches_too(toy: Path, alone: Alone) -> None:
    async with running(toy, config(prefill=0, decode=2, local="always")) as cluster:
        _, outcome = await cluster.generate(FIRST)
        await cluster.settled()
        await cluster.until(lambda: cluster.router.index.held(outcome.decode) > 0)
        steer(cluster, away_from=outcome.decode)
        tokens, outcome = await cluster.generate(AGAIN)
        assert ids(tokens) == alone(AGAIN)
        assert outcome.cached_tokens == 144
        assert counters(cluster, outcome.decode).blocks == 9


async def test_a_burst_behind_one_prefix_fetches_it_once(toy: Path, alone: Alone) -> None:
    burst = [replace(AGAIN, request_id=f"b{i}", token_ids=(*AGAIN.token_ids[:150], *range(i, 30))) for i in range(4)]
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        steer(cluster, away_from=holder)
        answers = await asyncio.gather(*(cluster.generate(req) for req in burst))
        for req, (tokens, _) in zip(burst, answers, strict=True):
            assert ids(tokens) == alone(req)
        assert counters(cluster, answers[0][1].prefill).blocks == 9


FAULTS = {
    "drop": (InjectFault(FaultKind.DROP), 0.3),
    "late": (InjectFault(FaultKind.DELAY, seconds=0.6), 0.2),
    "fail": (InjectFault(FaultKind.FAIL), 0.3),
    "corrupt": (InjectFault(FaultKind.CORRUPT), PATIENT_S),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fetch_that_goes_wrong_costs_time_alone(toy: Path, alone: Alone, fault: str) -> None:
    question, patience_s = FAULTS[fault]
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        steer(cluster, away_from=holder, source=holder, tokens=144, patience_s=patience_s)
        cut_soon(cluster, holder)
        where = other_than(holder) if question.kind is FaultKind.CORRUPT else holder
        assert await cluster.ask(cluster.info(where).ref, question) == FaultInjected()
        tokens, outcome = await cluster.generate(AGAIN)
        assert ids(tokens) == alone(AGAIN)
        assert outcome.report.fetched_tokens == 0
        assert counters(cluster, outcome.prefill).failed == 1
        assert computed(cluster, outcome.prefill) == len(AGAIN.token_ids)
        later = replace(AGAIN, request_id="later", token_ids=(*FIRST.token_ids, *range(40)))
        tokens, _ = await cluster.generate(later)
        assert ids(tokens) == alone(later), "nothing wrong was kept"


@pytest.mark.parametrize("nth", [1, 3])
async def test_a_source_whose_push_fails_says_so(toy: Path, alone: Alone, nth: int) -> None:
    """Nobody waits for the deadline; what came before counts."""
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        steer(cluster, away_from=holder, source=holder, tokens=144, patience_s=3 * PATIENT_S)
        source = cluster.slots[holder].worker
        block_bytes = source.engine.info.block_bytes
        source.loans._limits = replace(source.loans._limits, push_bytes=block_bytes, quiet_patience_s=0.1)
        await cluster.ask(cluster.info(holder).ref, InjectFault(FaultKind.FAIL, nth=nth))
        tokens, outcome = await asyncio.wait_for(cluster.generate(AGAIN), PATIENT_S)
        assert ids(tokens) == alone(AGAIN)
        assert outcome.report.fetched_tokens == 16 * (nth - 1)
        assert counters(cluster, outcome.prefill).failed == 1


@pytest.mark.parametrize("moment", ["before", "asked"])
async def test_a_source_that_dies_is_not_waited_for(toy: Path, alone: Alone, moment: str) -> None:
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        steer(cluster, away_from=holder, source=holder, tokens=144)
        if moment == "before":
            ref = cluster.info(holder).ref
            cluster.kill(holder)
            steer(cluster)
            place = cluster.router.place
            cluster.router.place = lambda *how: replace(place(*how), fetch=Fetch(ref, 144, PATIENT_S, 16))  # type: ignore
        else:
            hold_back(cluster, holder)
        asked = asyncio.create_task(cluster.generate(AGAIN))
        if moment == "asked":
            await cluster.until(lambda: any(not slot.worker.fetches.idle() for slot in cluster.slots.values()))
            cluster.kill(holder)
        tokens, outcome = await asyncio.wait_for(asked, PATIENT_S / 2)
        assert ids(tokens) == alone(AGAIN)
        assert outcome.report.fetched_tokens == 0


@pytest.mark.parametrize(("held", "came"), [(0, 0), (70, 64)])
async def test_a_source_that_has_evicted_some_sends_the_rest(toy: Path, alone: Alone, held: int, came: int) -> None:
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        cluster.slots[holder].worker.engine.reset_prefix_cache()
        if held:
            shorter = replace(FIRST, request_id="shorter", token_ids=FIRST.token_ids[:held])
            place = cluster.router.place
            steer(cluster, away_from=other_than(holder))
            await cluster.generate(shorter)
            cluster.router.place = place  # type: ignore[method-assign]
        steer(cluster, away_from=holder, source=holder, tokens=144)
        tokens, outcome = await cluster.generate(AGAIN)
        assert ids(tokens) == alone(AGAIN)
        assert outcome.report.fetched_tokens == came
        assert counters(cluster, outcome.prefill).failed == 1


async def test_another_tenants_prefix_is_not_lent(toy: Path, alone: Alone) -> None:
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        steer(cluster, away_from=holder, source=holder, tokens=144)
        other = replace(AGAIN, cache_salt="another")
        tokens, outcome = await cluster.generate(other)
        assert ids(tokens) == alone(AGAIN)
        assert (outcome.report.fetched_tokens, outcome.cached_tokens) == (0, 0)


async def test_who_leaves_while_the_prefix_is_under_way_leaves_nothing_behind(toy: Path) -> None:
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        steer(cluster, away_from=holder, source=holder, tokens=144, patience_s=0.6)
        hold_back(cluster, holder)
        late = replace(AGAIN, deadline_s=cluster.now() + 0.3)
        _, outcome = await cluster.generate(late)
        assert outcome.code is Code.DEADLINE
        cluster.thaw(holder)
        await cluster.settled()
        assert counters(cluster, other_than(holder)).failed == 1


async def test_without_fetching_a_prefix_is_computed_again(toy: Path, alone: Alone) -> None:
    never = config(2)
    never = replace(never, routing=replace(never.routing, fetch="never"))
    async with running(toy, never) as cluster:
        holder = await warmed(cluster, FIRST)
        steer(cluster, away_from=holder)
        tokens, outcome = await cluster.generate(AGAIN)
        assert ids(tokens) == alone(AGAIN)
        assert (outcome.report.fetched_tokens, outcome.cached_tokens) == (0, 0)


async def test_what_was_fetched_and_what_was_forgone_is_counted(toy: Path) -> None:
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        steer(cluster, away_from=holder)
        await cluster.generate(AGAIN)
        await cluster.settled()
        cluster.router._knobs = replace(cluster.router._knobs, fetch_gain=1e9)
        cluster.restart(other_than(holder))
        _, outcome = await cluster.generate(replace(AGAIN, request_id="computed"))
        assert outcome.report.fetched_tokens == 0
        shown = cluster.metrics.expose().decode()
        assert 'tandem_prefix_fetches_total{decision="chosen"} 1.0' in shown
        assert 'tandem_prefix_fetches_total{decision="forgone"} 1.0' in shown
        assert "computes rather than fetch 176 tokens from" in cluster.router.recent[-1]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"layout": "other"}, Code.MISMATCH),
        ({"model_digest": "other"}, Code.MISMATCH),
        ({"block_size": 24}, Code.MISMATCH),
        ({"keys": (b"unknown" * 3,)}, Code.NOT_FOUND),
        ({"transports": (("inproc", b"elsewhere"),)}, Code.UNAVAILABLE),
        ({"transports": ()}, Code.UNAVAILABLE),
        ({}, None),
    ],
    ids=["layout", "model", "block size", "keys", "address", "no way", "a lease that is gone"],
)
async def test_what_a_source_lends_and_what_not(toy: Path, changes: dict[str, Any], code: Code | None) -> None:
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        there, asker = cluster.info(holder), cluster.info(other_than(holder))
        question = FetchPrefix(
            fetch_id="gone",
            generation=1,
            keys=cluster.view(FIRST).prefix_keys[:4],
            skipped_tokens=0,
            destination=asker.ref,
            transports=asker.transports,
            model_digest=there.model_digest,
            layout=there.layout,
            block_size=16,
            patience_s=1.0,
        )
        answer = await cluster.ask(there.ref, replace(question, **changes))
        if code is None:
            assert answer == PrefixComing("gone", 4), "who asked has closed it meanwhile: refused, and let go"
        else:
            assert isinstance(answer, Declined)
            assert (answer.code, answer.by) == (code, holder)


async def test_more_than_a_source_can_serve_is_computed(toy: Path, alone: Alone) -> None:
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        for slot in cluster.slots.values():
            slot.worker.loans._limits = replace(slot.worker.loans._limits, most_lent=0)
        steer(cluster, away_from=holder)
        tokens, outcome = await cluster.generate(AGAIN)
        assert ids(tokens) == alone(AGAIN)
        assert (outcome.report.fetched_tokens, counters(cluster, outcome.prefill).failed) == (0, 1)


async def test_a_destination_that_dies_leaves_nothing_at_the_source(toy: Path, alone: Alone) -> None:
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        steer(cluster, away_from=holder, source=holder, tokens=144, patience_s=1.0)
        await cluster.ask(cluster.info(holder).ref, InjectFault(FaultKind.DELAY, seconds=0.2))
        asked = asyncio.create_task(cluster.generate(AGAIN))
        source = cluster.slots[holder].worker
        await cluster.until(lambda: not source.loans.idle())
        cluster.kill(other_than(holder))
        cluster.start(other_than(holder))
        tokens, outcome = await asked
        assert ids(tokens) == alone(AGAIN)
        assert outcome.attempts == 2
        await cluster.until(source.idle)


@pytest.mark.parametrize("blocks", [4, 9])
async def test_what_comes_for_an_aborted_request_is_not_its_successors(toy: Path, alone: Alone, blocks: int) -> None:
    """The same id at once again, with another prompt and from another worker that sends nothing."""
    async with running(toy, config(2)) as cluster:
        holder = await warmed(cluster, FIRST)
        source, other = cluster.info(holder).ref, cluster.info(other_than(holder)).ref
        decode = cluster.info("decode-0").ref
        once = replace(AGAIN, sampling=replace(AGAIN.sampling, max_tokens=1))
        unlike = replace(once, token_ids=tuple(reversed(once.token_ids)))
        hold_back(cluster, "decode-0")
        _, gone, told = await asyncio.gather(
            cluster.ask(other, Submit(once, decode, Fetch(source, 16 * blocks, PATIENT_S, 16))),
            cluster.ask(other, Abort(once.request_id)),
            cluster.ask(other, Submit(unlike, decode, Fetch(decode, 144, 0.3, 16))),
        )
        assert gone == Aborted(once.request_id, known=True)
        assert isinstance(told, FinishedEarly)
        assert [token.token_id for delta in told.deltas for token in delta.tokens] == alone(unlike)
        assert told.report.fetched_tokens == 0
        cluster.thaw("decode-0")
