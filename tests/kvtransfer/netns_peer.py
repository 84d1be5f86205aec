"""A destination in a process of its own, behind a link that a test can cut or slow: `netns_peer.py TRANSPORT HOST`.

It says its address, hears who the source is, opens `LEASES` leases over blocks of its own, and then obeys lines:
`wait N` until so many blocks came in whole; `end` cuts the source off, closes every lease and waits for the quiet;
`reopen` grants the same leases under the next generation. Each is answered by one line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading

from transfer_peer import make_peer

from kvtransfer.engine import TransferEngine
from kvtransfer.layout import block_spans
from kvtransfer.types import LeaseKey, PushFailed, Quiet, Received, Spans, TransferEvent

BLOCK_BYTES = 64 * 1024
LEASES = 4
BLOCKS_PER_LEASE = 8
SOURCE = "prefill-0#1"


def lease(number: int) -> Spans:
    first = number * BLOCKS_PER_LEASE
    return block_spans(range(first, first + BLOCKS_PER_LEASE), BLOCK_BYTES)


class Destination:
    """Counts its blocks: a lease holds them until its `Quiet`."""

    def __init__(self, engine: TransferEngine, news: threading.Event) -> None:
        self._engine = engine
        self._news = news
        self._generation = 0
        self._held: set[LeaseKey] = set()
        self._received = 0

    def reopen(self) -> None:
        self._generation += 1
        for number in range(LEASES):
            key = LeaseKey(str(number), self._generation)
            self._engine.open(key, SOURCE, lease(number))
            self._held.add(key)

    def wait(self, blocks: int) -> None:
        while self._received < blocks:
            self._take()

    def end(self) -> None:
        self._engine.cut(SOURCE)
        for key in tuple(self._held):
            self._engine.close(key)
        while self._held:
            self._take()

    def state(self) -> dict[str, int]:
        self._engine.check()
        total = LEASES * BLOCKS_PER_LEASE
        free = total - len(self._held) * BLOCKS_PER_LEASE
        return {"received": self._received, "free": free, "total": total, "in_flight": self._engine.in_flight()}

    def _take(self) -> None:
        self._news.clear()
        events = self._engine.poll()
        for event in events:
            self._apply(event)
        if not events and not self._news.wait(20):
            sys.exit("nothing happened for 20 s")

    def _apply(self, event: TransferEvent) -> None:
        match event:
            case Received(count=count):
                self._received += count
            case Quiet(key=key):
                self._held.discard(key)
            case PushFailed():
                raise AssertionError("a destination pushes nothing")


def main(transport: str, host: str) -> None:
    news = threading.Event()
    _, engine = make_peer("decode-0#1", transport, news, host)
    destination = Destination(engine, news)
    destination.reopen()
    print(engine.addresses()[0][1].hex(), flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        {"wait": destination.wait, "end": destination.end, "reopen": destination.reopen}[word](*map(int, numbers))
        print(json.dumps(destination.state()), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
