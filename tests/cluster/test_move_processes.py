"""A running request moves between two real decode workers: rank processes, controls, gRPC, shared memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.toy import make_toy_checkpoint
from tandem.messages import Abort, Aborted, Declined, Follow, Followed, Migrate, Migrated, SetDraining
from tests.cluster.test_rank_process import PATIENCE_S, Gateway, alone, control, no_blocks_held, refs, request


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"))


async def test_it_moves_there_and_back_and_a_gateway_that_listens_late_misses_nothing(checkpoint: Path) -> None:
    gateway = Gateway()
    pair = (control("d0", "decode", checkpoint, "shm"), control("d1", "decode", checkpoint, "shm"))
    await asyncio.gather(*(worker.start() for worker in pair))
    try:
        here, there = refs(pair)
        req = request("r", max_tokens=1900, ignore_eos=True)
        stream, _ = await gateway.start(req, None, here)
        tokens: list[int] = []
        places, returned = [there, here], 0
        moving = asyncio.create_task(gateway.client.ask(here, Migrate("r", there), 30))
        async with asyncio.timeout(PATIENCE_S):
            async for delta in stream:
                assert delta.error is None, delta.error
                tokens += [token.token_id for token in delta.tokens]
                if not places:
                    returned += len(delta.tokens)
                    if returned >= 20:
                        break
                if len(tokens) >= 3 and moving.done() and isinstance(moving.result(), Declined) and len(places) == 2:
                    # It was not decoding yet when it was asked.
                    moving = asyncio.create_task(gateway.client.ask(here, Migrate("r", there), 30))
                if delta.moved is not None:
                    assert delta.moved == places.pop(0)
                    await gateway.client.open(delta.moved)
                    answer = await gateway.client.ask(delta.moved, Follow("r", "g"), 10)
                    assert isinstance(answer, Followed), answer
                    if places:
                        assert isinstance(await moving, Migrated)
                        moving = asyncio.create_task(gateway.client.ask(there, Migrate("r", here), 30))
        assert isinstance(await moving, Migrated)
        assert places == []
        assert len(tokens) > 20
        assert tokens == alone(checkpoint, req)[: len(tokens)]
        assert await gateway.client.ask(here, Abort("r"), 10) == Aborted("r", True)
        await gateway.client.ask(there, SetDraining(True), 10)
        refused = await gateway.client.ask(here, Migrate("r", there), 10)
        assert isinstance(refused, Declined)
        await asyncio.gather(*(no_blocks_held(worker) for worker in pair))
    finally:
        await gateway.client.close()
        await asyncio.gather(*(worker.stop() for worker in pair))
