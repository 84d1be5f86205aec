"""The whole cluster in one process: right text or an error, whatever dies, and nothing held afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import PoolsSection
from cluster.local import LocalCluster
from cluster.validate import Ask
from engine.config import EngineConfig
from engine.engine import Engine
from engine.toy import make_toy_checkpoint
from engine.types import FinishReason, Request, SamplingParams
from tandem.messages import Code, FaultInjected, FaultKind, InjectFault
from tests.cluster.local_rig import POOL, config, ids, request, running


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2)])
async def test_a_burst_reads_as_from_one_engine(
    toy: Path, alone: Callable[[Request], list[int]], shape: tuple[int, int]
) -> None:
    reqs = [request(f"r{i}", 20 + 30 * i, salt=i % 2, max_tokens=4 + i) for i in range(8)]
    async with running(toy, config(*shape)) as cluster:
        answers = await asyncio.gather(*(cluster.generate(req) for req in reqs))
        for req, (tokens, outcome) in zip(reqs, answers, strict=True):
            assert ids(tokens) == alone(req)
            assert outcome.code is None
            assert outcome.report.transport == "inproc"


async def test_the_second_turn_of_a_chat_is_found_on_both_sides(
    toy: Path, alone: Callable[[Request], list[int]]
) -> None:
    first = request("a", 64)
    second = replace(request("b"), token_ids=first.token_ids + tuple(range(40)))
    async with running(toy, config()) as cluster:
        await cluster.generate(first)
        tokens, outcome = await cluster.generate(second)
        assert ids(tokens) == alone(second)
        assert outcome.report.decode_held_tokens == 64
        assert outcome.cached_tokens == 64


async def test_local_prefill_moves_nothing(toy: Path, alone: Callable[[Request], list[int]]) -> None:
    async with running(toy, config(prefill=0, local="auto")) as cluster:
        tokens, outcome = await cluster.generate(request("r"))
        assert ids(tokens) == alone(request("r"))
        assert (outcome.report.kv_blocks, outcome.decode) == (0, "decode-0")


async def test_text_goes_through_the_gateway(toy: Path) -> None:
    async with running(toy, config()) as cluster:
        ask = Ask(prompts=("the quick brown fox jumps over the lazy dog",), max_tokens=12)
        job = await cluster.gateway.prepare(replace(ask, sampling=SamplingParams(temperature=0.0)))
        pieces = [piece async for piece in cluster.gateway.answer(job, 0)]
        assert "".join(piece.text for piece in pieces)
        assert pieces[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("extra", [{"max_tokens": 1}, {"stop": True}])
async def test_an_answer_of_one_token_never_starts_decode(
    toy: Path, alone: Callable[[Request], list[int]], extra: dict[str, object]
) -> None:
    req = request("r")
    if extra.pop("stop", False):
        extra["stop_token_ids"] = (alone(req)[0],)
    async with running(toy, config()) as cluster:
        tokens, outcome = await cluster.generate(request("r", **extra))
        assert ids(tokens) == alone(req)[:1]
        assert (outcome.decode, outcome.code) == ("", None)
        assert cluster.slots["decode-0"].worker.engine.load(0.0).generated_tokens == 0


async def test_a_full_decode_pool_serves_everybody_in_the_end(toy: Path, alone: Callable[[Request], list[int]]) -> None:
    reqs = [request(f"r{i}", 80, salt=i, max_tokens=10) for i in range(8)]
    async with running(toy, config(decode_blocks=14)) as cluster:
        answers = await asyncio.gather(*(cluster.generate(req) for req in reqs))
        for req, (tokens, outcome) in zip(reqs, answers, strict=True):
            assert ids(tokens) == alone(req), outcome


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_killed_worker_costs_no_wrong_answer_and_no_traffic(
    toy: Path, alone: Callable[[Request], list[int]], victim: str
) -> None:
    reqs = [request(f"r{i}", 150, salt=i, max_tokens=30) for i in range(6)]
    async with running(toy, config(2, 2)) as cluster:
        started = time.monotonic()
        tasks = [asyncio.create_task(cluster.generate(req)) for req in reqs]
        await cluster.until(lambda: bool(cluster.slots[victim].worker.request_ids()))
        cluster.kill(victim)
        for req, (tokens, outcome) in zip(reqs, await asyncio.gather(*tasks), strict=True):
            assert (outcome.code, ids(tokens)) == (None, alone(req))
        assert time.monotonic() - started < 10
        cluster.restart(victim)
        tokens, outcome = await cluster.generate(request("after"))
        assert ids(tokens) == alone(request("after"))


async def test_a_silent_decode_worker_is_fenced_and_restarted_and_its_answer_goes_on(
    toy: Path, alone: Callable[[Request], list[int]]
) -> None:
    req = request("r", 100, max_tokens=200, ignore_eos=True)
    async with running(toy, config()) as cluster:
        await cluster.generate(request("before"))
        old = cluster.info("decode-0").ref.incarnation
        task = asyncio.create_task(cluster.generate(req))
        await cluster.until(lambda: cluster.slots["decode-0"].worker.engine.load(0.0).running > 0)
        cluster.freeze("decode-0")
        tokens, outcome = await asyncio.wait_for(task, 20)
        assert (outcome.code, ids(tokens)) == (None, alone(req))
        assert cluster.info("decode-0").ref.incarnation != old
        tokens, outcome = await cluster.generate(request("after"))
        assert ids(tokens) == alone(request("after"))


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.CORRUPT])
async def test_a_failed_transfer_is_an_error_or_the_right_text(
    toy: Path, alone: Callable[[Request], list[int]], kind: FaultKind, nth: int
) -> None:
    req = request("r", 150)
    async with running(toy, config(2, 2)) as cluster:
        for name in cluster.slots:
            assert await cluster.ask(cluster.info(name).ref, InjectFault(kind, nth)) == FaultInjected()
        tokens, outcome = await cluster.generate(req)
        assert (outcome.code is not None and not tokens) or ids(tokens) == alone(req)


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.CORRUPT])
async def test_failed_transfers_cost_a_retry_not_the_worker_they_went_to(
    toy: Path, alone: Callable[[Request], list[int]], kind: FaultKind
) -> None:
    async with running(toy, config()) as cluster:
        before = {name: cluster.info(name).ref.incarnation for name in cluster.slots}
        at_fault = "decode-0" if kind is FaultKind.CORRUPT else "prefill-0"
        for number in range(4):
            assert await cluster.ask(cluster.info(at_fault).ref, InjectFault(kind)) == FaultInjected()
            req = request(f"r{number}", 150 + number)
            tokens, outcome = await cluster.generate(req)
            assert outcome.code is None, outcome.message
            assert outcome.attempts == 2
            assert ids(tokens) == alone(req)
        assert {name: cluster.info(name).ref.incarnation for name in cluster.slots} == before


@pytest.mark.parametrize("after", range(0, 40, 4))
async def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(toy: Path, after: int) -> None:
    async with running(toy, config()) as cluster:
        task = asyncio.create_task(cluster.generate(request("r", 300, max_tokens=400)))
        for _ in range(after):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_deadline_in_the_queue_computes_nothing(toy: Path) -> None:
    async with running(toy, config()) as cluster:
        cluster.freeze("prefill-0")
        late = replace(request("r"), deadline_s=time.monotonic() + 0.3)
        tokens, outcome = await asyncio.wait_for(cluster.generate(late), 5)
        assert (tokens, outcome.code) == ((), Code.DEADLINE)
        cluster.thaw("prefill-0")
        await cluster.settled()
        assert cluster.slots["prefill-0"].worker.engine.load(0.0).prompt_tokens == 0


async def test_another_model_is_refused_at_registration_with_both_values(toy: Path, tmp_path: Path) -> None:
    other = make_toy_checkpoint(tmp_path, layers=1)

    def engines(settings: EngineConfig) -> Engine:
        odd = settings.max_num_seqs == 7
        return Engine.open(replace(settings, model=str(other)) if odd else settings)

    settings = replace(config(), pools=PoolsSection(prefill=replace(POOL, max_num_seqs=7), decode=POOL))
    with pytest.raises(ValueError, match=r"of decode-0 is .*, of prefill-0 .*; they must be equal"):
        async with LocalCluster(settings, toy, engine_of=engines):
            pass
