"""Transports between processes: one authenticated control connection per link, and a payload road beside or on it.

A *link* runs from one source to one destination; a pair that sends both ways has two. Its connection carries

    destination                       source
        CHALLENGE  ─────────────────▶            who are you?
                   ◀─────────────────  HELLO     two names, a proof, what the payload road needs
        WELCOME    ─────────────────▶            the same back
                   ◀─────────────────  OFFER     per push: "I have these spans"
        TAKE       ─────────────────▶            receives are posted, go (or REFUSE and why)
                   ◀═════════════════  payload   on the connection (tcp) or beside it (ucx)
        ACK        ─────────────────▶            all in place (or why not)

    (where the destination reads the source's memory by itself there is no TAKE, and the source waits for ACK; over
    UCX it answers by CONFIRM: the memory was the lease's all the time, so what was read counts)

Nothing moves before the destination has said where it belongs, so refused bytes need no draining, a withdrawn offer
costs nothing, and no peer can make this side buffer what it did not ask for. The price is one round trip per push,
hidden as soon as two pushes are in flight. A link ends as a whole (connection lost, protocol error, peer forgotten,
transport closed): its payload road is torn down first, then every push and take ends with the reason. The next offer
dials anew; only a forgotten incarnation stays out.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer import frames, handshake
from kvtransfer.connection import Connection
from kvtransfer.errors import TransferError
from kvtransfer.frames import FrameError, Header, Kind
from kvtransfer.handshake import UNIX, WiredAddress, socket_address
from kvtransfer.io_loop import IoLoop
from kvtransfer.lingering import LINGER_BYTES
from kvtransfer.transport import Acceptor, Refused, Sent, Taken, TransportEvent
from kvtransfer.types import Offer, PeerId, PeerLost, Span, Spans

HANDSHAKE_TIMEOUT_S = 10.0
ACCEPT_REST_S = 0.1
"""Nobody is let in for so long after there was no descriptor for a caller."""
MAX_STRANGERS = 64
"""Connections that have not proved themselves yet; one more, and the oldest is closed."""


class Payload(Protocol):
    """The payload road of one link; lives on the I/O thread."""

    confirms: bool
    """Source: an ACK without a TAKE before it is answered by CONFIRM."""

    def blob(self) -> bytes:
        """What the other end needs to know; travels in the handshake."""
        ...

    def descriptor(self) -> int | None:
        """Source: a file descriptor that travels with the greeting, on a connection within one host."""
        ...

    def attach(self, blob: bytes) -> None:
        """The other end's blob. Raises `TransferError` if it cannot be used."""
        ...

    def announce(self, spans: Spans) -> bytes:
        """Source: what this road adds to the offer."""
        ...

    def receive(self, serial: int, spans: Spans, announced: bytes) -> bytes | None:
        """Destination: make ready; what TAKE shall tell the source, None if the source has nothing to send.

        Raises `FrameError` for an announcement that does not fit.
        """
        ...

    def send(self, serial: int, spans: Spans, wanted: bytes) -> None:
        """Source: the destination is ready. Raises `FrameError` for a wish that does not fit."""
        ...

    def data(self, header: Header) -> None:
        """A DATA frame arrived. Raises `FrameError` on roads that use none."""
        ...

    def close(self) -> None:
        """Afterwards this road touches no memory. No more callbacks."""
        ...


class Road(Protocol):
    """What a link gives its payload: the connection, and where ends are reported (serial, error).

    `confirm`, at a destination: it counts only once the source has confirmed that its memory was the lease's.
    """

    connection: Connection

    def payload_done(self, serial: int, error: str = "", *, confirm: bool = False) -> None: ...


class PayloadMaker(Protocol):
    """Makes a payload road for a new link."""

    def __call__(self, loop: IoLoop, road: Road) -> Payload: ...


@dataclass(slots=True)
class _Push:
    offer: Offer
    spans: Spans
    using_memory: bool = False
    taken: bool = False
    answer: str | None = None


class _Outgoing:
    """The source's end of a link."""

    def __init__(self, transport: WiredTransport, peer: PeerId, address: WiredAddress) -> None:
        """Raises `OSError` when there is no socket to dial with."""
        self.peer = peer
        self.connection: Connection
        self._dialling: socket.socket | None = None
        self._transport = transport
        self._address = address
        self._pushes: dict[int, _Push] = {}
        self._last_serial = 0
        self._nonces = (b"", b"")
        self._payload: Payload | None = None
        self._ready = False
        self._ended = False
        self._dial()
        self._deadline = transport.loop.after(HANDSHAKE_TIMEOUT_S, lambda: self.end("no answer to the handshake"))

    def offer(self, offer: Offer, spans: Spans) -> None:
        self._last_serial += 1
        self._pushes[self._last_serial] = _Push(offer, spans)
        if self._ready:
            self._announce(self._last_serial)

    def payload_done(self, serial: int, error: str = "", *, confirm: bool = False) -> None:
        push = self._pushes.get(serial)
        if push is not None:
            push.using_memory = False
            push.answer = error or push.answer
            self._end_if_done(serial, push)

    def end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._transport.loop.cancel(self._deadline)
        if self._dialling is not None:
            self._transport.loop.unwatch(self._dialling)
            self._dialling.close()
        else:
            self.connection.close(reason)
        if self._payload is not None:
            self._payload.close()
        for push in self._pushes.values():
            self._transport.emit(Sent(push.offer.key, push.offer.push_id, reason, unheard=not self._ready))
        self._pushes.clear()
        self._transport.outgoing_ended(self, reason)

    # -- dialling

    def _dial(self) -> None:
        sock = socket.socket(_family(self._address.host), socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            error = sock.connect_ex(self._address.where)
            self._transport.loop.watch(sock, selectors.EVENT_WRITE, lambda events: self._dialled(sock))
        except OSError:
            sock.close()
            raise
        self._dialling = sock
        if error not in (0, errno.EINPROGRESS):  # within a host the answer comes at once
            self._transport.loop.call(lambda: self.end(self._cannot_connect(error)))

    def _dialled(self, sock: socket.socket) -> None:
        if self._dialling is None or self._ended:
            return
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self.end(self._cannot_connect(error))
            return
        if stranger := foreign_user(sock):
            self.end(f"cannot connect to {self._address.host}: {stranger}")
            return
        self.connection = Connection(sock, self._transport.loop, self._frame, self.end)  # it watches the socket now
        self._dialling = None

    def _cannot_connect(self, error: int) -> str:
        return f"cannot connect to {self._address.host}:{self._address.port}: {os.strerror(error)}"

    # -- frames

    def _frame(self, header: Header, body: bytes) -> None:
        match header.kind:
            case Kind.CHALLENGE if self._payload is None:
                self._challenged(*frames.decode_fields(body, bytes))
            case Kind.WELCOME if self._payload is not None and not self._ready:
                self._welcomed(*frames.decode_fields(body, bytes, bytes))
            case Kind.TAKE if self._ready:
                self._taken(header.serial, *frames.decode_fields(body, bytes))
            case Kind.REFUSE | Kind.ACK if self._ready:
                self._answered(header, *frames.decode_fields(body, str))
            case _:
                raise FrameError(f"{header.kind.name} out of turn")

    def _challenged(self, challenge: bytes) -> None:
        self._nonces = challenge, handshake.new_nonce()
        self._payload = self._transport.make_payload(self._transport.loop, self)
        blob = self._payload.blob()
        proof = self._proof("hello", blob)
        me = self._transport.me
        self.connection.send(
            frames.encode(Kind.HELLO, 0, self._nonces[1], me, self.peer, self._transport.scheme, blob, proof),
            self._payload.descriptor(),
        )

    def _welcomed(self, blob: bytes, proof: bytes) -> None:
        assert self._payload is not None
        if not handshake.proves(self._proof("welcome", blob), proof):
            raise FrameError("the listener does not know its own address")
        self._payload.attach(blob)
        self._ready = True
        self._transport.loop.cancel(self._deadline)
        for serial in list(self._pushes):
            self._announce(serial)

    def _announce(self, serial: int) -> None:
        assert self._payload is not None
        push = self._pushes[serial]
        try:
            frame = frames.encode_offer(serial, push.offer, self._payload.announce(push.spans))
        except (OverflowError, ValueError) as error:
            push.answer = f"cannot be offered: {error}"
            self._end_if_done(serial, push)
            return
        self.connection.send(frame)

    def _taken(self, serial: int, wanted: bytes) -> None:
        assert self._payload is not None
        push = self._pushes.get(serial)
        if push is None or push.using_memory:
            raise FrameError(f"TAKE for push {serial}, which is not waiting for it")
        push.using_memory = push.taken = True
        self._payload.send(serial, push.spans, wanted)

    def _answered(self, header: Header, error: str) -> None:
        assert self._payload is not None
        push = self._pushes.get(header.serial)
        if push is None:
            raise FrameError(f"{header.kind.name} for push {header.serial}, which is not open")
        if header.kind is Kind.ACK and not error and not push.taken and self._payload.confirms:
            self.connection.send(frames.encode(Kind.CONFIRM, header.serial, ""))
        push.answer = f"refused: {error}" if header.kind is Kind.REFUSE else error
        self._end_if_done(header.serial, push)

    def _end_if_done(self, serial: int, push: _Push) -> None:
        if push.answer is not None and not push.using_memory:
            del self._pushes[serial]
            self._transport.emit(Sent(push.offer.key, push.offer.push_id, push.answer))

    def _proof(self, role: str, blob: bytes) -> bytes:
        return handshake.proof(self._address.token, role, *self._nonces, self._transport.me, self.peer, blob)


class _Incoming:
    """The destination's end of a link."""

    def __init__(self, transport: WiredTransport, sock: socket.socket) -> None:
        self.peer: PeerId | None = None
        self._transport = transport
        self._takes: dict[int, Offer] = {}
        self._unconfirmed: set[int] = set()
        self._challenge = handshake.new_nonce()
        self._payload: Payload | None = None
        self._ended = False
        limit = frames.MAX_HANDSHAKE_BYTES
        self.connection = Connection(sock, transport.loop, self._frame, self.end, limit, answers=True)
        self._deadline = transport.loop.after(HANDSHAKE_TIMEOUT_S, lambda: self.end("no handshake"))

    def challenge(self) -> None:
        self.connection.send(frames.encode(Kind.CHALLENGE, 0, self._challenge))

    def payload_done(self, serial: int, error: str = "", *, confirm: bool = False) -> None:
        offer = self._takes.get(serial)
        if offer is None:
            return
        if confirm and not error:
            self._unconfirmed.add(serial)
        else:
            del self._takes[serial]
            self._transport.emit(Taken(offer, error))  # known here before the source can know
        self.connection.send(frames.encode(Kind.ACK, serial, error))
        if offer.num_bytes <= LINGER_BYTES:
            self._transport.loop.more_is_likely()

    def end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._transport.loop.cancel(self._deadline)
        self.connection.close(reason)
        if self._payload is not None:
            self._payload.close()
        for offer in self._takes.values():
            self._transport.emit(Taken(offer, reason))
        self._takes.clear()
        self._transport.incoming_ended(self, reason)

    def _confirmed(self, serial: int) -> None:
        if serial not in self._unconfirmed:
            raise FrameError(f"CONFIRM for push {serial}, which does not wait for it")
        self._unconfirmed.discard(serial)
        self._transport.emit(Taken(self._takes.pop(serial)))

    def _frame(self, header: Header, body: bytes) -> None:
        match header.kind:
            case Kind.HELLO if self.peer is None:
                self._greeted(*frames.decode_fields(body, bytes, str, str, str, bytes, bytes))
            case Kind.OFFER if self.peer is not None:
                self._offered(header.serial, *frames.decode_offer(body))
            case Kind.CONFIRM if self.peer is not None:
                self._confirmed(header.serial)
            case Kind.DATA if self._payload is not None:
                self._payload.data(header)
            case _:
                raise FrameError(f"{header.kind.name} out of turn")

    def _greeted(self, nonce: bytes, source: str, destination: str, scheme: str, blob: bytes, proof: bytes) -> None:
        transport = self._transport

        def expected(role: str, blob: bytes) -> bytes:
            return handshake.proof(transport.token, role, self._challenge, nonce, source, destination, blob)

        if not handshake.proves(expected("hello", blob), proof):
            raise FrameError("a stranger: the proof is wrong")
        if (destination, scheme) != (transport.me, transport.scheme):
            raise FrameError(f"{source} looks for {destination} over {scheme}, not {transport.me}")
        if transport.is_fenced(source):
            raise FrameError(f"{source} was forgotten")
        self.peer = source
        transport.loop.cancel(self._deadline)
        self.connection.max_body_bytes = frames.MAX_BODY_BYTES
        self._payload = transport.make_payload(transport.loop, self)
        self._payload.attach(blob)
        transport.admitted(self)
        ours = self._payload.blob()
        self.connection.send(frames.encode(Kind.WELCOME, 0, ours, expected("welcome", ours)))

    def _offered(self, serial: int, offer: Offer, announced: bytes) -> None:
        assert self._payload is not None
        if offer.source != self.peer or serial in self._takes:
            raise FrameError(f"{self.peer} offers in the name of {offer.source}, serial {serial}")
        spans = self._transport.accept(offer)
        if isinstance(spans, Refused):
            self.connection.send(frames.encode(Kind.REFUSE, serial, spans.reason))
            return
        self._takes[serial] = offer
        wanted = self._payload.receive(serial, Spans.of(spans), announced)
        if wanted is not None:
            self.connection.send(frames.encode(Kind.TAKE, serial, wanted))


class WiredTransport:
    """A `Transport` over links; what differs between tcp and ucx is the payload road they are given."""

    def __init__(
        self,
        scheme: str,
        me: PeerId,
        make_payload: PayloadMaker,
        *,
        host: str = "127.0.0.1",
        advertise: str | None = None,
    ) -> None:
        """`host` is bound: an IP address, or `unix:` and a name that only this host sees. `advertise`, default the
        same, is what peers dial.
        """
        self.scheme = scheme
        self.me = me
        self.make_payload = make_payload
        self.token = handshake.new_token()
        self.loop = IoLoop(f"kv-{scheme}")
        self._acceptor: Acceptor = lambda offer: Refused("not started")
        self._wake: Callable[[], None] = lambda: None
        self._events: deque[TransportEvent] = deque()
        self._addresses: dict[PeerId, WiredAddress] = {}
        self._fenced: set[PeerId] = set()
        self._outgoing: dict[PeerId, _Outgoing] = {}
        self._incoming: dict[PeerId, _Incoming] = {}
        self._strangers: dict[_Incoming, None] = {}
        self._closed = False
        self._listener = _listen(host)
        port = 0 if host.startswith(UNIX) else self._listener.getsockname()[1]
        self._address = WiredAddress(scheme, advertise or host, port, self.token)

    # -- the owner's side

    def start(self, acceptor: Acceptor, wake: Callable[[], None]) -> None:
        self._acceptor, self._wake = acceptor, wake
        self._listen_to(selectors.EVENT_READ)
        self.loop.start()

    def address(self) -> bytes:
        return self._address.pack()

    def connect(self, peer: PeerId, address: bytes) -> None:
        where = WiredAddress.unpack(address)
        if where.scheme != self.scheme:
            raise TransferError(f"an address of the transport {where.scheme}, not of {self.scheme}")
        _family(where.host)
        if peer in self._fenced:
            raise TransferError(f"{peer} was forgotten; only a new incarnation can be connected")
        if self._addresses.get(peer) != where:
            self._addresses[peer] = where
            self.loop.call(lambda: self._join(peer))

    def offer(self, offer: Offer, spans: Sequence[Span]) -> None:
        if self._closed or offer.destination not in self._addresses:
            self._events.append(Sent(offer.key, offer.push_id, f"{offer.destination} is not connected"))
            self._wake()
            return
        self.loop.call_here(lambda: self._offer(offer, Spans.of(spans)))

    def poll(self) -> list[TransportEvent]:
        self.loop.turn_here(but=self._wake)  # we are looking
        return self._take_events()

    def linger(self, until_s: float) -> list[TransportEvent]:
        if not self._closed:
            self.loop.linger(lambda: bool(self._events) or time.monotonic() >= until_s, but=self._wake)
        return self._take_events()

    def _take_events(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def give_way(self, works: bool) -> None:
        self.loop.owner_works = works

    def cut(self, peer: PeerId) -> None:
        self.loop.call(lambda: self._end_links(peer, f"{peer} was cut off"))

    def forget(self, peer: PeerId) -> None:
        self._fenced.add(peer)
        self._addresses.pop(peer, None)
        self.loop.call(lambda: self._end_links(peer, f"{peer} was forgotten"))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.loop.stop(self._shut)

    # -- the links' side, on the I/O thread

    def accept(self, offer: Offer) -> Sequence[Span] | Refused:
        return self._acceptor(offer)

    def emit(self, event: TransportEvent) -> None:
        """The owner is woken when the work at hand is done."""
        self._events.append(event)
        self.loop.afterwards(self._wake)

    def is_fenced(self, peer: PeerId) -> bool:
        return peer in self._fenced

    def admitted(self, link: _Incoming) -> None:
        assert link.peer is not None
        self._strangers.pop(link, None)
        before = self._incoming.pop(link.peer, None)
        if before is not None:
            before.end(f"{link.peer} connected anew")
        self._incoming[link.peer] = link

    def outgoing_ended(self, link: _Outgoing, reason: str) -> None:
        if self._outgoing.get(link.peer) is link:
            del self._outgoing[link.peer]
            self._lost(link.peer, reason)

    def incoming_ended(self, link: _Incoming, reason: str) -> None:
        self._strangers.pop(link, None)
        if link.peer is not None and self._incoming.get(link.peer) is link:
            del self._incoming[link.peer]
            self._lost(link.peer, reason)

    def _lost(self, peer: PeerId, reason: str) -> None:
        if not self._closed and peer not in self._fenced:
            self.emit(PeerLost(peer, reason))

    def _knocked(self, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # the caller stays where it is, and would ring at once
            self._listen_to(0)
            self.loop.after(ACCEPT_REST_S, lambda: self._listen_to(selectors.EVENT_READ))
            return
        if foreign_user(sock):
            sock.close()
            return
        if len(self._strangers) >= MAX_STRANGERS:  # a peer proves itself within a round trip, and is not the oldest
            next(iter(self._strangers)).end("no handshake, and others wait")
        link = _Incoming(self, sock)
        self._strangers[link] = None
        link.challenge()

    def _listen_to(self, events: int) -> None:
        if not self._closed:
            self.loop.watch(self._listener, events, self._knocked)

    def _join(self, peer: PeerId) -> None:
        with contextlib.suppress(OSError):  # the next offer dials anew, and tells
            self._link(peer)

    def _link(self, peer: PeerId) -> _Outgoing | None:
        """Raises `OSError` when there is no socket to dial with."""
        address = self._addresses.get(peer)
        if address is None:
            return None
        link = self._outgoing.get(peer)
        if link is None:
            link = self._outgoing[peer] = _Outgoing(self, peer, address)
        return link

    def _offer(self, offer: Offer, spans: Spans) -> None:
        try:
            link = self._link(offer.destination)
        except OSError as error:
            reason = f"cannot connect to {offer.destination}: {error.strerror or error}"
            self.emit(Sent(offer.key, offer.push_id, reason, unheard=True))
            return
        if link is None:
            self.emit(Sent(offer.key, offer.push_id, f"{offer.destination} was forgotten"))
        else:
            link.offer(offer, spans)

    def _end_links(self, peer: PeerId, reason: str) -> None:
        """By our own choice, so nobody is told that the peer is lost."""
        for link in (self._outgoing.pop(peer, None), self._incoming.pop(peer, None)):
            if link is not None:
                link.end(reason)

    def _shut(self) -> None:
        self.loop.unwatch(self._listener)
        self._listener.close()
        links: list[_Outgoing | _Incoming] = [*self._outgoing.values(), *self._incoming.values(), *self._strangers]
        for link in links:
            link.end(f"{self.me} closed")


def _family(host: str) -> socket.AddressFamily:
    if host.startswith(UNIX):
        return socket.AF_UNIX
    try:
        version = ipaddress.ip_address(host).version
    except ValueError as error:
        raise TransferError(f"transfer hosts are IP addresses, not {host!r}") from error
    return socket.AF_INET6 if version == 6 else socket.AF_INET


def _listen(host: str) -> socket.socket:
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setblocking(False)
    try:
        listener.bind(socket_address(host, 0))
    except OSError as error:
        listener.close()
        raise TransferError(f"cannot listen on {host}: {error.strerror}") from error
    listener.listen(MAX_STRANGERS)
    return listener


def foreign_user(sock: socket.socket) -> str:
    """Within a host: why the other end may not be spoken to; empty when its user is ours, or over a network."""
    if sock.family != socket.AF_UNIX:
        return ""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return "" if uid == os.getuid() else f"it belongs to user {uid}, not to {os.getuid()}"
