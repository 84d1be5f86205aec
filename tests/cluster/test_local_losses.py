"""An answer outlives its decode worker: another goes on behind the tokens that are out, and the text is the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.local import LocalCluster
from cluster.snapshot import RESUMED
from engine.types import FinishReason, Request
from tandem.messages import Code, Frame
from tests.cluster.local_rig import config, ids, request, running

Alone = Callable[[Request], list[int]]

SAMPLINGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "penalised": {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "log-probabilities": {"logprobs": 2, "prompt_logprobs": 1},
    "at least": {"min_tokens": 60, "stop_token_ids": tuple(range(120)), "ignore_eos": False},
}


async def told(cluster: LocalCluster, request_id: str, tokens: int) -> str:
    """Where the request decodes, once it has told its gateway so many tokens."""
    flights = cluster.dispatch._flights
    await cluster.until(lambda: request_id in flights and flights[request_id].tokens >= tokens)
    attempt = flights[request_id].attempt
    assert attempt is not None
    return attempt.placement.decode.name


@pytest.mark.parametrize("local", ["auto", "never"])
@pytest.mark.parametrize("how", SAMPLINGS)
async def test_an_answer_whose_worker_is_killed_reads_as_undisturbed(
    toy: Path, alone: Alone, how: str, local: str
) -> None:
    chance = random.Random(how)
    sampling = {"max_tokens": 70, "ignore_eos": True} | SAMPLINGS[how]
    reqs = [request(f"r{i}", chance.randrange(5, 150), salt=i, **sampling) for i in range(3)]
    async with running(toy, config(1, 2, local)) as cluster:
        tasks = [asyncio.create_task(cluster.generate(req)) for req in reqs]
        victim = await told(cluster, "r0", chance.randrange(1, 50))
        for req in reqs:
            await told(cluster, req.request_id, 1)
        cluster.kill(victim)
        answers = await asyncio.gather(*tasks)
        for req, (tokens, outcome) in zip(reqs, answers, strict=True):
            assert ids(tokens) == alone(req)
            assert (outcome.code, outcome.completion_tokens) == (None, len(tokens))
        _, first = answers[0]
        assert (first.attempts, first.placement_reason, first.decode == victim) == (2, RESUMED, False)


async def test_log_probabilities_after_a_loss_are_those_of_an_undisturbed_answer(toy: Path) -> None:
    req = request("r", 50, max_tokens=30, ignore_eos=True, logprobs=3)
    async with running(toy, config(1, 2)) as cluster:
        undisturbed, _ = await cluster.generate(replace(req, request_id="before"))
        task = asyncio.create_task(cluster.generate(req))
        cluster.kill(await told(cluster, "r", 10))
        tokens, _ = await task
        for ours, theirs in zip(tokens, undisturbed, strict=True):
            assert [index for index, _ in ours.top] == [index for index, _ in theirs.top]
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


async def test_an_answer_survives_the_loss_of_one_worker_after_the_other(toy: Path, alone: Alone) -> None:
    req = request("r", 80, max_tokens=90, ignore_eos=True)
    async with running(toy, config(1, 2)) as cluster:
        task = asyncio.create_task(cluster.generate(req))
        first = await told(cluster, "r", 10)
        cluster.kill(first)
        second = await told(cluster, "r", 30)
        assert second != first
        await cluster.until(lambda: first in cluster.slots)
        cluster.kill(second)
        tokens, outcome = await task
        assert (ids(tokens), outcome.code) == (alone(req), None)


async def test_an_answer_whose_only_worker_is_killed_goes_on_when_that_has_been_started_again(
    toy: Path, alone: Alone
) -> None:
    reqs = [request(f"r{i}", 60 + i, salt=i, max_tokens=80, ignore_eos=True) for i in range(3)]
    async with running(toy, config(1, 1)) as cluster:
        tasks = [asyncio.create_task(cluster.generate(req)) for req in reqs]
        for req in reqs:
            await told(cluster, req.request_id, 10)
        cluster.kill("decode-0")
        for req, (tokens, outcome) in zip(reqs, await asyncio.gather(*tasks), strict=True):
            assert (ids(tokens), outcome.code, outcome.decode) == (alone(req), None, "decode-0")


async def test_an_answer_whose_worker_falls_silent_goes_on_when_that_is_fenced(toy: Path, alone: Alone) -> None:
    req = request("r", 80, max_tokens=60, ignore_eos=True)
    async with running(toy, config(1, 2)) as cluster:
        task = asyncio.create_task(cluster.generate(req))
        cluster.freeze(await told(cluster, "r", 10))
        tokens, outcome = await asyncio.wait_for(task, 10)
        assert (ids(tokens), outcome.code, outcome.attempts) == (alone(req), None, 2)


async def test_a_frame_that_is_lost_on_the_way_makes_no_hole_in_an_answer(toy: Path, alone: Alone) -> None:
    req = request("r", 80, max_tokens=60, ignore_eos=True)
    async with running(toy, config(1, 2)) as cluster:
        deliver, lost = cluster.hub.deliver, []

        def lossy(frame: Frame) -> None:
            if not lost and any(delta.seq == 20 for delta in frame.deltas):
                lost.append(frame)
            else:
                deliver(frame)

        cluster.hub.deliver = lossy  # type: ignore[method-assign]
        tokens, outcome = await cluster.generate(req)
        assert lost
        assert (ids(tokens), outcome.code, outcome.attempts) == (alone(req), None, 2)


async def test_a_lost_answer_with_one_token_to_go_gets_that_one(toy: Path, alone: Alone) -> None:
    req = request("r", 40, max_tokens=20, ignore_eos=True)
    async with running(toy, config(1, 2)) as cluster:
        task = asyncio.create_task(cluster.generate(req))
        victim = await told(cluster, "r", 19)
        if not task.done():
            cluster.kill(victim)
        tokens, outcome = await task
        assert (ids(tokens), outcome.finish) == (alone(req), FinishReason.LENGTH)


async def test_with_nobody_to_go_on_the_client_keeps_what_it_has_and_hears_unavailable(toy: Path, alone: Alone) -> None:
    settings = config(1, 1)
    settings = replace(settings, timeouts=replace(settings.timeouts, restart_backoff_s=60.0, resume_s=0.3))
    req = request("r", 40, max_tokens=80, ignore_eos=True)
    async with running(toy, settings) as cluster:
        task = asyncio.create_task(cluster.generate(req))
        cluster.kill(await told(cluster, "r", 10))
        tokens, outcome = await task
        assert outcome.code is Code.UNAVAILABLE
        assert ids(tokens) == alone(req)[: len(tokens)]
        assert len(tokens) >= 10
