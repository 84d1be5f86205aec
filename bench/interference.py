"""What a transfer at full rate costs the decode loop beside it: `python -m bench.interference [--transport shm]`.

One process decodes a batch with the engine (a model's file, or a random one when none is named) while its own transfer
engine receives without a pause from a source in another process, as a decode worker does. Idle and busy phases
alternate, because a shared machine drifts; the ratio is of the 99th percentiles of the times between steps. The
machine's cores are the limit: the loop, the receiving thread and the source share them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.transfer import TRANSPORTS, OurCourse, two_processes
from engine.config import EngineConfig
from engine.engine import Engine
from engine.toy import make_toy_checkpoint
from engine.types import Request, SamplingParams

PROMPT_TOKENS = 32
BLOCK_BYTES = 368 * 1024
ROUND_BYTES = 32 * 2**20


def decoder(path: Path, streams: int, steps: int, dtype: str) -> Engine:
    """An engine in which `streams` requests decode for at least so many steps."""
    blocks = streams * (-(-(PROMPT_TOKENS + steps) // 16) + 1)
    config = EngineConfig(
        model=str(path),
        dtype=dtype,
        num_blocks=blocks,
        max_num_seqs=streams,
        max_num_batched_tokens=max(512, streams),
        threads=1,
    )
    engine = Engine.open(config, clock=time.monotonic)
    for number in range(streams):
        tokens = tuple((37 * number + 11 * place) % 300 + 100 for place in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
        engine.submit(Request(request_id=f"r{number}", token_ids=tokens, sampling=sampling, arrival_s=time.monotonic()))
    return engine


def gaps(engine: Engine, steps: int) -> list[float]:
    """Seconds of each of the next steps, until one ends and the next begins."""
    times = []
    for _ in range(steps):
        start_s = time.perf_counter()
        engine.step(time.monotonic())
        times.append(time.perf_counter() - start_s)
    return times


class Traffic:
    """Receives without a pause on a thread while it is on."""

    def __init__(self, course: OurCourse) -> None:
        self._course = course
        self._on, self._idle = threading.Event(), threading.Event()
        self._ended = False
        self.rates: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._idle.set()
        self._thread.start()

    def on(self) -> None:
        self._idle.clear()
        self._on.set()

    def off(self) -> None:
        """Returns when the last round has ended."""
        self._on.clear()
        self._idle.wait()

    def end(self) -> None:
        self._ended = True
        self._on.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._idle.set()
            self._on.wait()
            self._idle.clear()
            if self._ended:
                return
            seconds = self._course.move(BLOCK_BYTES, ROUND_BYTES, len(self.rates) + 1)
            self.rates.append(ROUND_BYTES // BLOCK_BYTES * BLOCK_BYTES / seconds / 1e9)


def p99(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def report(path: Path, args: argparse.Namespace) -> None:
    engine = decoder(path, args.streams, 2 * args.phases * args.steps + args.steps + PROMPT_TOKENS, args.dtype)
    gaps(engine, args.steps)
    idle: list[float] = []
    busy: list[float] = []
    with two_processes(args.transport) as course:
        traffic = Traffic(course)
        try:
            for _ in range(args.phases):
                idle += gaps(engine, args.steps)
                traffic.on()
                busy += gaps(engine, args.steps)
                traffic.off()
        finally:
            traffic.end()
    row = {
        "idle_p50_ms": statistics.median(idle) * 1e3,
        "idle_p99_ms": p99(idle) * 1e3,
        "busy_p50_ms": statistics.median(busy) * 1e3,
        "busy_p99_ms": p99(busy) * 1e3,
        "transfer_gb_per_s": statistics.median(traffic.rates),
    }
    for name, value in row.items():
        print(f"{name:20}{value:10.2f}")
    ratio = {"itl_p99_busy_vs_idle": round(p99(busy) / p99(idle), 3)}
    rounded = {name: round(value, 3) for name, value in row.items()}
    line = {"bench": "interference", "transport": args.transport, "ratios": ratio, **rounded}
    print(json.dumps(line | {"load": os.getloadavg()[0], "cores": os.cpu_count()}))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.interference", description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: a small random one")
    parser.add_argument("--transport", choices=TRANSPORTS, default="shm")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60, help="per phase")
    parser.add_argument("--phases", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(arguments)
    if args.model is not None:
        report(args.model, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        report(make_toy_checkpoint(Path(folder)), args)


if __name__ == "__main__":
    main()
