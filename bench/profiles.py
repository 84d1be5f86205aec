"""What the profiles trade: tokens per second against the tails of TTFT and of the time between tokens.

    python -m bench.profiles [--model NAME_OR_PATH] [--requests 32] [--rate 2.0] [--picture profiles.png]

One workload for all: prompts of mixed length arrive at random times, answers have the lengths of the Azure conversation
trace, cut at `--longest`. Each step's duration is measured and moves its engine's own clock, so that an idle engine
costs no waiting and the two engines of `disaggregated` run side by side, as two processes would, with half of the
threads each; the hand-over's copy counts for the decode side. The picture needs matplotlib. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
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
        span = max(times[-1] for times in self.tokens.values()) - min(self.arrived.values())
        return {
            "tokens_per_s": sum(map(len, self.tokens.values())) / span,
            "ttft_p50_s": statistics.median(ttft),
            "ttft_p99_s": p99(ttft),
            "itl_p50_s": statistics.median(gaps),
            "itl_p99_s": p99(gaps),
        }


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def workload(args: argparse.Namespace) -> list[tuple[float, Request]]:
    chance, now, out = random.Random(1), 0.0, []
    for i, length in enumerate(output_lengths(args.requests, seed=1)):
        now += chance.expovariate(args.rate)
        prompt = tuple(chance.randrange(100, 40_000) for _ in range(chance.choice(PROMPTS)))
        sampling = SamplingParams(max_tokens=max(2, min(length, args.longest)), temperature=0.0, ignore_eos=True)
        out.append((now, Request(request_id=f"r{i}", token_ids=prompt, sampling=sampling)))
    return out


def opened(config: Callable[..., EngineConfig], args: argparse.Namespace, threads: int) -> Lane:
    blocks = args.requests * (-(-(max(PROMPTS) + args.longest) // 16) + 2)
    lane = Lane(
        Engine.open(config(model=str(models.resolve(args.model)), dtype=args.dtype, num_blocks=blocks, threads=threads))
    )
    lane.engine.submit(Request(request_id="warm-up", token_ids=tuple(range(100, 164))))
    while lane.engine.has_work():
        lane.engine.step(time.monotonic())
    return lane


def together(lane: Lane, work: list[tuple[float, Request]]) -> Seen:
    """One engine does all."""
    seen, queue = Seen({request.request_id: at for at, request in work}), list(work)
    while queue or lane.engine.has_work():
        if not lane.engine.has_work():
            lane.now = max(lane.now, queue[0][0])
        while queue and queue[0][0] <= lane.now:
            lane.engine.submit(queue.pop(0)[1])
        seen.note(lane.step(), lane.now)
    return seen


def apart(prefill: Lane, decode: Lane, work: list[tuple[float, Request]]) -> Seen:
    """Prompts on one engine, the rest on another; whichever clock is behind steps next."""
    seen, queue = Seen({request.request_id: at for at, request in work}), list(work)
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
    return seen


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


def measured(name: str, args: argparse.Namespace) -> dict[str, float]:
    work = workload(args)
    if name != "disaggregated":
        return together(opened(lambda **given: profiled(name, **given), args, args.threads), work).figures()
    threads = max(1, args.threads // 2)
    lanes = [
        opened(lambda role=role, **given: profiled(name, role=role, **given), args, threads)
        for role in ("prefill", "decode")
    ]
    return apart(lanes[0], lanes[1], work).figures()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals per second")
    parser.add_argument("--longest", type=int, default=160, help="output tokens at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--picture", type=Path, help="write a scatter of the trade here")
    args = parser.parse_args()
    figures = {name: measured(name, args) for name in PROFILES}
    print(f"{'profile':>14}  tokens/s  TTFT p50 / p99 s   ITL p50 / p99 ms")
    for name, one in figures.items():
        print(
            f"{name:>14}  {one['tokens_per_s']:8.1f}  {one['ttft_p50_s']:7.2f} / {one['ttft_p99_s']:6.2f}"
            f"   {one['itl_p50_s'] * 1e3:7.1f} / {one['itl_p99_s'] * 1e3:7.1f}"
        )
    if args.picture:
        draw(figures, args.picture)
    print(json.dumps({name: {key: round(value, 4) for key, value in one.items()} for name, one in figures.items()}))


def draw(figures: dict[str, dict[str, float]], path: Path) -> None:
    """Throughput against each tail: better is up and to the left."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, (("ttft_p99_s", "P99 TTFT, s"), ("itl_p99_s", "P99 ITL, s")), strict=True):
        for name, one in figures.items():
            axis.scatter(one[key], one["tokens_per_s"])
            axis.annotate(name, (one[key], one["tokens_per_s"]), textcoords="offset points", xytext=(6, 4))
        axis.set_xlabel(label)
        axis.margins(0.2)
    axes[0].set_ylabel("tokens/s")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
