"""What every transport must do, seen through the transfer engine."""

from __future__ import annotations

import random

import pytest
from transfer_rig import Clock

from kvtransfer.errors import TransferError
from kvtransfer.faults import Fault
from kvtransfer.layout import block_spans
from kvtransfer.types import LeaseKey, PeerLost, PushDone, PushFailed, Quiet, Received, ReceiveFailed, Span

KEY = LeaseKey("request-1", 1)


def random_spans(seed: int, lengths: list[int], region_bytes: int) -> list[Span]:
    """Disjoint spans of these lengths at random places, some of them neighbours."""
    chance = random.Random(seed)
    slack = region_bytes - sum(lengths)
    order = chance.sample(range(len(lengths)), len(lengths))
    spans: dict[int, Span] = {}
    offset = 0
    for index in order:
        gap = chance.choice([0, 0, chance.randrange(1 + slack // (2 * len(lengths)))])
        offset += gap
        spans[index] = Span(offset, lengths[index])
        offset += lengths[index]
    return [spans[index] for index in range(len(lengths))]


@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_right_at_random_offsets_and_sizes(rig, seed):
    source, destination = rig.pair(checksums=True)
    chance = random.Random(seed)
    lengths = [chance.choice([1, 7, 64, 4_096, 8_191, 20_000]) for _ in range(40)]
    from_spans = random_spans(seed, lengths, source.memory.size)
    to_spans = random_spans(seed + 100, lengths, destination.memory.size)
    untouched = bytearray(destination.memory.tobytes())

    destination.engine.open(KEY, source.name, to_spans)
    source.engine.push(KEY, destination.name, 0, from_spans)
    rig.until(lambda: destination.saw(Received) and source.saw(PushDone))

    assert destination.bytes_of(to_spans) == source.bytes_of(from_spans)
    for span in to_spans:
        untouched[span.offset : span.offset + span.length] = destination.bytes_of([span])
    assert destination.memory.tobytes() == bytes(untouched), "bytes outside the lease changed"
    assert destination.saw(Received)[0].num_bytes == source.saw(PushDone)[0].num_bytes == sum(lengths)


def test_a_span_larger_than_any_buffer_arrives(rig):
    source, destination = rig.pair(region_bytes=24 << 20)
    span = Span(1, (24 << 20) - 2)
    destination.engine.open(KEY, source.name, [span])
    source.engine.push(KEY, destination.name, 0, [span])
    rig.until(lambda: destination.saw(Received) and source.saw(PushDone))
    assert destination.bytes_of([span]) == source.bytes_of([span])


def test_many_pushes_in_flight_fill_one_lease_in_any_order(rig):
    source, destination = rig.pair()
    count = 128
    spans = block_spans(random.Random(1).sample(range(count), count), 4_096)
    destination.engine.open(KEY, source.name, spans)
    for index in random.Random(2).sample(range(count), count):
        source.engine.push(KEY, destination.name, index, [Span(index * 4_096, 4_096)])
    rig.until(lambda: len(destination.saw(Received)) == len(source.saw(PushDone)) == count)
    assert destination.bytes_of(spans) == source.memory[: count * 4_096].tobytes()
    assert source.engine.in_flight() == destination.engine.in_flight() == 0
    assert source.engine.stats()[0].push_bytes == destination.engine.stats()[0].receive_bytes == count * 4_096


def test_peers_send_to_each_other_and_to_a_third_at_the_same_time(rig):
    names = ["a#1", "b#1", "c#1"]
    peers = [rig.peer(name) for name in names]
    routes = [(source, destination) for source in peers for destination in peers if source is not destination]
    sent: dict[LeaseKey, bytes] = {}
    slots: dict[LeaseKey, list[Span]] = {}
    for number, (source, destination) in enumerate(routes):
        rig.connect(source, destination)
        key = LeaseKey(f"{source.name}-{destination.name}", number)
        received_before = sum(1 for slot in slots if slot.lease_id.endswith(destination.name))
        slots[key] = block_spans(range(received_before * 8, received_before * 8 + 8), 8_192)
        destination.engine.open(key, source.name, slots[key])
        outgoing = [Span(524_288 + i * 8_192, 8_192) for i in range(8)]
        sent[key] = source.bytes_of(outgoing)
        source.engine.push(key, destination.name, 0, outgoing)
    rig.until(lambda: sum(len(peer.saw(Received)) for peer in peers) == len(routes))
    rig.until(lambda: sum(len(peer.saw(PushDone)) for peer in peers) == len(routes))
    for key, (_, destination) in zip(slots, routes, strict=True):
        assert destination.bytes_of(slots[key]) == sent[key]


def test_an_offer_for_a_lease_that_is_not_open_is_refused_and_lands_nowhere(rig):
    source, destination = rig.pair()
    before = destination.memory.copy()
    source.engine.push(KEY, destination.name, 0, [Span(0, 100)])
    rig.until(lambda: source.saw(PushFailed))
    assert "no open lease" in source.saw(PushFailed)[0].reason
    assert (destination.memory == before).all()


def test_bytes_for_a_closed_lease_never_land(rig):
    source, destination = rig.pair()
    spans = block_spans(range(4), 4_096)
    destination.engine.open(KEY, source.name, spans)
    source.engine.push(KEY, destination.name, 0, spans[:2])
    rig.until(lambda: destination.saw(Received))
    destination.engine.close(KEY)
    rig.until(lambda: destination.saw(Quiet))
    destination.memory[:] = 7
    source.engine.push(KEY, destination.name, 2, spans[2:])
    rig.until(lambda: source.saw(PushFailed))
    assert (destination.memory == 7).all()


def test_an_offer_of_an_older_generation_is_refused_while_the_new_one_is_served(rig):
    source, destination = rig.pair()
    old, new = LeaseKey("request-1", 1), LeaseKey("request-1", 2)
    destination.engine.open(old, source.name, [Span(0, 64)])
    destination.engine.close(old)
    destination.engine.open(new, source.name, [Span(0, 64)])
    source.engine.push(old, destination.name, 0, [Span(128, 64)])
    source.engine.push(new, destination.name, 0, [Span(256, 64)])
    rig.until(lambda: source.saw(PushFailed, old) and source.saw(PushDone, new) and destination.saw(Received, new))
    assert destination.bytes_of([Span(0, 64)]) == source.bytes_of([Span(256, 64)])


def test_a_source_cannot_write_into_the_lease_of_another(rig):
    source, destination = rig.pair()
    destination.engine.open(KEY, "prefill-0#0", [Span(0, 64)])
    source.engine.push(KEY, destination.name, 0, [Span(0, 64)])
    rig.until(lambda: source.saw(PushFailed))
    assert "is for prefill-0#0" in source.saw(PushFailed)[0].reason


def test_closing_in_the_middle_ends_with_exactly_one_quiet(rig):
    source, destination = rig.pair()
    spans = block_spans(range(64), 16_384)
    destination.engine.open(KEY, source.name, spans)
    for index, span in enumerate(spans):
        source.engine.push(KEY, destination.name, index, [span])
    rig.until(lambda: destination.saw(Received))
    destination.engine.close(KEY)
    destination.engine.close(KEY)
    rig.until(lambda: destination.saw(Quiet))
    destination.memory[:] = 9
    rig.until(lambda: len(source.saw(PushDone)) + len(source.saw(PushFailed)) == len(spans))
    assert (destination.memory == 9).all(), "bytes landed after Quiet"
    assert len(destination.saw(Quiet)) == 1
    assert destination.engine.in_flight() == 0


def test_withdrawing_in_the_middle_ends_with_exactly_one_quiet(rig):
    source, destination = rig.pair(window_bytes=65_536)
    spans = block_spans(range(64), 16_384)
    destination.engine.open(KEY, source.name, spans)
    for index, span in enumerate(spans):
        source.engine.push(KEY, destination.name, index, [span])
    rig.until(lambda: source.saw(PushDone))
    source.engine.withdraw(KEY)
    rig.until(lambda: source.saw(Quiet))
    assert source.engine.in_flight() == 0
    assert source.saw(PushFailed), "what had not been offered is not sent"
    assert len(source.saw(PushDone)) + len(source.saw(PushFailed)) == len(spans)
    assert len(source.saw(Quiet)) == 1


def test_a_corrupted_block_is_found_by_its_checksum(rig):
    source, destination = rig.pair(checksums=True)
    destination.engine.faults.add(Fault.CORRUPT, nth=2)
    spans = block_spans(range(3), 4_096)
    destination.engine.open(KEY, source.name, spans)
    for index, span in enumerate(spans[:2]):
        source.engine.push(KEY, destination.name, index, [span])
        rig.until(lambda done=index + 1: len(source.saw(PushDone)) + len(source.saw(PushFailed)) == done)
    rig.until(lambda: destination.saw(ReceiveFailed))
    source.engine.push(KEY, destination.name, 2, spans[2:])
    rig.until(lambda: source.saw(PushFailed))
    assert "checksum of span 1" in destination.saw(ReceiveFailed)[0].reason
    assert len(destination.saw(Received)) == 1, "nothing is received into a failed lease"
    assert "failed" in source.saw(PushFailed)[0].reason, "the third offer is refused"


def test_a_forgotten_source_is_refused_and_its_leases_fail(rig):
    source, destination = rig.pair()
    destination.engine.open(KEY, source.name, [Span(0, 64), Span(64, 64)])
    source.engine.push(KEY, destination.name, 0, [Span(0, 64)])
    rig.until(lambda: destination.saw(Received))
    destination.engine.forget(source.name)
    source.engine.push(KEY, destination.name, 1, [Span(0, 64)])
    rig.until(lambda: source.saw(PushFailed) and destination.saw(ReceiveFailed))
    destination.engine.close(KEY)
    rig.until(lambda: destination.saw(Quiet))
    with pytest.raises(TransferError, match="forgotten"):
        destination.engine.open(LeaseKey("request-2", 1), source.name, [Span(0, 64)])
    with pytest.raises(TransferError, match="forgotten"):
        destination.engine.connect(source.name, *source.engine.addresses()[0])


def test_a_forgotten_destination_fails_its_pushes_and_the_source_is_quiet(rig):
    source, destination = rig.pair()
    spans = block_spans(range(16), 65_536)
    destination.engine.open(KEY, source.name, spans)
    for index, span in enumerate(spans):
        source.engine.push(KEY, destination.name, index, [span])
    source.engine.forget(destination.name)
    source.engine.withdraw(KEY)
    rig.until(lambda: source.saw(Quiet))
    assert source.engine.in_flight() == 0
    with pytest.raises(TransferError, match="not connected"):
        source.engine.push(LeaseKey("request-2", 1), destination.name, 0, spans[:1])


@pytest.mark.parametrize("cutter", ["source", "destination"])
def test_a_pair_that_was_cut_in_the_middle_is_quiet_and_works_again_in_the_same_incarnations(rig, cutter):
    clock = Clock()
    source, destination = rig.pair(clock=clock, checksums=True)
    spans = block_spans(range(16), 65_536)
    destination.engine.open(KEY, source.name, spans)
    source.engine.faults.add(Fault.DROP, nth=3)
    for index, span in enumerate(spans):
        source.engine.push(KEY, destination.name, index, [span])
    rig.until(lambda: len(source.saw(PushDone)) == 15)
    if cutter == "destination":
        destination.engine.cut(source.name)
    source.engine.cut(destination.name)  # the dropped offer never left it
    source.engine.withdraw(KEY)
    destination.engine.close(KEY)
    rig.until(lambda: source.saw(Quiet) and destination.saw(Quiet))
    assert source.engine.in_flight() == destination.engine.in_flight() == 0
    assert cutter == "destination" or not source.saw(PeerLost), "whoever cuts knows it already"

    clock.now += 1.0
    rig.connect(source, destination)
    again = LeaseKey(KEY.lease_id, 2)
    destination.engine.open(again, source.name, spans)
    before = destination.bytes_of(spans)
    source.engine.push(KEY, destination.name, 0, spans[:1])
    rig.until(lambda: source.saw(PushFailed, KEY) and "no open lease" in source.saw(PushFailed, KEY)[-1].reason)
    assert destination.bytes_of(spans) == before, "a lease of before takes nothing"
    source.engine.push(again, destination.name, 0, list(reversed(spans)))
    rig.until(lambda: source.saw(PushDone, again) and destination.saw(Received, again))
    assert destination.bytes_of(spans) == source.bytes_of(list(reversed(spans)))


def test_a_peer_that_closes_is_reported_lost_and_a_new_incarnation_is_served(rig):
    source, destination = rig.pair()
    destination.engine.open(KEY, source.name, [Span(0, 64)])
    source.engine.push(KEY, destination.name, 0, [Span(0, 64)])
    rig.until(lambda: source.saw(PushDone))
    rig.peers.pop(destination.name).engine.shutdown()
    rig.until(lambda: source.saw(PeerLost))
    assert source.saw(PeerLost)[0].peer == destination.name
    source.engine.push(KEY, destination.name, 1, [Span(0, 64)])
    rig.until(lambda: source.saw(PushFailed))

    reborn = rig.peer("decode-0#2")
    rig.connect(source, reborn)
    again = LeaseKey("request-1", 2)
    reborn.engine.open(again, source.name, [Span(0, 64)])
    source.engine.push(again, reborn.name, 0, [Span(512, 64)])
    rig.until(lambda: source.saw(PushDone, again) and reborn.saw(Received, again))
    assert reborn.bytes_of([Span(0, 64)]) == source.bytes_of([Span(512, 64)])


def test_one_lost_peer_does_not_touch_another(rig):
    source, destination = rig.pair()
    other = rig.peer("decode-1#1")
    rig.connect(source, other)
    for peer in (destination, other):
        peer.engine.open(KEY, source.name, block_spans(range(8), 65_536))
        source.engine.push(KEY, peer.name, 0, block_spans(range(4), 65_536))
    rig.until(lambda: len(source.saw(PushDone)) == 2)
    source.engine.forget(destination.name)
    source.engine.push(KEY, other.name, 4, block_spans(range(4, 8), 65_536))
    rig.until(lambda: len(other.saw(Received)) == 2)
    assert other.bytes_of(block_spans(range(8), 65_536)) == source.bytes_of(block_spans(range(8), 65_536))


def test_an_address_that_is_none_is_refused(rig):
    source, destination = rig.pair()
    with pytest.raises(TransferError):
        source.engine.connect("decode-9#1", rig.scheme, b"\x00nonsense")
    with pytest.raises(TransferError, match="no transport"):
        source.engine.connect("decode-9#1", "pigeon", b"")
    with pytest.raises(TransferError, match="itself"):
        source.engine.connect(source.name, rig.scheme, source.engine.addresses()[0][1])
    assert source.engine.in_flight() == destination.engine.in_flight() == 0


def test_shutdown_in_the_middle_ends_every_transfer_on_both_sides(rig):
    source, destination = rig.pair()
    spans = block_spans(range(16), 65_536)
    destination.engine.open(KEY, source.name, spans)
    for index, span in enumerate(spans):
        source.engine.push(KEY, destination.name, index, [span])
    source.engine.shutdown()
    assert source.engine.in_flight() == 0
    rig.until(lambda: destination.engine.in_flight() == 0)
    destination.engine.close(KEY)
    rig.until(lambda: destination.saw(Quiet))
    assert len(destination.saw(Quiet)) == 1


def test_after_shutdown_nothing_is_taken_and_looking_is_harmless(rig):
    source, destination = rig.pair()
    source.engine.shutdown()
    with pytest.raises(TransferError, match="is not connected"):
        source.engine.push(KEY, destination.name, 0, block_spans([0], 16))
    for transport in source.engine._transports.values():
        assert transport.linger(0.0) == transport.linger(0.0) == []
    assert not source.engine.linger()
    assert source.engine.in_flight() == 0
