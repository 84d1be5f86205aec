"""Where a destination reads the source's memory by itself, what it read counts only once the source confirms it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest
from test_transfer_strangers import KEY, dial, greet, is_closed, read_frame
from transfer_rig import REGION_BYTES, Peer, Rig

from kvtransfer import frames
from kvtransfer.frames import Header, Kind
from kvtransfer.io_loop import IoLoop
from kvtransfer.types import Numbers, Offer, PeerLost, Quiet, Received, ReceiveFailed, Span, Spans
from kvtransfer.wired import Road, WiredTransport

SOURCE = "prefill-9#1"


class Reads:
    """A payload road that has read everything as soon as it is asked to."""

    confirms = True

    def __init__(self, loop: IoLoop, road: Road) -> None:
        self._road = road

    def blob(self) -> bytes:
        return b""

    def descriptor(self) -> None:
        return None

    def attach(self, blob: bytes) -> None:
        pass

    def announce(self, spans: Spans) -> bytes:
        return b""

    def receive(self, serial: int, spans: Spans, announced: bytes) -> None:
        self._road.payload_done(serial, confirm=True)

    def send(self, serial: int, spans: Spans, wanted: bytes) -> None:
        raise frames.FrameError("TAKE")

    def data(self, header: Header) -> None:
        raise frames.FrameError("DATA")

    def close(self) -> None:
        pass


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("tcp")
    yield rig
    rig.close()


@pytest.fixture
def destination(rig: Rig) -> Peer:
    memory = np.zeros(REGION_BYTES, np.uint8)
    transport = WiredTransport("reads", "decode-0#1", Reads)
    destination = rig.adopt("decode-0#1", memory, transport)
    destination.engine.open(KEY, SOURCE, [Span(0, 64), Span(64, 64)])
    return destination


def offered(destination: Peer) -> socket.socket:
    """A source that has offered the first span and heard that it was read."""
    sock, address = dial(destination)
    greet(sock, address.token, SOURCE, destination.name, "reads")
    assert read_frame(sock)[0].kind is Kind.WELCOME
    sock.sendall(frames.encode_offer(1, Offer(KEY, 1, 0, Numbers([64]), SOURCE, destination.name), b""))
    assert read_frame(sock)[0].kind is Kind.ACK
    return sock


def test_what_was_read_counts_when_it_is_confirmed_and_not_before(rig: Rig, destination: Peer) -> None:
    sock = offered(destination)
    assert not [event for event in destination.poll() if isinstance(event, Received)]
    assert destination.engine.in_flight() == 1
    sock.sendall(frames.encode(Kind.CONFIRM, 1, ""))
    rig.until(lambda: destination.saw(Received))
    assert destination.engine.in_flight() == 0
    sock.close()


def test_a_source_that_goes_before_it_confirms_fails_the_lease(rig: Rig, destination: Peer) -> None:
    offered(destination).close()
    rig.until(lambda: destination.saw(ReceiveFailed) and destination.saw(PeerLost))
    assert not destination.saw(Received)
    assert destination.engine.in_flight() == 0


def test_a_lease_closed_before_the_confirmation_is_quiet_only_with_it(rig: Rig, destination: Peer) -> None:
    sock = offered(destination)
    destination.engine.close(KEY)
    assert not [event for event in destination.poll() if isinstance(event, Quiet)]
    sock.sendall(frames.encode(Kind.CONFIRM, 1, ""))
    rig.until(lambda: destination.saw(Quiet))
    assert not destination.saw(Received)
    sock.close()


@pytest.mark.parametrize("serials", [(1, 1), (2,)], ids=["twice", "another's"])
def test_a_confirmation_that_is_repeated_or_stale_ends_the_link(
    rig: Rig, destination: Peer, serials: tuple[int, ...]
) -> None:
    sock = offered(destination)
    for serial in serials:
        sock.sendall(frames.encode(Kind.CONFIRM, serial, ""))
    assert is_closed(sock)
    rig.until(lambda: destination.saw(PeerLost))
    assert len(destination.saw(Received)) == serials.count(1) // 2
    assert destination.engine.in_flight() == 0


def test_an_offer_repeated_under_its_serial_ends_the_link_and_under_another_is_refused(
    rig: Rig, destination: Peer
) -> None:
    sock = offered(destination)
    sock.sendall(frames.encode_offer(2, Offer(KEY, 2, 0, Numbers([64]), SOURCE, destination.name), b""))
    header, body = read_frame(sock)
    assert header.kind is Kind.REFUSE
    assert "offered before" in body.decode("utf-8", "replace")
    sock.sendall(frames.encode_offer(1, Offer(KEY, 3, 1, Numbers([64]), SOURCE, destination.name), b""))
    assert is_closed(sock)
    rig.until(lambda: destination.saw(ReceiveFailed))
    assert not destination.saw(Received)
