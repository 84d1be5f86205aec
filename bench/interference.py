"""What a transfer at full rate costs the decode loop beside it: `python -m bench.interference [--transports shm tcp]`.

One process decodes a batch (of the default model; `--model toy` takes a tiny random one) and polls its transfer engine
between steps and lets it give way, as a decode worker does, while a source in another process keeps its link full.
Windows of idle, busy and *neighbour* alternate, because a shared machine drifts; each decodes the same prompts. A ratio
is the median over rounds of the ratio of two windows of one round: a disturbance from outside spoils the round that it
hits and no other one. In a neighbour window nothing is transferred, but a process of no other purpose takes as much CPU
as the source took: on a machine with few cores that is not the transfer's cost. `alone` is what the link moves while
nobody decodes. `noise` is how far apart the p99 of one idle window and of the next one are, in the median: no ratio is
known better than by about that over the root of the rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.transfer import POOL_BYTES, TRANSPORTS, Child, Worker, push_all
from cluster import models
from cluster.rank import SWITCH_INTERVAL_S
from engine.config import EngineConfig
from engine.engine import Engine
from engine.toy import make_toy_checkpoint
from engine.types import Request, SamplingParams
from kvtransfer.layout import block_spans
from kvtransfer.select import ucx_available
from kvtransfer.types import LeaseKey, PushFailed, Received, ReceiveFailed, Spans

PROMPT_TOKENS = 64
WARM_STEPS = 8
BLOCK_BYTES = 368 * 1024
LEASE_BLOCKS = 2**26 // BLOCK_BYTES
OPEN_LEASES = 8
"""More than moves within a step, so that the link never waits for this process to look."""
ALONE_S = 1.0
DUTY_S = 0.002
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


# -- decoding ----------------------------------------------------------------------------------------------------------


def decoder(path: Path, streams: int, steps: int, dtype: str, threads: int) -> Engine:
    """An engine with room for so many requests of so many steps."""
    config = EngineConfig(
        model=str(path),
        dtype=dtype,
        num_blocks=streams * (-(-(PROMPT_TOKENS + steps + 2) // 16) + 1),
        max_num_seqs=streams,
        max_num_batched_tokens=max(512, streams * PROMPT_TOKENS),
        threads=threads,
        prefix_caching=False,
    )
    return Engine.open(config, clock=time.monotonic)


def gaps(engine: Engine, streams: int, steps: int, between: Callable[[], None]) -> list[float]:
    """Seconds from step to step while so many requests decode; `between` is done with each, as by a worker."""
    names = [f"r{number}" for number in range(streams)]
    for number, name in enumerate(names):
        tokens = tuple((37 * number + 11 * place) % 300 + 100 for place in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=WARM_STEPS + steps + 2, temperature=0.0, ignore_eos=True)
        engine.submit(Request(request_id=name, token_ids=tokens, sampling=sampling, arrival_s=time.monotonic()))
    times = []
    for _ in range(WARM_STEPS + steps):
        start_s = time.perf_counter()
        between()
        engine.step(time.monotonic())
        times.append(time.perf_counter() - start_s)
    for name in names:
        engine.abort(name)
    return times[WARM_STEPS:]


# -- the stream --------------------------------------------------------------------------------------------------------


class Stream:
    """Leases that a source in another process fills one after the other, a few of them open at any time."""

    def __init__(self, worker: Worker, source: Child) -> None:
        self._worker = worker
        self._source = source
        self._lists = list(block_lists("writes"))
        self._last = 0
        self._missing: Counter[LeaseKey] = Counter()
        self._running = False
        self.moved_bytes = 0

    def start(self) -> None:
        self._running = True
        self.tend()

    def tend(self) -> None:
        """Take what came, open new leases for it; returns at once."""
        for event in self._worker.engine.poll():
            if isinstance(event, ReceiveFailed):
                raise RuntimeError(f"a transfer failed: {event}")
            if isinstance(event, Received):
                self._received(event)
        while self._running and len(self._missing) < OPEN_LEASES:
            self._last += 1
            key = LeaseKey("bench", self._last)
            self._missing[key] = LEASE_BLOCKS
            self._worker.engine.open(key, "source#1", self._lists[self._last % len(self._lists)])
            self._source.say(str(self._last))

    def give_way(self, works: bool) -> None:
        """As a worker's transfers do while it has steps to do."""
        self._worker.engine.give_way(works)

    def stop(self) -> None:
        """Returns when the open leases are full."""
        self._running = False
        while self._missing:
            self.wait()

    def wait(self) -> None:
        """For news, and tend to it."""
        self.tend()
        self._worker.news.wait(0.1)

    def _received(self, event: Received) -> None:
        self.moved_bytes += event.num_bytes
        self._missing[event.key] -= event.count
        if not self._missing[event.key]:
            del self._missing[event.key]
            self._worker.engine.close(event.key)


def block_lists(seed: str) -> Iterator[Spans]:
    """A few random lists of blocks of the pool."""
    chance = random.Random(seed)
    for _ in range(16):
        yield block_spans(chance.sample(range(POOL_BYTES // BLOCK_BYTES), LEASE_BLOCKS), BLOCK_BYTES)


def serve_source(transport: str) -> None:
    """The child: reads the address, then the numbers of leases to fill."""
    worker = Worker("source#1", transport)
    worker.engine.connect("destination#1", TRANSPORTS[transport][0], bytes.fromhex(sys.stdin.readline().strip()))
    print("ready", flush=True)
    lists = list(block_lists("reads"))
    os.set_blocking(sys.stdin.fileno(), False)
    told = b""
    while True:
        ready, _, _ = select.select([sys.stdin, worker.news], [], [])
        events = worker.engine.poll() if worker.news in ready and worker.news.wait(0) else []
        if failed := [event for event in events if isinstance(event, PushFailed)]:
            raise RuntimeError(f"a transfer failed: {failed}")
        if sys.stdin in ready:
            read = os.read(sys.stdin.fileno(), 4096)
            if not read:
                break
            *lines, told = (told + read).split(b"\n")
            for number in map(int, lines):
                push_all(worker, LeaseKey("bench", number), "destination#1", lists[number % len(lists)])
    worker.engine.shutdown()


@contextmanager
def a_stream(transport: str) -> Iterator[tuple[Stream, Child]]:
    """Connected, and its source."""
    worker = Worker("destination#1", transport)
    source = Child([sys.executable, "-m", "bench.interference", "--serve", transport])
    try:
        source.say(worker.engine.addresses()[0][1].hex())
        source.hear("ready")
        yield Stream(worker, source), source
    finally:
        source.end()
        worker.engine.shutdown()


# -- the neighbour -----------------------------------------------------------------------------------------------------


def serve_neighbour() -> None:
    """The child: reads shares of one core, and takes so much until it reads another one."""
    share = 0.0
    while True:
        if select.select([sys.stdin], [], [], max(0.0, DUTY_S * (1 - share)) if share else None)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            share = float(line)
        end_s = time.perf_counter() + DUTY_S * share
        while time.perf_counter() < end_s:
            pass


def cpu_s(child: Child) -> float:
    """CPU seconds that a child has taken so far, in 10 ms."""
    fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """One window of decoding. `source_cores`, `own_cores`: CPU taken by the source and by this process, over time."""

    p50_ms: float
    p99_ms: float
    gb_per_s: float
    own_cores: float
    source_cores: float


def p99(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


PARTS: dict[str, Callable[[Window], float]] = {"p50": lambda one: one.p50_ms, "p99": lambda one: one.p99_ms}


class Course:
    """Windows of each kind, over one transport."""

    def __init__(self, engine: Engine, args: argparse.Namespace, stream: Stream, source: Child, other: Child) -> None:
        self._engine, self._args = engine, args
        self._stream, self._source, self._other = stream, source, other
        self._source_cores = 0.0

    def idle(self) -> Window:
        return self._window()

    def busy(self) -> Window:
        self._stream.start()
        window = self._window()
        self._stream.stop()
        self._source_cores = window.source_cores
        return window

    def neighbour(self) -> Window:
        self._other.say(str(min(1.0, self._source_cores)))
        window = self._window()
        self._other.say("0")
        return window

    def alone(self) -> float:
        """GB/s while nobody decodes."""
        self._stream.start()
        start_s, before = time.perf_counter(), self._stream.moved_bytes
        while time.perf_counter() - start_s < ALONE_S:
            self._stream.wait()
        rate = (self._stream.moved_bytes - before) / (time.perf_counter() - start_s) / 1e9
        self._stream.stop()
        return rate

    def _window(self) -> Window:
        stream, source = self._stream, self._source
        start_s, own_s, source_s, before = time.perf_counter(), time.process_time(), cpu_s(source), stream.moved_bytes
        stream.give_way(True)
        times = gaps(self._engine, self._args.streams, self._args.steps, stream.tend)
        stream.give_way(False)
        wall_s = time.perf_counter() - start_s
        return Window(
            p50_ms=statistics.median(times) * 1e3,
            p99_ms=p99(times) * 1e3,
            gb_per_s=(stream.moved_bytes - before) / wall_s / 1e9,
            own_cores=(time.process_time() - own_s) / wall_s,
            source_cores=(cpu_s(source) - source_s) / wall_s,
        )


def measure(course: Course, rounds: int) -> dict[str, float]:
    """Medians of `rounds` windows of each kind, taken in turn, and of the ratios within a round."""
    kinds = {"idle": course.idle, "busy": course.busy, "neighbour": course.neighbour}
    windows: dict[str, list[Window]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, window in kinds.items():
            windows[kind].append(window())

    def of(kind: str, what: Callable[[Window], float]) -> float:
        return statistics.median(map(what, windows[kind]))

    def ratio(kind: str, what: Callable[[Window], float]) -> float:
        rounds = zip(windows["busy"], windows[kind], strict=True)
        return statistics.median(what(busy) / what(other) for busy, other in rounds)

    row = {f"{kind}_{name}_ms": of(kind, what) for name, what in PARTS.items() for kind in kinds}
    row |= {
        f"{name}_busy_vs_{kind}": ratio(kind, what) for name, what in PARTS.items() for kind in kinds if kind != "busy"
    }
    row["noise"] = statistics.median(max(a, b) / min(a, b) for a, b in pairwise(map(PARTS["p99"], windows["idle"])))
    row["busy_gb_per_s"] = of("busy", lambda window: window.gb_per_s)
    row["alone_gb_per_s"] = course.alone()
    row["source_cores"] = of("busy", lambda window: window.source_cores)
    row["own_cores"] = of("busy", lambda window: window.own_cores)
    row["own_idle_cores"] = of("idle", lambda window: window.own_cores)
    return row


def report(path: Path, args: argparse.Namespace) -> None:
    """Measure all, print a table and the JSON line."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    engine = decoder(path, args.streams, WARM_STEPS + args.steps, args.dtype, args.threads)
    gaps(engine, args.streams, args.steps, lambda: None)
    other = Child([sys.executable, "-m", "bench.interference", "--neighbour"])
    rows: dict[str, dict[str, float]] = {}
    for transport in args.transports:
        with a_stream(transport) as (stream, source):
            rows[transport] = measure(Course(engine, args, stream, source, other), args.rounds)
    other.end()
    print(f"{'':20}" + "".join(f"{transport:>12}" for transport in rows))
    for name in next(iter(rows.values())):
        print(f"{name:20}" + "".join(f"{row[name]:12.2f}" for row in rows.values()))
    ratios = {
        f"{transport}_itl_{part}_busy_vs_{kind}": round(row[f"{part}_busy_vs_{kind}"], 3)
        for transport, row in rows.items()
        for part in ("p50", "p99")
        for kind in ("idle", "neighbour")
    }
    rounded = {transport: {name: round(value, 3) for name, value in row.items()} for transport, row in rows.items()}
    line = {"bench": "interference", "model": path.name, "threads": args.threads, "ratios": ratios, **rounded}
    print(json.dumps(line | {"load": os.getloadavg()[0], "cores": os.cpu_count()}))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    usable = ucx_available()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.interference", description=__doc__)
    parser.add_argument("--model", default=models.DEFAULT, help="a checkpoint, a known name, or `toy`")
    chosen = ("shm", "tcp", "ucx") if usable else ("shm", "tcp")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=chosen)
    parser.add_argument("--threads", type=int, default=1, help="of the step; workers have one unless told")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200, help="per window")
    parser.add_argument("--rounds", type=int, default=7, help="windows of each kind")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--serve", choices=TRANSPORTS, help=argparse.SUPPRESS)
    parser.add_argument("--neighbour", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.serve:
        serve_source(args.serve)
    elif args.neighbour:
        serve_neighbour()
    elif args.model == "toy":
        with tempfile.TemporaryDirectory() as folder:
            report(make_toy_checkpoint(Path(folder)), args)
    else:
        report(models.resolve(args.model), args)


if __name__ == "__main__":
    main()
