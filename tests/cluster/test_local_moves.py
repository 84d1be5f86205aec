"""Running requests move between decode workers of a whole cluster: the same text at any moment, whoever dies."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from cluster.http_server import HttpSettings, build_app
from cluster.local import LocalCluster
from engine.types import Branching, FinishReason, Request
from tandem.messages import Code, Declined, FaultInjected, FaultKind, InjectFault, Migrated
from tests.cluster.local_rig import config, ids, request, running

Alone = Callable[[Request], list[int]]
DECODE = ("decode-0", "decode-1")


def where(cluster: LocalCluster, request_id: str) -> tuple[str, int]:
    """On which decode worker it decodes, and how many tokens it has; ("", 0) when on none."""
    for name in DECODE:
        generated = cluster.slots[name].worker.engine.generated(request_id) if name in cluster.slots else None
        if generated is not None:
            return name, len(generated)
    return "", 0


async def decoding(cluster: LocalCluster, request_id: str, tokens: int = 1) -> tuple[str, str]:
    """Where it decodes, once it has so many tokens, and the other worker."""
    await cluster.until(lambda: where(cluster, request_id)[1] >= tokens)
    source = where(cluster, request_id)[0]
    return source, next(name for name in DECODE if name != source)


@pytest.mark.parametrize("seed", range(4))
async def test_a_move_at_any_step_changes_no_token(toy: Path, alone: Alone, seed: int) -> None:
    chance = random.Random(seed)
    sampling: dict[str, object] = {"temperature": 0.9, "seed": seed, "frequency_penalty": 0.3} if seed % 2 else {}
    reqs = [
        request(f"r{i}", chance.randrange(5, 150), salt=i, max_tokens=70, ignore_eos=True, **sampling) for i in range(3)
    ]
    async with running(toy, config(1, 2)) as cluster:
        tasks = [asyncio.create_task(cluster.generate(req)) for req in reqs]
        for req in reqs:
            source, other = await decoding(cluster, req.request_id, chance.randrange(1, 40))
            answer = await cluster.migrate(req.request_id, source, other)
            assert isinstance(answer, Migrated), answer
        for req, task in zip(reqs, tasks, strict=True):
            tokens, outcome = await task
            assert ids(tokens) == alone(req)
            assert (outcome.code, outcome.finish, outcome.moves) == (None, FinishReason.LENGTH, 1)
        again = replace(reqs[0], request_id="again")
        assert ids((await cluster.generate(again))[0]) == alone(again)


async def test_draining_a_worker_empties_it_and_its_streams_go_on(toy: Path, alone: Alone) -> None:
    reqs = [request(f"r{i}", 40 + 20 * i, salt=i, max_tokens=150, ignore_eos=True) for i in range(4)]
    async with running(toy, config(1, 2)) as cluster:
        await cluster.drain("decode-1")
        await cluster.until(lambda: "decode-1 is draining" in cluster.router._why_not("decode"))
        tasks = [asyncio.create_task(cluster.generate(req)) for req in reqs]
        for req in reqs:
            assert (await decoding(cluster, req.request_id, 5))[0] == "decode-0"
        await cluster.drain("decode-1", False)
        await cluster.drain("decode-0")
        await cluster.until(cluster.slots["decode-0"].worker.idle)
        assert not any(task.done() for task in tasks)
        load = cluster.slots["decode-0"].worker.engine.load(0.0)
        assert load.free_blocks + load.cached_blocks == load.total_blocks
        for req, task in zip(reqs, tasks, strict=True):
            tokens, outcome = await task
            assert ids(tokens) == alone(req)
            assert (outcome.code, outcome.decode, outcome.moves) == (None, "decode-1", 1)
        await cluster.settled()
        assert len(cluster.router.ledger) == 0
        told = cluster.metrics.expose().decode()
        assert 'tandem_worker_migrations_total{result="moved",worker="decode-0"} 4.0' in told
        assert "tandem_request_moves_total 4.0" in told
        tokens, outcome = await cluster.generate(request("after"))
        assert outcome.decode == "decode-1"


async def test_a_restarted_router_gives_a_drained_worker_nothing(toy: Path) -> None:
    async with running(toy, config(1, 2)) as cluster:
        await cluster.drain("decode-0")
        cluster.restart_router()
        outcomes = [(await cluster.generate(request(f"r{i}", salt=i)))[1] for i in range(4)]
        assert {(one.decode, one.attempts) for one in outcomes} == {("decode-1", 1)}


async def test_a_draining_worker_finishes_what_fits_nowhere(toy: Path, alone: Alone) -> None:
    several = replace(request("several", 40, max_tokens=40, temperature=0.7), branching=Branching(n=2))
    req = request("r", 60, max_tokens=60, ignore_eos=True)
    async with running(toy, config(1, 1)) as cluster:
        tasks = [asyncio.create_task(cluster.generate(one)) for one in (several, req)]
        await cluster.until(lambda: bool(cluster.slots["decode-0"].worker.engine.generated("r")))
        await cluster.drain("decode-0")
        _, (tokens, outcome) = await asyncio.gather(*tasks)
        assert ids(tokens) == alone(req)
        assert (outcome.code, outcome.decode, outcome.moves) == (None, "decode-0", 0)
        assert all(one.code is None for one in cluster.outcomes)
        await cluster.drain("decode-0", False)


async def test_several_sequences_stay_together(toy: Path) -> None:
    several = replace(request("s", 40, max_tokens=40, temperature=0.7, ignore_eos=True), branching=Branching(n=2))
    async with running(toy, config(1, 2)) as cluster:
        task = asyncio.create_task(cluster.generate(several))
        await cluster.until(lambda: any(cluster.slots[name].worker.engine.load(0.0).running > 1 for name in DECODE))
        source = next(name for name in DECODE if cluster.slots[name].worker.engine.load(0.0).running)
        answer = await cluster.migrate("s", source, next(name for name in DECODE if name != source))
        assert isinstance(answer, Declined)
        assert answer.code is Code.INVALID
        await cluster.drain(source)
        tokens, outcome = await task
        assert (len(tokens), outcome.code, outcome.moves) == (80, None, 0)
        await cluster.drain(source, False)


@pytest.mark.parametrize("turns", [1, 3, 6])
@pytest.mark.parametrize("how", ["abort", "deadline", "kill destination", "kill source"])
async def test_what_ends_during_a_move_ends_cleanly(toy: Path, alone: Alone, how: str, turns: int) -> None:
    skipped_s = 0.0
    settings = config(1, 2)
    if how == "deadline":  # nothing else may run out in the time that is skipped
        settings = replace(settings, timeouts=replace(settings.timeouts, lease_s=90.0, suspect_s=90.0, fence_s=120.0))
    async with running(toy, settings, clock=lambda: time.monotonic() + skipped_s) as cluster:
        req = replace(request("r", 200, max_tokens=90, ignore_eos=True), deadline_s=time.monotonic() + 60.0)
        task = asyncio.create_task(cluster.generate(req))
        source, other = await decoding(cluster, "r", 4)
        moving = asyncio.create_task(cluster.migrate("r", source, other))
        for _ in range(turns):
            await asyncio.sleep(0)
        if how == "abort":
            cluster.dispatch.abort("r")
        elif how == "deadline":
            skipped_s = 60.0
        else:
            cluster.kill(other if how == "kill destination" else source)
        tokens, outcome = await asyncio.wait_for(task, 10)
        assert ids(tokens) == alone(req)[: len(tokens)]
        if how.startswith("kill"):
            assert (outcome.code, ids(tokens)) == (None, alone(req))
        assert outcome.code in (None, Code.ABORTED, Code.DEADLINE)
        assert how != "deadline" or outcome.code is Code.DEADLINE
        await moving


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.CORRUPT])
async def test_a_failed_copy_is_not_noticed_by_the_client(toy: Path, alone: Alone, kind: FaultKind, nth: int) -> None:
    req = request("r", 200, max_tokens=60, ignore_eos=True)
    async with running(toy, config(1, 2)) as cluster:
        task = asyncio.create_task(cluster.generate(req))
        source, other = await decoding(cluster, "r", 4)
        at_fault = other if kind is FaultKind.CORRUPT else source
        assert await cluster.ask(cluster.info(at_fault).ref, InjectFault(kind, nth)) == FaultInjected()
        answer = await cluster.migrate("r", source, other)
        assert isinstance(answer, Declined)
        tokens, outcome = await task
        assert (ids(tokens), outcome.code, outcome.moves) == (alone(req), None, 0)


async def test_a_stream_over_http_has_no_hole_and_no_repetition(toy: Path) -> None:
    body = {"model": "toy", "prompt": list(range(60)), "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    async with running(toy, config(1, 2)) as cluster:
        app = build_app(cluster.gateway, HttpSettings(api_key=None, max_body_bytes=1 << 20))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            task = asyncio.create_task(client.post("/v1/completions", json=body | {"stream": True}))
            for tokens in (10, 50):
                await cluster.until(lambda: bool(running_id(cluster)))
                request_id = running_id(cluster)
                source, other = await decoding(cluster, request_id, tokens)
                assert isinstance(await cluster.migrate(request_id, source, other), Migrated)
            lines = [line.removeprefix("data: ") for line in (await task).text.splitlines() if line]
            assert lines.pop() == "[DONE]"
            events = [json.loads(line) for line in lines]
            assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == whole
        assert cluster.outcomes[-1].moves == 2


def running_id(cluster: LocalCluster) -> str:
    names = {one for name in DECODE for one in cluster.slots[name].worker.decode.request_ids()}
    return next((one for one in names if where(cluster, one)[0]), "")
