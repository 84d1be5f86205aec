"""How fast blocks move between two processes of this machine: `python -m bench.transfer [--peers DIR]`.

For each transport and block size a source process pushes a random list of blocks into a random list at this process,
from a pool much larger than any cache. The lists are new in each round; the clock runs from the word "go" to the last
byte. Yardsticks of the same run: one thread copying such lists inside one process, and with `--peers` NIXL (over what
it chooses, and over TCP) and Mooncake's Transfer Engine (TCP), each as two processes of the Python in DIR, see
`bench.transfer_peers`. All take turns within a round, because a shared machine drifts; a ratio is the median of those
within a round. The processes of those whose turn it is not are stopped: some poll even when idle. `ucx_perftest`, where
the wheel brings it, is shown for information: it reuses one hot buffer. Latency is that of one block until its source
knows that it has arrived: one after the other, as `ucx_perftest` measures; the same with a core for each process, since
Linux may keep two that answer each other on one; and with a pause before each, after which both processes must be woken
and the processor has forgotten their code. Medians count; the last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from operator import truediv
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvtransfer.engine import TransferEngine
from kvtransfer.layout import block_spans
from kvtransfer.memory import SharedMemory, private_memory
from kvtransfer.select import make_transport, ucx_available
from kvtransfer.types import LeaseKey, PushDone, PushFailed, Received, ReceiveFailed, Spans, TransferEvent

KIB = 1024
BLOCK_KIB = (16, 64, 368, 2048)
POOL_BYTES = 256 * 2**20
ROUND_BYTES = 64 * 2**20
PUSH_BYTES = 8 * 2**20
LATENCY_KIB = 368
LATENCY_BLOCKS = 200
PAUSE_MS = 2
STEP_TIMEOUT_S = 60.0

POOLS = {"shared": SharedMemory, "private": private_memory}
"""A worker's pool is shared when `shm` is among its transports, else private, as the pools of the peers are."""
TRANSPORTS = {
    "shm": ("shm", True, "shared"),
    "tcp": ("tcp", True, "private"),
    "ucx": ("ucx", True, "private"),
    "ucx_beside_shm": ("ucx", True, "shared"),
    "ucx_shared_memory": ("ucx", False, "private"),
}
"""Name in the report: scheme, UCX error handling, pool. `ucx_beside_shm` is what a worker with both has towards peers
that shm does not reach; the last does not survive a killed peer and is never chosen."""
CHOSEN = "shm"
"""What workers of one host use by default."""
PEERS = {
    "nixl": ("nixl", {"UCX_NET_DEVICES": "lo"}),
    "nixl_tcp": ("nixl", {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}),
    "mooncake": ("mooncake", {}),
}
"""Name in the report: name in `bench.transfer_peers`, environment."""


class Course(Protocol):
    """A connected pair that moves one list per call."""

    children: Sequence[Child]

    def move(self, block_bytes: int, num_bytes: int, seed: int) -> float:
        """Seconds until all bytes are in place."""
        ...


def block_ids(seed: int, block_bytes: int, num_bytes: int) -> list[int]:
    """Random blocks of the pool, each once."""
    return random.Random(seed).sample(range(POOL_BYTES // block_bytes), max(1, num_bytes // block_bytes))


# -- one thread, one process -------------------------------------------------------------------------------------------


class CopyCourse:
    """The yardstick: one numpy copy per block."""

    children: Sequence[Child] = ()

    def __init__(self) -> None:
        self._source, self._target = np.ones(POOL_BYTES, np.uint8), np.zeros(POOL_BYTES, np.uint8)

    def move(self, block_bytes: int, num_bytes: int, seed: int) -> float:
        source, target = self._source, self._target
        reads = [block * block_bytes for block in block_ids(seed, block_bytes, num_bytes)]
        writes = [block * block_bytes for block in block_ids(~seed, block_bytes, num_bytes)]
        start_s = time.perf_counter()
        for read, write in zip(reads, writes, strict=True):
            target[write : write + block_bytes] = source[read : read + block_bytes]
        return time.perf_counter() - start_s


# -- ours: two processes -----------------------------------------------------------------------------------------------


class Bell:
    """How a transport wakes its owner: as a worker's doorbell does, by a descriptor."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._descriptor, select.POLLIN)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def wait(self, timeout_s: float) -> bool:
        """Whether it rang since the last wait."""
        if not self._poller.poll(math.ceil(timeout_s * 1000)):
            return False
        os.eventfd_read(self._descriptor)
        return True


class Worker:
    """A pool and its engine; waits for events as a node would."""

    def __init__(self, name: str, transport: str) -> None:
        scheme, error_handling, pool = TRANSPORTS[transport]
        region = memoryview(POOLS[pool](POOL_BYTES))
        np.frombuffer(region, np.uint8)[:] = len(name)
        self.news = Bell()
        made = make_transport(scheme, name, region, ucx_error_handling=error_handling)
        self.engine = TransferEngine(name, region, [made], wake=self.news.ring)

    def wait(self, kinds: tuple[type, ...], count: int) -> None:
        """Until `count` such events came. Raises RuntimeError on a failure or when they do not come."""
        end = time.monotonic() + STEP_TIMEOUT_S
        while count > 0:
            for event in self.engine.poll():
                count -= isinstance(event, kinds)
                _refuse_failures(event)
            if count > 0 and not self.engine.linger() and not self.news.wait(max(0.0, end - time.monotonic())):
                raise RuntimeError(f"{count} transfers did not end within {STEP_TIMEOUT_S} s")


def _refuse_failures(event: TransferEvent) -> None:
    if isinstance(event, PushFailed | ReceiveFailed):
        raise RuntimeError(f"a transfer failed: {event}")


def push_all(worker: Worker, key: LeaseKey, peer: str, spans: Spans) -> int:
    """In pushes of about `PUSH_BYTES`, as chunks of a prompt would be; how many."""
    step = max(1, PUSH_BYTES // spans[0].length)
    starts = range(0, len(spans), step)
    for start in starts:
        worker.engine.push(key, peer, start, spans[start : start + step])
    return len(starts)


def push_each(worker: Worker, key: LeaseKey, peer: str, spans: Spans, pause_s: float) -> float:
    """One by one, after a pause each; the median of the seconds until it was known to have arrived."""
    seconds = []
    for place in range(len(spans)):
        one = spans[place : place + 1]
        if pause_s:
            time.sleep(pause_s)
        start_s = time.perf_counter()
        worker.engine.push(key, peer, place, one)
        worker.wait((PushDone,), 1)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)


def serve_source(transport: str) -> None:
    """The child: reads the address, then per round a list to make (all at once, or each block after a pause) and "go";
    answers with seconds."""
    worker = Worker("source#1", transport)
    scheme = TRANSPORTS[transport][0]
    worker.engine.connect("destination#1", scheme, bytes.fromhex(sys.stdin.readline().strip()))
    print("ready", flush=True)
    for line in sys.stdin:
        number, seed, block_bytes, num_bytes, *pause_ms = map(int, line.split())
        spans = block_spans(block_ids(seed, block_bytes, num_bytes), block_bytes)
        print("ready", flush=True)
        sys.stdin.readline()
        key, peer = LeaseKey("bench", number), "destination#1"
        if pause_ms:
            print(push_each(worker, key, peer, spans, pause_ms[0] / 1e3), flush=True)
        else:
            worker.wait((PushDone,), push_all(worker, key, peer, spans))
            print("done", flush=True)
    worker.engine.shutdown()


class OurCourse:
    """This process as the destination, a child as the source."""

    def __init__(self, worker: Worker, child: Child) -> None:
        self._worker = worker
        self._child = child
        self.children = (child,)
        self._number = 0

    def move(self, block_bytes: int, num_bytes: int, seed: int) -> float:
        blocks = max(1, num_bytes // block_bytes)
        pushes = -(-blocks // max(1, PUSH_BYTES // block_bytes))
        return self._round(f"{seed} {block_bytes} {num_bytes}", pushes)[0]

    def latency_s(self, block_bytes: int, blocks: int, pause_ms: int) -> float:
        """Median seconds until the source knew that a block had arrived, each sent by itself after a pause."""
        return float(self._round(f"1 {block_bytes} {blocks * block_bytes} {pause_ms}", blocks)[1])

    def apart(self) -> AbstractContextManager[None]:
        """The two processes on cores of their own, if there are two."""
        return cores_of_their_own(os.getpid(), self._child.process.pid)

    def _round(self, what: str, pushes: int) -> tuple[float, str]:
        """Seconds until so many pushes had arrived, and what the source says of it."""
        self._number += 1
        key = LeaseKey("bench", self._number)
        self._child.say(f"{self._number} {what}")
        seed, block_bytes, num_bytes, *_ = map(int, what.split())
        spans = block_spans(block_ids(~seed, block_bytes, num_bytes), block_bytes)
        self._worker.engine.open(key, "source#1", spans)
        self._child.hear()
        start_s = time.perf_counter()
        self._child.say("go")
        self._worker.wait((Received,), pushes)
        received_s = time.perf_counter() - start_s
        said = self._child.hear()
        self._worker.engine.close(key)
        return received_s, said


@contextmanager
def cores_of_their_own(*pids: int) -> Iterator[None]:
    """Each process on one core. Left alone Linux may keep two that answer each other on the same one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(pids):
        yield
        return
    try:
        for core, pid in zip(cores, pids, strict=False):
            _bind(pid, {core})
        yield
    finally:
        for pid in pids:
            _bind(pid, set(cores))


def _bind(pid: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


_CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
"""Taken before ucxx loads: it writes settings of its own into the environment, which would slow NIXL down tenfold."""


class Child:
    """A process that is asked and answers in lines."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 lives as long as the child
        self.process: subprocess.Popen[str] = subprocess.Popen(
            command,
            text=True,
            env=_CLEAN | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def hear(self, start: str = "") -> str:
        """The next line that starts so. Raises RuntimeError when the process ends first."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line.strip()
        raise self._ended()

    def _ended(self) -> RuntimeError:
        code = self.process.wait()
        self._complaints.seek(0)
        return RuntimeError(f"{self.process.args!r} ended with {code}: {self._complaints.read()[-2000:]}")

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def two_processes(transport: str) -> Iterator[OurCourse]:
    """Connected."""
    worker = Worker("destination#1", transport)
    child = Child([sys.executable, "-m", "bench.transfer", "--serve", transport])
    try:
        child.say(worker.engine.addresses()[0][1].hex())
        child.hear("ready")
        yield OurCourse(worker, child)
    finally:
        child.end()
        worker.engine.shutdown()


# -- peers: two processes each -----------------------------------------------------------------------------------------


class PeerCourse:
    """Two processes of a peer."""

    def __init__(self, target: Child, initiator: Child) -> None:
        self.children = (target, initiator)
        self._initiator = initiator
        initiator.say(target.hear("{"))
        initiator.hear("{")

    def move(self, block_bytes: int, num_bytes: int, seed: int) -> float:
        reads = [block * block_bytes for block in block_ids(seed, block_bytes, num_bytes)]
        writes = [block * block_bytes for block in block_ids(~seed, block_bytes, num_bytes)]
        self._initiator.say(json.dumps({"reads": reads, "writes": writes, "block_bytes": block_bytes}))
        answer = json.loads(self._initiator.hear("{"))
        if not answer["moved"]:
            raise RuntimeError(f"{self._initiator.process.args!r} did not move all bytes")
        return float(answer["seconds"])


def python_of(peers: Path) -> Path:
    """The interpreter that the peers are installed for: `transfer` in the folder of all peers' environments."""
    return peers / "transfer" / "bin" / "python"


@contextmanager
def peer_processes(peers: Path, name: str) -> Iterator[PeerCourse]:
    """A peer of the environment in `peers`."""
    peer, environment = PEERS[name]
    script = str(Path(__file__).with_name("transfer_peers.py"))
    children = [
        Child([str(python_of(peers)), script, role, peer, str(POOL_BYTES)], environment)
        for role in ("target", "initiator")
    ]
    try:
        yield PeerCourse(*children)
    finally:
        for child in children[::-1]:
            child.end()


# -- the run -----------------------------------------------------------------------------------------------------------


Seconds = dict[str, dict[int, list[float]]]
"""By course and KiB of a block: one per round."""


@contextmanager
def turn_of(course: Course) -> Iterator[None]:
    """Its processes run; those of others are stopped."""
    _signal(course, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(course, signal.SIGSTOP)


def _signal(course: Course, number: signal.Signals) -> None:
    for child in course.children:
        child.process.send_signal(number)


def measure(courses: dict[str, Course], rounds: int) -> Seconds:
    """Each turn begins with a list that is not counted: whoever was stopped is cold."""
    seconds: Seconds = {name: {kib: [] for kib in BLOCK_KIB} for name in courses}
    for kib in BLOCK_KIB:
        for number in range(rounds):
            for name, course in courses.items():
                with turn_of(course):
                    course.move(kib * KIB, ROUND_BYTES, 2 * number)
                    seconds[name][kib].append(course.move(kib * KIB, ROUND_BYTES, 2 * number + 1))
    return seconds


def gb_per_s(seconds: Seconds) -> dict[str, dict[str, float]]:
    """Medians."""
    moved = {kib: ROUND_BYTES // (kib * KIB) * kib * KIB for kib in BLOCK_KIB}
    return {
        name: {f"{kib}k": moved[kib] / statistics.median(took) / 1e9 for kib, took in by_size.items()}
        for name, by_size in seconds.items()
    }


def latency_us(course: OurCourse, pause_ms: int) -> int:
    """Median until the source knows that one block has arrived, after as many to warm up."""
    return round([course.latency_s(LATENCY_KIB * KIB, LATENCY_BLOCKS, pause_ms) for _ in range(2)][1] * 1e6)


def perftest(test: str, num_bytes: int) -> dict[str, float] | None:
    """`ucx_perftest`'s own median latency in µs and average GB/s; None where it is not installed or does not run."""
    spec = importlib.util.find_spec("libucx")
    folder = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    if folder is None or not (folder / "bin" / "ucx_perftest").exists():
        return None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    command = [str(folder / "bin" / "ucx_perftest"), "-t", test, "-s", str(num_bytes), "-n", "500", "-p"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "env": environment}
    with subprocess.Popen([*command, str(port)], **pipes) as server:
        for _ in range(50):
            done = subprocess.run([*command, str(port), "127.0.0.1"], check=False, timeout=STEP_TIMEOUT_S, **pipes)
            if done.returncode == 0:
                break
            time.sleep(0.1)
        server.kill()
    fields = [line.split() for line in done.stdout.splitlines() if line.startswith("Final:")]
    return {"us": float(fields[-1][2]), "gb_per_s": float(fields[-1][5]) * 2**20 / 1e9} if fields else None


def report(rounds: int, peers: Path | None) -> None:
    """Measure all, print a table and the JSON line."""
    usable, why = ucx_available()
    names = [name for name, (scheme, *_) in TRANSPORTS.items() if scheme != "ucx" or usable]
    if not usable:
        print(f"ucx is left out: {why}")
    if peers is not None and not python_of(peers).exists():
        print(f"the peers are left out: {python_of(peers)} is not there")
        peers = None
    latency, after_pause, apart = {}, {}, {}
    with ExitStack() as stack:
        courses: dict[str, Course] = {"copy": CopyCourse()}

        def join(name: str, course: Course) -> None:
            courses[name] = course
            _signal(course, signal.SIGSTOP)

        for name in names:
            ours = stack.enter_context(two_processes(name))
            latency[name], after_pause[name] = latency_us(ours, 0), latency_us(ours, PAUSE_MS)
            with ours.apart():
                apart[name] = latency_us(ours, 0)
            join(name, ours)
        for name in PEERS if peers is not None else ():
            assert peers is not None
            join(name, stack.enter_context(peer_processes(peers, name)))
        seconds = measure(courses, rounds)
    rates = gb_per_s(seconds)
    hot = perftest("tag_lat", LATENCY_KIB * KIB) if usable else None
    _print_table(rates, latency, apart, after_pause)
    if hot is not None:
        print(f"ucx_perftest, one hot buffer of {LATENCY_KIB} KiB: {hot['us']:.0f} µs, {hot['gb_per_s']:.2f} GB/s")
        latency["ucx_perftest"] = round(hot["us"])
    line = {"bench": "transfer", "gb_per_s": _rounded(rates), "ratios": ratios(seconds)}
    line |= {"latency_us": latency, "latency_own_cores_us": apart, "latency_after_pause_us": after_pause}
    pools = {name: TRANSPORTS[name][2] for name in names}
    line |= {"shared_huge_pages": shared_huge_pages()}
    print(f"huge pages in shared memory: {line['shared_huge_pages']}")
    print(json.dumps(line | {"pools": pools, "load": os.getloadavg()[0], "cores": os.cpu_count()}))


def shared_huge_pages() -> str:
    """What the kernel does about them: `shm` pools depend on it."""
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def ratios(seconds: Seconds) -> dict[str, float]:
    """Ours over each yardstick, like over like: `ucx` over NIXL with the same error handling, TCP over TCP."""
    pairs = [("best", CHOSEN, "copy", "copy")]
    if "nixl" in seconds:
        pairs += [("best", CHOSEN, "nixl", "nixl"), ("tcp", "tcp", "nixl", "nixl_tcp")]
        pairs += [("best", CHOSEN, "mooncake", "mooncake")]
        pairs += [("ucx", "ucx", "nixl", "nixl"), ("ucx", "ucx", "nixl_tcp", "nixl_tcp")] if "ucx" in seconds else []
    return {
        f"{name}_{kib}k_vs_{yardstick}": round(
            statistics.median(map(truediv, seconds[theirs][kib], seconds[ours][kib])), 3
        )
        for name, ours, yardstick, theirs in pairs
        for kib in BLOCK_KIB
    }


def _rounded(rates: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {size: round(rate, 3) for size, rate in row.items()} for name, row in rates.items()}


def _print_table(rates: dict[str, dict[str, float]], *latencies: dict[str, int]) -> None:
    _print_row("GB/s", [f"{kib} KiB" for kib in BLOCK_KIB] + ["latency µs", "own cores µs", "paused µs", "pool"])
    for name, row in rates.items():
        pool = TRANSPORTS[name][2] if name in TRANSPORTS else "private"
        _print_row(
            name,
            [f"{rate:.2f}" for rate in row.values()] + [str(times.get(name, "")) for times in latencies] + [pool],
        )


def _print_row(name: str, cells: list[str]) -> None:
    print(f"{name:20}" + "".join(f"{cell:>13}" for cell in cells))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, help="folder of the peers' virtual environments")
    parser.add_argument("--serve", choices=TRANSPORTS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.serve:
        serve_source(chosen.serve)
    else:
        report(chosen.rounds, chosen.peers)


if __name__ == "__main__":
    main()
