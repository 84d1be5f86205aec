"""The ucx transport: payload over UCX (`ucxx` core API), one UCX worker per link, control on the link's connection.

The destination posts receives for exactly the bytes it takes, each with a tag of its own (push serial, message index),
before it says TAKE; neighbours at both ends travel as one message, large ones by rendezvous. All workers of a transport
progress on its I/O thread, which sleeps on their event descriptors. Measured beside a decode loop over TCP, that costs
the loop no more than UCX's own thread does and moves as much, and one thread owns every UCX object.

**How a link ends.** A receive that matched a message cannot be cancelled, and closing an endpoint whose peer died may
crash or wait for ever. So nothing is closed politely: the worker is destroyed as a whole (`ucp_worker_destroy`), which
touches no other link, and after which nothing of that peer incarnation can reach the region. The wrapper objects would
use the dead handle in their destructors, so they are kept alive until the process ends: a few kilobytes per link.

**Error handling.** With it (default) UCX reports a dead peer, and between peers of one host uses TCP. Without it UCX
takes shared memory, many times faster there, and **a peer killed while its memory is being read aborts this process**:
UCX 1.21 calls abort() when `process_vm_readv` fails (seen under SIGKILL in the middle of a transfer; without that
path shared memory is slower than TCP). So it is off only where both ends may die together, such as a benchmark.

UCX does not encrypt, and listens on every interface unless told: bound to loopback this transport tells it `lo`.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import selectors
from dataclasses import dataclass
from typing import Any

from kvtransfer.errors import TransferError
from kvtransfer.frames import FrameError, Header, decode_counts
from kvtransfer.io_loop import IoLoop
from kvtransfer.layout import common_runs, group, runs, views_of
from kvtransfer.types import Numbers, PeerId, Spans
from kvtransfer.wired import Payload, Road, WiredTransport

# Before UCX loads: at its default level it prints a line per open request of a destroyed worker, hundreds for one peer.
os.environ.setdefault("UCX_LOG_LEVEL", "error")

from ucxx._lib import libucxx as ucx
from ucxx._lib.arr import Array

_INDEX_BITS = 24
_SERIAL_LIMIT = 1 << (64 - _INDEX_BITS)


@dataclass(frozen=True, slots=True)
class UcxOptions:
    """Choices for one transport; they go into UCX's own configuration, not into the environment."""

    error_handling: bool = True
    """False is fast on one host and lets a peer's death abort this process, see the module's head."""
    devices: str | None = None
    """UCX `NET_DEVICES`; None: `lo` on a loopback address, else UCX's choice."""
    max_message_bytes: int = 8 * 2**20
    settings: tuple[tuple[str, str], ...] = ()
    """Further UCX settings, names without `UCX_`."""


def ucx_transport(
    me: PeerId,
    region: memoryview,
    *,
    host: str = "127.0.0.1",
    advertise: str | None = None,
    options: UcxOptions | None = None,
) -> WiredTransport:
    """A `Transport` over UCX. Raises `TransferError` when UCX cannot be set up."""
    chosen = options or UcxOptions()
    try:
        context = ucx.UCXContext(_settings(chosen, host), (ucx.Feature.TAG, ucx.Feature.WAKEUP))
    except Exception as error:
        raise TransferError(f"UCX cannot start: {error}") from error

    def make_payload(loop: IoLoop, road: Road, region: memoryview) -> Payload:
        return UcxPayload(loop, road, region, context, chosen)

    return WiredTransport("ucx", me, region, make_payload, host=host, advertise=advertise)


@dataclass(slots=True)
class _Batch:
    """The UCX requests of one push, and how many of them, from the front, are known to be complete."""

    requests: list[Any]
    done: int = 0


class UcxPayload:
    """The payload road of one link: a UCX worker with one endpoint."""

    def __init__(self, loop: IoLoop, road: Road, region: memoryview, context: Any, options: UcxOptions) -> None:
        self._loop = loop
        self._road = road
        self._region = region
        self._options = options
        self._batches: dict[int, _Batch] = {}
        self._closed = False
        self._endpoint: Any = None
        self._worker = ucx.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        loop.watch(self._worker.epoll_file_descriptor, selectors.EVENT_READ, lambda events: None)
        loop.before_sleep(self._progress)

    def blob(self) -> bytes:
        return bytes(self._worker.address.tobytes())

    def attach(self, blob: bytes) -> None:
        """Both ends make an endpoint at once, so that UCX has wired the pair up before the first payload."""
        try:
            address = ucx.UCXAddress.create_from_buffer(bytearray(blob))
            self._endpoint = self._worker.create_endpoint_from_worker_address(address, self._options.error_handling)
        except (ucx.UCXError, IndexError) as error:
            raise TransferError(f"no UCX endpoint: {error}") from error

    def descriptor(self) -> None:
        return None

    def announce(self, spans: Spans) -> bytes:
        return runs(spans, self._options.max_message_bytes).pack()

    def receive(self, serial: int, spans: Spans, announced: bytes) -> bytes:
        theirs = decode_counts(announced, len(spans))
        counts = common_runs(theirs, runs(spans, self._options.max_message_bytes))
        worker = self._worker
        self._start(serial, [worker.tag_recv(array, tag) for array, tag in self._messages(serial, spans, counts)])
        return counts.pack()

    def send(self, serial: int, spans: Spans, wanted: bytes) -> None:
        counts = decode_counts(wanted, len(spans))
        endpoint = self._endpoint
        self._start(serial, [endpoint.tag_send(array, tag) for array, tag in self._messages(serial, spans, counts)])

    def data(self, header: Header) -> None:
        raise FrameError("payload on the connection of a ucx link")

    def close(self) -> None:
        self._closed = True
        self._loop.remove_hook(self._progress)
        self._loop.unwatch(self._worker.epoll_file_descriptor)
        open_requests = [batch.requests[batch.done :] for batch in self._batches.values()]
        self._batches.clear()
        _destroy(self._worker, self._endpoint, open_requests)

    def _messages(self, serial: int, spans: Spans, counts: Numbers) -> list[tuple[Any, Any]]:
        first_tag = serial % _SERIAL_LIMIT << _INDEX_BITS
        return [
            (Array(view), ucx.UCXXTag(first_tag | index))
            for index, view in enumerate(views_of(self._region, group(spans, counts)))
        ]

    def _start(self, serial: int, requests: list[Any]) -> None:
        self._batches[serial] = _Batch(requests)

    def _progress(self) -> bool:
        """Let UCX work, report what ended, and say whether the thread may sleep on the event descriptor."""
        if self._closed:
            return True
        self._worker.progress()
        try:
            ended = [serial for serial, batch in self._batches.items() if _advance(batch)]
        except ucx.UCXError as error:
            self._road.connection.close(f"UCX: {error}")
            return True
        for serial in ended:
            self._batches.pop(serial, None)
            self._road.payload_done(serial)
        # Reporting may have found the connection broken and ended this link, worker and all.
        return self._closed or bool(self._worker.arm())


def _advance(batch: _Batch) -> bool:
    """Step over completed requests; True when all are. Raises the first error."""
    requests = batch.requests
    while batch.done < len(requests) and requests[batch.done].completed:
        requests[batch.done].check_error()
        batch.done += 1
    return batch.done == len(requests)


def _destroy(worker: Any, *wrappers: Any) -> None:
    """Destroy a UCX worker with all its endpoints and requests; see the module's head."""
    descriptor = worker.epoll_file_descriptor
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((worker, wrappers)))
    _ucp().ucp_worker_destroy(ctypes.c_void_p(worker.handle))
    os.close(descriptor)


def version() -> str:
    """Of the UCX library in use."""
    return ".".join(map(str, ucx.get_ucx_version()))


def _ucp() -> ctypes.CDLL:
    """The libucp that ucxx has loaded."""
    return ctypes.CDLL("libucp.so.0")


def _settings(options: UcxOptions, host: str) -> dict[str, str]:
    settings = {"RNDV_SCHEME": "get_zcopy"} if not options.error_handling else {}
    devices = options.devices or ("lo" if ipaddress.ip_address(host).is_loopback else None)
    if devices is not None:
        settings["NET_DEVICES"] = devices
    return settings | dict(options.settings)
