"""The router's host against a real worker process: what the worker holds is known however late one listens."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.config import TandemConfig
from cluster.control import Control
from cluster.node_client import NodeClient
from cluster.processes import this_process
from cluster.router_host import RouterHost, Whereabouts
from cluster.snapshot import Placement, RequestView
from cluster.streams import FrameHub
from cluster.wiring import control_settings, hasher_for, rank_settings
from engine.types import Request, SamplingParams
from tandem.messages import (
    Expect,
    Expected,
    FetchCounters,
    LinkRate,
    MigrationCounters,
    Replaying,
    ReplayPrefixes,
    TransferCounters,
    WorkerInfo,
)
from tests.cluster.local_rig import config
from tests.router.worlds import info as worker_info
from tests.router.worlds import report as worker_report

SECRET = secrets.token_hex(8)
SETTINGS = config(prefill=0, local="always")
TOKENS = tuple((7 * i) % 250 for i in range(160))


@pytest_asyncio.fixture
async def worker(toy: Path) -> AsyncIterator[Control]:
    """A decode worker that has served one prompt before anybody listened."""
    control = Control(control_settings(SETTINGS, SECRET), rank_settings(SETTINGS, "decode-0", toy))
    info = await control.start()
    await served(info, Request(request_id="r", token_ids=TOKENS, sampling=SamplingParams(max_tokens=2)))
    yield control
    await control.stop()


async def served(info: WorkerInfo, request: Request) -> None:
    hub = FrameHub()
    client = NodeClient(SECRET, hub=hub, gateway_id="g")
    await client.open(info.ref)
    stream = hub.expect(request.request_id, info.ref)
    assert isinstance(await client.ask(info.ref, Expect(request, "g", None), 10), Expected)
    async with asyncio.timeout(60):
        deltas = [delta async for delta in stream]
    assert sum(len(delta.tokens) for delta in deltas) == 2
    await client.close()


@contextlib.asynccontextmanager
async def hosted(settings: TandemConfig) -> AsyncIterator[RouterHost]:
    host = RouterHost(settings, SECRET, lambda name, where: None)
    await host.start()
    yield host
    await host.stop()


async def test_a_router_that_comes_late_or_comes_back_is_told_what_the_worker_holds(worker: Control) -> None:
    assert worker.info is not None
    keys = hasher_for(SETTINGS, worker.info).chain(TOKENS, "")
    for _ in ("late", "restarted"):
        async with hosted(SETTINGS) as host:
            where = Whereabouts("node", this_process())
            assert host.register(worker.info, worker.events_address, where) is None
            assert _overlap(host, keys) == 0
            async with asyncio.timeout(15):
                while host.state.index.held("decode-0") < 10:
                    await worker.next_report()
            assert host.state.stale_indexes() == ()
            assert _overlap(host, keys) == 160
            host.state.check()
            status = host.status().workers[0]
            assert status.name == "decode-0"
            assert "tcp" in {counters.scheme for counters in status.transfers}


async def test_all_that_metrics_show_of_a_report_is_in_the_status() -> None:
    host = RouterHost(SETTINGS, SECRET, lambda name, where: None)
    host.state.register(worker_info("decode-0"), 0.0)
    told = replace(
        worker_report("decode-0", 1, running=2),
        transfers_in_flight=3,
        draining=True,
        transfers=(TransferCounters("shm", pushes=4),),
        fetches=(FetchCounters("prefill-0", fetches=5),),
        migrations=MigrationCounters(moved=6),
        links=(LinkRate("decode-1", "shm", 7.0, 8.0, 9.0),),
    )
    host.state.report(told, 0.0)
    assert host.status().workers[0].report() == replace(told, number=0, request_ids=(), kv_events=0)
    await host.stop()


def _overlap(host: RouterHost, keys: tuple[bytes, ...]) -> int:
    view = RequestView(request_id=secrets.token_hex(4), prompt_tokens=len(TOKENS), prefix_keys=keys)
    placed = host.place(view, 10.0, frozenset())
    assert isinstance(placed, Placement), placed
    host.state.finished(view.request_id)
    return placed.decode_overlap_tokens


async def test_a_worker_answers_how_much_it_will_tell(worker: Control) -> None:
    assert worker.info is not None
    client = NodeClient(SECRET)
    assert await client.ask(worker.info.ref, ReplayPrefixes(), 5) == Replaying(10)
    await client.close()


async def test_a_worker_that_asks_whether_it_is_known_is_there(worker: Control) -> None:
    assert worker.info is not None
    now = time.monotonic()
    clock = [now]
    host = RouterHost(SETTINGS, SECRET, lambda name, where: None, clock=lambda: clock[0])
    assert not host.knows(worker.info.ref)
    assert host.register(worker.info, worker.events_address, Whereabouts("node", this_process())) is None
    for _ in range(20):
        clock[0] += SETTINGS.timeouts.fence_s / 2
        assert host.knows(worker.info.ref)
        assert host.state.tick(clock[0]) == ()
    assert isinstance(host.place(RequestView(request_id="r", prompt_tokens=3), 10.0, frozenset()), Placement)
    clock[0] += SETTINGS.timeouts.fence_s
    assert host.state.tick(clock[0])
    assert not host.knows(worker.info.ref)
    await host.stop()


@pytest.mark.parametrize("where", [None, Whereabouts("node", this_process())], ids=["a stopped one", "a slow one"])
async def test_a_worker_that_does_not_join_in_time_is_ended_wherever_it_is(where: Whereabouts | None) -> None:
    """A router that has just been restarted knows nothing of a worker that is stopped, but for its name."""
    clock, ended = [0.0], list[tuple[str, Whereabouts | None]]()
    host = RouterHost(SETTINGS, SECRET, lambda *who: ended.append(who), clock=lambda: clock[0])
    if where is not None:
        assert await host.turn("decode-0", where) is None
    clock[0] += SETTINGS.timeouts.start_s / 2
    host._supervisor.tick()
    assert ended == []
    clock[0] += SETTINGS.timeouts.start_s / 2
    host._supervisor.tick()
    assert ended == [("decode-0", where)]
    await host.stop()
