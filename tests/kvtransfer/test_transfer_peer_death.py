"""A peer process is killed or stopped in the middle of a transfer: we go on, and its memory comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transfer_peer import NAMES, keep_pushing, lease_key, make_peer, open_all
from transfer_rig import transports

from kvtransfer.engine import TransferEngine
from kvtransfer.layout import block_spans
from kvtransfer.types import PeerLost, PushDone, PushFailed, Quiet, Received, ReceiveFailed, TransferEvent

HERE = Path(__file__).parent
BOUND_S = 10.0
OTHER = {"source": "destination", "destination": "source"}
WIRED = transports()[1:4]
"""tcp, shm and ucx; without error handling UCX aborts when a peer is killed, which is why that is not the default."""


class Scene:
    """We are `role` in this process; the other role runs in a child, and transfers flow."""

    def __init__(self, role: str, transport: str, child: subprocess.Popen[str]) -> None:
        self.role = role
        self.child = child
        self.peer = NAMES[OTHER[role]]
        self.events: list[TransferEvent] = []
        self._news = threading.Event()
        self.memory, self.engine = make_peer(NAMES[role], transport, self._news)
        self._last = 0
        assert child.stdin is not None
        assert child.stdout is not None
        address = bytes.fromhex(child.stdout.readline())
        if role == "destination":
            open_all(self.engine)
        else:
            self.engine.connect(self.peer, transport.split("-")[0], address)
        child.stdin.write(self.engine.addresses()[0][1].hex() + "\n")
        child.stdin.flush()

    def until(self, happened: Callable[[], object], *, pushing: bool = False) -> float:
        """Seconds until it had happened."""
        start_s = time.monotonic()
        while True:
            self._news.clear()
            self.events += self.engine.poll()
            self.engine.check()
            if pushing and self.role == "source":  # after the poll: it may have ended all that was in flight
                self._last = keep_pushing(self.engine, self._last)
            waited_s = time.monotonic() - start_s
            if happened():
                return waited_s
            assert waited_s < BOUND_S, f"not within {BOUND_S} s; in flight {self.engine.in_flight()}"
            self._news.wait(BOUND_S - waited_s)

    def count(self, *kinds: type) -> int:
        return sum(isinstance(event, kinds) for event in self.events)

    def get_going(self) -> None:
        self.until(lambda: self.count(PushDone, Received) >= 10, pushing=True)

    def freeze(self) -> None:
        """The peer stops in the middle: what a source pushes from here on cannot be answered."""
        self.get_going()
        self.child.send_signal(signal.SIGSTOP)
        if self.role == "source":
            self._last = keep_pushing(self.engine, self._last)

    def quiet_lease(self) -> None:
        """The lease that was in flight is quiet after it is closed or withdrawn."""
        key = next(event.key for event in reversed(self.events) if not isinstance(event, PeerLost))
        (self.engine.withdraw if self.role == "source" else self.engine.close)(key)
        self.until(lambda: Quiet(key) in self.events)


@contextmanager
def scene(role: str, transport: str) -> Iterator[Scene]:
    command = [sys.executable, str(HERE / "transfer_peer.py"), OTHER[role], transport]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent.parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as child:
        playing = Scene(role, transport, child)
        try:
            yield playing
        finally:
            child.kill()
            playing.engine.shutdown()
        assert playing.engine.in_flight() == 0


@pytest.mark.parametrize("transport", WIRED)
@pytest.mark.parametrize("role", ["source", "destination"])
def test_a_peer_killed_in_the_middle_is_lost_within_bounds_and_nothing_stays_in_flight(role, transport):
    with scene(role, transport) as we:
        we.freeze()
        we.child.kill()
        we.until(lambda: we.count(PeerLost) and we.engine.in_flight() == 0)
        if role == "source":
            assert we.count(PushFailed)
        we.engine.forget(we.peer)
        we.until(lambda: role == "source" or we.count(ReceiveFailed))
        we.quiet_lease()


@pytest.mark.parametrize("transport", WIRED)
@pytest.mark.parametrize("role", ["source", "destination"])
@pytest.mark.parametrize("end", [TransferEngine.forget, TransferEngine.cut])
def test_a_peer_stopped_in_the_middle_is_ended_without_it_and_writes_nothing_when_it_revives(role, transport, end):
    with scene(role, transport) as we:
        we.freeze()
        end(we.engine, we.peer)
        waited_s = we.until(lambda: we.engine.in_flight() == 0)
        assert waited_s < 2.0, "ending does not wait for the peer"
        assert we.count(PushFailed, ReceiveFailed)
        we.quiet_lease()
        we.memory[:] = 0xEE
        we.child.send_signal(signal.SIGCONT)
        assert we.child.stdout is not None
        assert we.child.stdout.readline() == "lost\n", "the revived peer sees that its link is gone"
        we.events += we.engine.poll()
        assert (we.memory == 0xEE).all()


@pytest.mark.parametrize("transport", WIRED)
def test_after_a_peer_died_the_same_worker_serves_others(transport):
    with scene("destination", transport) as we:
        we.get_going()
        we.child.kill()
        we.until(lambda: we.count(PeerLost))
        we.engine.forget(we.peer)
        news = threading.Event()
        memory, source = make_peer("prefill-0#2", transport, news)
        memory[:] = 0x55
        source.connect(NAMES["destination"], *we.engine.addresses()[0])
        fresh = lease_key(99_999)
        spans = block_spans(range(4), 4_096)
        we.engine.open(fresh, "prefill-0#2", spans)
        source.push(fresh, NAMES["destination"], 0, spans)
        we.until(lambda: any(isinstance(event, Received) and event.key == fresh for event in we.events))
        assert (we.memory[: spans[-1].offset + spans[-1].length] == 0x55).all()
        source.shutdown()
