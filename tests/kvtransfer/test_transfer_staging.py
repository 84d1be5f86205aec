"""A pool that no transport reaches: its bytes go by way of a region that does, and nothing else of it is touched."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.engine import TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.faults import Fault
from kvtransfer.inproc import InprocHub, InprocTransport
from kvtransfer.layout import block_spans
from kvtransfer.staging import ALIGNMENT, Extents, StagedTransfers
from kvtransfer.types import LeaseKey, PushDone, PushFailed, Quiet, Received, ReceiveFailed, Span, Spans, TransferEvent

BLOCK = 4096
KEY = LeaseKey("r", 1)
SOURCE, DESTINATION = "p#1", "d#1"


class Device:
    """Memory that only this object can copy."""

    def __init__(self, blocks: int, fill: int) -> None:
        self.memory = np.arange(blocks * BLOCK, dtype=np.uint32).astype(np.uint8) * fill
        self.nbytes = self.memory.nbytes

    def read(self, spans: Spans, into: memoryview) -> None:
        into[:] = b"".join(self.of(span) for span in spans)

    def write(self, spans: Spans, data: memoryview) -> None:
        place = 0
        for span in spans:
            self.memory[span.offset : span.offset + span.length] = np.frombuffer(
                data[place : place + span.length], np.uint8
            )
            place += span.length

    def of(self, span: Span) -> bytes:
        return self.memory[span.offset : span.offset + span.length].tobytes()

    def block(self, index: int) -> bytes:
        return self.of(Span(index * BLOCK, BLOCK))


class Pair:
    """A source and a destination, both staged, with regions of so many blocks."""

    def __init__(self, source_blocks: int = 32, destination_blocks: int = 32, *, pool_blocks: int = 64) -> None:
        self.now, self.hub = 0.0, InprocHub()
        self.pools = Device(pool_blocks, 7), Device(pool_blocks, 0)
        sizes = (source_blocks, destination_blocks)
        self.source, self.destination = (
            StagedTransfers(
                name,
                region := memoryview(bytearray(size * BLOCK)),
                [InprocTransport(name, region, self.hub)],
                pool,
                clock=lambda: self.now,
                checksums=True,
            )
            for name, size, pool in zip((SOURCE, DESTINATION), sizes, self.pools, strict=True)
        )
        self.source.connect(DESTINATION, "inproc", dict(self.destination.addresses())["inproc"])

    def another(self, name: str, blocks: int = 32) -> StagedTransfers:
        """One more destination."""
        region = memoryview(bytearray(blocks * BLOCK))
        end = StagedTransfers(name, region, [InprocTransport(name, region, self.hub)], Device(64, 0))
        self.source.connect(name, "inproc", dict(end.addresses())["inproc"])
        return end

    def run(self) -> tuple[list, list]:
        """Until nothing more happens: what both ends were told."""
        told: tuple[list, list] = ([], [])
        quiet = 0
        while quiet < 3:
            news = [(self.source.poll(), told[0]), (self.destination.poll(), told[1])]
            quiet = 0 if any(events for events, _ in news) else quiet + 1
            for events, heard in news:
                heard.extend(events)
                end = (self.source, self.destination)[heard is told[1]]
                end.check()
        return told

    def close(self) -> None:
        self.destination.close(KEY)
        self.source.withdraw(KEY)
        told = self.run()
        assert [Quiet(KEY) in heard for heard in told] == [True, True]
        for end in (self.source, self.destination):
            end.check()
            assert end._extents.whole
            assert not end._books.outer
            assert not end._books.parts
            end.shutdown()


def test_blocks_arrive_where_they_belong_by_way_of_both_regions() -> None:
    pair = Pair()
    pair.destination.open(KEY, SOURCE, block_spans([40, 3, 21], BLOCK))
    push = pair.source.push(KEY, DESTINATION, 1, block_spans([9, 33], BLOCK))
    sent, received = pair.run()
    assert [type(event) for event in sent] == [PushDone]
    assert (sent[0].push_id, sent[0].num_bytes) == (push, 2 * BLOCK)
    assert received == [Received(KEY, 1, 2, 2 * BLOCK)]
    source, destination = pair.pools
    assert [destination.block(index) for index in (3, 21)] == [source.block(index) for index in (9, 33)]
    assert not destination.block(40).strip(b"\0"), "not sent, not touched"
    assert pair.source.stats()[0].staged_bytes == pair.destination.stats()[0].staged_bytes == 2 * BLOCK
    pair.close()


def test_a_push_larger_than_the_region_goes_in_parts_and_is_acknowledged_once() -> None:
    pair = Pair(source_blocks=8, destination_blocks=56)
    blocks = [int(block) for block in np.random.default_rng(1).permutation(64)[:40]]
    pair.destination.open(KEY, SOURCE, block_spans(range(40), BLOCK))
    push = pair.source.push(KEY, DESTINATION, 0, block_spans(blocks, BLOCK))
    sent, received = pair.run()
    assert [(event.push_id, event.num_bytes) for event in sent] == [(push, 40 * BLOCK)]
    assert sum(event.count for event in received) == 40
    assert all(pair.pools[1].block(place) == pair.pools[0].block(block) for place, block in enumerate(blocks))
    pair.close()


def test_what_waits_for_room_goes_by_priority() -> None:
    pair = Pair(source_blocks=4, destination_blocks=16)
    pair.destination.open(KEY, SOURCE, block_spans(range(12), BLOCK))
    pushes = [
        pair.source.push(KEY, DESTINATION, place, block_spans(range(place, place + 4), BLOCK), priority=priority)
        for place, priority in ((0, 0), (4, 5), (8, -1))
    ]
    sent, _ = pair.run()
    assert [event.push_id for event in sent] == [pushes[2], pushes[0], pushes[1]]
    pair.close()


@pytest.mark.parametrize("how", ["withdraw", "deadline", "cut"])
def test_a_push_that_still_waits_for_room_ends_as_any_other(how: str) -> None:
    pair = Pair(source_blocks=4, destination_blocks=16)
    pair.destination.open(KEY, SOURCE, block_spans(range(12), BLOCK))
    push = pair.source.push(KEY, DESTINATION, 0, block_spans(range(12), BLOCK), deadline_s=1.0)
    assert pair.source.in_flight()
    if how == "withdraw":
        pair.source.withdraw(KEY)
    elif how == "cut":
        pair.source.cut(DESTINATION)
    else:
        pair.now = 2.0
    sent, _ = pair.run()
    assert [event.push_id for event in sent if isinstance(event, PushFailed)] == [push]
    assert not [event for event in sent if isinstance(event, PushDone)]
    assert not pair.source.in_flight()
    pair.close()


def test_a_lease_that_has_no_room_is_refused_and_takes_none() -> None:
    pair = Pair(destination_blocks=4)
    assert pair.destination.most_lease_bytes() == 3 * BLOCK, "the rest is for what is sent"
    with pytest.raises(TransferError, match="has not 20480 bytes in one piece now"):
        pair.destination.open(KEY, SOURCE, block_spans(range(5), BLOCK))
    pair.destination.open(KEY, SOURCE, block_spans(range(2), BLOCK))
    assert [pair.destination.has_room(blocks * BLOCK) for blocks in (1, 2)] == [True, False]
    with pytest.raises(TransferError, match="already open"):
        pair.destination.open(KEY, SOURCE, block_spans(range(1), BLOCK))
    pair.close()


def test_spans_are_those_of_the_pool() -> None:
    pair = Pair()
    outside = [Span(64 * BLOCK - 1, 2)]
    pair.destination.open(KEY, SOURCE, block_spans([1], BLOCK))
    with pytest.raises(TransferError, match="outside"):
        pair.destination.open(LeaseKey("another", 1), SOURCE, outside)
    with pytest.raises(TransferError, match="outside"):
        pair.source.push(KEY, DESTINATION, 0, outside)
    with pytest.raises(TransferError, match="larger than the staging memory"):
        pair.source.push(KEY, DESTINATION, 0, [Span(0, 33 * BLOCK)])
    pair.close()


def test_a_peer_that_hangs_leaves_room_for_the_others() -> None:
    pair = Pair(source_blocks=16)
    pair.destination.open(KEY, SOURCE, block_spans(range(24), BLOCK))
    pair.source.push(KEY, DESTINATION, 0, block_spans(range(24), BLOCK))
    others = [pair.another(f"d{number}#1") for number in range(3)]
    for number, other in enumerate(others):
        other.open(LeaseKey(other.me, 1), SOURCE, block_spans(range(8), BLOCK))
        pair.source.push(LeaseKey(other.me, 1), other.me, 0, block_spans(range(8 * number, 8 * number + 8), BLOCK))
    told: list = []
    for _ in range(20):  # all are polled but the first
        told += [event.key.lease_id for end in (pair.source, *others) for event in end.poll() if _ends_well(event)]
    assert sorted(told) == [other.me for other in others]
    for other in others:
        other.shutdown()
    pair.run()
    pair.close()


def _ends_well(event: TransferEvent) -> bool:
    return isinstance(event, PushDone)


def test_two_that_send_to_one_another_do_not_wait_for_ever() -> None:
    pair = Pair(8, 8)
    pair.destination.connect(SOURCE, "inproc", dict(pair.source.addresses())["inproc"])
    back = LeaseKey("back", 1)
    pair.destination.open(KEY, SOURCE, block_spans(range(6), BLOCK))
    pair.source.open(back, DESTINATION, block_spans(range(6), BLOCK))
    more = [LeaseKey("more", number) for number in range(8)]
    for end, peer in ((pair.source, DESTINATION), (pair.destination, SOURCE)):
        for key in more:  # all that it grants
            if end.has_room(BLOCK):
                end.open(key, peer, block_spans([20], BLOCK))
    pair.source.push(KEY, DESTINATION, 0, block_spans(range(8, 14), BLOCK))
    pair.destination.push(back, SOURCE, 0, block_spans(range(8, 14), BLOCK))
    for told in pair.run():
        assert [event.num_bytes for event in told if isinstance(event, PushDone)] == [6 * BLOCK]
    for key in (back, *more):
        pair.source.close(key)
        pair.destination.close(key)
    pair.destination.withdraw(back)
    pair.close()


def test_corrupted_bytes_stay_in_the_region() -> None:
    pair = Pair()
    pair.destination.open(KEY, SOURCE, block_spans([5], BLOCK))
    pair.destination.faults.add(Fault.CORRUPT)
    pair.source.push(KEY, DESTINATION, 0, block_spans([9], BLOCK))
    _, received = pair.run()
    assert [type(event) for event in received] == [ReceiveFailed]
    assert not pair.pools[1].block(5).strip(b"\0")
    pair.close()


def test_a_peer_cannot_tell_a_staged_end_from_another() -> None:
    """Rows of a block, as ends with blocks of two sizes exchange them."""
    device, hub = Device(64, 7), InprocHub()
    plain_pool, region = memoryview(bytearray(64 * BLOCK)), memoryview(bytearray(8 * BLOCK))
    staged = StagedTransfers(SOURCE, region, [InprocTransport(SOURCE, region, hub)], device)
    plain = TransferEngine(DESTINATION, plain_pool, [InprocTransport(DESTINATION, plain_pool, hub)])
    staged.connect(DESTINATION, "inproc", dict(plain.addresses())["inproc"])
    rows = [Span(BLOCK * 3 + 512 * place, 256) for place in (0, 2, 5)]
    plain.open(KEY, SOURCE, [Span(700 * place, 256) for place in range(3)])
    staged.push(KEY, DESTINATION, 0, rows)
    for _ in range(4):
        staged.poll()
        plain.poll()
    assert [bytes(plain_pool[700 * place :][:256]) for place in range(3)] == [device.of(row) for row in rows]
    plain.shutdown()
    staged.shutdown()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * ALIGNMENT)), max_size=60), st.randoms())
def test_extents_never_overlap_and_all_come_back(wishes: list[tuple[bool, int]], random) -> None:
    extents, held = Extents(20 * ALIGNMENT), list[Span]()
    for take, num_bytes in wishes:
        if take and (extent := extents.take(num_bytes)) is not None:
            assert num_bytes <= extent.length < num_bytes + ALIGNMENT
            held.append(extent)
        elif not take and held:
            extents.give(held.pop(random.randrange(len(held))))
        assert all(one.offset + one.length <= other.offset for one, other in pairwise(sorted(held, key=_offset)))
        assert sum(one.length for one in held) + sum(length for _, length in extents._free) == extents.num_bytes
    for extent in held:
        extents.give(extent)
    assert extents.whole


def _offset(span: Span) -> int:
    return span.offset
