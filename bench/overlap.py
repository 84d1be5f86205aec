"""How much of a hand-over hides behind prefill: `python -m bench.overlap [--transport shm] [--rate-gbit 1]`.

A prefill and a decode worker, each a rank process with its control, take prompts of 1,500 tokens in chunks of 256. The
exposed hand-over runs from the end of the last prefill step to the answer of Commit, which decode gives as it begins
the request; it is held against one decode step and 5 ms. With `--rate-gbit` all runs once more over TCP in a network
namespace of its own, whose loopback is shaped to that rate (`tbf`; needs root): then from the first chunk to Commit's
answer it should take what computing or moving takes, whichever is longer, and no more than a tenth on top. Medians of
`--rounds` different prompts; with `--block-sizes 16,32` once more with blocks of those sizes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from tandem.messages import Expect, Expected, HandedOver, HandoffReport, Submit, WorkerRef

PROMPT_TOKENS = 1500
CHUNK_TOKENS = 256
ANSWER_TOKENS = 16
SECRET = secrets.token_hex(8)
SLACK_S = 0.005
"""What the hand-over may expose beyond one decode step."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One prompt: prefill's own account, and the seconds between the tokens that followed."""

    report: HandoffReport
    itl_s: float


def worker(name: str, role: str, path: Path, transport: str, block_size: int) -> Control:
    engine = EngineConfig(
        model=str(path),
        dtype="bfloat16",
        block_size=block_size,
        num_blocks=4096 // block_size,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK_TOKENS,
        threads=1,
    )
    settings = WorkerSettings(name=name, incarnation="", role=role, address="")
    rank = RankSettings(worker=settings, engine=engine, transports=(transport,))
    return Control(ControlSettings(secret=SECRET), rank)


def request(number: int) -> Request:
    tokens = tuple((37 * number + 11 * place) % 1000 + 100 for place in range(PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    return Request(request_id=f"r{number}", token_ids=tokens, sampling=sampling, arrival_s=time.monotonic())


async def hand_over(client: NodeClient, hub: FrameHub, prefill: WorkerRef, decode: WorkerRef, number: int) -> Seen:
    asked = request(number)
    stream = hub.expect(asked.request_id, decode)
    expected = await client.ask(decode, Expect(asked, "bench", prefill), 30)
    assert isinstance(expected, Expected), expected
    answer, times = await asyncio.gather(client.ask(prefill, Submit(asked, decode), 120), arrivals(stream))
    assert isinstance(answer, HandedOver), answer
    return Seen(answer.report, statistics.median(later - earlier for earlier, later in pairwise(times)))


async def arrivals(stream: TokenStream) -> list[float]:
    times: list[float] = []
    async for delta in stream:
        assert delta.error is None, delta.error
        times += [time.monotonic()] * len(delta.tokens)
    return times


async def measure(path: Path, transport: str, rounds: int, block_sizes: Sequence[int] = (16, 16)) -> list[Seen]:
    """The first prompt warms up and does not count."""
    hub = FrameHub()
    client = NodeClient(SECRET, hub=hub, gateway_id="bench")
    roles = (("p0", "prefill"), ("d0", "decode"))
    workers = [worker(*role, path, transport, size) for role, size in zip(roles, block_sizes, strict=True)]
    try:
        prefill, decode = [info.ref for info in await asyncio.gather(*(one.start() for one in workers))]
        await client.open(decode)
        seen = [await hand_over(client, hub, prefill, decode, number) for number in range(rounds + 1)]
    finally:
        await client.close()
        await asyncio.gather(*(one.stop() for one in workers))
    return seen[1:]


def median(seen: list[Seen], name: str) -> float:
    return float(statistics.median(getattr(one.report, name) for one in seen))


def row(seen: list[Seen], rate_gbit: float | None) -> dict[str, float]:
    """Seconds but for the ratios; `bound_s` is what the promise allows."""
    compute_s, exposed_s, itl_s = median(seen, "prefill_s"), median(seen, "exposed_s"), median_itl(seen)
    told = {"prefill_s": compute_s, "exposed_s": exposed_s, "decode_step_s": itl_s}
    if rate_gbit is None:
        return told | {"exposed_vs_bound": exposed_s / (itl_s + SLACK_S)}
    wire_s = median(seen, "kv_bytes") * 8 / rate_gbit / 1e9
    longer_s = max(compute_s, wire_s)
    return told | {"wire_s": wire_s, "total_vs_longer": (compute_s + exposed_s) / longer_s}


def median_itl(seen: list[Seen]) -> float:
    return statistics.median(one.itl_s for one in seen)


# -- the shaped link ---------------------------------------------------------------------------------------------------


def shaped(arguments: list[str], rate_gbit: float) -> str:
    """This command's output in a namespace whose loopback has that rate. Raises RuntimeError saying why not."""
    name = f"tandem-overlap-{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    shape = ["tbf", "rate", f"{round(rate_gbit * 1000)}mbit", "burst", "256kb", "latency", "50ms"]
    try:
        _run(["ip", "netns", "add", name])
        _run([*inside, "ip", "link", "set", "lo", "up"])
        _run([*inside, "tc", "qdisc", "add", "dev", "lo", "root", *shape])
        return _run([*inside, sys.executable, "-m", "bench.overlap", *arguments])
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"no shaped link here: {error}") from error
    return done.stdout


def report(args: argparse.Namespace) -> None:
    rows = {args.transport: row(asyncio.run(measure(args.path, args.transport, args.rounds)), None)}
    if args.block_sizes != "16,16":
        sizes = [int(size) for size in args.block_sizes.split(",")]
        seen = asyncio.run(measure(args.path, args.transport, args.rounds, sizes))
        rows[f"{args.transport}_blocks_{args.block_sizes.replace(',', '_')}"] = row(seen, None)
    if args.rate_gbit:
        inside = ["--model", str(args.path), "--rounds", str(args.rounds), "--inside", str(args.rate_gbit)]
        try:
            rows[f"tcp_{args.rate_gbit:g}_gbit"] = json.loads(shaped(inside, args.rate_gbit).splitlines()[-1])
        except RuntimeError as error:
            print(error)
    flat = {(name, what): value for name, values in rows.items() for what, value in values.items()}
    ratios = {f"{what}_{name}": round(value, 3) for (name, what), value in flat.items() if "_vs_" in what}
    times = {f"{name}_{what}": round(value, 5) for (name, what), value in flat.items() if "_vs_" not in what}
    for label, value in (ratios | times).items():
        print(f"{label:36}{value:10.4f}")
    print(
        json.dumps({"bench": "overlap", "ratios": ratios, **times, "load": os.getloadavg()[0], "cores": os.cpu_count()})
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--transport", choices=("shm", "ucx", "tcp"), default="shm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-sizes", default="16,16", help="of prefill and decode, beside equal ones: 16,32")
    parser.add_argument("--rate-gbit", type=float, default=1.0, help="0: no shaped link")
    parser.add_argument("--inside", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.path = Path(args.model) if Path(args.model).exists() else models.resolve(args.model)
    if args.inside:
        print(json.dumps(row(asyncio.run(measure(args.path, "tcp", args.rounds)), args.inside)))
    else:
        report(args)


if __name__ == "__main__":
    main()
