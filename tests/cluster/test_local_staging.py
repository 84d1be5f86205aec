"""Workers whose pools no transport reaches, as those in a GPU's memory: the same text, by way of staging memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import TandemConfig
from engine.types import Request
from tandem.messages import Code
from tests.cluster.local_rig import config, ids, request, running
from tests.cluster.test_local_block_sizes import NEXT_TURN, SIZES, moved, unlike
from tests.cluster.test_local_fetch import FIRST, other_than, steer, warmed

Alone = Callable[[Request], list[int]]
BLOCK_BYTES = 8192
"""Of 16 tokens of the toy model; asserted below."""


def staged(settings: TandemConfig, blocks: int = 64) -> TandemConfig:
    transfer = replace(settings.transfer, staging="always", staging_bytes=blocks * BLOCK_BYTES)
    return replace(settings, transfer=transfer)


@pytest.mark.parametrize("blocks", [16, 64])
async def test_more_requests_than_the_staging_memory_holds_end_with_the_text_of_one_engine(
    toy: Path, alone: Alone, blocks: int
) -> None:
    requests = [request(f"r{salt}", 100 + salt, salt=salt) for salt in range(6)]
    async with running(toy, staged(config(2, 1), blocks)) as cluster:
        assert cluster.info("decode-0").block_bytes == BLOCK_BYTES
        answers = await asyncio.gather(*(cluster.generate(one) for one in requests))
        assert [ids(tokens) for tokens, _ in answers] == [alone(one) for one in requests]
        (stats,) = cluster.slots["decode-0"].worker.transfers.stats()
        assert stats.staged_bytes == stats.receive_bytes >= 6 * 7 * BLOCK_BYTES


@pytest.mark.parametrize("sizes", SIZES[:2])
async def test_fetches_moves_and_blocks_of_two_sizes_go_that_way_too(
    toy: Path, alone: Alone, sizes: tuple[int, int]
) -> None:
    long = request("r", 90, salt=1, max_tokens=60, ignore_eos=True)
    async with running(toy, staged(unlike(*sizes, prefill=2, decode=2))) as cluster:
        tokens, outcome = await moved(cluster, long)
        assert (ids(tokens), outcome.moves) == (alone(long), 1)
        holder = await warmed(cluster, FIRST)
        steer(cluster, away_from=holder, source=holder, tokens=128)
        tokens, outcome = await cluster.generate(NEXT_TURN)
        assert (ids(tokens), outcome.report.fetched_tokens) == (alone(NEXT_TURN), 128)
        assert outcome.prefill == other_than(holder)


async def test_a_prompt_that_can_never_land_is_refused_with_the_remedy(toy: Path, alone: Alone) -> None:
    async with running(toy, staged(config(), 4)) as cluster:
        _, outcome = await asyncio.wait_for(cluster.generate(request("r", 200)), 5)
        assert outcome.code is Code.INVALID
        assert "raise transfer.staging_memory" in outcome.message
        small = request("s", 40)
        assert ids((await cluster.generate(small))[0]) == alone(small)


@pytest.mark.parametrize("sizes", [(16, 16), *SIZES[:2]])
async def test_clients_that_leave_at_any_moment_hold_neither_blocks_nor_staging_memory(
    toy: Path, alone: Alone, sizes: tuple[int, int]
) -> None:
    """On a region that is too small for all of them at once."""
    async with running(toy, staged(unlike(*sizes), 24)) as cluster:
        for turns in range(0, 60, 4):
            leaving = [request(f"{turns}-{place}", 90 + place, salt=turns + place, max_tokens=40) for place in range(4)]
            tasks = [asyncio.create_task(cluster.generate(one)) for one in leaving]
            for _ in range(turns):
                await asyncio.sleep(0)
            for one in leaving[:3]:
                cluster.dispatch.abort(one.request_id)
            answers = await asyncio.wait_for(asyncio.gather(*tasks), 20)
            assert all(outcome.code in (None, Code.ABORTED) for _, outcome in answers)
            tokens, outcome = answers[3]
            assert (ids(tokens), outcome.code) == (alone(leaving[3]), None)
