"""A worker's starts and ends: turns are given as membership says, only the right process is killed, fences are told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.config import TimeoutsSection, default_config
from cluster.router import RouterState
from cluster.supervisor import Supervisor
from tandem.messages import Code, Declined, WorkerInfo, WorkerRef

TIMES = TimeoutsSection(suspect_s=2.0, fence_s=6.0, start_s=60.0, restart_backoff_s=1.0, max_start_failures=3)


class Desk:
    """A supervisor with a clock that is turned by hand and a list of the killed."""

    def __init__(self) -> None:
        self.now = 100.0
        self.killed: list[str] = []
        self.state = RouterState(replace(default_config(), timeouts=TIMES))
        self.supervisor = Supervisor(self.state, self.killed.append, lambda: self.now)
        self.supervisor.expect(["prefill-0", "decode-0"])

    def join(self, incarnation: str, name: str = "decode-0") -> None:
        assert self.state.register(_info(name, incarnation), self.now) is None
        self.supervisor.joined(name)

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.supervisor.tick()


def _info(name: str, incarnation: str) -> WorkerInfo:
    return WorkerInfo(
        ref=WorkerRef(name, incarnation, "127.0.0.1:1"),
        role=name.split("-")[0],
        model="m",
        model_digest="d",
        layout="l",
        numerics="n",
        max_model_len=64,
        vocab_size=8,
        block_bytes=16,
        total_blocks=4,
        max_num_seqs=2,
        block_size=16,
        kv_heads=1,
        layers=1,
    )


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def _pending(turn: asyncio.Task[Declined | None]) -> bool:
    """Whether the turn still waits once everything that can run has run."""
    for _ in range(3):
        await asyncio.sleep(0)
    return not turn.done()


async def test_the_first_turn_comes_at_once(desk: Desk) -> None:
    assert await desk.supervisor.turn("decode-0") is None


async def test_a_worker_that_died_waits_for_its_back_off_and_its_fence_is_told(desk: Desk) -> None:
    await desk.supervisor.turn("decode-0")
    desk.join("one")
    turn = asyncio.create_task(desk.supervisor.turn("decode-0"))
    assert await _pending(turn)
    assert desk.state.workers() == (), "nothing goes to the dead one from now on"
    desk.after(0.1)
    assert await _pending(turn), "the back-off is not over"
    desk.after(1.5)
    assert await turn is None
    (news,) = await desk.supervisor.fences(0)
    assert (news.worker, news.incarnation) == ("decode-0", "one")
    assert desk.killed == [], "its process was gone already"


async def test_a_silent_worker_is_killed_and_its_newborn_may_start(desk: Desk) -> None:
    await desk.supervisor.turn("decode-0")
    desk.join("one")
    desk.after(6.5)
    assert desk.killed == ["decode-0"]
    turn = asyncio.create_task(desk.supervisor.turn("decode-0"))
    assert await _pending(turn)
    desk.after(1.5)
    assert await turn is None
    desk.join("two")
    refusal = desk.state.register(_info("decode-0", "one"), desk.now)
    assert refusal is not None
    assert refusal.code is Code.STALE, "an old incarnation that wakes up is nobody"


async def test_starting_too_often_is_given_up(desk: Desk) -> None:
    assert await desk.supervisor.turn("decode-0") is None
    for _ in range(TIMES.max_start_failures - 1):
        turn = asyncio.create_task(desk.supervisor.turn("decode-0"))
        assert await _pending(turn)
        desk.after(0.0)
        desk.after(10.0)
        assert await turn is None
    answer = await desk.supervisor.turn("decode-0")
    assert isinstance(answer, Declined)
    assert "given up" in answer.message


async def test_a_start_that_would_fail_for_ever_is_given_up_at_once(desk: Desk) -> None:
    assert await desk.supervisor.turn("decode-0") is None
    desk.state.membership.exited("decode-0", "", "no block fits", desk.now, hopeless=True)
    desk.after(0.0)
    answer = await desk.supervisor.turn("decode-0")
    assert isinstance(answer, Declined)
    assert answer.message == "decode-0 does not start and is given up: no block fits"


async def test_one_that_has_served_before_is_tried_again_whatever_it_says(desk: Desk) -> None:
    await desk.supervisor.turn("decode-0")
    desk.join("one")
    turn = asyncio.create_task(desk.supervisor.turn("decode-0"))
    assert await _pending(turn)
    desk.after(0.1)
    desk.after(1.5)
    assert await turn is None
    desk.state.membership.exited("decode-0", "", "the memory is still in use", desk.now, hopeless=True)
    again = asyncio.create_task(desk.supervisor.turn("decode-0"))
    assert await _pending(again)
    desk.after(2.5)
    assert await again is None


async def test_a_restart_that_comes_before_its_newborn_is_not_lost(desk: Desk) -> None:
    await desk.supervisor.turn("decode-0")
    desk.join("one")
    desk.after(6.5)
    desk.after(5.0)
    assert await asyncio.wait_for(desk.supervisor.turn("decode-0"), 1) is None


async def test_fences_wait_until_there_is_news(desk: Desk) -> None:
    await desk.supervisor.turn("prefill-0")
    desk.join("one", "prefill-0")
    waiting = asyncio.create_task(desk.supervisor.fences(desk.supervisor.last_fence))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    desk.after(7.0)
    assert [news.worker for news in await waiting] == ["prefill-0"]
