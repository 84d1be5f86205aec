"""What a worker costs: time between tokens with many streams through a whole worker, against the bare engine.

    python -m bench.worker_itl [--model NAME_OR_PATH] [--streams 32] [--tokens 64] [--rounds 2] [--dtype bfloat16]

The bare engine steps in this process; the worker is its rank process, its control and a reader of its gRPC frames. Both
decode the same prompts with one thread. A gap counts only while every stream is decoding. The two are measured in turn,
`rounds` times, because a shared machine drifts. The last line is JSON; `ratio` is of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from cluster import models
from cluster.control import Control, ControlSettings
from cluster.ipc import RankSettings
from cluster.node_client import NodeClient
from cluster.streams import FrameHub, TokenStream
from cluster.worker import WorkerSettings
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Request, SamplingParams
from tandem.messages import Expect, Expected

PROMPT_TOKENS = 64


def engine_config(args: argparse.Namespace) -> EngineConfig:
    blocks = args.streams * (-(-(PROMPT_TOKENS + args.tokens) // 16) + 1)
    return EngineConfig(
        model=str(args.path),
        dtype=args.dtype,
        num_blocks=blocks,
        max_num_seqs=args.streams,
        max_num_batched_tokens=512,
        threads=1,
    )


def requests(args: argparse.Namespace) -> list[Request]:
    sampling = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    return [
        Request(
            request_id=f"r{i}",
            token_ids=tuple((37 * i + 11 * j) % 1000 + 100 for j in range(PROMPT_TOKENS)),
            sampling=sampling,
            arrival_s=time.monotonic(),
        )
        for i in range(args.streams)
    ]


def bare_gaps(args: argparse.Namespace) -> list[float]:
    """Seconds between the steps in which every sequence got a token."""
    import torch

    torch.set_num_threads(1)
    engine = Engine.open(engine_config(args))
    for request in requests(args):
        engine.submit(request)
    full: list[float] = []
    while engine.has_work():
        result = engine.step(time.monotonic())
        if result is not None and sum(len(one.tokens) for one in result.progress) == args.streams:
            full.append(time.monotonic())
    return [later - earlier for earlier, later in pairwise(full)]


async def worker_gaps(args: argparse.Namespace) -> list[float]:
    """Seconds between the tokens of each stream, as the reader of the frames sees them."""
    worker = WorkerSettings(
        name="bench", incarnation="", role="decode", address="", max_num_seqs=args.streams, heartbeat_s=0.5
    )
    rank = RankSettings(worker=worker, engine=engine_config(args), transports=("tcp",))
    secret = secrets.token_hex(8)
    control = Control(ControlSettings(secret=secret), rank)
    info = await control.start()
    hub = FrameHub()
    client = NodeClient(secret, hub=hub, gateway_id="bench")
    try:
        await client.open(info.ref)
        streams = []
        for request in requests(args):
            streams.append(hub.expect(request.request_id, info.ref))
            answer = await client.ask(info.ref, Expect(request, "bench", None), 30)
            assert isinstance(answer, Expected), answer
        seen = await asyncio.wait_for(asyncio.gather(*(arrivals(stream) for stream in streams)), 600)
    finally:
        await client.close()
        await control.stop()
    started, ended = max(times[0] for times in seen), min(times[-1] for times in seen)
    inside = [[at for at in times if started <= at <= ended] for times in seen]
    return [later - earlier for times in inside for earlier, later in pairwise(times)]


async def arrivals(stream: TokenStream) -> list[float]:
    times: list[float] = []
    async for delta in stream:
        assert delta.error is None, delta.error
        times += [time.monotonic()] * len(delta.tokens)
    return times


def one(args: argparse.Namespace) -> int:
    gaps = bare_gaps(args) if args.part == "bare" else asyncio.run(worker_gaps(args))
    print(json.dumps(gaps))
    return 0


def measure(part: str) -> list[float]:
    """One part in a process of its own, so that neither inherits the other's memory or threads."""
    command = [sys.executable, "-m", "bench.worker_itl", *sys.argv[1:], "--part", part]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    gaps: list[float] = json.loads(done.stdout.splitlines()[-1])
    return gaps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--part", choices=("bare", "worker"))
    args = parser.parse_args()
    args.path = Path(args.model) if Path(args.model).exists() else models.resolve(args.model)
    if args.part:
        return one(args)
    gaps: dict[str, list[float]] = {"bare": [], "worker": []}
    for _ in range(args.rounds):
        for part, seen in gaps.items():
            seen += measure(part)
    report = {
        f"{part}_itl_{name}_ms": round(1e3 * value, 2)
        for part, seen in gaps.items()
        for name, value in (("p50", statistics.median(seen)), ("p99", statistics.quantiles(seen, n=100)[98]))
    }
    ratio = statistics.median(gaps["worker"]) / statistics.median(gaps["bare"])
    for name, value in report.items():
        print(f"{name:22} {value:9.2f}")
    print(json.dumps({"bench": "worker_itl", "streams": args.streams, **report, "ratios": {"itl": round(ratio, 3)}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
