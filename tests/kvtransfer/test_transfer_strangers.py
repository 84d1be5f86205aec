"""Bytes that are not ours on a transport's socket end that connection, and nothing else happens."""

from __future__ import annotations

import gc
import random
import resource
import select
import socket
import struct

import pytest

from kvtransfer import frames, handshake
from kvtransfer.connection import Connection
from kvtransfer.frames import FrameError, Kind
from kvtransfer.handshake import WiredAddress
from kvtransfer.types import LeaseKey, Numbers, Offer, PeerLost, PushDone, PushFailed, Received, ReceiveFailed, Span
from kvtransfer.wired import MAX_STRANGERS

KEY = LeaseKey("request-1", 1)
HEADER = struct.Struct(">4sBBHQQ")


def dial(peer) -> tuple[socket.socket, WiredAddress]:
    address = WiredAddress.unpack(peer.engine.addresses()[0][1])
    sock = socket.create_connection((address.host, address.port), timeout=5)
    return sock, address


def read_frame(sock: socket.socket) -> tuple[frames.Header, bytes]:
    header = frames.decode_header(sock.recv(frames.HEADER_BYTES, socket.MSG_WAITALL))
    return header, sock.recv(header.length, socket.MSG_WAITALL)


def greet(sock: socket.socket, token: bytes, source: str, destination: str, scheme: str = "tcp") -> None:
    _, body = read_frame(sock)
    (challenge,) = frames.decode_fields(body, bytes)
    nonce = handshake.new_nonce()
    proof = handshake.proof(token, "hello", challenge, nonce, source, destination, b"")
    sock.sendall(frames.encode(Kind.HELLO, 0, nonce, source, destination, scheme, b"", proof))


def is_closed(sock: socket.socket) -> bool:
    """True when the other side hangs up (within the socket's timeout); what it said before is read away."""
    try:
        while sock.recv(65_536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    finally:
        sock.close()
    return True


def still_serves(rig, source, destination) -> None:
    destination.engine.open(KEY, source.name, [Span(0, 4_096)])
    source.engine.push(KEY, destination.name, 0, [Span(8_192, 4_096)])
    rig.until(lambda: source.saw(PushDone) and destination.saw(Received))
    assert destination.bytes_of([Span(0, 4_096)]) == source.bytes_of([Span(8_192, 4_096)])


GARBAGE = {
    "random bytes": random.Random(0).randbytes(4_096),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b" " * 64,
    "another magic": HEADER.pack(b"EVIL", 1, Kind.HELLO, 0, 0, 5) + b"\x00" * 5,
    "another version": HEADER.pack(b"TKVT", 9, Kind.HELLO, 0, 0, 5) + b"\x00" * 5,
    "an unknown kind": HEADER.pack(b"TKVT", 1, 77, 0, 0, 5) + b"\x00" * 5,
    "a body of 2 GB": HEADER.pack(b"TKVT", 1, Kind.HELLO, 0, 0, 2 << 30),
    "a body of 2^63 bytes": HEADER.pack(b"TKVT", 1, Kind.HELLO, 0, 0, 1 << 63),
    "an empty body": HEADER.pack(b"TKVT", 1, Kind.HELLO, 0, 0, 0),
    "a body that is no msgpack": HEADER.pack(b"TKVT", 1, Kind.HELLO, 0, 0, 4) + b"\xc1\xc1\xc1\xc1",
    "fields of other types": frames.encode(Kind.HELLO, 0, 1, 2, 3, 4, 5, 6),
    "payload before a greeting": frames.data_header(1, 100) + b"x" * 100,
    "an offer before a greeting": frames.encode_offer(1, Offer(KEY, 1, 0, Numbers([64]), "a#1", "decode-0#1"), b""),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_its_own_connection_without_a_jump_in_memory(tcp, garbage):
    source, destination = tcp.pair()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sock, _ = dial(destination)
    sock.sendall(garbage)
    assert is_closed(sock)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 64 * 1_024
    still_serves(tcp, source, destination)


def test_a_stranger_without_the_token_is_turned_away(tcp):
    source, destination = tcp.pair()
    sock, _ = dial(destination)
    greet(sock, b"\x00" * handshake.TOKEN_BYTES, source.name, destination.name)
    assert is_closed(sock)
    still_serves(tcp, source, destination)


def test_strangers_that_say_nothing_make_way_for_a_peer_the_oldest_first(tcp):
    source, destination = tcp.peer("prefill-0#1"), tcp.peer("decode-0#1")
    silent = [dial(destination)[0] for _ in range(MAX_STRANGERS)]
    for sock in silent:
        read_frame(sock)  # it was let in
    tcp.connect(source, destination)
    still_serves(tcp, source, destination)
    assert is_closed(silent[0])
    silent[-1].setblocking(False)
    with pytest.raises(BlockingIOError):  # still open
        silent[-1].recv(1)
    for sock in silent:
        sock.close()


def test_callers_that_hang_up_at_once_take_nobodys_place(tcp):
    source, destination = tcp.peer("prefill-0#1"), tcp.peer("decode-0#1")
    for _ in range(2 * MAX_STRANGERS):
        sock, _ = dial(destination)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    tcp.connect(source, destination)
    still_serves(tcp, source, destination)


def test_nothing_is_kept_of_callers_that_have_gone(tcp):
    source, destination = tcp.pair()
    still_serves(tcp, source, destination)
    links = connections()
    for _ in range(8):
        sock, _ = dial(destination)
        read_frame(sock)
        sock.close()
    tcp.until(lambda: connections() == links, alarm_s=0.01)


def connections() -> int:
    """Ends of links that something in this process holds."""
    gc.collect()
    return sum(type(thing) is Connection for thing in gc.get_objects())


@pytest.mark.parametrize(
    ("destination_name", "scheme"), [("decode-0#0", "tcp"), ("decode-0#1", "ucx")], ids=["incarnation", "scheme"]
)
def test_a_caller_for_another_incarnation_or_scheme_is_turned_away(tcp, destination_name, scheme):
    source, destination = tcp.pair()
    sock, address = dial(destination)
    greet(sock, address.token, "prefill-9#1", destination_name, scheme)
    assert is_closed(sock)
    still_serves(tcp, source, destination)


def test_a_forgotten_incarnation_that_calls_again_is_turned_away(tcp):
    source, destination = tcp.pair()
    destination.engine.forget("prefill-9#1")
    sock, address = dial(destination)
    greet(sock, address.token, "prefill-9#1", destination.name)
    assert is_closed(sock)
    still_serves(tcp, source, destination)


def greeted(destination) -> socket.socket:
    """A peer that knows the token and then misbehaves."""
    sock, address = dial(destination)
    greet(sock, address.token, "prefill-9#1", destination.name)
    header, _ = read_frame(sock)
    assert header.kind is Kind.WELCOME
    return sock


MISBEHAVIOUR = {
    "an offer in another's name": frames.encode_offer(
        1, Offer(KEY, 1, 0, Numbers([64]), "prefill-0#1", "decode-0#1"), b""
    ),
    "payload that was not taken": frames.data_header(5, 64) + b"x" * 64,
    "a frame of the other direction": frames.encode(Kind.TAKE, 1, b""),
    "a confirmation that nobody waits for": frames.encode(Kind.CONFIRM, 1, ""),
    "a second greeting": frames.encode(Kind.HELLO, 0, b"", "a", "b", "tcp", b"", b""),
    "an empty offer": frames.encode(Kind.OFFER, 1, "request-1", 1, 1, 0, b"", "prefill-9#1", "decode-0#1", b"", b""),
    "a body of 2 GB": HEADER.pack(b"TKVT", 1, Kind.OFFER, 0, 1, 2 << 30),
}


@pytest.mark.parametrize("frame", MISBEHAVIOUR.values(), ids=MISBEHAVIOUR.keys())
def test_a_known_peer_that_breaks_the_protocol_loses_its_own_link_only(tcp, frame):
    source, destination = tcp.pair()
    sock = greeted(destination)
    sock.sendall(frame)
    assert is_closed(sock)
    still_serves(tcp, source, destination)


def test_a_peer_that_reads_no_answer_is_not_read_from_until_it_does(tcp):
    source, destination = tcp.pair()
    sock = greeted(destination)
    unknown = Offer(LeaseKey("x" * frames.MAX_NAME_CHARS, 1), 1, 0, Numbers([64]), "prefill-9#1", destination.name)
    frame = frames.encode_offer(1, unknown, b"")
    peak_kib, sent_bytes, most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, 64 << 20
    while sent_bytes < most_bytes and select.select([], [sock], [], 0.5)[1]:
        sent_bytes += sock.send(frame[sent_bytes % len(frame) :] + frame * 99)
    assert sent_bytes < most_bytes, "all was read"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 16 * 1_024
    still_serves(tcp, source, destination)
    answers = sock.makefile("rb")
    for _ in range(sent_bytes // len(frame)):
        header = frames.decode_header(answers.read(frames.HEADER_BYTES))
        assert header.kind is Kind.REFUSE
        answers.read(header.length)
    sock.close()


def test_payload_of_another_length_than_offered_fails_the_lease_and_touches_nothing_else(tcp):
    destination = tcp.peer("decode-0#1")
    sock = greeted(destination)
    destination.engine.open(KEY, "prefill-9#1", [Span(0, 64)])
    before = destination.memory.copy()
    sock.sendall(frames.encode_offer(1, Offer(KEY, 1, 0, Numbers([64]), "prefill-9#1", destination.name), b""))
    header, _ = read_frame(sock)
    assert header.kind is Kind.TAKE
    sock.sendall(frames.data_header(1, 128) + b"x" * 128)
    assert is_closed(sock)
    tcp.until(lambda: destination.saw(ReceiveFailed))
    assert (destination.memory == before).all()


def test_a_connection_cut_in_the_middle_of_payload_fails_the_lease(tcp):
    destination = tcp.peer("decode-0#1")
    sock = greeted(destination)
    destination.engine.open(KEY, "prefill-9#1", [Span(0, 4_096)])
    sock.sendall(frames.encode_offer(1, Offer(KEY, 1, 0, Numbers([4_096]), "prefill-9#1", destination.name), b""))
    read_frame(sock)
    sock.sendall(frames.data_header(1, 4_096) + b"x" * 100)
    sock.close()
    tcp.until(lambda: destination.saw(ReceiveFailed) and destination.saw(PeerLost))
    assert destination.engine.in_flight() == 0


def test_an_offer_that_cannot_be_written_ends_its_own_push_and_no_other(tcp):
    source, destination = tcp.pair()
    unwritable = LeaseKey("half a surrogate \ud800", 1)
    destination.engine.open(KEY, source.name, [Span(0, 64)])
    source.engine.push(unwritable, destination.name, 0, [Span(0, 64)])
    source.engine.push(KEY, destination.name, 0, [Span(64, 64)])
    tcp.until(lambda: source.saw(PushDone, KEY) and destination.saw(Received, KEY))
    assert "cannot be offered" in source.saw(PushFailed, unwritable)[0].reason
    assert not source.saw(PeerLost)
    assert source.engine.in_flight() == 0


def test_frames_come_back_as_they_were_sent():
    offer = Offer(KEY, 7, 3, Numbers([1, 2**40]), "a#1", "b#2", Numbers([2**64 - 1, 0]))
    raw = frames.encode_offer(9, offer, b"places")
    header = frames.decode_header(raw[: frames.HEADER_BYTES])
    assert (header.kind, header.serial) == (Kind.OFFER, 9)
    assert frames.decode_offer(raw[frames.HEADER_BYTES :]) == (offer, b"places")


@pytest.mark.parametrize(
    "counts", [[0, 3], [1, 1], [2**63, 2**63, 3], [], [1] * (frames.MAX_SPANS + 1)], ids=lambda counts: str(counts)[:12]
)
def test_counts_that_do_not_add_up_are_refused(counts):
    with pytest.raises(FrameError):
        frames.decode_counts(Numbers(counts).pack(), 3)


def test_bytes_that_are_no_numbers_are_refused():
    with pytest.raises(FrameError, match="not a list of numbers"):
        frames.decode_numbers(b"123456789")
