"""The ucx transport: payload over UCX (`ucxx` core API), one UCX worker per link, control on the link's connection.

Where UCX can read a peer's memory without its help (RDMA, CMA within a host), the destination reads exactly the bytes
it takes, straight from the pool that the source has registered, and says ACK; the source answers CONFIRM: the memory
was still the lease's. Elsewhere (TCP) the destination posts receives, each with a tag of its own (push serial, message
index), before it says TAKE. Neighbours at both ends travel as one. All workers of a transport progress on its I/O
thread, which sleeps on their event descriptors. Measured beside a decode loop over TCP, that costs
the loop no more than UCX's own thread does and moves as much, and whoever holds the turn owns every UCX object.

**How a link ends.** A receive that matched a message cannot be cancelled, and closing an endpoint whose peer died may
crash or wait for ever. So nothing is closed politely: the worker is destroyed as a whole (`ucp_worker_destroy`), which
touches no other link, and after which nothing of that peer incarnation can reach the region. The wrapper objects would
use the dead handle in their destructors, so they are kept alive until the process ends: a few kilobytes per link.

**Error handling.** With it (default) UCX reports a dead peer. Rendezvous then avoids CMA, since its sender would not
know when the reading stops; reads of our own may use it, since CONFIRM settles that. Without it rendezvous takes CMA
too, and **a peer killed while its memory is being read aborts this process**: UCX 1.21 calls abort() when
`process_vm_readv` fails on an endpoint without error handling (seen under SIGKILL in the middle of a transfer). So it
is off only where both ends may die together, such as a benchmark.

UCX does not encrypt, and listens on every interface unless told: bound to loopback this transport tells it `lo`.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import selectors
from dataclasses import dataclass
from typing import Any

from kvtransfer import ucp
from kvtransfer.device import Region, address_of
from kvtransfer.errors import TransferError
from kvtransfer.frames import FrameError, Header, decode_counts, decode_numbers
from kvtransfer.io_loop import GENTLE_BYTES, IoLoop
from kvtransfer.layout import check_spans, common_runs, group, runs, shared_runs, views_of
from kvtransfer.packing import pack, unpack
from kvtransfer.reading import Move, Reads
from kvtransfer.types import Numbers, PeerId, Spans
from kvtransfer.wired import Payload, Road, WiredTransport

# Before UCX loads: at its default level it prints a line per open request of a destroyed worker, hundreds for one peer.
os.environ.setdefault("UCX_LOG_LEVEL", "error")

from ucxx._lib import libucxx as ucx
from ucxx._lib.arr import Array

_INDEX_BITS = 24
_SERIAL_LIMIT = 1 << (64 - _INDEX_BITS)
_READS = {
    "RNDV_THRESH": "inf",
    "ZCOPY_THRESH": "16384",
    "TCP_TX_SEG_SIZE": "512k",
    "TCP_RX_SEG_SIZE": "512k",
}
"""UCX leaves CMA out beside error handling while rendezvous might use it. What goes as messages then, over TCP, goes
eagerly into receives that are posted: measured in segments of 512 KiB 4.5 GB/s, as UCX has it by default 1.2."""
_READING = ("cma", "knem", "xpmem", "rc_", "dc_", "cuda_ipc", "rocm_ipc")
"""How UCX's names of transports begin that read a peer's memory without its help."""


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
    region: Region,
    *,
    host: str = "127.0.0.1",
    advertise: str | None = None,
    options: UcxOptions | None = None,
) -> WiredTransport:
    """A `Transport` over UCX. Raises `TransferError` when UCX cannot be set up."""
    chosen = options or UcxOptions()
    try:
        context = ucx.UCXContext(_settings(chosen, host), (ucx.Feature.TAG, ucx.Feature.RMA, ucx.Feature.WAKEUP))
        pool = _Pool(context, region)
    except Exception as error:
        raise TransferError(f"UCX cannot start: {error}") from error

    def make_payload(loop: IoLoop, road: Road) -> Payload:
        return UcxPayload(loop, road, pool, context, chosen)

    return WiredTransport("ucx", me, make_payload, host=host, advertise=advertise)


class _Pool:
    """The region, registered with UCX as long as this lives."""

    def __init__(self, context: Any, region: Region) -> None:
        self.region = region
        self._context = context
        self.registration = ucp.register(context.handle, address_of(region), region.nbytes)

    def __del__(self) -> None:
        if hasattr(self, "registration"):
            ucp.unregister(self._context.handle, self.registration)


@dataclass(slots=True)
class _Batch:
    """The UCX requests of one push that are not known to be complete, the next one last."""

    requests: list[Any]


class UcxPayload:
    """The payload road of one link: a UCX worker with one endpoint."""

    confirms = True

    def __init__(self, loop: IoLoop, road: Road, pool: _Pool, context: Any, options: UcxOptions) -> None:
        self._loop = loop
        self._road = road
        self._pool = pool
        self._region = pool.region
        self._options = options
        self._batches: dict[int, _Batch] = {}
        self._closed = False
        self._endpoint: Any = None
        self._reads: Reads | None = None
        self._their_address = self._their_bytes = 0
        self._worker = ucx.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        loop.watch(self._worker.epoll_file_descriptor, selectors.EVENT_READ, lambda events: None)
        loop.before_sleep(self._progress)

    def blob(self) -> bytes:
        ours = self._pool.registration
        return pack(bytes(self._worker.address.tobytes()), ours.address, self._region.nbytes, ours.key)

    def attach(self, blob: bytes) -> None:
        """Both ends make an endpoint at once, so that UCX has wired the pair up before the first payload."""
        try:
            worker, self._their_address, self._their_bytes, key = unpack(blob)
            address = ucx.UCXAddress.create_from_buffer(bytearray(worker))
            self._endpoint = self._worker.create_endpoint_from_worker_address(address, self._options.error_handling)
            if self._options.error_handling and self._can_read():
                their_key = ucp.unpack_key(self._endpoint.handle, key)
                reader = ucp.Reader(self._endpoint.handle, their_key, self._pool.registration)
                self._reads = Reads(reader, self._worker.progress)
        except (ucx.UCXError, ucp.UcpError, IndexError, TypeError, ValueError) as error:
            raise TransferError(f"no UCX endpoint: {error}") from error

    def _can_read(self) -> bool:
        """Whether UCX can read the peer's memory here without its help."""
        return any(name.startswith(_READING) for name in ucp.transports_of(self._endpoint.handle))

    def descriptor(self) -> None:
        return None

    def announce(self, spans: Spans) -> bytes:
        return spans.offsets.tobytes()

    def receive(self, serial: int, spans: Spans, announced: bytes) -> bytes | None:
        offsets = decode_numbers(announced).array.view("<i8")
        if len(offsets) != len(spans):
            raise FrameError(f"{len(offsets)} places for {len(spans)} spans")
        theirs = Spans(offsets, spans.lengths)
        if problem := check_spans(theirs, self._their_bytes):
            raise FrameError(f"the source offers what it has not: {problem}")
        if self._reads is not None:
            self._reads.add(serial, self._moves(theirs, spans))
            return None
        limit = self._options.max_message_bytes
        counts = common_runs(runs(theirs, limit), runs(spans, limit))
        worker = self._worker
        self._start(serial, [worker.tag_recv(array, tag) for array, tag in self._messages(serial, spans, counts)])
        return counts.pack()

    def _moves(self, theirs: Spans, ours: Spans) -> list[Move]:
        """Neighbours at both ends as one."""
        counts = shared_runs(theirs, ours)
        reads, writes = group(theirs, counts), group(ours, counts)
        addresses = (reads.offsets + self._their_address).tolist()
        return list(zip(addresses, writes.offsets.tolist(), reads.lengths.tolist(), strict=True))

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
        if self._reads is not None:
            self._reads.drain()
        open_requests = [batch.requests for batch in self._batches.values()]
        self._batches.clear()
        _destroy(self._worker, self._endpoint, open_requests)

    def _messages(self, serial: int, spans: Spans, counts: Numbers) -> list[tuple[Any, Any]]:
        first_tag = serial % _SERIAL_LIMIT << _INDEX_BITS
        return [
            (Array(view), ucx.UCXXTag(first_tag | index))
            for index, view in enumerate(views_of(self._region, group(spans, counts)))
        ]

    def _start(self, serial: int, requests: list[Any]) -> None:
        self._batches[serial] = _Batch(requests[::-1])

    def _progress(self) -> bool:
        """Let UCX work, report what ended, and say whether the thread may sleep on the event descriptor."""
        if self._closed:
            return True
        if self._is_for_the_thread():
            return False
        self._worker.progress()
        try:
            read = self._reads.advance() if self._reads is not None else []
            moved = [serial for serial, batch in self._batches.items() if _advance(batch)]
        except (ucx.UCXError, ucp.UcpError) as error:
            self._road.connection.close(f"UCX: {error}")
            return True
        for serial in read:
            self._road.payload_done(serial, confirm=True)
        for serial in moved:
            self._batches.pop(serial, None)
            self._road.payload_done(serial)
        # Reporting may have found the connection broken and ended this link, worker and all.
        return self._closed or bool(self._worker.arm())

    def _is_for_the_thread(self) -> bool:
        """UCX would copy all that is under way."""
        under_way = self._reads.under_way_bytes if self._reads is not None else 0
        return under_way > GENTLE_BYTES and self._loop.is_owners_turn()


def _advance(batch: _Batch) -> bool:
    """Drop completed requests; True when all are. Raises the first error."""
    requests = batch.requests
    while requests and requests[-1].completed:
        requests.pop().check_error()
    return not requests


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
    settings = dict(_READS) if options.error_handling else {"RNDV_SCHEME": "get_zcopy"}
    devices = options.devices or ("lo" if ipaddress.ip_address(host).is_loopback else None)
    if devices is not None:
        settings["NET_DEVICES"] = devices
    return settings | dict(options.settings)
