"""A rig of peers: each a small region and a transfer engine; after each test the invariants hold and nothing runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtransfer.engine import TransferEngine
from kvtransfer.inproc import InprocHub
from kvtransfer.memory import SharedMemory
from kvtransfer.select import make_transport, ucx_available
from kvtransfer.transport import Transport
from kvtransfer.types import LeaseKey, Span, TransferEvent

REGION_BYTES = 1 << 20
DEADLINE_S = 10.0


@dataclass
class Peer:
    """One worker: its memory, its engine, and every event it has seen."""

    name: str
    memory: np.ndarray
    engine: TransferEngine
    events: list[TransferEvent] = field(default_factory=list)

    def poll(self) -> list[TransferEvent]:
        fresh = self.engine.poll()
        self.events += fresh
        return fresh

    def saw(self, kind: type, key: LeaseKey | None = None) -> list[TransferEvent]:
        return [
            event for event in self.events if isinstance(event, kind) and key in (None, getattr(event, "key", None))
        ]

    def bytes_of(self, spans: list[Span]) -> bytes:
        return b"".join(self.memory[span.offset : span.offset + span.length].tobytes() for span in spans)


class Clock:
    """Stands still until the test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """Makes peers over one transport and drives them until something has happened."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.scheme = transport.split("-")[0]
        self.peers: dict[str, Peer] = {}
        self.news = threading.Event()
        self._hub = InprocHub()

    def peer(
        self,
        name: str,
        *,
        region_bytes: int = REGION_BYTES,
        clock: Callable[[], float] = time.monotonic,
        checksums: bool = False,
        window_bytes: int = 1 << 30,
    ) -> Peer:
        region = memoryview(SharedMemory(region_bytes))
        memory = np.frombuffer(region, np.uint8)
        memory[:] = np.random.default_rng(len(self.peers)).integers(0, 256, region_bytes, np.uint8)
        error_handling = self.transport != "ucx-nofault"
        transport = make_transport(self.scheme, name, region, hub=self._hub, ucx_error_handling=error_handling)
        engine = TransferEngine(
            name,
            region,
            [transport],
            clock=clock,
            wake=self.news.set,
            checksums=checksums,
            window_bytes=window_bytes,
        )
        self.peers[name] = Peer(name, memory, engine)
        return self.peers[name]

    def adopt(self, name: str, memory: np.ndarray, transport: Transport) -> Peer:
        """One more engine over memory and a transport that the test has made."""
        engine = TransferEngine(name, memoryview(memory), [transport], wake=self.news.set)
        peer = self.peers[f"{name} over {transport.address().hex()}"] = Peer(name, memory, engine)
        return peer

    def connect(self, source: Peer, destination: Peer) -> None:
        source.engine.connect(destination.name, *destination.engine.addresses()[0])

    def pair(self, **options: object) -> tuple[Peer, Peer]:
        source = self.peer("prefill-0#1", **options)  # type: ignore[arg-type]
        destination = self.peer("decode-0#1", **options)  # type: ignore[arg-type]
        self.connect(source, destination)
        return source, destination

    def until(
        self, happened: Callable[[], object], deadline_s: float = DEADLINE_S, *, alarm_s: float = DEADLINE_S
    ) -> None:
        """Poll all peers as their wake says so, and after `alarm_s` without any, until it has happened."""
        end = time.monotonic() + deadline_s
        while True:
            self.news.clear()
            for peer in self.peers.values():
                peer.poll()
            if happened():
                return
            left_s = end - time.monotonic()
            if left_s <= 0 or not (self.news.wait(min(left_s, alarm_s)) or alarm_s < left_s):
                story = {name: peer.events[-5:] for name, peer in self.peers.items()}
                raise AssertionError(f"not within {deadline_s} s; last events: {story}")

    def close(self) -> None:
        for peer in self.peers.values():
            peer.poll()
            peer.engine.check()
        for peer in self.peers.values():
            peer.engine.shutdown()
            peer.engine.check()
            assert peer.engine.in_flight() == 0, f"{peer.name} has transfers after shutdown"
        running = [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]
        assert not running, f"threads left: {running}"


def transports() -> list[object]:
    """All schemes; ucx both with error handling (TCP) and without (shared memory)."""
    usable, why = ucx_available()
    skip = pytest.mark.skipif(not usable, reason=f"ucx: {why}")
    return ["inproc", "tcp", "shm", pytest.param("ucx", marks=skip), pytest.param("ucx-nofault", marks=skip)]
