"""A road that is cut: a relay between two peers refuses, or swallows everything, and heals."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import replace

import pytest
from transfer_rig import Rig

from kvtransfer.handshake import WiredAddress
from kvtransfer.layout import block_spans
from kvtransfer.types import LeaseKey, PushDone, PushFailed, Quiet, Received

KEY = LeaseKey("request-1", 1)


class Relay:
    """A TCP road to `where`. It hangs up on the first `refuse` callers; `cut` swallows all bytes and closes nothing."""

    def __init__(self, where: WiredAddress, *, refuse: int = 0) -> None:
        self._where = where
        self._refuse = refuse
        self._cut = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def address(self) -> bytes:
        return replace(self._where, host="127.0.0.1", port=self._listener.getsockname()[1]).pack()

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._refuse:
                self._refuse -= 1
                near.close()
                continue
            far = socket.create_connection((self._where.host, self._where.port))
            self._sockets += [near, far]
            for start, end in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(start, end), daemon=True).start()

    def _carry(self, start: socket.socket, end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := start.recv(65_536):
                if not self._cut.is_set():
                    end.sendall(data)
            end.shutdown(socket.SHUT_WR)


@pytest.fixture
def tcp():
    rig = Rig("tcp")
    yield rig
    rig.close()


def road(rig: Rig, source, destination, **options: int) -> Relay:
    relay = Relay(WiredAddress.unpack(destination.engine.addresses()[0][1]), **options)
    source.engine.connect(destination.name, "tcp", relay.address())
    return relay


def test_a_peer_that_hangs_up_a_few_times_is_reached_without_a_failed_push(tcp):
    source, destination = tcp.peer("prefill-0#1"), tcp.peer("decode-0#1")
    relay = road(tcp, source, destination, refuse=2)
    spans = block_spans(range(8), 4_096)
    destination.engine.open(KEY, source.name, spans)
    for index, span in enumerate(spans):
        source.engine.push(KEY, destination.name, index, [span])
    tcp.until(lambda: len(source.saw(PushDone)) == len(spans) and len(destination.saw(Received)) == len(spans))
    assert not source.saw(PushFailed)
    assert destination.bytes_of(spans) == source.bytes_of(spans)
    relay.close()


def test_a_cut_road_is_ended_by_forgetting_and_another_pair_does_not_notice(tcp):
    source = tcp.peer("prefill-0#1")
    lost, other = tcp.peer("decode-0#1"), tcp.peer("decode-1#1")
    relay = road(tcp, source, lost)
    tcp.connect(source, other)
    spans = block_spans(range(8), 65_536)
    for peer in (lost, other):
        peer.engine.open(KEY, source.name, spans)
    source.engine.push(KEY, lost.name, 0, spans[:1])
    tcp.until(lambda: lost.saw(Received) and source.saw(PushDone))
    relay.cut()
    source.engine.push(KEY, lost.name, 1, spans[1:])
    source.engine.push(LeaseKey("request-1", 1), other.name, 0, spans)
    tcp.until(lambda: other.saw(Received) and len(source.saw(PushDone)) == 2)
    assert source.engine.in_flight() == 1, "the cut pair hangs, nothing told it"

    start_s = time.monotonic()
    source.engine.forget(lost.name)
    lost.engine.forget(source.name)
    source.engine.withdraw(KEY)
    lost.engine.close(KEY)
    tcp.until(lambda: source.saw(Quiet) and lost.saw(Quiet))
    assert time.monotonic() - start_s < 2.0
    assert source.engine.in_flight() == lost.engine.in_flight() == 0
    relay.close()

    healed, again = tcp.peer("decode-0#2"), LeaseKey("request-1", 2)
    tcp.connect(source, healed)
    healed.engine.open(again, source.name, spans)
    source.engine.push(again, healed.name, 0, spans)
    tcp.until(lambda: healed.saw(Received) and source.saw(PushDone, again))
    assert healed.bytes_of(spans) == source.bytes_of(spans)
