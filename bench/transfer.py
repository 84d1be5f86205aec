"""How fast blocks move between two processes of this machine: `python -m bench.transfer`.

For each transport and block size a source process pushes a random list of blocks into a random list at this process,
from a pool much larger than any cache, several rounds; the median counts. The yardstick, measured in the same run, is
one thread copying the same cold lists inside one process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtransfer.engine import TransferEngine
from kvtransfer.layout import block_spans
from kvtransfer.select import make_transport, ucx_available
from kvtransfer.types import LeaseKey, PushDone, PushFailed, Received, ReceiveFailed, Span, TransferEvent

KIB = 1024
BLOCK_KIB = (16, 64, 368, 2048)
POOL_BYTES = 256 * 2**20
ROUND_BYTES = 64 * 2**20
PUSH_BYTES = 8 * 2**20
LATENCY_ROUNDS = 100
STEP_TIMEOUT_S = 60.0

TRANSPORTS = {"tcp": ("tcp", True), "ucx": ("ucx", True), "ucx_shared_memory": ("ucx", False)}
"""Name in the report: scheme, UCX error handling. The last does not survive a killed peer and is never the best."""
SAFE = ("tcp", "ucx")


class Worker:
    """A pool and its engine; waits for events as a node would."""

    def __init__(self, name: str, transport: str) -> None:
        scheme, error_handling = TRANSPORTS[transport]
        self.pool = np.full(POOL_BYTES, len(name), np.uint8)
        region = self.pool.data
        self._news = threading.Event()
        made = make_transport(scheme, name, region, ucx_error_handling=error_handling)
        self.engine = TransferEngine(name, region, [made], wake=self._news.set)

    def wait(self, kinds: tuple[type, ...], count: int) -> None:
        """Until `count` such events came. Raises RuntimeError on a failure or when they do not come."""
        end = time.monotonic() + STEP_TIMEOUT_S
        while count > 0:
            self._news.clear()
            for event in self.engine.poll():
                count -= isinstance(event, kinds)
                _refuse_failures(event)
            if count > 0 and not self._news.wait(max(0.0, end - time.monotonic())):
                raise RuntimeError(f"{count} transfers did not end within {STEP_TIMEOUT_S} s")


def _refuse_failures(event: TransferEvent) -> None:
    if isinstance(event, PushFailed | ReceiveFailed):
        raise RuntimeError(f"a transfer failed: {event}")


def block_list(seed: int, block_bytes: int, num_bytes: int) -> list[Span]:
    """Random blocks of the pool, each once."""
    ids = random.Random(seed).sample(range(POOL_BYTES // block_bytes), max(1, num_bytes // block_bytes))
    return block_spans(ids, block_bytes)


def push_all(worker: Worker, key: LeaseKey, peer: str, spans: Sequence[Span]) -> int:
    """In pushes of about `PUSH_BYTES`, as chunks of a prompt would be; how many."""
    step = max(1, PUSH_BYTES // spans[0].length)
    starts = range(0, len(spans), step)
    for start in starts:
        worker.engine.push(key, peer, start, spans[start : start + step])
    return len(starts)


def serve_source(transport: str) -> None:
    """The child: reads `address`, then `push KEY SEED BLOCK_BYTES NUM_BYTES` lines, answers with seconds."""
    worker = Worker("source#1", transport)
    scheme = TRANSPORTS[transport][0]
    worker.engine.connect("destination#1", scheme, bytes.fromhex(sys.stdin.readline().strip()))
    print("ready", flush=True)
    for line in sys.stdin:
        number, seed, block_bytes, num_bytes = map(int, line.split())
        spans = block_list(seed, block_bytes, num_bytes)
        start_s = time.perf_counter()
        worker.wait((PushDone,), push_all(worker, LeaseKey("bench", number), "destination#1", spans))
        print(time.perf_counter() - start_s, flush=True)
    worker.engine.shutdown()


@contextmanager
def two_processes(transport: str) -> Iterator[tuple[Worker, subprocess.Popen[str]]]:
    """This process as the destination, a child as the source, connected."""
    worker = Worker("destination#1", transport)
    command = [sys.executable, "-m", "bench.transfer", "--serve", transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(worker.engine.addresses()[0][1].hex() + "\n")
        child.stdin.flush()
        child.stdout.readline()
        yield worker, child
        child.stdin.close()
        child.wait(STEP_TIMEOUT_S)
    worker.engine.shutdown()


class Course:
    """One connected pair, measured over and over."""

    def __init__(self, worker: Worker, child: subprocess.Popen[str]) -> None:
        self._worker = worker
        self._child = child
        self._number = 0

    def move(self, block_bytes: int, num_bytes: int) -> tuple[float, float]:
        """Seconds until all is received here, seconds until the source knows."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._number += 1
        key = LeaseKey("bench", self._number)
        spans = block_list(2 * self._number, block_bytes, num_bytes)
        self._worker.engine.open(key, "source#1", spans)
        pushes = -(-len(spans) // max(1, PUSH_BYTES // block_bytes))
        self._child.stdin.write(f"{self._number} {2 * self._number + 1} {block_bytes} {num_bytes}\n")
        start_s = time.perf_counter()
        self._child.stdin.flush()
        self._worker.wait((Received,), pushes)
        received_s = time.perf_counter() - start_s
        known_s = float(self._child.stdout.readline())
        self._worker.engine.close(key)
        return received_s, known_s


def copy_gb_per_s(block_bytes: int, rounds: int) -> float:
    """One thread, one process, the same kind of lists between two pools."""
    source, destination = np.ones(POOL_BYTES, np.uint8), np.zeros(POOL_BYTES, np.uint8)
    rates = []
    for number in range(rounds + 1):
        reads = block_list(2 * number + 1, block_bytes, ROUND_BYTES)
        writes = block_list(2 * number, block_bytes, ROUND_BYTES)
        start_s = time.perf_counter()
        for read, write in zip(reads, writes, strict=True):
            destination[write.offset : write.offset + write.length] = source[read.offset : read.offset + read.length]
        rates.append(len(reads) * block_bytes / (time.perf_counter() - start_s) / 1e9)
    return statistics.median(rates[1:])


def measure(transport: str, rounds: int) -> dict[str, float]:
    """GB/s per block size (median of `rounds` after one to warm up); `latency_us`: until the source knows one push."""
    result = {}
    with two_processes(transport) as (worker, child):
        course = Course(worker, child)
        for kib in BLOCK_KIB:
            block_bytes = kib * KIB
            moved = ROUND_BYTES // block_bytes * block_bytes
            times = [course.move(block_bytes, ROUND_BYTES)[0] for _ in range(rounds + 1)][1:]
            result[f"{kib}k"] = moved / statistics.median(times) / 1e9
        known = [course.move(368 * KIB, 368 * KIB)[1] for _ in range(LATENCY_ROUNDS)]
        result["latency_us"] = statistics.median(known) * 1e6
    return result


def report(rounds: int, peers: Path | None) -> None:
    """Measure all, print a table and the JSON line."""
    usable, why = ucx_available()
    names = [name for name, (scheme, _) in TRANSPORTS.items() if scheme != "ucx" or usable]
    if not usable:
        print(f"ucx is left out: {why}")
    copy = {f"{kib}k": copy_gb_per_s(kib * KIB, rounds) for kib in BLOCK_KIB}
    measured = {name: measure(name, rounds) for name in names}
    _print_row("GB/s", [f"{kib} KiB" for kib in BLOCK_KIB] + ["latency µs"])
    _print_row("one-thread copy", [f"{rate:.2f}" for rate in copy.values()])
    for name, result in measured.items():
        _print_row(name, [f"{result[size]:.2f}" for size in copy] + [f"{result['latency_us']:.0f}"])
    print(_peers_line(peers))
    ratios = {f"{name}_{size}_vs_copy": round(measured[name][size] / copy[size], 3) for name in names for size in copy}
    for size in copy:
        ratios[f"best_{size}_vs_copy"] = round(
            max(measured[name][size] for name in names if name in SAFE) / copy[size], 3
        )
    latency = {name: round(result["latency_us"]) for name, result in measured.items()}
    print(json.dumps({"bench": "transfer", "ratios": ratios, "latency_us": latency}))


def _print_row(name: str, cells: list[str]) -> None:
    print(f"{name:20}" + "".join(f"{cell:>12}" for cell in cells))


def _peers_line(peers: Path | None) -> str:
    found = [name for name in ("nixl", "mooncake") if importlib.util.find_spec(name) is not None]
    where = f"--peers {peers}" if peers is not None else "no --peers"
    return f"peers ({where}; importable here: {', '.join(found) or 'none'}): NIXL and Mooncake are not yet measured"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, help="folder with peers to compare with")
    parser.add_argument("--serve", choices=TRANSPORTS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.serve:
        serve_source(chosen.serve)
    else:
        report(chosen.rounds, chosen.peers)


if __name__ == "__main__":
    main()
