"""A worker's process as the router sees it: what it says when it registers, and when it cannot start."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from cluster.config_text import config_from_text
from cluster.node_client import NodeClient
from cluster.worker_host import WorkerHost
from tandem.messages import Declined, DrainingSet, SetDraining, WorkerInfo, WorkerRef
from tests.cluster.local_rig import config

SETTINGS = config(prefill=0, local="always")


class Desk:
    """A router that can be exchanged: a new one knows nobody. It lets everybody start."""

    def __init__(self) -> None:
        self.known = False
        self.registered: asyncio.Queue[tuple[WorkerInfo, bool]] = asyncio.Queue()
        self.failures: list[tuple[str, bool]] = []

    async def turn(self, name: str) -> Declined | None:
        return None

    async def register(self, info: WorkerInfo, events: str, draining: bool) -> Declined | None:
        self.known = True
        self.registered.put_nowait((info, draining))
        return None

    async def failed(self, name: str, why: str, hopeless: bool) -> None:
        self.failures.append((why, hopeless))

    async def knows(self, ref: WorkerRef) -> bool | None:
        return self.known


SLA = """
pools:
  decode:
    kv_memory: 2KiB
"""


async def test_a_setting_that_no_start_can_use_is_told_by_the_files_own_name_and_as_hopeless(toy: Path) -> None:
    desk = Desk()
    settings = config_from_text(SLA, "x.sla.yaml")
    worker = WorkerHost(settings, "secret", "decode-0", desk, host="127.0.0.1", resolve=lambda source: toy)
    why = await asyncio.wait_for(worker.run(), 60)
    assert "x.sla.yaml:4: pools.decode.kv_memory: is 2048; it must be at least 4096, the bytes of one KV block" in why
    assert desk.failures == [(why, True)]


async def test_a_checkpoint_that_is_none_is_hopeless_and_a_busy_machine_is_not(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    desk = Desk()
    worker = WorkerHost(SETTINGS, "secret", "decode-0", desk, host="127.0.0.1", resolve=lambda source: tmp_path)
    await asyncio.wait_for(worker.run(), 60)
    late = replace(SETTINGS, timeouts=replace(SETTINGS.timeouts, start_s=0.01))
    worker = WorkerHost(late, "secret", "decode-0", desk, host="127.0.0.1", resolve=lambda source: toy)
    await asyncio.wait_for(worker.run(), 60)
    assert [hopeless for _, hopeless in desk.failures] == [True, False]


async def test_a_drained_worker_tells_a_new_router_that_it_is(toy: Path) -> None:
    desk, client = Desk(), NodeClient("secret")
    worker = WorkerHost(SETTINGS, "secret", "decode-0", desk, host="127.0.0.1", resolve=lambda source: toy)
    serving = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(60):
            info, draining = await desk.registered.get()
            assert not draining
            assert await client.ask(info.ref, SetDraining(True), 10) == DrainingSet(True)
            assert worker.control is not None
            while not (await worker.control.next_report()).draining:
                assert not serving.done()
            desk.known = False
            assert await desk.registered.get() == (info, True)
    finally:
        await client.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await worker.stop()
