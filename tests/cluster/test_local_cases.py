"""What operators of such systems have met, tried on the whole cluster in one process: requests too large, pools too
small, workers that die unnoticed, routers that know little, tenants that must not see each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.gateway import Piece
from cluster.local import LocalCluster
from cluster.validate import Ask, RequestFailed
from engine.types import Request, SamplingParams
from tandem.messages import Code, FaultInjected, FaultKind, InjectFault, KvEvents
from tests.cluster.local_rig import SOON, config, ids, request, running

Alone = Callable[[Request], list[int]]
TOKENS = SamplingParams(temperature=0.0, ignore_eos=True)


async def ask(cluster: LocalCluster, prompt: str | tuple[int, ...], max_tokens: int = 4, **more: object) -> Piece:
    """One prompt through the gateway; its last piece."""
    job = await cluster.gateway.prepare(Ask(prompts=(prompt,), sampling=TOKENS, max_tokens=max_tokens, **more))  # type: ignore[arg-type]
    return [piece async for piece in cluster.gateway.answer(job, 0)][-1]


# -- a request larger than the pool -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "max_tokens", "field"),
    [(255, 1, ""), (256, 1, "prompt"), (257, 1, "prompt"), (300, 1, "prompt"), (200, 56, ""), (200, 200, "max_tokens")],
)
async def test_what_cannot_fit_the_pool_is_refused_at_once_and_the_next_is_served(
    toy: Path, length: int, max_tokens: int, field: str
) -> None:
    async with running(toy, config(prefill_blocks=16, decode_blocks=16)) as cluster:
        prompt = tuple(i % 250 for i in range(length))
        if field:
            with pytest.raises(RequestFailed, match=r"\b256 tokens") as refused:
                await ask(cluster, prompt, max_tokens)
            assert refused.value.code is Code.INVALID
            assert not any(slot.worker.engine.load(0.0).prompt_tokens for slot in cluster.slots.values())
        else:
            last = await ask(cluster, prompt, max_tokens)
            assert last.outcome is not None
            assert last.outcome.completion_tokens == max_tokens
        small = await asyncio.wait_for(ask(cluster, tuple(range(10))), 5)
        assert small.outcome is not None
        await cluster.settled()
        assert not any(slot.worker.engine.has_work() for slot in cluster.slots.values()), "an idle worker spins"


# -- KV full --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("length", "max_tokens"), [(200, 56), (100, 156)])
@pytest.mark.parametrize("local", ["never", "always"])
async def test_six_requests_of_four_fifths_of_the_pool_all_finish(
    toy: Path, alone: Alone, caching: bool, length: int, max_tokens: int, local: str
) -> None:
    reqs = [request(f"r{i}", length, salt=i, max_tokens=max_tokens, ignore_eos=True) for i in range(6)]
    settings = config(
        prefill=0 if local == "always" else 1,
        local=local,
        prefill_blocks=20,
        decode_blocks=20,
        prefix_caching=caching,
    )
    async with running(toy, settings) as cluster:
        started = time.monotonic()
        await cluster.generate(replace(reqs[0], request_id="first"))
        alone_s = time.monotonic() - started
        started = time.monotonic()
        answers = await asyncio.gather(*(cluster.generate(req) for req in reqs))
        took_s = time.monotonic() - started
        for req, (tokens, outcome) in zip(reqs, answers, strict=True):
            assert ids(tokens) == alone(req), outcome
        assert took_s < 3 * 6 * alone_s + 5
        preempted = sum(slot.worker.engine.load(0.0).preemptions for slot in cluster.slots.values())
        assert preempted <= 12, "they thrash"


@pytest.mark.parametrize("leave", ["abort", "cancel"])
async def test_clients_that_leave_while_they_wait_for_room_keep_no_place(toy: Path, alone: Alone, leave: str) -> None:
    """Their claims would outlast the test by far; the one that stays is the youngest."""
    async with running(toy, config(decode_blocks=24, prefix_caching=False)) as cluster:
        decode, engine = (getattr(cluster.slots["decode-0"].worker, name) for name in ("decode", "engine"))
        decode._limits = replace(decode._limits, claim_s=600.0)
        for turn in range(5):
            reqs = [request(f"{turn}-{i}", 250, salt=4 * turn + i, max_tokens=40, ignore_eos=True) for i in range(4)]
            tasks = [asyncio.create_task(cluster.generate(req)) for req in reqs]
            await cluster.until(lambda: len(decode._claims) >= 2)
            for req, task in zip(reqs[:3], tasks[:3], strict=True):
                task.cancel() if leave == "cancel" else cluster.dispatch.abort(req.request_id)
            await asyncio.wait(tasks[:3])
            await cluster.dispatch.drained()
            assert {claim.wish.key for claim in decode._claims} <= {reqs[3].request_id}
            tokens, outcome = await asyncio.wait_for(tasks[3], 15)
            assert (ids(tokens), outcome.code) == (alone(reqs[3]), None)
            await cluster.settled()
            assert decode._claims == ()
            assert engine.load(cluster.now()).free_blocks == 24


# -- dead workers -----------------------------------------------------------------------------------------------------

NOT_SOON_BACK = replace(config(), timeouts=replace(SOON, restart_backoff_s=60.0))


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_worker_that_died_unnoticed_costs_one_retry_and_gets_nothing_more(
    toy: Path, alone: Alone, victim: str
) -> None:
    async with running(toy, config(2, 2)) as cluster:
        cluster.kill(victim, noticed=False)
        outcomes = []
        for i in range(8):
            req = request(f"r{i}", salt=i)
            tokens, outcome = await cluster.generate(req)
            assert ids(tokens) == alone(req)
            outcomes.append(outcome)
        assert victim not in {name for outcome in outcomes for name in (outcome.prefill, outcome.decode)}
        assert [outcome.attempts for outcome in outcomes if outcome.attempts > 1] == [2]
        await cluster.until(lambda: victim in cluster.slots)
        await asyncio.gather(*(cluster.generate(request(f"s{i}", salt=20 + i)) for i in range(8)))
        served = {name for outcome in cluster.outcomes[-8:] for name in (outcome.prefill, outcome.decode)}
        assert victim in served, "traffic comes back after the restart"


async def test_without_any_worker_a_request_is_unavailable_at_once(toy: Path) -> None:
    async with running(toy, NOT_SOON_BACK) as cluster:
        await ask(cluster, "hello")
        for name in tuple(cluster.slots):
            cluster.kill(name)
        started = time.monotonic()
        with pytest.raises(RequestFailed) as refused:
            await ask(cluster, "hello")
        tokens, outcome = await cluster.generate(request("r"))
        assert (refused.value.code, outcome.code, tokens) == (Code.UNAVAILABLE, Code.UNAVAILABLE, ())
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_when_the_only_worker_fails_in_the_middle_the_client_hears_unavailable(toy: Path, victim: str) -> None:
    async with running(toy, NOT_SOON_BACK) as cluster:
        task = asyncio.create_task(cluster.generate(request("r", 300, max_tokens=100)))
        await cluster.until(lambda: bool(cluster.slots[victim].worker.request_ids()))
        cluster.kill(victim)
        tokens, outcome = await asyncio.wait_for(task, 10)
        assert (outcome.code, tokens) == (Code.UNAVAILABLE, ())


# -- a transfer that never ends ---------------------------------------------------------------------------------------


async def test_after_a_transfer_that_hung_the_same_pair_works_again_by_itself(toy: Path, alone: Alone) -> None:
    async with running(toy, config()) as cluster:
        refs = {name: slot.ref for name, slot in cluster.slots.items()}
        fault = InjectFault(FaultKind.DROP)
        assert await cluster.ask(cluster.info("prefill-0").ref, fault) == FaultInjected()
        hung = replace(request("hung", 150), deadline_s=cluster.now() + 1.0)
        tokens, outcome = await cluster.generate(hung)
        assert (tokens, outcome.code) == ((), Code.DEADLINE)
        tokens, outcome = await cluster.generate(request("beside", 150, salt=1))
        assert ids(tokens) == alone(request("beside", 150, salt=1)), "the hung one holds nobody up"
        await cluster.settled()
        tokens, outcome = await cluster.generate(request("after", 150, salt=2))
        assert ids(tokens) == alone(request("after", 150, salt=2)), "it waits until the pair has cooled down"
        assert {name: slot.ref for name, slot in cluster.slots.items()} == refs, "nobody had to be restarted"


# -- no usable information --------------------------------------------------------------------------------------------


async def test_service_goes_on_without_reports_and_events(
    toy: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(toy, config()) as cluster:
        monkeypatch.setattr(cluster.router, "report", lambda report, now: False)
        monkeypatch.setattr(cluster.router, "kv_events", lambda events: False)
        before = {name: slot.ref for name, slot in cluster.slots.items()}
        blind_from_s = cluster.now()
        while cluster.now() < blind_from_s + 3 * cluster.config.timeouts.fence_s:
            tokens, outcome = await cluster.generate(request("r", 100, max_tokens=60))
            assert outcome.code is None
            assert outcome.attempts == 1
        assert ids(tokens) == alone(request("r", 100, max_tokens=60))
        assert {name: slot.ref for name, slot in cluster.slots.items()} == before, "nobody was fenced for it"


async def test_every_kind_of_request_passes_the_prefix_aware_policy(toy: Path) -> None:
    async with running(toy, config()) as cluster:
        asks = (
            Ask(prompts=((1, 2, 3),), sampling=TOKENS, max_tokens=2),
            Ask(prompts=("short",), sampling=TOKENS, max_tokens=2),
            Ask(prompts=("long " * 40,), sampling=replace(TOKENS, prompt_logprobs=0), max_tokens=2),
            Ask(messages=({"role": "user", "content": "hello"},), sampling=TOKENS, max_tokens=2),
        )
        for one in asks:
            job = await cluster.gateway.prepare(one)
            pieces = [piece async for piece in cluster.gateway.answer(job, 0)]
            assert pieces[-1].outcome is not None
            assert pieces[-1].outcome.completion_tokens == 2
        empty = Ask(messages=({"role": "user", "content": ""},), sampling=TOKENS, max_tokens=2)
        with pytest.raises(RequestFailed, match="must not be empty"):
            await cluster.gateway.prepare(empty)


# -- what the router knows of prefixes --------------------------------------------------------------------------------


def overlaps(cluster: LocalCluster, req: Request) -> dict[str, int]:
    """Prompt tokens that the router believes each worker holds."""
    return dict(cluster.router.snapshot(cluster.view(req), frozenset(), cluster.now()).overlaps)


BOTH = {"prefill-0": 160, "decode-0": 160}


async def test_lost_events_mean_no_hits_until_the_worker_has_told_again(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = request("a", 160), request("b", 170, salt=1)
    async with running(toy, config()) as cluster:
        await cluster.generate(first)
        await cluster.until(lambda: overlaps(cluster, first) == BOTH)
        with monkeypatch.context() as lossy:
            lossy.setattr(cluster.router, "kv_events", lambda events: False)
            await cluster.generate(second)
            await cluster.until(lambda: len(cluster.router.stale_indexes()) == 2)
            assert overlaps(cluster, first) == {}
            _, outcome = await cluster.generate(replace(first, request_id="blind"))
            assert outcome.code is None
        await cluster.until(lambda: not cluster.router.stale_indexes())
        assert overlaps(cluster, first) == BOTH
        assert overlaps(cluster, second) == BOTH
        _, outcome = await cluster.generate(replace(first, request_id="c"))
        assert outcome.placement_reason == "prefix held"


async def test_a_restarted_router_knows_prefixes_again(toy: Path) -> None:
    first = request("a", 160)
    async with running(toy, config()) as cluster:
        await cluster.generate(first)
        cluster.restart_router()
        assert overlaps(cluster, first) == {}
        await cluster.until(lambda: overlaps(cluster, first) == BOTH)
        _, outcome = await cluster.generate(replace(first, request_id="b"))
        assert (outcome.placement_reason, outcome.report.decode_held_tokens) == ("prefix held", 160)


async def test_what_was_evicted_before_the_retelling_is_not_in_it(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = request("a", 160)
    async with running(toy, config(prefill_blocks=24, decode_blocks=24)) as cluster:
        await cluster.generate(first)
        cluster.restart_router()
        for i in range(4):
            await cluster.generate(request(f"r{i}", 160, salt=i + 1))
        await cluster.until(lambda: not cluster.router.stale_indexes() and cluster.router.index.held("decode-0") > 0)
        assert overlaps(cluster, first) == {}
        for slot in cluster.slots.values():
            slot.worker.check()


async def test_a_large_retelling_comes_in_parts(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.worker.KEYS_PER_EVENT", 4)
    first = request("a", 160)
    async with running(toy, config()) as cluster:
        await cluster.generate(first)
        parts: list[KvEvents] = []
        cluster.restart_router()
        hear = cluster.router.kv_events
        monkeypatch.setattr(cluster.router, "kv_events", lambda events: parts.append(events) or hear(events))
        await cluster.until(lambda: overlaps(cluster, first) == BOTH)
        told = [event for event in parts if event.worker == "decode-0"]
        assert [len(event.stored) for event in told] == [4, 4, 2]
        assert [event.cleared for event in told] == [True, False, False]


# -- tenants ----------------------------------------------------------------------------------------------------------


async def test_prefixes_are_shared_within_a_salt_and_nowhere_else(toy: Path) -> None:
    base = request("r", 320)

    def salted(request_id: str, salt: str) -> Request:
        return replace(base, request_id=request_id, cache_salt=salt)

    async with running(toy, config()) as cluster:
        cold: dict[str, tuple[int, ...]] = {}
        for salt in ("a", "b", "", "ab"):
            assert overlaps(cluster, salted("?", salt)) == {}, "the router sees another tenant's prefix"
            tokens, outcome = await cluster.generate(salted(f"cold-{salt}", salt))
            assert (outcome.cached_tokens, outcome.report.decode_held_tokens) == (0, 0)
            cold[salt] = tuple(ids(tokens))
            await cluster.until(lambda salt=salt: len(overlaps(cluster, salted("?", salt))) == 2)  # type: ignore[misc]
            tokens, outcome = await cluster.generate(salted(f"warm-{salt}", salt))
            assert outcome.cached_tokens >= 304
            assert outcome.report.decode_held_tokens == 320
            assert outcome.placement_reason == "prefix held"
            assert tuple(ids(tokens)) == cold[salt]
        assert len(set(cold.values())) == 1, "a salt changes what is shared, not what is said"


async def test_a_restarted_worker_holds_nobodys_prefix(toy: Path) -> None:
    warm = replace(request("a", 320), cache_salt="a")
    async with running(toy, config()) as cluster:
        await cluster.generate(warm)
        await cluster.until(lambda: len(overlaps(cluster, warm)) == 2)
        cluster.restart("decode-0")
        assert overlaps(cluster, warm) == {"prefill-0": 320}
        _, outcome = await cluster.generate(replace(warm, request_id="b"))
        assert outcome.code is None
        assert outcome.report.decode_held_tokens == 0
        assert outcome.cached_tokens >= 304
