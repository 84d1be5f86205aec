"""Pools whose blocks differ in size: the same text, all of the KV handed over, fetched and given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import TandemConfig
from engine.types import Branching, Request
from tests.cluster.local_rig import config, ids, request, running
from tests.cluster.test_local_fetch import counters, other_than, steer, warmed

Alone = Callable[[Request], list[int]]
SIZES = [(16, 32), (32, 16), (64, 16), (16, 64)]
FIRST = request("first", 160)
NEXT_TURN = replace(request("next"), token_ids=FIRST.token_ids[:150] + tuple(range(30)))


def unlike(prefill_size: int, decode_size: int, prefill: int = 1, decode: int = 1) -> TandemConfig:
    """Pools of as many tokens each."""
    settings = config(prefill, decode, prefill_blocks=1536 // prefill_size, decode_blocks=1536 // decode_size)
    pools = settings.pools
    prefills, decodes = replace(pools.prefill, block_size=prefill_size), replace(pools.decode, block_size=decode_size)
    return replace(settings, pools=replace(pools, prefill=prefills, decode=decodes))


@pytest.mark.parametrize("sizes", SIZES)
async def test_every_length_is_handed_over_whole(toy: Path, alone: Alone, sizes: tuple[int, int]) -> None:
    lengths = (1, 15, 16, 17, 33, 64, 100, 129)
    requests = [request(f"r{length}", length, salt=length) for length in lengths]
    async with running(toy, unlike(*sizes)) as cluster:
        answers = await asyncio.gather(*(cluster.generate(one) for one in requests))
        for one, (tokens, outcome) in zip(requests, answers, strict=True):
            assert ids(tokens) == alone(one)
            assert outcome.report.kv_blocks == -(-len(one.token_ids) // min(sizes)), "a piece is a block of the smaller"
            assert outcome.report.kv_bytes == outcome.report.kv_blocks * 16 * bytes_per_token(cluster.info("decode-0"))


@pytest.mark.parametrize("sizes", SIZES)
async def test_what_decode_holds_is_not_sent_again(toy: Path, alone: Alone, sizes: tuple[int, int]) -> None:
    async with running(toy, unlike(*sizes)) as cluster:
        await cluster.generate(FIRST)
        await cluster.settled()
        tokens, outcome = await cluster.generate(NEXT_TURN)
        assert ids(tokens) == alone(NEXT_TURN)
        held = 150 // sizes[1] * sizes[1]
        assert outcome.report.decode_held_tokens == held
        assert outcome.report.kv_blocks == -(-(180 - held) // min(sizes))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("source", ["peer", "decode-0"])
async def test_a_prefix_comes_from_a_worker_with_other_blocks(
    toy: Path, alone: Alone, sizes: tuple[int, int], source: str
) -> None:
    async with running(toy, unlike(*sizes, prefill=2)) as cluster:
        holder = await warmed(cluster, FIRST)
        asker = other_than(holder)
        size = max(sizes[0], cluster.info(holder if source == "peer" else source).block_size)
        steer(cluster, away_from=holder, source=holder if source == "peer" else source, tokens=150 // size * size)
        tokens, outcome = await cluster.generate(NEXT_TURN)
        assert ids(tokens) == alone(NEXT_TURN)
        assert outcome.report.fetched_tokens == 150 // size * size
        assert counters(cluster, asker).kv_bytes == outcome.report.fetched_tokens * bytes_per_token(cluster.info(asker))


async def test_a_fetch_may_begin_inside_a_block_of_its_source(toy: Path, alone: Alone) -> None:
    async with running(toy, unlike(16, 64, prefill=2)) as cluster:
        holder = await warmed(cluster, FIRST)
        asker = other_than(holder)
        steer(cluster, away_from=holder)
        await cluster.generate(replace(request("start"), token_ids=FIRST.token_ids[:32] + (9,)))
        await cluster.settled()
        steer(cluster, away_from=holder, source="decode-0", tokens=128)
        tokens, outcome = await cluster.generate(NEXT_TURN)
        assert ids(tokens) == alone(NEXT_TURN)
        assert (outcome.report.prefill_cached_tokens, outcome.report.fetched_tokens) == (128, 96)
        told = cluster.slots[asker].worker.fetches.counters()
        assert [one.failed for one in told if one.source == "decode-0"] == [0]


@pytest.mark.parametrize("sizes", SIZES)
async def test_a_running_request_moves_and_a_branching_one_is_sent_once(
    toy: Path, alone: Alone, sizes: tuple[int, int]
) -> None:
    several = replace(request("several", 40, salt=1, max_tokens=8, temperature=0.7), branching=Branching(n=3))
    long = request("r", 90, max_tokens=60, ignore_eos=True)
    async with running(toy, unlike(*sizes, decode=2)) as cluster:
        tokens, outcome = await moved(cluster, long)
        assert (ids(tokens), outcome.moves) == (alone(long), 1)
        _, outcome = await cluster.generate(several)
        assert (outcome.code, outcome.report.kv_blocks) == (None, -(-40 // min(sizes)))


async def moved(cluster, req: Request):  # type: ignore[no-untyped-def]
    """Tokens and outcome of a request that moves from one of two decode workers to the other as it runs."""
    task = asyncio.create_task(cluster.generate(req))
    await cluster.until(lambda: bool(running_on(cluster, req.request_id)))
    (there,) = running_on(cluster, req.request_id)
    await cluster.migrate(req.request_id, there, "decode-1" if there == "decode-0" else "decode-0")
    return await task


def running_on(cluster, request_id: str) -> list[str]:  # type: ignore[no-untyped-def]
    workers = {name: cluster.slots[name].worker.engine for name in ("decode-0", "decode-1")}
    return [name for name, engine in workers.items() if len(engine.generated(request_id) or ()) > 4]


def bytes_per_token(info) -> int:  # type: ignore[no-untyped-def]
    return info.block_bytes // info.block_size
