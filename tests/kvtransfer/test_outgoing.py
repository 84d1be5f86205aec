"""What an owner of blocks sends: whole, and each block let go of once, however many spans it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from transfer_rig import Rig

from kvtransfer.frames import MAX_SPANS
from kvtransfer.outgoing import Outgoing
from kvtransfer.plan import Cut, KvShape, Side
from kvtransfer.types import LeaseKey, PushDone, Quiet

KEY = LeaseKey("r", 1)
SHAPE = KvShape(kv_heads=64, layers=64, row_bytes=2)
SOURCE = Side(SHAPE, Cut(16), Cut(32))
PIECES = MAX_SPANS // SOURCE.spans_per_piece + 2
REGION_BYTES = 2 * PIECES * SOURCE.piece_bytes


class Owners:
    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def retain(self, block_ids: Iterable[int]) -> None:
        self.held.update(block_ids)

    def unretain(self, block_ids: Iterable[int]) -> None:
        self.held.subtract(block_ids)
        assert min(self.held.values()) >= 0


@pytest.mark.parametrize("rig", ["tcp"], indirect=True)
def test_more_spans_than_one_offer_may_have_are_still_one_push_to_its_owner(rig: Rig) -> None:
    source, destination = rig.peer("p#1", region_bytes=REGION_BYTES), rig.peer("d#1", region_bytes=REGION_BYTES)
    owners = Owners()
    scheme, address = destination.engine.addresses()[0]
    outgoing = Outgoing(source.engine, owners, SOURCE, KEY, destination.name, scheme, address)
    taking = Side(SHAPE, Cut(32), Cut(16))
    destination.engine.open(KEY, source.name, taking.spans(range(PIECES), 0, PIECES))
    outgoing.push(list(range(PIECES)), 0, PIECES, deadline_s=10.0)
    done: list[int] = []

    def acknowledged() -> bool:
        while source.events:
            event = source.events.pop(0)
            assert isinstance(event, PushDone), event
            done.append(outgoing.done(event.push_id))
        return not outgoing

    rig.until(acknowledged)
    assert [pieces for pieces in done if pieces] == [PIECES]
    assert not +owners.held
    outgoing.withdraw(0.0, 1.0)
    destination.engine.close(KEY)
    rig.until(lambda: Quiet(KEY) in source.events and Quiet(KEY) in destination.events)
    reads, writes = SOURCE.spans(range(PIECES), 0, PIECES), taking.spans(range(PIECES), 0, PIECES)
    assert source.bytes_of(list(reads)) == destination.bytes_of(list(writes))
