"""A peer in a process of its own, to be killed or stopped: `transfer_peer.py ROLE TRANSPORT`.

It prints its address, reads the other's, and then keeps eight pushes in flight for ever (source) or takes whatever
comes (destination). It prints `lost` when it sees its peer go.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

from kvtransfer.engine import TransferEngine
from kvtransfer.layout import block_spans
from kvtransfer.memory import SharedMemory
from kvtransfer.select import make_transport
from kvtransfer.types import LeaseKey, PeerLost, PushFailed, Spans

BLOCK_BYTES = 256 * 1024
BLOCKS = 32
LEASES = 2_000
IN_FLIGHT = 8
NAMES = {"source": "prefill-0#1", "destination": "decode-0#1"}


def lease_spans() -> Spans:
    """All blocks, scattered."""
    return block_spans([index * 13 % BLOCKS for index in range(BLOCKS)], BLOCK_BYTES)


def lease_key(number: int) -> LeaseKey:
    return LeaseKey("request", number)


def make_peer(
    name: str, transport: str, wake: threading.Event, host: str = "127.0.0.1"
) -> tuple[np.ndarray, TransferEngine]:
    region = memoryview(SharedMemory(BLOCK_BYTES * BLOCKS))
    memory = np.frombuffer(region, np.uint8)
    memory[:] = 1
    scheme, error_handling = transport.split("-")[0], transport != "ucx-nofault"
    made = make_transport(scheme, name, region, host=host, ucx_error_handling=error_handling)
    return memory, TransferEngine(name, region, [made], wake=wake.set)


def keep_pushing(engine: TransferEngine, last: int) -> int:
    """Top up to `IN_FLIGHT` pushes; the number of the last lease used."""
    while engine.in_flight() < IN_FLIGHT and last < LEASES:
        last += 1
        engine.push(lease_key(last), NAMES["destination"], 0, lease_spans())
    return last


def open_all(engine: TransferEngine) -> None:
    for number in range(1, LEASES + 1):
        engine.open(lease_key(number), NAMES["source"], lease_spans())


def main(role: str, transport: str) -> None:
    news = threading.Event()
    _, engine = make_peer(NAMES[role], transport, news)
    if role == "destination":
        open_all(engine)
    print(engine.addresses()[0][1].hex(), flush=True)
    address = bytes.fromhex(sys.stdin.readline())
    if role == "source":
        engine.connect(NAMES["destination"], transport.split("-")[0], address)
    last = 0
    while True:
        if role == "source":
            last = keep_pushing(engine, last)
        news.wait()
        news.clear()
        if any(isinstance(event, PeerLost | PushFailed) for event in engine.poll()):
            print("lost", flush=True)
            sys.stdin.readline()
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
