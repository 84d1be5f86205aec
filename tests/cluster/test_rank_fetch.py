"""A prefix moves between two real prefill workers on one host: rank processes, control, gRPC, shared memory."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.node_client import NodeClient
from engine.toy import make_toy_checkpoint
from engine.types import Request
from tandem.messages import Fetch, FinishedEarly, Submit, WorkerRef
from tests.cluster.test_rank_process import SECRET, alone, control, no_blocks_held, request

NOBODY = WorkerRef("d0", "none", "127.0.0.1:1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"))


async def answer(client: NodeClient, worker: WorkerRef, req: Request, fetch: Fetch | None = None) -> FinishedEarly:
    told = await client.ask(worker, Submit(req, NOBODY, fetch), 30)
    assert isinstance(told, FinishedEarly), told
    return told


def ids(told: FinishedEarly) -> list[int]:
    return [token.token_id for delta in told.deltas for token in delta.tokens]


async def test_a_prefix_is_fetched_and_from_a_hung_source_only_waited_for(checkpoint: Path) -> None:
    prompt = request("warm", 200, max_tokens=1)
    workers = tuple(control(name, "prefill", checkpoint, "shm") for name in ("p0", "p1"))
    client = NodeClient(SECRET)
    await asyncio.gather(*(worker.start() for worker in workers))
    try:
        source, other = (worker.info.ref for worker in workers if worker.info is not None)
        await answer(client, source, prompt)
        again = replace(prompt, request_id="again", token_ids=(*prompt.token_ids[:180], *range(30)))
        told = await answer(client, other, again, Fetch(source, 176, 10.0, 16))
        assert ids(told) == alone(checkpoint, again)
        assert (told.report.fetched_tokens, told.report.computed_tokens) == (176, 210 - 176)

        unlike = replace(prompt, request_id="unlike", cache_salt="other")
        await answer(client, source, replace(unlike, request_id="warm too"))
        assert workers[0].pid is not None
        os.kill(workers[0].pid, signal.SIGSTOP)
        told = await answer(client, other, unlike, Fetch(source, 176, 0.3, 16))
        assert ids(told) == alone(checkpoint, unlike)
        assert told.report.fetched_tokens == 0
        os.kill(workers[0].pid, signal.SIGCONT)
        await asyncio.gather(*(no_blocks_held(worker) for worker in workers))
    finally:
        await client.close()
        await asyncio.gather(*(worker.stop() for worker in workers))
