"""Small clusters in one process, and requests for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from cluster.config import ModelSection, PoolSection, PoolsSection, RoutingSection, TandemConfig, TimeoutsSection
from cluster.local import LocalCluster
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Request, SamplingParams

POOL = PoolSection(num_blocks=96, max_num_batched_tokens=64, max_num_seqs=8)
SOON = TimeoutsSection(
    heartbeat_s=0.1,
    suspect_s=0.5,
    fence_s=1.0,
    lease_s=2.0,
    connect_s=2.0,
    request_s=30.0,
    restart_backoff_s=0.1,
)


def config(
    prefill: int = 1,
    decode: int = 1,
    local: str = "never",
    *,
    prefill_blocks: int = 96,
    decode_blocks: int = 96,
    prefix_caching: bool = True,
) -> TandemConfig:
    return TandemConfig(
        model=ModelSection(name="toy", dtype="float32", prefix_caching=prefix_caching),
        pools=PoolsSection(
            prefill=replace(POOL, count=prefill, num_blocks=prefill_blocks),
            decode=replace(POOL, count=decode, num_blocks=decode_blocks),
        ),
        routing=RoutingSection(local_prefill=local),
        timeouts=SOON,
    )


@contextlib.asynccontextmanager
async def running(
    toy: Path, settings: TandemConfig, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[LocalCluster]:
    """A cluster that must end with nothing held."""
    async with LocalCluster(settings, toy, clock=clock) as cluster:
        yield cluster
        await cluster.settled()
        cluster.check()
        assert len(cluster.hub) == 0


def request(request_id: str, length: int = 60, *, salt: int = 0, **sampling: object) -> Request:
    """Its tokens depend on `length` and `salt` (one of another `salt` shares no block with it)."""
    params = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    token_ids = tuple((11 * i + 17 * salt) % 250 for i in range(length))
    return Request(request_id=request_id, token_ids=token_ids, sampling=params, arrival_s=time.monotonic())


def ids(tokens: tuple[object, ...]) -> list[int]:
    return [token.token_id for token in tokens]  # type: ignore[attr-defined]


def lone_engine(toy: Path) -> Callable[[Request], list[int]]:
    """What one engine by itself answers: the truth for the cluster."""
    engine = Engine.open(EngineConfig(model=str(toy), num_blocks=256))

    def answer(req: Request) -> list[int]:
        engine.submit(replace(req, deadline_s=None))
        tokens: list[int] = []
        while engine.has_work():
            result = engine.step(0.0)
            assert result is not None
            tokens += [token.token_id for one in result.progress for token in one.tokens]
        return tokens

    return answer
