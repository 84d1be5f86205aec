"""One socket of a link: frames in both directions, and payload straight between the socket and the region.

Lives on the I/O thread. Payload passes through no buffer: it goes from the socket into the spans by `recvmsg_into`,
from the spans into the socket by `sendmsg`. Only what arrives together with a header, a body as a rule, is read along
with it, up to a page: a call less per frame.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.errors import TransferError
from kvtransfer.frames import HEADER_BYTES, MAX_BODY_BYTES, FrameError, Header, Kind, decode_header
from kvtransfer.io_loop import IoLoop
from kvtransfer.layout import Cursor

logger = logging.getLogger(__name__)

MAX_VIEWS = 64
"""Views per vectored call: enough to amortise the call, small enough to build quickly."""
FAIR_BYTES = 2**21
"""After so much payload in one go the other links get their turn."""
AHEAD_BYTES = 4096
MOST_WAITING_BYTES = 2**20
"""Of answers that a peer has not read; while there are more, nothing that it asks is read."""
KEEPALIVE_IDLE_S = 5
USER_TIMEOUT_MS = 15_000


@dataclass(slots=True)
class _Writing:
    cursor: Cursor
    done: Callable[[], None] | None
    descriptor: int | None = None


class Connection:
    """`on_frame(header, body)` for each frame (an empty body for DATA, whose payload the callee then reads)."""

    def __init__(
        self,
        sock: socket.socket,
        loop: IoLoop,
        on_frame: Callable[[Header, bytes], None],
        on_lost: Callable[[str], None],
        max_body_bytes: int = MAX_BODY_BYTES,
        *,
        answers: bool = False,
    ) -> None:
        """`answers`: what is sent answers what is read, so who reads no answer is not read from. At one end of a link
        only: if both waited for the other to read, they would wait for ever."""
        self.max_body_bytes = max_body_bytes
        self._answers = answers
        self._waiting_bytes = 0
        self._sock = sock
        self._loop = loop
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._header = bytearray(HEADER_BYTES)
        self._reading: Cursor
        self._reading_header: bool
        self._read_done: Callable[[], None]
        self.expect_frame()
        self._room = memoryview(bytearray(AHEAD_BYTES))
        self._ahead = self._room[:0]
        self._writing: deque[_Writing] = deque()
        self._open = True
        self._may_bring_descriptor = sock.family == socket.AF_UNIX
        self._descriptors: list[int] = []
        self._hang_up: select.poll | None = None
        _tune(sock)
        self._watched = selectors.EVENT_READ
        loop.watch(sock, self._watched, self._ready)

    def send(self, frame: bytes, descriptor: int | None = None) -> None:
        """Queue a frame, with a file descriptor where the peer is on this host."""
        view = memoryview(frame)
        if descriptor is None and self._open and not self._writing:  # as a rule the kernel takes all of it at once
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self.close(f"connection lost: {error.strerror or error}")
                return
        if view:
            self._send(_Writing(Cursor([view]), None, descriptor))

    def send_views(self, views: Sequence[memoryview], done: Callable[[], None] | None = None) -> None:
        """Queue bytes that stay where they are; `done` when the kernel has them all."""
        self._send(_Writing(Cursor(views), done))

    def take_descriptor(self) -> int | None:
        """The file descriptor that came with a frame; from now on the caller's to close. No more are read."""
        self._may_bring_descriptor = False
        return self._descriptors.pop() if self._descriptors else None

    def hung_up(self) -> bool:
        """Whether the peer has closed its end by now, even if what it sent before is not read yet."""
        if self._hang_up is None:
            self._hang_up = select.poll()
            self._hang_up.register(self._sock, select.POLLRDHUP)
        return bool(self._hang_up.poll(0))

    def _send(self, writing: _Writing) -> None:
        if not self._open:
            return
        self._writing.append(writing)
        self._waiting_bytes += writing.cursor.remaining
        if len(self._writing) == 1:
            self._write()

    def read_into(self, views: Sequence[memoryview], done: Callable[[], None]) -> None:
        """From within `on_frame` of a DATA frame: where its payload goes."""
        self._reading = Cursor(views)
        self._reading_header = False
        self._read_done = done

    def close(self, reason: str) -> None:
        """End it; `on_lost` is told once."""
        if not self._open:
            return
        self._open = False
        self._loop.unwatch(self._sock)
        self._sock.close()
        self._writing.clear()
        self._reading = Cursor([])
        self._drop_descriptors()
        self._on_lost(reason)

    def _ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read()
            if self._open and events & selectors.EVENT_WRITE:
                self._write()
        except (FrameError, TransferError) as error:
            self.close(f"protocol error: {error}")
        except OSError as error:
            self.close(f"connection lost: {error.strerror or error}")
        except Exception as error:  # a bug must end its own link, not leave it half alive
            logger.exception("a link failed")
            self.close(f"internal error: {error}")

    def _read(self) -> None:
        budget, drained = self._loop.at_most(FAIR_BYTES), False
        while self._open and (self._ahead or (budget > 0 and self._may_read())):  # what was read ahead rings no bell
            if self._ahead:
                self._use_ahead()
            elif drained:
                return
            else:
                try:
                    received, drained = self._receive_more(budget)
                except BlockingIOError:
                    return
                if not received:
                    self.close("connection closed by the peer")
                    return
                budget -= received
        self._watch()

    def _may_read(self) -> bool:
        return not self._answers or self._waiting_bytes <= MOST_WAITING_BYTES

    def _receive_more(self, budget: int) -> tuple[int, bool]:
        """Bytes received, of payload no more than `budget`, and whether the socket has no more. A header's, and what
        comes with it, are kept ahead."""
        if self._reading_header:
            received = self._receive([self._room])
            self._ahead = self._room[:received]
            return received, received < len(self._room)
        window = self._reading.window(MAX_VIEWS, budget)
        received, room = self._receive(window), sum(map(len, window))
        self._advance(received)
        return received, received < room

    def _use_ahead(self) -> None:
        if self._reading_header and self._reading.remaining == HEADER_BYTES <= len(self._ahead):  # as a rule
            header, self._ahead = decode_header(self._ahead[:HEADER_BYTES]), self._ahead[HEADER_BYTES:]
            self._begun(header)
        else:
            self._advance(self._take_ahead())

    def _advance(self, num_bytes: int) -> None:
        self._reading.advance(num_bytes)
        if not self._reading.remaining:
            self._read_done()

    def _take_ahead(self) -> int:
        taken = 0
        for view in self._reading.window(MAX_VIEWS, len(self._ahead)):
            part = self._ahead[: len(view)]
            view[: len(part)] = part
            self._ahead = self._ahead[len(part) :]
            taken += len(part)
        return taken

    def _receive(self, window: list[memoryview]) -> int:
        if not self._may_bring_descriptor:  # one that comes nevertheless is dropped by the kernel
            return self._sock.recv_into(window[0]) if len(window) == 1 else self._sock.recvmsg_into(window)[0]
        received, ancillary, _, _ = self._sock.recvmsg_into(window, _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors += array("i", data[: len(data) // 4 * 4])
        if len(self._descriptors) > 1:
            self._drop_descriptors()
            raise FrameError("more file descriptors than one")
        return received

    def _drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _between_frames(self) -> bool:
        return self._reading_header and self._reading.remaining == HEADER_BYTES

    def _header_read(self) -> None:
        self.expect_frame()
        self._begun(decode_header(self._header))

    def _begun(self, header: Header) -> None:
        """A header was read; unless what follows says otherwise, another one comes next."""
        if header.kind is Kind.DATA:
            self._on_frame(header, b"")
            return
        if header.length > self.max_body_bytes:
            raise FrameError(f"a body of {header.length} bytes, at most {self.max_body_bytes} are read")
        if not header.length:
            raise FrameError("a frame without a body")
        if header.length <= len(self._ahead):  # as a rule it is here already
            whole, self._ahead = bytes(self._ahead[: header.length]), self._ahead[header.length :]
            self._on_frame(header, whole)
            return
        body = bytearray(header.length)
        self._reading = Cursor([memoryview(body)])
        self._reading_header = False
        self._read_done = lambda: self._body_read(header, body)

    def _body_read(self, header: Header, body: bytearray) -> None:
        self.expect_frame()
        self._on_frame(header, bytes(body))

    def expect_frame(self) -> None:
        """A header comes next: at the start, after a body, and, said by the reader of the payload, after payload."""
        self._reading = Cursor([memoryview(self._header)])
        self._reading_header = True
        self._read_done = self._header_read

    def _write(self) -> None:
        budget = self._loop.at_most(FAIR_BYTES)
        try:
            while self._writing and budget > 0:
                writing = self._writing[0]
                rights = [] if writing.descriptor is None else [_rights(writing.descriptor)]
                sent = self._sock.sendmsg(writing.cursor.window(MAX_VIEWS, budget), rights)
                writing.descriptor = None
                budget -= sent
                self._waiting_bytes -= sent
                writing.cursor.advance(sent)
                if not writing.cursor.remaining:
                    self._writing.popleft()
                    if writing.done is not None:
                        writing.done()
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(f"connection lost: {error.strerror or error}")
            return
        self._watch()

    def _watch(self) -> None:
        events = (selectors.EVENT_READ if self._may_read() else 0) | (selectors.EVENT_WRITE if self._writing else 0)
        if self._open and events != self._watched:
            self._watched = events
            self._loop.watch(self._sock, events, self._ready)


_ONE_DESCRIPTOR = socket.CMSG_SPACE(array("i").itemsize)


def _rights(descriptor: int) -> tuple[int, int, bytes]:
    """Ancillary data that makes the peer an owner of the same open file."""
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]).tobytes()


_TCP_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": KEEPALIVE_IDLE_S,
    "TCP_KEEPINTVL": KEEPALIVE_IDLE_S,
    "TCP_KEEPCNT": 2,
    "TCP_USER_TIMEOUT": USER_TIMEOUT_MS,
}


def _tune(sock: socket.socket) -> None:
    """No delay for small frames; a host that vanished is noticed. Buffers are left to the kernel, which tunes them."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
