"""The rank process of a worker: `python -m cluster.rank`, started by `cluster.control` alone.

It loads the model, registers its KV pool with the transports, tells control who it is, and then loops: take what came,
`prepare`, send, `tick`, send; asleep only while nothing runs, and woken by control or by a transport. It speaks to
control and, through the transports, to the pools of its peers; to nobody else. It dies with its control, by signal.
What else ends it is its last word to control, so that whoever started the cluster is told why.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from types import FrameType

import zmq

from cluster import net_devices, tiers
from cluster.ipc import LAST_WORD, RankSettings, from_json
from cluster.worker import Worker
from engine.engine import Engine
from engine.errors import ConfigError, ModelError, TandemError, too_much
from kvtransfer.device import DeviceRegion, Region
from kvtransfer.engine import TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.memory import SharedMemory, private_memory
from kvtransfer.select import make_transport
from kvtransfer.staging import StagedTransfers
from kvtransfer.transport import Transport
from tandem.messages import Code, Declined, Question
from tandem.wire import decode_envelope, encode_envelope

log = logging.getLogger("tandem.rank")

PR_SET_PDEATHSIG = 1


SWITCH_INTERVAL_S = 0.0005
"""How long the step loop may wait for the interpreter when a transport's thread has it; Python's own 5 ms are a third
of a decode step of the built-in model, see `kvtransfer.io_loop`."""


class Doorbell:
    """Wakes the loop from any thread."""

    def __init__(self) -> None:
        self._rings, self._ring = socket.socketpair()
        self._rings.setblocking(False)
        self._ring.setblocking(False)

    def fileno(self) -> int:
        return self._rings.fileno()

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it rings already; closed: nobody listens
            self._ring.send(b"!")

    def answer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._rings.recv(4096):
                pass


class RankLoop:
    """One worker and its pair socket."""

    def __init__(self, worker: Worker, pair: zmq.Socket[bytes], doorbell: Doorbell) -> None:
        self._worker = worker
        self._pair = pair
        self._doorbell = doorbell
        self._poller = zmq.Poller()
        self._poller.register(pair, zmq.POLLIN)
        self._poller.register(doorbell.fileno(), zmq.POLLIN)
        self.stopped = False

    def run(self) -> None:
        self._send(0, self._worker.info)
        while not self.stopped:
            self._turn()

    def stop(self, signum: int, frame: FrameType | None) -> None:
        self.stopped = True
        self._doorbell.ring()

    def _turn(self) -> None:
        wait_s = self._worker.wait_s(time.monotonic())
        if wait_s and not self._worker.transfers.linger():
            self._poller.poll(math.ceil(wait_s * 1000))
        self._doorbell.answer()
        self._take()
        self._worker.prepare(time.monotonic())
        self._flush()
        self._worker.tick(time.monotonic())
        self._flush()

    def _take(self) -> None:
        while True:
            try:
                data = self._pair.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            now = time.monotonic()
            ask_id, value = decode_envelope(data, now)
            if isinstance(value, Question):
                self._worker.receive(ask_id, value, now)
            else:
                self._worker.answered(ask_id, value, now)

    def _flush(self) -> None:
        outbox, self._worker.outbox = self._worker.outbox, []
        for ask_id, value in outbox:
            self._send(ask_id, value)

    def _send(self, ask_id: int, value: object) -> None:
        self._pair.send(encode_envelope(ask_id, value, time.monotonic()))


def main() -> int:
    settings = from_json(sys.stdin.read())
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {settings.worker.name} %(levelname)s %(message)s")
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is control's to handle
    limit_threads(settings.engine.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with zmq.Context() as context, context.socket(zmq.PAIR) as pair:
        pair.setsockopt(zmq.SNDHWM, 0)
        pair.setsockopt(zmq.RCVHWM, 0)
        pair.setsockopt(zmq.LINGER, 200)
        pair.connect(settings.endpoint)
        try:
            serve(settings, pair)
        except Exception as error:
            pair.send(encode_envelope(LAST_WORD, last_word(error, settings.keys), time.monotonic()))
            raise
    return 0


def serve(settings: RankSettings, pair: zmq.Socket[bytes]) -> None:
    """Load, register, and loop until told to stop."""
    engine = Engine.open(settings.engine)
    doorbell = Doorbell()
    transfers = open_transfers(settings, engine, doorbell)
    role, lower = settings.worker.role, settings.tiers
    store = tiers.attach(engine, lower, role, wake=doorbell.ring) if lower is not None else None
    loop = RankLoop(Worker(settings.worker, engine, transfers), pair, doorbell)
    signal.signal(signal.SIGTERM, loop.stop)
    try:
        loop.run()
    finally:
        transfers.shutdown()
        if store is not None:
            store.shutdown()


def last_word(error: Exception, keys: Mapping[str, str]) -> Declined:
    """In one line, for people; errors of ours say it all themselves, a setting by the name in `keys` that people gave
    it. INVALID: it would end so again."""
    if isinstance(error, ConfigError):
        return Declined(Code.INVALID, f"{keys.get(error.field, error.field)}: {error.fault}")
    said = " ".join(str(error).split())
    if isinstance(error, ModelError):
        return Declined(Code.INVALID, said)
    named = isinstance(error, TandemError) and said
    return Declined(Code.INTERNAL, said if named else f"{type(error).__name__}: {said}".removesuffix(": "))


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the thread that started us ends; at once if it has ended already."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        sys.exit("control ended before the rank began")


def limit_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def open_transfers(settings: RankSettings, engine: Engine, doorbell: Doorbell) -> TransferEngine:
    """The transfer engine over the transports that this machine has. Raises TransferError when there is none."""
    peer = f"{settings.worker.name}#{settings.worker.incarnation}"
    if settings.staging == "always" or not (engine.on_host or settings.staging == "never"):
        return _staged(peer, engine, settings, doorbell)
    if engine.on_host:
        memory = engine.pool_bytes()
        transports = _transports(peer, memory, settings)
        return TransferEngine(peer, memory, transports, wake=doorbell.ring, checksums=settings.checksums)
    pool = engine.pool_spans()
    region = DeviceRegion(pool.address, pool.nbytes, pool)
    transports = _transports(peer, region, settings)
    log.info("KV moves straight from and to the device's memory, over UCX")
    return TransferEngine(peer, region, transports, wake=doorbell.ring, settle=pool.settle)


def _staged(peer: str, engine: Engine, settings: RankSettings, doorbell: Doorbell) -> TransferEngine:
    region, copies = staging_memory(settings), engine.pool_spans()
    transports = _transports(peer, region, settings)
    pinned = "pinned" if copies.pin(region) else "unpinned"
    log.info("KV moves by way of %.0f MiB of %s host memory", region.nbytes / (1 << 20), pinned)
    transfers = StagedTransfers(peer, region, transports, copies, wake=doorbell.ring, checksums=settings.checksums)
    if (most := transfers.most_lease_bytes()) < engine.info.block_bytes:
        remedy = f"larger: {most:.0f} of its bytes may hold what arrives, and a block has {engine.info.block_bytes}"
        raise ConfigError("staging_bytes", settings.staging_bytes, remedy)
    return transfers


def _transports(peer: str, region: Region, settings: RankSettings) -> list[Transport]:
    transports: list[Transport] = []
    missing: list[str] = []
    host, advertise = transport_hosts(settings)
    for scheme in settings.transports:
        try:
            transports.append(
                make_transport(
                    scheme,
                    peer,
                    region,
                    host=host,
                    advertise=advertise,
                    ucx_error_handling=settings.ucx_error_handling,
                    ucx_devices=settings.net_device,
                )
            )
        except TransferError as error:
            log.warning("transport %s is left out: %s", scheme, error)
            missing.append(str(error))
    if not transports:
        raise TransferError("no transport can be used: " + "; ".join(missing))
    return transports


def transport_hosts(settings: RankSettings) -> tuple[str, str | None]:
    """The address that sockets bind, and the one that peers are told."""
    if settings.net_device is None:
        return settings.host, settings.advertise
    if absent := net_devices.missing(settings.net_device):
        remedy = f"a device of each worker's host, and there is no {' or '.join(absent)} here"
        raise ConfigError("net_device", settings.net_device, remedy)
    address = net_devices.ipv4_of(settings.net_device)
    return (settings.host, settings.advertise) if address is None else (address, None)


def staging_memory(settings: RankSettings) -> memoryview:
    """Raises ConfigError when the machine has not that much."""
    make = SharedMemory if "shm" in settings.transports else private_memory
    try:
        return memoryview(make(settings.staging_bytes))
    except (OSError, OverflowError, ValueError) as error:
        raise too_much("staging_bytes", settings.staging_bytes, error) from error


if __name__ == "__main__":
    sys.exit(main())
