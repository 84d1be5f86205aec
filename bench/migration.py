"""What moving a running request costs: `python -m bench.migration [--transport shm] [--model NAME_OR_PATH]`.

Two decode workers as a cluster has them (rank process, control, gRPC), one thread each; this process is gateway and
router. Some streams decode on each worker, and one with a long context is moved from the one to the other and back,
again and again. Measured where its reader sits: the pause is the gap between its last token from the source and its
first from the destination, less the usual gap; in decode steps it is that over the usual gap. The neighbours' times
between tokens during copies are set against those without. The last line is JSON; `pause_steps` is to be under 2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from cluster import models
from cluster.control import Control, ControlSettings
from cluster.ipc import RankSettings
from cluster.node_client import NodeClient
from cluster.streams import FrameHub, TokenStream
from cluster.worker import WorkerSettings
from engine.config import EngineConfig
from engine.types import Request, SamplingParams
from tandem.messages import Expect, Expected, Follow, Followed, Migrate, Migrated, MigrationReport, WorkerRef

GATEWAY = "bench"
MOVER = "mover"
NEIGHBOUR_TOKENS = 32
ASK_S = 60.0


@dataclass
class Seen:
    """When tokens came, and from whom."""

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    at_moves: list[int] = field(default_factory=list)
    """How many tokens of the mover had come at each move."""


class Bench:
    """Two workers and the streams of this gateway."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.hub = FrameHub()
        self.seen = Seen()
        self._news = asyncio.Event()
        secret = secrets.token_hex(8)
        self.client = NodeClient(secret, hub=self.hub, gateway_id=GATEWAY)
        settings = ControlSettings(secret=secret)
        self.controls = [Control(settings, rank(args, f"decode-{number}")) for number in range(2)]
        self.readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Bench:
        for control in self.controls:
            info = await control.start()
            await self.client.open(info.ref)
        return self

    async def __aexit__(self, *error: object) -> None:
        for reader in self.readers:
            reader.cancel()
        await self.client.close()
        for control in self.controls:
            await control.stop()

    def ref(self, number: int) -> WorkerRef:
        info = self.controls[number].info
        assert info is not None
        return info.ref

    async def start(self, request: Request, number: int) -> None:
        """Begin to decode it there, and read its tokens."""
        stream = self.hub.expect(request.request_id, self.ref(number))
        answer = await self.client.ask(self.ref(number), Expect(request, GATEWAY, None), ASK_S)
        assert isinstance(answer, Expected), answer
        self.readers.append(asyncio.create_task(self._read(stream)))

    async def _read(self, stream: TokenStream) -> None:
        async for delta in stream:
            assert delta.error is None, delta.error
            if delta.moved is not None:
                self.seen.at_moves.append(len(self.seen.times[stream.request_id]))
                self.readers.append(asyncio.create_task(self._follow(delta.moved)))
                continue
            self.seen.times[stream.request_id] += [time.monotonic()] * len(delta.tokens)
            self._news.set()

    async def _follow(self, worker: WorkerRef) -> None:
        answer = await self.client.ask(worker, Follow(MOVER, GATEWAY), ASK_S)
        assert isinstance(answer, Followed), answer

    async def tokens(self, request_id: str, count: int) -> None:
        """Wait until so many more of its tokens have come."""
        wanted = len(self.seen.times[request_id]) + count
        async with asyncio.timeout(ASK_S):
            while len(self.seen.times[request_id]) < wanted:
                self._news.clear()
                await self._news.wait()

    async def move(self, source: int) -> tuple[float, float, MigrationReport]:
        """Move it to the other worker: when that began and ended, and the source's report."""
        began = time.monotonic()
        answer = await self.client.ask(self.ref(source), Migrate(MOVER, self.ref(1 - source)), ASK_S)
        assert isinstance(answer, Migrated), answer
        return began, time.monotonic(), answer.report


def rank(args: argparse.Namespace, name: str) -> RankSettings:
    blocks = (args.context + total_tokens(args)) // 16 + args.streams * (total_tokens(args) // 16 + 8) + 64
    engine = EngineConfig(
        model=str(args.path),
        dtype=args.dtype,
        num_blocks=blocks,
        max_num_seqs=args.streams + 2,
        max_num_batched_tokens=512,
        threads=1,
        prefix_caching=False,
    )
    worker = WorkerSettings(name=name, incarnation="", role="decode", address="", max_num_seqs=args.streams + 2)
    return RankSettings(worker=worker, engine=engine, transports=(args.transport,))


def total_tokens(args: argparse.Namespace) -> int:
    return int((args.moves + 2) * args.between * 4)


def request(request_id: str, length: int, tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    salt = sum(request_id.encode())
    token_ids = tuple((37 * place + 11 * salt) % 1000 + 100 for place in range(length))
    return Request(request_id=request_id, token_ids=token_ids, sampling=sampling, arrival_s=time.monotonic())


async def measure(args: argparse.Namespace) -> dict[str, float | str]:
    async with Bench(args) as bench:
        for number in range(2 * args.streams):
            name = f"n{number}"
            await bench.start(request(name, NEIGHBOUR_TOKENS, total_tokens(args)), number % 2)
        await bench.start(request(MOVER, args.context, total_tokens(args)), 0)
        await bench.tokens(MOVER, args.between)
        moves = []
        for number in range(args.moves):
            moves.append(await bench.move(number % 2))
            await bench.tokens(MOVER, args.between)
    return summary(args, bench.seen, moves)


def summary(
    args: argparse.Namespace, seen: Seen, moves: Sequence[tuple[float, float, MigrationReport]]
) -> dict[str, float | str]:
    mover = seen.times[MOVER]
    at_moves = set(seen.at_moves)
    usual = [
        later - earlier
        for at, (earlier, later) in enumerate(pairwise(mover), 1)
        if at not in at_moves and later > earlier
    ]
    usual_s = statistics.median(usual)
    gaps = [mover[at] - mover[at - 1] for at in seen.at_moves]
    inside: list[float] = []
    outside: list[float] = []
    for name, times in seen.times.items():
        for earlier, later in pairwise(times if name != MOVER else ()):
            during = any(earlier < end and later > began for began, end, _ in moves)
            (inside if during else outside).append(later - earlier)
    reports = [report for _, _, report in moves]
    pause_s = [gap - usual_s for gap in gaps]
    return {
        "moves": float(len(gaps)),
        "context_tokens": float(args.context),
        "kv_mib": statistics.median(report.kv_bytes for report in reports) / 2**20,
        "stages": statistics.median(report.stages for report in reports),
        "tail_blocks": statistics.median(report.tail_blocks for report in reports),
        "step_ms": usual_s * 1e3,
        "pause_ms": statistics.median(pause_s) * 1e3,
        "pause_max_ms": max(pause_s) * 1e3,
        "pause_at_source_ms": statistics.median(report.pause_s for report in reports) * 1e3,
        "copy_ms": statistics.median(report.copy_s for report in reports) * 1e3,
        "itl_p50_ms": statistics.median(outside) * 1e3,
        "itl_p99_ms": p99(outside) * 1e3,
        "itl_p50_during_ms": statistics.median(inside) * 1e3 if inside else 0.0,
        "itl_p99_during_ms": p99(inside) * 1e3 if len(inside) > 1 else 0.0,
    }


def p99(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.migration", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--transport", choices=("shm", "ucx", "tcp"), default="shm")
    parser.add_argument("--context", type=int, default=1500, help="prompt tokens of the stream that moves")
    parser.add_argument("--streams", type=int, default=2, help="neighbours on each worker")
    parser.add_argument("--moves", type=int, default=10)
    parser.add_argument("--between", type=int, default=24, help="tokens between two moves")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(arguments)
    args.path = Path(args.model) if Path(args.model).exists() else models.resolve(args.model)
    row = asyncio.run(measure(args))
    for name, value in row.items():
        print(f"{name:22}{value:10.2f}")
    step = float(row["step_ms"])
    ratios = {
        "pause_steps": round(float(row["pause_ms"]) / step, 3),
        "pause_max_steps": round(float(row["pause_max_ms"]) / step, 3),
        "neighbours_p50_during": round(float(row["itl_p50_during_ms"]) / float(row["itl_p50_ms"]), 3),
        "neighbours_p99_during": round(float(row["itl_p99_during_ms"]) / float(row["itl_p99_ms"]), 3),
    }
    rounded = {name: round(float(value), 3) for name, value in row.items()}
    line = {"bench": "migration", "transport": args.transport, "ratios": ratios, **rounded}
    print(json.dumps(line | {"load": os.getloadavg()[0], "cores": os.cpu_count()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
