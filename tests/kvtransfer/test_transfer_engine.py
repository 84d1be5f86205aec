"""The engine's books: leases, queues, deadlines, and what it refuses; over the in-process transport."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_rig import Clock

from kvtransfer.engine import MAX_ATTEMPTS, MAX_REST_S, REST_S, TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.faults import Fault
from kvtransfer.frames import MAX_NAME_CHARS
from kvtransfer.layout import block_spans
from kvtransfer.lingering import LINGER_BYTES, MAX_IN_VAIN, Lingering
from kvtransfer.transport import Acceptor, Refused, Sent, Taken, TransportEvent
from kvtransfer.types import LeaseKey, Numbers, Offer, PushDone, PushFailed, Quiet, Received, ReceiveFailed, Span

KEY = LeaseKey("request-1", 1)
ME, SOURCE = "decode-0#1", "prefill-0#1"


class Script:
    """A transport that does nothing by itself: the test plays the other side."""

    scheme = "script"

    def __init__(self) -> None:
        self.offers: list[Offer] = []
        self.coming: list[TransportEvent] = []
        self.lingered = 0
        self.gave_way: list[bool] = []
        self.accept: Acceptor

    def start(self, acceptor, wake):
        self.accept = acceptor

    def address(self) -> bytes:
        return b"script"

    def connect(self, peer, address):
        pass

    def offer(self, offer, spans):
        self.offers.append(offer)

    def poll(self) -> list[TransportEvent]:
        events, self.coming = self.coming, []
        return events

    def linger(self, until_s: float) -> list[TransportEvent]:
        self.lingered += 1
        return self.poll()

    def give_way(self, works: bool) -> None:
        self.gave_way.append(works)

    def cut(self, peer):
        pass

    def forget(self, peer):
        pass

    def close(self):
        pass


def scripted(
    clock: Clock | None = None, *, region_bytes: int = 4_096, **options
) -> tuple[TransferEngine, Script, bytearray]:
    memory, script = bytearray(region_bytes), Script()
    return TransferEngine(ME, memoryview(memory), [script], clock=clock or Clock(), **options), script, memory


def offer(push_id: int = 1, **changes) -> Offer:
    fields = {
        "key": KEY,
        "push_id": push_id,
        "first": 0,
        "lengths": Numbers([16, 16]),
        "source": SOURCE,
        "destination": ME,
    }
    return Offer(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": LeaseKey("request-1", 0)}, "no open lease request-1 of generation 0"),
        ({"key": LeaseKey("request-2", 1)}, "no open lease"),
        ({"source": "prefill-0#0"}, "is for prefill-0#1, not for prefill-0#0"),
        ({"destination": "decode-0#0"}, "offer for decode-0#0"),
        ({"first": 3}, "of a lease with 4"),
        ({"first": -1}, "of a lease with 4"),
        ({"lengths": Numbers()}, "of a lease with 4"),
        ({"lengths": Numbers([16, 15])}, "differ from the lease's"),
        ({"checksums": Numbers([1])}, "1 checksums for 2 spans"),
    ],
)
def test_an_offer_that_does_not_fit_is_refused_with_the_reason(changes, reason):
    engine, script, _ = scripted()
    engine.open(KEY, SOURCE, block_spans(range(4), 16))
    answer = script.accept(offer(**changes))
    assert isinstance(answer, Refused)
    assert reason in answer.reason
    assert engine.in_flight() == 0
    engine.check()


def test_a_span_is_taken_once_whether_done_or_in_flight():
    engine, script, _ = scripted()
    engine.open(KEY, SOURCE, block_spans(range(4), 16))
    assert script.accept(offer(1)) == tuple(block_spans([0, 1], 16))
    duplicate = script.accept(offer(2, first=1))
    assert isinstance(duplicate, Refused)
    assert "offered before" in duplicate.reason
    script.coming.append(Taken(offer(1)))
    assert engine.poll() == [Received(KEY, 0, 2, 32)]
    assert isinstance(script.accept(offer(3)), Refused)
    engine.check()


def test_a_push_id_is_not_taken_twice_at_a_time_for_one_lease():
    engine, script, _ = scripted()
    engine.open(KEY, SOURCE, block_spans(range(4), 16))
    script.accept(offer(1))
    again = script.accept(offer(1, first=2))
    assert isinstance(again, Refused)
    assert "push 1 was taken before" in again.reason
    engine.check()
    engine.close(KEY)
    script.coming.append(Taken(offer(1)))
    assert engine.poll() == [Quiet(KEY)]
    assert engine.in_flight() == 0


def test_a_close_is_quiet_only_when_the_last_receive_has_ended():
    engine, script, _ = scripted()
    engine.open(KEY, SOURCE, block_spans(range(6), 16))
    script.accept(offer(1))
    script.accept(offer(2, first=2))
    engine.close(KEY)
    late = script.accept(offer(3, first=4))
    assert isinstance(late, Refused)
    assert "no open lease" in late.reason
    script.coming.append(Taken(offer(2, first=2)))
    assert engine.poll() == [], "bytes of a closed lease are not received, and one receive is still out"
    assert engine.in_flight() == 1
    script.coming.append(Taken(offer(1), "peer lost"))
    assert engine.poll() == [Quiet(KEY)]
    engine.close(KEY)
    script.coming.append(Taken(offer(1)))
    assert engine.poll() == [], "a late or repeated end changes nothing"
    engine.check()


def test_a_failed_receive_fails_the_lease_once_and_keeps_it_until_it_is_closed():
    engine, script, _ = scripted()
    engine.open(KEY, SOURCE, block_spans(range(4), 16))
    script.accept(offer(1))
    script.accept(offer(2, first=2))
    script.coming += [Taken(offer(1), "truncated"), Taken(offer(2, first=2), "truncated")]
    assert engine.poll() == [ReceiveFailed(KEY, "truncated")]
    engine.close(KEY)
    assert engine.poll() == [Quiet(KEY)]
    assert engine.stats()[0].failed == 1


def test_a_lease_cannot_be_opened_twice_nor_outside_the_region():
    engine, _, _ = scripted()
    engine.open(KEY, SOURCE, [Span(0, 16)])
    with pytest.raises(TransferError, match="already open"):
        engine.open(KEY, SOURCE, [Span(0, 16)])
    with pytest.raises(TransferError, match="outside the region of 4096"):
        engine.open(LeaseKey("request-2", 1), SOURCE, [Span(4_090, 16)])


@pytest.mark.parametrize("works", [True, False])
def test_an_owner_that_looks_gives_no_way_meanwhile_and_says_whether_there_is_news(works):
    engine, script, _ = scripted()
    engine.connect("d#1", "script", b"")
    sent = engine.push(KEY, "d#1", 0, [Span(0, 16)])
    engine.give_way(works)
    assert not engine.look("script", 0.0)
    script.coming.append(Sent(KEY, sent))
    assert engine.look("script", 0.0)
    assert script.gave_way == [works, False, works, False, works]
    assert [event.push_id for event in engine.poll() if isinstance(event, PushDone)] == [sent]


def test_how_a_peer_was_joined_is_told_once(caplog):
    engine, _, _ = scripted()
    with caplog.at_level(logging.INFO, "kvtransfer.engine"):
        for _ in range(2):
            engine.connect("decode-1#1", "script", b"")
    assert [record.getMessage() for record in caplog.records] == [
        "decode-1#1 is joined over script (here: script, best first)"
    ]


def test_a_push_must_lie_in_the_region_and_go_to_a_connected_peer():
    engine, _, _ = scripted()
    with pytest.raises(TransferError, match="not connected"):
        engine.push(KEY, "decode-1#1", 0, [Span(0, 16)])
    engine.connect("decode-1#1", "script", b"")
    with pytest.raises(TransferError, match="outside"):
        engine.push(KEY, "decode-1#1", 0, [Span(4_096, 1)])
    with pytest.raises(TransferError, match="at least one span"):
        engine.push(KEY, "decode-1#1", 0, [])
    with pytest.raises(TransferError, match="over tcp"):
        engine.push(KEY, "decode-1#1", 0, [Span(0, 16)], scheme="tcp")
    assert engine.in_flight() == 0


LONG = "x" * (MAX_NAME_CHARS + 1)


@pytest.mark.parametrize(
    ("key", "first", "reason"),
    [
        (LeaseKey(LONG, 1), 0, "513 characters, at most 512"),
        (LeaseKey("request-1", 2**63), 0, "at most 63 bits"),
        (KEY, 2**63, "at most 63 bits"),
        (KEY, -1, "numbers from 0"),
    ],
)
def test_what_no_offer_can_carry_is_refused_where_it_is_asked_for(key, first, reason):
    engine, script, _ = scripted()
    engine.connect("d#1", "script", b"")
    with pytest.raises(TransferError, match=reason):
        engine.push(key, "d#1", first, [Span(0, 16)])
    assert not script.offers
    assert engine.in_flight() == 0
    if not first:
        with pytest.raises(TransferError, match=reason):
            engine.open(key, SOURCE, [Span(0, 16)])


def test_a_peer_whose_name_no_offer_can_carry_is_refused():
    engine, script, memory = scripted()
    with pytest.raises(TransferError, match="at most 512"):
        engine.connect(LONG, "script", b"")
    with pytest.raises(TransferError, match="at most 512"):
        engine.open(KEY, LONG, [Span(0, 16)])
    with pytest.raises(TransferError, match="at most 512"):
        TransferEngine(LONG, memoryview(memory), [script])


def test_the_window_lets_urgent_pushes_pass_the_waiting_ones():
    engine, script, _ = scripted(window_bytes=64)
    engine.connect("d#1", "script", b"")
    ids = [engine.push(KEY, "d#1", index, [Span(0, 40)], priority=priority) for index, priority in enumerate([5, 5, 1])]
    assert [offer.push_id for offer in script.offers] == ids[:1], "the window holds one"
    for sent in (ids[0], ids[2], ids[1]):
        script.coming.append(Sent(KEY, sent))
        assert [event.push_id for event in engine.poll() if isinstance(event, PushDone)] == [sent]
    assert [offer.push_id for offer in script.offers] == [ids[0], ids[2], ids[1]]
    engine.check()


@pytest.mark.parametrize(("bytes_per_s", "expected"), [(0, 4), (40 << 20, 4), (320 << 20, 10), (4 << 30, 32)])
def test_a_peer_is_offered_what_its_link_moves_in_a_quarter_of_a_second_within_bounds(bytes_per_s, expected):
    """In pushes of 8 MiB; nothing is known of the link at first."""
    clock, whole = Clock(), [Span(0, 8 << 20)]
    engine, script, _ = scripted(clock, region_bytes=8 << 20)
    engine.connect("d#1", "script", b"")
    for _ in range(2 if bytes_per_s else 0):  # the first one pays for joining the pair
        sent = engine.push(KEY, "d#1", 0, whole)
        clock.now += (8 << 20) / bytes_per_s
        script.coming.append(Sent(KEY, sent))
        assert engine.poll()
    before = len(script.offers)
    for _ in range(40):
        engine.push(KEY, "d#1", 0, whole)
    assert len(script.offers) - before == expected


def test_a_push_larger_than_the_window_goes_when_it_is_alone():
    engine, script, _ = scripted(window_bytes=64)
    engine.connect("d#1", "script", b"")
    engine.push(KEY, "d#1", 0, [Span(0, 4_096)])
    assert len(script.offers) == 1


def test_a_deadline_fails_the_push_at_once_and_the_quiet_comes_only_with_its_end():
    clock = Clock()
    engine, script, _ = scripted(clock)
    engine.connect("d#1", "script", b"")
    push_id = engine.push(KEY, "d#1", 0, [Span(0, 16)], deadline_s=2.0)
    clock.now = 1.9
    assert engine.poll() == []
    clock.now = 2.0
    assert engine.poll() == [PushFailed(KEY, push_id, "deadline passed")]
    engine.withdraw(KEY)
    assert engine.poll() == []
    script.coming.append(Sent(KEY, push_id))
    assert engine.poll() == [Quiet(KEY)], "neither done nor failed twice"
    assert engine.in_flight() == 0


def test_withdrawing_fails_what_waits_and_refuses_more_until_quiet():
    engine, script, _ = scripted(window_bytes=16)
    engine.connect("d#1", "script", b"")
    first = engine.push(KEY, "d#1", 0, [Span(0, 16)])
    second = engine.push(KEY, "d#1", 1, [Span(16, 16)])
    engine.withdraw(KEY)
    with pytest.raises(TransferError, match="withdrawn"):
        engine.push(KEY, "d#1", 2, [Span(0, 16)])
    assert engine.poll() == [PushFailed(KEY, second, "withdrawn")]
    script.coming.append(Sent(KEY, first, "refused: no open lease"))
    assert engine.poll() == [PushFailed(KEY, first, "refused: no open lease"), Quiet(KEY)]


def test_withdrawing_a_lease_without_pushes_is_quiet_at_once():
    engine, _, _ = scripted()
    engine.withdraw(KEY)
    assert engine.poll() == [Quiet(KEY)]


def test_withdrawing_again_before_its_quiet_is_told_adds_none_and_lets_no_push_slip_between():
    engine, script, _ = scripted()
    engine.connect("d#1", "script", b"")
    engine.withdraw(KEY)
    engine.withdraw(KEY)
    with pytest.raises(TransferError, match="withdrawn"):
        engine.push(KEY, "d#1", 0, [Span(0, 16)])
    assert engine.poll() == [Quiet(KEY)]
    assert engine.poll() == []
    engine.push(KEY, "d#1", 0, [Span(0, 16)])
    engine.withdraw(KEY)
    script.coming.append(Sent(KEY, script.offers[-1].push_id))
    assert [type(event) for event in engine.poll()] == [PushDone, Quiet]
    engine.check()


def test_of_a_forgotten_incarnation_only_its_name_is_kept_once_its_pushes_have_ended():
    engine, script, _ = scripted()
    engine.connect("d#1", "script", b"")
    engine.push(KEY, "d#1", 0, [Span(0, 16)])
    engine.cut("d#1")
    engine.forget("d#1")
    engine.cut("d#1")
    engine.poll()
    engine.check()
    assert engine.in_flight() == 1
    script.coming.append(Sent(KEY, script.offers[-1].push_id, "d#1 was forgotten"))
    assert [type(event) for event in engine.poll()] == [PushFailed]
    assert (engine._lanes, engine._cooling, engine._pushes) == ({}, {}, {})
    engine.check()


def test_an_unreachable_peer_is_tried_again_after_a_rest_that_grows_and_other_pairs_go_on():
    clock = Clock()
    engine, script, _ = scripted(clock)
    for peer in ("d#1", "e#1"):
        engine.connect(peer, "script", b"")
    first = engine.push(KEY, "d#1", 0, [Span(0, 16)])
    second = engine.push(KEY, "d#1", 1, [Span(16, 16)])
    script.coming += [Sent(KEY, push_id, "cannot connect", unheard=True) for push_id in (first, second)]
    assert engine.poll() == [], "not failed, waiting"
    assert engine.in_flight() == 2
    other = engine.push(KEY, "e#1", 0, [Span(0, 16)])
    assert [offer.push_id for offer in script.offers] == [first, second, other], "another pair does not wait"
    clock.now += REST_S
    engine.poll()
    assert [offer.push_id for offer in script.offers[3:]] == [first, second]
    script.coming += [Sent(KEY, push_id, "cannot connect", unheard=True) for push_id in (first, second)]
    engine.poll()
    clock.now += 1.5 * REST_S
    engine.poll()
    assert len(script.offers) == 5, "the second rest is longer"
    clock.now += REST_S
    engine.poll()
    script.coming += [Sent(KEY, push_id) for push_id in (first, second)]
    assert [event.push_id for event in engine.poll() if isinstance(event, PushDone)] == [first, second]
    engine.check()


def test_an_unreachable_peer_fails_the_push_in_the_end_and_the_next_push_tries_anew():
    clock = Clock()
    engine, script, _ = scripted(clock)
    engine.connect("d#1", "script", b"")
    push_id = engine.push(KEY, "d#1", 0, [Span(0, 16)])
    events = []
    while not events:
        script.coming.append(Sent(KEY, push_id, "cannot connect", unheard=True))
        events = engine.poll()
        clock.now += MAX_REST_S
    assert events == [PushFailed(KEY, push_id, "cannot connect")]
    assert len(script.offers) == MAX_ATTEMPTS
    again = engine.push(KEY, "d#1", 0, [Span(0, 16)])
    script.coming.append(Sent(KEY, again))
    assert [type(event) for event in engine.poll()] == [PushDone]


def test_a_push_that_rests_ends_by_deadline_withdrawal_or_forgetting():
    clock = Clock()
    engine, script, _ = scripted(clock)
    engine.connect("d#1", "script", b"")
    keys = [LeaseKey("r", number) for number in range(3)]
    ids = [engine.push(key, "d#1", 0, [Span(0, 16)], deadline_s=9.0 if key is keys[0] else None) for key in keys]
    script.coming += [
        Sent(key, push_id, "cannot connect", unheard=True) for key, push_id in zip(keys, ids, strict=True)
    ]
    assert engine.poll() == []
    engine.withdraw(keys[1])
    assert engine.poll() == [PushFailed(keys[1], ids[1], "withdrawn"), Quiet(keys[1])]
    engine.forget("d#1")
    assert {event.push_id for event in engine.poll() if isinstance(event, PushFailed)} == {ids[0], ids[2]}
    assert engine.in_flight() == 0
    engine.check()


def test_shutdown_ends_what_rests_and_what_nobody_heard_of():
    engine, script, _ = scripted()
    engine.connect("d#1", "script", b"")
    first = engine.push(KEY, "d#1", 0, [Span(0, 16)])
    script.coming.append(Sent(KEY, first, "cannot connect", unheard=True))
    assert engine.poll() == []
    second = engine.push(KEY, "d#1", 1, [Span(16, 16)])
    engine.connect("e#1", "script", b"")
    third = engine.push(KEY, "e#1", 0, [Span(0, 16)])
    script.coming.append(Sent(KEY, third, "closed", unheard=True))
    engine.shutdown()
    assert first < second < third
    assert engine.in_flight() == 0
    assert engine.stats()[0].failed == 3
    engine.check()


def test_a_delayed_offer_waits_for_the_clock_and_arrives_out_of_order(inproc):
    clock = Clock()
    source, destination = inproc.pair(clock=clock)
    source.engine.faults.add(Fault.DELAY, nth=1, delay_s=3.0)
    spans = block_spans(range(2), 64)
    destination.engine.open(KEY, source.name, spans)
    for index, span in enumerate(spans):
        source.engine.push(KEY, destination.name, index, [span])
    inproc.until(lambda: destination.saw(Received))
    assert [event.first for event in destination.saw(Received)] == [1]
    clock.now = 3.0
    inproc.news.set()
    inproc.until(lambda: len(destination.saw(Received)) == 2 and len(source.saw(PushDone)) == 2)
    assert destination.bytes_of(spans) == source.bytes_of(spans)


def test_a_dropped_offer_is_ended_by_its_deadline_and_by_forgetting_the_peer(inproc):
    clock = Clock()
    source, destination = inproc.pair(clock=clock)
    source.engine.faults.add(Fault.DROP)
    destination.engine.open(KEY, source.name, [Span(0, 64)])
    source.engine.push(KEY, destination.name, 0, [Span(0, 64)], deadline_s=1.0)
    clock.now = 1.0
    inproc.until(lambda: source.saw(PushFailed))
    source.engine.withdraw(KEY)
    assert not source.saw(Quiet)
    source.engine.forget(destination.name)
    inproc.until(lambda: source.saw(Quiet))
    assert not destination.saw(Received)


def test_a_peer_that_hangs_is_tried_again_after_a_cooldown_that_grows_until_something_arrives(inproc):
    clock = Clock()
    source, destination = inproc.pair(clock=clock)
    for wait_s in (0.5, 1.0, 2.0):
        source.engine.cut(destination.name)
        clock.now += wait_s - 0.125
        with pytest.raises(TransferError, match=r"hung; it is tried again in 0\.1 s"):
            inproc.connect(source, destination)
        clock.now += 0.125
        inproc.connect(source, destination)
    destination.engine.open(KEY, source.name, [Span(0, 64)])
    source.engine.push(KEY, destination.name, 0, [Span(0, 64)])
    inproc.until(lambda: source.saw(PushDone))
    source.engine.cut(destination.name)
    clock.now += 0.5
    inproc.connect(source, destination)


def test_a_failing_offer_is_one_failure_and_the_next_succeeds(inproc):
    source, destination = inproc.pair()
    source.engine.faults.add(Fault.FAIL, nth=2)
    spans = block_spans(range(3), 64)
    destination.engine.open(KEY, source.name, spans)
    ids = [source.engine.push(KEY, destination.name, index, [span]) for index, span in enumerate(spans)]
    inproc.until(lambda: source.saw(PushFailed) and len(source.saw(PushDone)) == 2)
    assert [event.push_id for event in source.saw(PushFailed)] == [ids[1]]
    source.engine.push(KEY, destination.name, 1, [spans[1]])
    inproc.until(lambda: len(destination.saw(Received)) == 3)
    assert destination.bytes_of(spans) == source.bytes_of(spans)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), actions=st.lists(st.sampled_from("oppppcwftt"), min_size=5, max_size=60))
def test_whatever_happens_the_books_agree_and_quiet_memory_never_changes(inproc, seed, actions):
    """Random opens, pushes, closes, withdrawals and faults; what is quiet is painted and must keep its paint."""
    chance = random.Random(seed)
    inproc.close()
    inproc.peers.clear()
    source, destination = inproc.pair(region_bytes=1_024)
    source.engine.faults.add(Fault.FAIL, nth=chance.randint(1, 10))
    destination.engine.faults.add(Fault.CORRUPT, nth=chance.randint(1, 40))
    blocks = 16
    free, leases, closing, painted = set(range(blocks)), {}, {}, set()
    generation = 0

    def settle() -> None:
        inproc.news.clear()
        source.poll()
        for event in destination.poll():
            if isinstance(event, Quiet):
                ids = closing.pop(event.key)
                for span in block_spans(ids, 64):
                    destination.memory[span.offset : span.offset + 64] = 0xEE
                painted.update(ids)
                free.update(ids)
        for peer in (source, destination):
            peer.engine.check()
        for span in block_spans(painted, 64):
            assert (destination.memory[span.offset : span.offset + 64] == 0xEE).all()

    for action in actions:
        if action == "o" and len(free) >= 4:
            generation += 1
            ids = chance.sample(sorted(free), 4)
            free.difference_update(ids)
            painted.difference_update(ids)
            leases[LeaseKey("r", generation)] = ids
            destination.engine.open(LeaseKey("r", generation), source.name, block_spans(ids, 64))
        elif action == "p" and generation:
            first = chance.randint(0, 3)
            spans = block_spans(chance.sample(range(blocks), chance.randint(1, 4 - first)), 64)
            key = LeaseKey("r", chance.randint(1, generation))
            if key not in source.engine._withdrawn:
                source.engine.push(key, destination.name, first, spans)
        elif action == "c" and leases:
            key = chance.choice(sorted(leases, key=lambda key: key.generation))
            closing[key] = leases.pop(key)
            destination.engine.close(key)
        elif action == "w" and generation:
            source.engine.withdraw(LeaseKey("r", chance.randint(1, generation)))
        elif action == "f":
            source.engine.faults.add(Fault.FAIL, nth=1)
        else:
            settle()
    for key, ids in leases.items():
        closing[key] = ids
        destination.engine.close(key)
    for _ in range(4):
        settle()
    assert not closing, "a closed lease never became quiet"
    assert free == set(range(blocks))
    assert source.engine.in_flight() == destination.engine.in_flight() == 0


def test_an_owner_lingers_for_the_end_of_one_small_push_and_for_nothing_else():
    script, memory = Script(), bytearray(LINGER_BYTES + 1)
    engine = TransferEngine(ME, memoryview(memory), [script], clock=Clock())
    engine.connect(SOURCE, "script", b"script")
    assert not engine.linger()
    large = engine.push(KEY, SOURCE, 0, [Span(0, LINGER_BYTES + 1)])
    assert not engine.linger()
    small = engine.push(KEY, SOURCE, 1, [Span(0, 16)])
    assert not engine.linger()
    script.coming = [Sent(KEY, large)]
    engine.poll()
    assert script.lingered == 0
    script.coming = [Sent(KEY, small)]
    assert engine.linger()
    assert script.lingered == 1
    assert engine.linger(), "it has news already"
    assert [event.push_id for event in engine.poll()] == [small]
    assert script.lingered == 1
    engine.check()


def test_each_lingering_in_vain_spares_twice_as_many_up_to_a_bound_and_one_that_was_not_spares_none():
    lingering = Lingering()

    def spared() -> int:
        times = 0
        while lingering.spared():
            times += 1
        return times

    assert spared() == 0
    counts = []
    for _ in range(MAX_IN_VAIN + 2):
        lingering.ended(well=False)
        counts.append(spared())
    assert counts == [*(2**times - 1 for times in range(1, MAX_IN_VAIN + 1)), *[2**MAX_IN_VAIN - 1] * 2]
    lingering.ended(well=True)
    assert spared() == 0
