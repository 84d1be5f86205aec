"""News from the workers to the router: load reports and prefix-cache events, over ZeroMQ with CURVE keys.

Each worker's control publishes on a socket of its own; the router subscribes to all of them. Both ends derive their
keys from the cluster's secret, and a publisher turns away whoever has not. A message is a topic and one msgpack map,
never pickle. Events of a worker are numbered, so a gap is seen by whoever keeps an index of them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from engine.types import EngineLoad, StepTimes, TierLoad
from tandem.messages import FetchCounters, KvEvents, LinkRate, LoadReport, MigrationCounters, TransferCounters

log = logging.getLogger(__name__)

Event = LoadReport | KvEvents
ZAP_DOMAIN = b"tandem"
_pack: Callable[..., bytes] = getattr(msgpack, "packb")  # noqa: B009 (msgpack has no types)
_unpack: Callable[..., Any] = getattr(msgpack, "unpackb")  # noqa: B009


@dataclass(frozen=True, slots=True)
class Keys:
    """One end's CURVE pair, in Z85."""

    public: bytes
    secret: bytes


def derive_keys(secret: str, end: str) -> Keys:
    """The pair of `end` ("publisher" or "subscriber") in the cluster that shares `secret`."""
    seed = hashlib.blake2b(secret.encode(), digest_size=32, person=end.encode()[:16]).digest()
    private = z85.encode(seed)
    return Keys(zmq.curve_public(private), private)


class Publisher:
    """A worker's side. `address` is what subscribers connect to."""

    def __init__(self, secret: str, *, host: str = "127.0.0.1", advertise: str | None = None) -> None:
        ours, theirs = derive_keys(secret, "publisher"), derive_keys(secret, "subscriber")
        self._context = zmq.asyncio.Context()
        self._gate = AsyncioAuthenticator(self._context)
        self._gate.start()
        self._gate.configure_curve_callback(domain=ZAP_DOMAIN.decode(), credentials_provider=_Only(theirs.public))
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, ours.secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, ours.public)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{advertise or host}:{port}"

    async def publish(self, event: Event) -> None:
        await self._socket.send_multipart([type(event).__name__.encode(), _pack(asdict(event))])

    def close(self) -> None:
        self._socket.close()
        self._gate.stop()
        self._context.destroy(linger=0)


class Subscriber:
    """The router's side: one socket for all workers; iterate over it."""

    def __init__(self, secret: str) -> None:
        ours, theirs = derive_keys(secret, "subscriber"), derive_keys(secret, "publisher")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, ours.secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, ours.public)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, theirs.public)
        self._socket.setsockopt(zmq.RCVHWM, 100_000)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._connected: set[str] = set()

    def connect(self, address: str) -> None:
        """Hear this worker too. Idempotent; reconnects by itself."""
        if address not in self._connected:
            self._connected.add(address)
            self._socket.connect(address)

    def disconnect(self, address: str) -> None:
        if address in self._connected:
            self._connected.discard(address)
            self._socket.disconnect(address)

    async def receive(self) -> Event:
        """The next event of any worker."""
        while True:
            event = decode(await self._socket.recv_multipart())
            if event is not None:
                return event

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            yield await self.receive()

    def close(self) -> None:
        self._context.destroy(linger=0)


def decode(frames: list[bytes]) -> Event | None:
    """The event of a message; None for one that makes no sense (and a line in the log)."""
    try:
        topic, body = frames
        fields: dict[str, Any] = _unpack(body, use_list=False)
        return _DECODERS[topic](fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("an event could not be read: %s: %s", type(error).__name__, error)
        return None


def _load_report(fields: dict[str, Any]) -> LoadReport:
    load = fields.pop("load")
    times = StepTimes(**load.pop("step_times"))
    tiers = tuple([TierLoad(**tier) for tier in load.pop("tiers")])
    transfers = tuple([TransferCounters(**counters) for counters in fields.pop("transfers")])
    fetches = tuple([FetchCounters(**counters) for counters in fields.pop("fetches")])
    links = tuple([LinkRate(**rate) for rate in fields.pop("links")])
    load = EngineLoad(step_times=times, tiers=tiers, **load)
    migrations = MigrationCounters(**fields.pop("migrations"))
    return LoadReport(load=load, transfers=transfers, fetches=fetches, migrations=migrations, links=links, **fields)


_DECODERS: dict[bytes, Callable[[dict[str, Any]], Event]] = {
    b"LoadReport": _load_report,
    b"KvEvents": lambda fields: KvEvents(**fields),
}


class _Only:
    """Lets in the holder of one key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public
