"""What the profiles trade: tokens per second against the tails of TTFT and of the time between tokens.

    python -m bench.profiles [--model NAME_OR_PATH] [--requests 32] [--rate 2.0] [--burst 128] [--picture profiles.png]

Two workloads, the same for all profiles. Tokens per second come from a burst that is there at once and keeps all seats
taken; the tails from prompts of mixed length that arrive at random times, at a rate that every profile can serve (what
comes out per second is then what comes in). Answers have the lengths of the Azure conversation trace, cut. The profiles
take turns, so that a machine that slows down slows all.

Each step's duration is measured and moves its engine's own clock, so that an idle engine costs no waiting and the two
engines of `disaggregated` run side by side, as two processes would, with half of the threads each; the hand-over's copy
counts for the decode side. The picture needs matplotlib. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from bench.traces import output_lengths
from cluster import models
from engine.config import EngineConfig
from engine.engine import Engine
from engine.profiles import PROFILES, profiled
from engine.types import Request, SamplingParams, StepResult, Token

PROMPTS = (32, 64, 128, 256, 900)
TURN_S = 0.25
BURST_PROMPTS, BURST_LONGEST = (16, 32, 64), 64


@dataclass
class Lane:
    """An engine with a clock of its own, which its steps move."""

    engine: Engine
    now: float = 0.0

    def step(self) -> StepResult | None:
        started_s = time.perf_counter()
        result = self.engine.step(time.monotonic())
        self.now += time.perf_counter() - started_s
        return result


@dataclass
class Seen:
    """When each request arrived and when its tokens came."""

    arrived: dict[str, float]
    tokens: dict[str, list[float]] = field(default_factory=dict)

    def note(self, result: StepResult | None, now: float) -> None:
        for one in result.progress if result else ():
            self.tokens.setdefault(one.request_id, []).extend([now] * len(one.tokens))

    def figures(self) -> dict[str, float]:
        ttft = [times[0] - self.arrived[name] for name, times in self.tokens.items()]
        gaps = [later - earlier for times in self.tokens.values() for earlier, later in pairwise(times)]
        return {
            "ttft_p50_s": statistics.median(ttft),
            "ttft_p99_s": p99(ttft),
            "itl_p50_s": statistics.median(gaps),
            "itl_p99_s": p99(gaps),
        }

    @property
    def tokens_per_s(self) -> float:
        span = max(times[-1] for times in self.tokens.values()) - min(self.arrived.values())
        return sum(map(len, self.tokens.values())) / span


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


Work = list[tuple[float, Request]]
Server = Callable[[Work, Seen], Iterator[float]]


def workload(count: int, gap_s: float, prompts: tuple[int, ...], longest: int) -> Work:
    """`count` requests, `gap_s` apart on average."""
    chance, now, out = random.Random(1), 0.0, []
    for i, length in enumerate(output_lengths(count, seed=1)):
        now += gap_s and chance.expovariate(1 / gap_s)
        prompt = tuple(chance.randrange(100, 40_000) for _ in range(chance.choice(prompts)))
        sampling = SamplingParams(max_tokens=max(2, min(length, longest)), temperature=0.0, ignore_eos=True)
        out.append((now, Request(request_id=f"r{i}", token_ids=prompt, sampling=sampling)))
    return out


def opened(config: Callable[..., EngineConfig], args: argparse.Namespace, threads: int) -> Lane:
    most = [(args.requests, PROMPTS, args.longest), (args.burst, BURST_PROMPTS, BURST_LONGEST)]
    blocks = max(count * (-(-(max(prompts) + longest) // 16) + 2) for count, prompts, longest in most)
    lane = Lane(
        Engine.open(config(model=str(models.resolve(args.model)), dtype=args.dtype, num_blocks=blocks, threads=threads))
    )
    lane.engine.submit(Request(request_id="warm-up", token_ids=tuple(range(100, 1124))))
    while lane.engine.has_work():
        lane.engine.step(time.monotonic())
    return lane


def together(lane: Lane, work: Work, seen: Seen) -> Iterator[float]:
    """One engine does all; yields its clock after each step."""
    queue, lane.now = list(work), 0.0
    while queue or lane.engine.has_work():
        if not lane.engine.has_work():
            lane.now = max(lane.now, queue[0][0])
        while queue and queue[0][0] <= lane.now:
            lane.engine.submit(queue.pop(0)[1])
        seen.note(lane.step(), lane.now)
        yield lane.now


def apart(prefill: Lane, decode: Lane, work: Work, seen: Seen) -> Iterator[float]:
    """Prompts on one engine, the rest on another; whichever clock is behind steps next, and is yielded."""
    queue, prefill.now, decode.now = list(work), 0.0, 0.0
    requests = {request.request_id: request for _, request in work}
    handed: list[tuple[float, str, tuple[Token, ...]]] = []
    while queue or handed or prefill.engine.has_work() or decode.engine.has_work():
        busy = decode.engine.has_work() or bool(handed)
        if busy and (decode.now <= prefill.now or not (queue or prefill.engine.has_work())):
            if not decode.engine.has_work():
                decode.now = max(decode.now, handed[0][0])
            while handed and handed[0][0] <= decode.now:
                _, name, first = handed.pop(0)
                _hand_over(prefill, decode, requests[name], first)
            seen.note(decode.step(), decode.now)
            yield decode.now
            continue
        if not prefill.engine.has_work():
            prefill.now = max(prefill.now, queue[0][0])
        while queue and queue[0][0] <= prefill.now:
            prefill.engine.submit(queue.pop(0)[1], hold=True)
        result = prefill.step()
        seen.note(result, prefill.now)
        for one in result.progress if result else ():
            if one.tokens:
                handed.append((prefill.now, one.request_id, one.tokens))
        yield prefill.now


def _hand_over(prefill: Lane, decode: Lane, request: Request, first: tuple[Token, ...]) -> None:
    started_s = time.perf_counter()
    lease = decode.engine.lease(request)
    assert lease is not None, "the pools hold the whole workload"
    size = decode.engine.info.block_bytes
    source, target = prefill.engine.pool_bytes(), decode.engine.pool_bytes()
    for here, there in zip(prefill.engine.block_table(request.request_id), lease.block_ids, strict=True):
        target[there * size : (there + 1) * size] = source[here * size : (here + 1) * size]
    decode.engine.adopt(request, first)
    prefill.engine.release(request.request_id)
    decode.now += time.perf_counter() - started_s


def measured(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By profile."""
    servers = {name: server(name, args) for name in PROFILES}
    burst = served(servers, workload(args.burst, 0.0, BURST_PROMPTS, BURST_LONGEST))
    steady = served(servers, workload(args.requests, 1 / args.rate, PROMPTS, args.longest))
    return {name: {"tokens_per_s": burst[name].tokens_per_s, **steady[name].figures()} for name in PROFILES}


def served(servers: Mapping[str, Server], work: Work) -> dict[str, Seen]:
    """The work by every server, in turns of `TURN_S` of their own time: what slows the machine slows all alike."""
    seen = {name: Seen({request.request_id: at for at, request in work}) for name in servers}
    going, end_s = [serve(work, seen[name]) for name, serve in servers.items()], TURN_S
    while going:
        going = [clocks for clocks in going if any(now >= end_s for now in clocks)]
        end_s += TURN_S
    return seen


def server(name: str, args: argparse.Namespace) -> Server:
    if name != "disaggregated":
        lane = opened(lambda **given: profiled(name, **given), args, args.threads)
        return lambda work, seen: together(lane, work, seen)
    threads = max(1, args.threads // 2)
    prefill, decode = (
        opened(lambda role=role, **given: profiled(name, role=role, **given), args, threads)
        for role in ("prefill", "decode")
    )
    return lambda work, seen: apart(prefill, decode, work, seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--burst", type=int, default=128, help="requests that are there at once")
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals per second")
    parser.add_argument("--longest", type=int, default=160, help="output tokens at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--picture", type=Path, help="write a scatter of the trade here")
    args = parser.parse_args()
    figures = measured(args)
    print(f"{'profile':>14}  tokens/s  TTFT p50 / p99 s   ITL p50 / p99 ms")
    for name, one in figures.items():
        print(
            f"{name:>14}  {one['tokens_per_s']:8.1f}  {one['ttft_p50_s']:7.2f} / {one['ttft_p99_s']:6.2f}"
            f"   {one['itl_p50_s'] * 1e3:7.1f} / {one['itl_p99_s'] * 1e3:7.1f}"
        )
    if args.picture:
        draw(figures, args.picture)
    line = {
        "bench": "profiles",
        "ratios": {name: round(value, 4) for name, value in ratios(figures).items()},
        "figures": {name: {key: round(value, 4) for key, value in one.items()} for name, one in figures.items()},
    }
    print(json.dumps(line))


def ratios(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Each profile over `balanced`: tokens per second, more is better, and both tails, less is better."""
    base = figures["balanced"]
    return {
        f"{name}_{word}": one[key] / base[key]
        for name, one in figures.items()
        for word, key in (("throughput", "tokens_per_s"), ("ttft_p99", "ttft_p99_s"), ("itl_p99", "itl_p99_s"))
        if one is not base
    }


def draw(figures: dict[str, dict[str, float]], path: Path) -> None:
    """Throughput against each tail: better is up and to the left. Names stand in a legend: points may lie close."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    tails = (("ttft_p99_s", 1, "P99 TTFT, s"), ("itl_p99_s", 1e3, "P99 ITL, ms"))
    for axis, (key, scale, label) in zip(axes, tails, strict=True):
        for (name, one), marker in zip(figures.items(), "osD^", strict=True):
            axis.scatter(one[key] * scale, one["tokens_per_s"], marker=marker, s=70, label=name)
        axis.set_xlabel(f"{label} (steady arrivals)")
        axis.set_xlim(left=0)
        axis.margins(0.15)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens/s (burst)")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(figures), frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
