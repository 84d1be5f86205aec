"""An operator's drain is of a name: it outlives the worker that had the name when it was asked for, and the router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from cluster.processes import this_process
from cluster.router_host import RouterHost, Whereabouts
from cluster.snapshot import Refusal, RequestView
from tandem.messages import Answer, DrainingSet, Question, SetDraining, WorkerRef
from tests.cluster.local_rig import config
from tests.router.worlds import info as worker_info

WHERE = Whereabouts("node", this_process())


class Workers:
    """Notes what it carries, and says yes."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()

    async def ask(self, worker: WorkerRef, question: Question, timeout_s: float) -> Answer:
        assert isinstance(question, SetDraining)
        self.asked.put_nowait((worker.incarnation, question.draining))
        return DrainingSet(question.draining)

    async def close(self) -> None: ...


def born(host: RouterHost, incarnation: str, *, draining: bool = False) -> None:
    info = worker_info("decode-0")
    info = replace(info, ref=replace(info.ref, incarnation=incarnation))
    assert host.register(info, "tcp://127.0.0.1:1", WHERE, draining=draining) is None


@contextlib.asynccontextmanager
async def hosted() -> AsyncIterator[tuple[RouterHost, Workers]]:
    """A router of one decode worker, and what it asks of workers."""
    host = RouterHost(config(prefill=0, local="always"), "secret", lambda name, where: None)
    await host._workers.close()
    host._workers = workers = Workers()  # type: ignore[assignment]
    yield host, workers
    host.state.check()
    await host.stop()


def placed(host: RouterHost) -> bool:
    return not isinstance(host.place(RequestView(request_id="r", prompt_tokens=3), 10.0, frozenset()), Refusal)


async def test_a_worker_that_starts_anew_is_drained_like_the_one_whose_name_it_has() -> None:
    async with hosted() as (host, workers):
        assert "no worker decode-7 (there are: decode-0)" in await host.drain("decode-7", True)
        assert await host.drain("decode-0", True) == "", "it is not there yet, and is told when it is"
        born(host, "first")
        assert not placed(host), "nothing reaches it before it has heard of the drain"
        assert await asyncio.wait_for(workers.asked.get(), 5) == ("first", True)
        host.failed("decode-0", "killed")
        born(host, "second")
        assert await asyncio.wait_for(workers.asked.get(), 5) == ("second", True)
        assert await host.drain("decode-0", False) == ""
        assert await asyncio.wait_for(workers.asked.get(), 5) == ("second", False)
        host.failed("decode-0", "killed")
        born(host, "third")
        assert placed(host)
        assert workers.asked.empty()


async def test_a_new_router_learns_of_the_drain_from_the_worker_and_keeps_it_for_the_next_one() -> None:
    async with hosted() as (host, workers):
        born(host, "first", draining=True)
        assert not placed(host)
        assert [worker.draining for worker in host.status().workers] == [True]
        assert workers.asked.empty(), "it knows"
        host.failed("decode-0", "killed")
        born(host, "second")
        assert not placed(host)
        assert await asyncio.wait_for(workers.asked.get(), 5) == ("second", True)


async def test_what_an_operator_tells_a_new_router_counts_more_than_what_the_worker_says() -> None:
    async with hosted() as (host, workers):
        assert await host.drain("decode-0", False) == ""
        born(host, "first", draining=True)
        assert await asyncio.wait_for(workers.asked.get(), 5) == ("first", False)
        assert placed(host)
