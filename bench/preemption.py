"""Preemption by swap, by computing again, and by cost, on the real model with a KV pool too small for its load.

    python -m bench.preemption [--model NAME_OR_PATH] [--requests 20] [--room 0.4] [--slow 0.15] [--threads 2]

Two kinds of requests share the pool: prompts of their own, dear to compute again, and short questions behind one long
document, whose KV the neighbours keep. `--room` is the pool's share of what all of them need at their ends. The modes
take turns of some steps each, so that a machine that slows down slows all. In host memory swapping is nearly free, so
all is done once more with copies held to `--slow` GB/s, where neither way is best for everybody. Each preemption by
cost is printed with both estimates and the choice; texts must be those of a pool with room for all. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise

from cluster import models
from engine.assemble import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.host_swap import HostSwap
from engine.swap import Pairs
from engine.types import Request, SamplingParams, StepResult

MODES = ("recompute", "swap", "auto")
TURN_STEPS = 10
DOCUMENT_TOKENS, QUESTION_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 384, 16, (160, 320), 160


class SlowLink:
    """Copies as `HostSwap`, held to a rate."""

    def __init__(self, swap: HostSwap, block_bytes: int, bytes_per_s: float) -> None:
        self._swap = swap
        self._block_s = block_bytes / bytes_per_s

    def out(self, pairs: Pairs) -> None:
        self._swap.out(pairs)
        time.sleep(len(pairs) * self._block_s)

    def copy(self, pairs: Pairs) -> None:
        self._swap.copy(pairs)

    def back(self, pairs: Pairs) -> None:
        self._swap.back(pairs)
        time.sleep(len(pairs) * self._block_s)


@dataclass
class Run:
    """One mode: its engine, the time that its steps took, and what came out when."""

    engine: Engine
    seconds: float = 0.0
    texts: dict[str, list[int]] = field(default_factory=dict)
    told_at: dict[str, list[float]] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)

    def turn(self) -> bool:
        """Some steps; False when all requests have ended."""
        for _ in range(TURN_STEPS):
            if not self.engine.has_work():
                return False
            started_s = time.perf_counter()
            result = self.engine.step(time.monotonic())
            self.seconds += time.perf_counter() - started_s
            if result is not None:
                self._note(result)
        return True

    def _note(self, result: StepResult) -> None:
        if result.plan.preempted:
            self.decisions += [clause for clause in result.plan.reason.split("; ") if "(swap " in clause]
        for one in result.progress:
            self.texts.setdefault(one.request_id, []).extend(token.token_id for token in one.tokens)
            self.told_at.setdefault(one.request_id, []).extend([self.seconds] * len(one.tokens))

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.texts.values())) / self.seconds

    @property
    def itl_p99_s(self) -> float:
        gaps = [later - earlier for times in self.told_at.values() for earlier, later in pairwise(times)]
        return statistics.quantiles(gaps, n=100, method="inclusive")[98]


def workload(count: int) -> list[Request]:
    """Both kinds in turn, all there at the start."""
    chance = random.Random(2)
    document = _tokens(chance, DOCUMENT_TOKENS)
    prompts = [
        _tokens(chance, chance.randint(*OWN_TOKENS)) if i % 2 else document + _tokens(chance, QUESTION_TOKENS)
        for i in range(count)
    ]
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    return [Request(request_id=f"r{i}", token_ids=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]


def _tokens(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(100, 40_000) for _ in range(count))


def blocks_needed(work: list[Request]) -> int:
    """Of all requests at their ends, the document held once."""
    whole = sum(-(-(len(request.token_ids) + ANSWER_TOKENS) // 16) for request in work)
    return whole - (DOCUMENT_TOKENS // 16) * (len(work[::2]) - 1)


def opened(preemption: str, blocks: int, args: argparse.Namespace, bytes_per_s: float | None = None) -> Run:
    config = EngineConfig(
        model=str(models.resolve(args.model)),
        dtype=args.dtype,
        num_blocks=blocks,
        preemption=preemption,
        max_num_batched_tokens=256,
        threads=args.threads,
    )
    runner, facts, memory = assemble(config)
    swap = HostSwap(runner.pool, config.swap_bytes)
    mover = swap if bytes_per_s is None else SlowLink(swap, facts.block_bytes, bytes_per_s)
    engine = Engine(config, runner, facts, memory=memory, mover=mover, swap_slots=swap.slots)
    for length in (32, 64, 128, 256):  # What prompts and steps cost is known before it matters.
        engine.submit(Request(request_id="warm-up", token_ids=tuple(range(100 + length, 100 + 2 * length))))
        while engine.has_work():
            engine.step(time.monotonic())
    engine.reset_prefix_cache()
    return Run(engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--room", type=float, default=0.4)
    parser.add_argument("--slow", type=float, default=0.15, help="GB/s of the slow link")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    work = workload(args.requests)
    needed = blocks_needed(work)
    tight = max(round(args.room * needed), max(-(-len(one.token_ids) // 16) for one in work) + ANSWER_TOKENS // 16 + 1)
    print(f"{len(work)} requests need {needed} blocks at their ends; the pool has {tight}")
    wanted = served({"": opened("recompute", needed + 2 * len(work), args)}, work)[""]
    print(f"with room for all: {wanted.tokens_per_s:.1f} tokens/s, P99 ITL {wanted.itl_p99_s * 1e3:.1f} ms")
    links = {"memory": None, f"{args.slow:g} GB/s": args.slow * 1e9}
    by_link = {}
    for link, bytes_per_s in links.items():
        by_link[link] = served({mode: opened(mode, tight, args, bytes_per_s) for mode in MODES}, work)
        show(link, by_link[link], wanted.texts)
    ratios = compared(by_link["memory"], "") | compared(by_link[f"{args.slow:g} GB/s"], "slow_link_")
    equal = all(run.texts == wanted.texts for runs in by_link.values() for run in runs.values())
    line = {
        "bench": "preemption",
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "tokens_per_s": {
            link: {mode: round(run.tokens_per_s, 1) for mode, run in runs.items()} for link, runs in by_link.items()
        },
        "texts_equal": equal,
    }
    print(json.dumps(line))
    sys.exit(not equal)


def served(runs: dict[str, Run], work: list[Request]) -> dict[str, Run]:
    """All of them to their ends, in turns."""
    for run in runs.values():
        for request in work:
            run.engine.submit(request)
    going = list(runs.values())
    while going:
        going = [run for run in going if run.turn()]
    return runs


def show(link: str, runs: dict[str, Run], wanted: dict[str, list[int]]) -> None:
    print(f"copies at the speed of {link}; preemptions by cost:")
    for decision in runs["auto"].decisions:
        print(f"  {decision}")
    for name, run in runs.items():
        load = run.engine.load(0.0)
        differing = sum(run.texts[request_id] != text for request_id, text in wanted.items())
        print(
            f"{name:>11}: {run.tokens_per_s:7.1f} tokens/s  P99 ITL {run.itl_p99_s * 1e3:6.1f} ms"
            f"  {load.swap_preemptions} swapped, {load.preemptions - load.swap_preemptions} computed again"
            f"  {len(wanted) - differing} of {len(wanted)} texts equal"
        )
        run.engine.check()


def compared(runs: dict[str, Run], prefix: str) -> dict[str, float]:
    forced = [runs["recompute"], runs["swap"]]
    ratios = {
        "auto_vs_best": runs["auto"].tokens_per_s / max(run.tokens_per_s for run in forced),
        "auto_vs_recompute": runs["auto"].tokens_per_s / runs["recompute"].tokens_per_s,
        "auto_vs_swap": runs["auto"].tokens_per_s / runs["swap"].tokens_per_s,
        "itl_p99_auto_vs_best": runs["auto"].itl_p99_s / min(run.itl_p99_s for run in forced),
    }
    return {prefix + name: value for name, value in ratios.items()}


if __name__ == "__main__":
    main()
