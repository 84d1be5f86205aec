"""How fast a pair moves KV is measured before anybody waits for it, and at nobody's expense."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import link_probe
from cluster.config import TandemConfig, TransferSection
from cluster.local import LocalCluster
from cluster.probe_turns import AGAIN_S, MOST_TRIES, Pair, ProbeTurns
from engine.types import Request
from kvtransfer.faults import Fault
from tandem.messages import Answer, Code, Declined, ProbeLink, ProbeSent, ProbingLink, SendProbe, WorkerRef
from tests.cluster.local_rig import config, ids, request, running

Alone = Callable[[Request], list[int]]
ENOUGH = 1200
"""Blocks of 8 KiB: twice a round, and some."""


def roomy(**pools: int) -> TandemConfig:
    return config(prefill_blocks=ENOUGH, decode_blocks=ENOUGH, **pools)


async def probe(cluster: LocalCluster, source: str = "prefill-0", destination: str = "decode-0") -> Answer:
    return await cluster.ask(cluster.info(destination).ref, ProbeLink(cluster.info(source).ref))


def all_free(cluster: LocalCluster) -> bool:
    loads = [slot.worker.engine.load(0.0) for slot in cluster.slots.values()]
    return all(load.free_blocks + load.cached_blocks == load.total_blocks for load in loads)


def hang(cluster: LocalCluster) -> None:
    """What the source sends is lost, and its silence is not borne for long."""
    source = cluster.slots["prefill-0"].worker
    source.transfers.faults.add(Fault.DROP)
    source.links._limits = replace(source.links._limits, quiet_patience_s=0.1)


async def test_an_idle_pair_is_measured_and_everybody_can_see_it(toy: Path) -> None:
    async with running(toy, roomy()) as cluster:
        await cluster.until(lambda: bool(cluster.router.probes_due(cluster.now())))
        assert isinstance(await probe(cluster), ProbingLink)
        pair = ("prefill-0", "decode-0")
        await cluster.until(lambda: pair in cluster.router.snapshot(cluster.view(request("r")), frozenset(), 0.0).links)
        await cluster.settled()
        (rate,) = cluster.router.loads()["prefill-0"].links
        assert (rate.peer, rate.scheme) == ("decode-0", "inproc")
        assert 0 < rate.bytes_per_s <= rate.best_bytes_per_s
        assert rate.limit_bytes_per_s > 0
        told = cluster.metrics.expose().decode()
        for name in ("rate", "best_rate", "rate_limit"):
            series = f'tandem_transfer_{name}_bytes_per_second{{peer="decode-0",scheme="inproc",worker="prefill-0"}}'
            assert series in told
        assert all_free(cluster)
        sent = cluster.slots["prefill-0"].worker.transfers.stats()[0].push_bytes
        assert sent == link_probe.ROUNDS * link_probe.ROUND_BYTES <= 16 * 2**20
        later = cluster.router.probes_due(cluster.now() + 2 * AGAIN_S)
        assert Pair(cluster.info("prefill-0").ref, cluster.info("decode-0").ref) not in later


async def test_a_config_without_probes_leaves_idle_pairs_alone(toy: Path) -> None:
    settings = roomy()
    async with running(toy, settings) as cluster:
        await cluster.until(lambda: bool(cluster.router.probes_due(cluster.now())))
        cluster.router._config = replace(settings, transfer=TransferSection(link_probes=False))
        assert cluster.router.probes_due(cluster.now() + 2 * AGAIN_S) == ()


async def test_what_was_measured_of_a_worker_goes_with_it(toy: Path) -> None:
    async with running(toy, roomy()) as cluster:
        await probe(cluster)
        await cluster.until(lambda: bool(cluster.router.loads()["prefill-0"].links))
        cluster.restart("decode-0")
        assert not cluster.router.snapshot(cluster.view(request("r")), frozenset(), 0.0).links
        await cluster.until(lambda: bool(cluster.router.probes_due(cluster.now())))


async def test_work_comes_first(toy: Path, alone: Alone) -> None:
    """A probe that hangs at either end ends when a request comes, and the request waits for nothing."""
    async with running(toy, roomy()) as cluster:
        hang(cluster)
        for slot in cluster.slots.values():
            slot.worker.links._limits = replace(slot.worker.links._limits, deadline_s=60.0, quiet_patience_s=0.1)
        assert isinstance(await probe(cluster), ProbingLink)
        await cluster.until(lambda: not cluster.slots["prefill-0"].worker.links.idle())
        tokens, outcome = await asyncio.wait_for(cluster.generate(request("r")), 10.0)
        assert ids(tokens) == alone(request("r"))
        assert outcome.code is None
        await cluster.until(lambda: all(slot.worker.links.idle() for slot in cluster.slots.values()))
        assert all_free(cluster)


async def test_a_worker_that_has_something_to_do_is_not_probed(toy: Path, alone: Alone) -> None:
    req = request("r", max_tokens=80, ignore_eos=True)
    async with running(toy, roomy()) as cluster:
        task = asyncio.create_task(cluster.generate(req))
        await cluster.until(lambda: bool(cluster.slots["decode-0"].worker.engine.generated("r")))
        answer = await probe(cluster)
        assert isinstance(answer, Declined)
        assert answer.code is Code.NO_ROOM
        assert ids((await task)[0]) == alone(req)


@pytest.mark.parametrize("how", ["lost bytes", "a dead source", "a busy source"])
async def test_a_probe_that_goes_wrong_is_over_at_its_deadline(toy: Path, how: str) -> None:
    async with running(toy, roomy()) as cluster:
        source = cluster.slots["prefill-0"].worker
        if how == "lost bytes":
            hang(cluster)
        elif how == "a busy source":
            source.links._busy = lambda: True
        ref = cluster.info("prefill-0").ref
        if how == "a dead source":
            cluster.kill("prefill-0")
        assert isinstance(await cluster.ask(cluster.info("decode-0").ref, ProbeLink(ref)), ProbingLink)
        began = cluster.now()
        await cluster.until(lambda: cluster.slots["decode-0"].worker.links.idle())
        assert cluster.now() - began < 5.0
        await cluster.settled()
        assert all_free(cluster)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"span_bytes": 24}, Code.MISMATCH),
        ({"transports": ()}, Code.UNAVAILABLE),
        ({"num_spans": ENOUGH}, Code.NO_ROOM),
        ({}, None),
    ],
    ids=["odd spans", "no way", "too much", "a lease that is gone"],
)
async def test_what_a_source_sends_for_a_probe_and_what_not(
    toy: Path, changes: dict[str, Any], code: Code | None
) -> None:
    async with running(toy, roomy()) as cluster:
        asker, there = cluster.info("decode-0"), cluster.info("prefill-0")
        question = SendProbe("gone", 1, 4, 2, asker.ref, asker.transports, asker.block_bytes)
        answer = await cluster.ask(there.ref, replace(question, **changes))
        if code is None:
            assert answer == ProbeSent("gone")
        else:
            assert isinstance(answer, Declined)
            assert (answer.code, answer.by) == (code, "prefill-0")


@pytest.mark.parametrize(("blocks", "source", "code"), [(96, 0, Code.NO_ROOM), (ENOUGH, 1, Code.INVALID)])
async def test_what_a_destination_declines(toy: Path, blocks: int, source: int, code: Code) -> None:
    async with running(toy, config(decode_blocks=blocks)) as cluster:
        answer = await probe(cluster, ("prefill-0", "decode-0")[source])
        assert isinstance(answer, Declined)
        assert answer.code is code


def ref(name: str, incarnation: str = "1") -> WorkerRef:
    return WorkerRef(name, incarnation, f"{name}:1")


def test_a_worker_is_in_one_probe_at_a_time_and_a_pair_is_tried_a_few_times() -> None:
    pairs = [Pair(ref(source), ref(there)) for there in ("d0", "d1") for source in ("p0", "p1")]
    turns = ProbeTurns()
    assert turns.due(pairs, 0.0) == (pairs[0], pairs[3])
    assert turns.due(pairs, 0.1) == (pairs[1], pairs[2])
    assert turns.due(pairs, 0.2) == ()
    for again in range(1, MOST_TRIES):
        assert turns.due(pairs[:1], again * (AGAIN_S + 0.1)) == (pairs[0],)
    assert turns.due(pairs[:1], 1e6) == ()
    turns.forget("d0")
    assert turns.due(pairs[:1], 1e6) == (pairs[0],)
