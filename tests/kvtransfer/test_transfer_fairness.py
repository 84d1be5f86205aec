"""Who goes first: peers beside each other, urgent pushes before others, deadlines; over real transports."""

from __future__ import annotations

import os
import queue
import random
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from transfer_rig import Clock, Rig, transports

from kvtransfer.faults import Fault
from kvtransfer.io_loop import GENTLE_BYTES, MAX_REST_S, NICER, REST, SLICE_S, IoLoop
from kvtransfer.layout import block_spans
from kvtransfer.types import LeaseKey, PushDone, PushFailed, Quiet, Received

REGION_BYTES = 16 << 20
SPAN_BYTES = 4_096
SPANS = REGION_BYTES // SPAN_BYTES
BACKLOG = {"shm": 8}
"""How many times the whole region goes to the greedy peer: enough to take longer than asking for it does."""


@pytest.fixture(params=[one for one in transports() if one != "inproc"])
def wired(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


def scattered(seed: int) -> list[int]:
    return random.Random(seed).sample(range(SPANS), SPANS)


def test_a_peer_with_thousands_of_spans_does_not_hold_up_another(wired: Rig) -> None:
    source = wired.peer("prefill-0#1", region_bytes=REGION_BYTES)
    greedy, modest = (wired.peer(name, region_bytes=REGION_BYTES) for name in ("decode-0#1", "decode-1#1"))
    few = LeaseKey("few", 1)
    for peer in (greedy, modest):
        wired.connect(source, peer)
        peer.engine.open(LeaseKey("warm", 1), source.name, block_spans([0], SPAN_BYTES))
        source.engine.push(LeaseKey("warm", 1), peer.name, 0, block_spans([0], SPAN_BYTES))
    wired.until(lambda: len(source.saw(PushDone)) == 2)

    reads, writes = block_spans(scattered(1), SPAN_BYTES), block_spans(scattered(2), SPAN_BYTES)
    modest.engine.open(few, source.name, writes[:4])
    many = [LeaseKey("many", number) for number in range(BACKLOG.get(wired.scheme, 1))]
    for key in many:
        greedy.engine.open(key, source.name, writes)
    for key in many:
        for first in range(0, SPANS, 2_048):
            source.engine.push(key, greedy.name, first, reads[first : first + 2_048])
    source.engine.push(few, modest.name, 0, reads[:4])
    wired.until(lambda: source.saw(PushDone, few) and modest.saw(Received, few))
    ahead = len(source.saw(PushDone)) - 3
    wired.until(lambda: len(source.saw(PushDone)) - 3 == len(many) * SPANS // 2_048)
    assert ahead < len(many) * SPANS // 2_048, "the few waited for all of the many"
    assert modest.bytes_of(writes[:4]) == source.bytes_of(reads[:4])
    assert greedy.bytes_of(writes) == source.bytes_of(reads)


def test_an_urgent_push_overtakes_what_waits_for_the_window(wired: Rig) -> None:
    source, destination = wired.pair(window_bytes=65_536)
    spans = block_spans(range(32), 32_768)
    key, urgent = LeaseKey("patient", 1), LeaseKey("urgent", 1)
    destination.engine.open(key, source.name, spans[:31])
    destination.engine.open(urgent, source.name, spans[31:])
    for index in range(31):
        source.engine.push(key, destination.name, index, [spans[index]], priority=5)
    source.engine.push(urgent, destination.name, 0, spans[31:], priority=1)
    wired.until(lambda: len(source.saw(PushDone)) == 32)
    wired.until(lambda: len(destination.saw(Received)) == 32)
    order = [event.key for event in source.events if isinstance(event, PushDone)]
    assert order.index(urgent) <= 4, "only what was in the window went before it"
    assert destination.bytes_of(spans) == source.bytes_of(spans)


def test_a_push_past_its_deadline_fails_alone_and_its_lease_falls_silent(wired: Rig) -> None:
    clock = Clock()
    source, destination = wired.pair(clock=clock)
    source.engine.faults.add(Fault.DROP, nth=1)
    spans = block_spans(range(8), 65_536)
    late, well = LeaseKey("late", 1), LeaseKey("well", 1)
    destination.engine.open(late, source.name, spans[:4])
    destination.engine.open(well, source.name, spans[4:])
    source.engine.push(late, destination.name, 0, spans[:4], deadline_s=2.0)
    source.engine.push(well, destination.name, 0, spans[4:], deadline_s=2.0)
    wired.until(lambda: source.saw(PushDone, well) and destination.saw(Received, well))
    clock.now = 2.0
    wired.news.set()
    wired.until(lambda: source.saw(PushFailed, late))
    assert source.saw(PushFailed)[0].reason == "deadline passed"
    source.engine.withdraw(late)
    assert not source.poll(), "what was dropped ends only with its link"
    source.engine.cut(destination.name)
    destination.engine.close(late)
    wired.until(lambda: source.saw(Quiet, late) and destination.saw(Quiet, late))
    assert source.engine.in_flight() == destination.engine.in_flight() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread is as nice as its process")
def test_the_thread_of_a_transport_gives_way_to_its_owner():
    own, told = os.getpriority(os.PRIO_PROCESS, 0), queue.Queue[int]()
    loop = IoLoop("kv-test")
    loop.start()
    loop.call(lambda: told.put(os.getpriority(os.PRIO_PROCESS, 0)))
    assert told.get(timeout=10) == min(19, own + NICER)
    loop.stop(lambda: None)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_an_owner_is_woken_once_when_the_work_that_has_news_is_done():
    loop, told = IoLoop("kv-test"), list[str]()

    def ring() -> None:
        told.append("woken")

    def work() -> None:
        loop.afterwards(ring)
        loop.afterwards(ring)
        told.append("worked")

    loop.start()
    loop.call(work)
    loop.stop(work)
    assert told in (["worked", "woken"] * 2, ["worked", "worked", "woken"]), "one waking may be for both"


def test_an_owner_does_what_is_ready_while_the_thread_gets_no_core_and_it_is_done_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, told, core = IoLoop("kv-test"), list[bytes](), threading.Event()
    select = loop._alarm.select

    def select_and_starve(timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = select(timeout_s)
        core.wait(10)
        return ready

    monkeypatch.setattr(loop._alarm, "select", select_and_starve)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.watch(ours, selectors.EVENT_READ, lambda events: told.append(ours.recv(1)))
        loop.start()
        theirs.send(b"ab")
        end_s = time.monotonic() + 10
        while not told and time.monotonic() < end_s:
            loop.turn_here(but=lambda: None)
        assert told == [b"a"]
        core.set()
        loop.stop(lambda: None)
    assert told == [b"a", b"b"], "each byte was news once"


def test_a_thread_rests_after_long_turns_only_while_its_owner_works(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, rests, sleep = IoLoop("kv-test"), list[float](), time.sleep

    def note(seconds: float) -> None:
        if threading.current_thread().name == "kv-test":
            rests.append(seconds)
        else:
            sleep(seconds)

    def work() -> None:
        end_s = time.monotonic() + 2 * SLICE_S
        while time.monotonic() < end_s:
            pass

    def rests_after(works: bool) -> list[float]:
        rests.clear()
        loop.owner_works = works
        loop.call(work)
        done = threading.Event()
        loop.call(lambda: loop.after(0.0, done.set))  # a turn later
        assert done.wait(10)
        return list(rests)

    monkeypatch.setattr("kvtransfer.io_loop.time.sleep", note)
    loop.start()
    assert rests_after(False) == []
    assert REST * 2 * SLICE_S <= max(rests_after(True)) <= MAX_REST_S
    assert rests_after(False) == []
    loop.stop(lambda: None)


def test_the_transports_of_an_engine_give_way_while_its_owner_works(wired: Rig) -> None:
    _, destination = wired.pair()
    (transport,) = destination.engine._transports.values()
    loop = transport._inner.loop
    assert loop.at_most(2 * GENTLE_BYTES) == 2 * GENTLE_BYTES
    destination.engine.give_way(True)
    assert loop.owner_works
    assert loop.at_most(2 * GENTLE_BYTES) == GENTLE_BYTES
    assert loop.at_most(GENTLE_BYTES // 2) == GENTLE_BYTES // 2
    destination.engine.give_way(False)
    assert not loop.owner_works


def test_bulk_arrives_whole_while_both_owners_work(wired: Rig) -> None:
    source, destination = wired.pair(region_bytes=REGION_BYTES)
    key, spans = LeaseKey("bulk", 1), block_spans(scattered(3), SPAN_BYTES)
    for peer in (source, destination):
        peer.engine.give_way(True)
    destination.engine.open(key, source.name, spans)
    source.engine.push(key, destination.name, 0, spans)
    wired.until(lambda: source.saw(PushDone, key) and destination.saw(Received, key))
    assert destination.bytes_of(spans) == source.bytes_of(spans)


def test_while_an_owner_lingers_the_thread_sleeps_on_and_then_it_does_what_comes():
    loop, told, all_told = IoLoop("kv-test"), list[tuple[bytes, int]](), threading.Event()
    ours, theirs = socket.socketpair()

    def read(events: int) -> None:
        told.append((ours.recv(1), threading.get_ident()))
        if len(told) == 2:
            all_told.set()

    def until() -> bool:
        if not told:
            theirs.send(b"a")
        return bool(told)

    with ours, theirs:
        loop.watch(ours, selectors.EVENT_READ, read)
        loop.start()
        while not told:  # it may not have fallen asleep yet
            loop.linger(until, but=lambda: None)
        theirs.send(b"b")
        assert all_told.wait(10)
        loop.stop(lambda: None)
    assert told[0] == (b"a", threading.get_ident())
    assert told[1][1] != threading.get_ident()


def test_an_owner_waits_for_the_turn_before_it_lingers():
    """What it is to look for may be in the hands of the loop's own thread."""
    loop, busy, go, told = IoLoop("kv-test"), threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        busy.set()
        assert go.wait(10)
        told.append("end")

    def until() -> bool:
        go.set()
        return bool(told)

    loop.start()
    loop.call(work)
    assert busy.wait(10)
    loop.linger(until, but=lambda: None)
    assert told == ["end"]
    loop.stop(lambda: None)


def test_where_more_is_likely_the_thread_looks_for_a_while_and_less_often_when_it_was_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, waits = IoLoop("kv-test"), queue.Queue[float | None]()
    select = loop._alarm.select

    def select_and_tell(timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        waits.put(timeout_s)
        return select(timeout_s)

    def looks_before_it_sleeps() -> int:
        looks = 0
        while waits.get(timeout=10) is not None:
            looks += 1
        return looks

    monkeypatch.setattr(loop._alarm, "select", select_and_tell)
    loop.start()
    assert looks_before_it_sleeps() == 0
    looks = []
    for _ in range(5):
        loop.call(loop.more_is_likely)
        looks.append(looks_before_it_sleeps() > 0)
    loop.stop(lambda: None)
    assert looks == [True, False, True, False, False], "one is spared after the first in vain, three after the second"


def test_an_owner_that_lingers_finds_the_end_of_a_small_push(wired: Rig) -> None:
    source, destination = wired.pair()
    destination.engine.open(LeaseKey("small", 1), source.name, block_spans([0], SPAN_BYTES))
    source.engine.push(LeaseKey("small", 1), destination.name, 0, block_spans([0], SPAN_BYTES))
    end_s = time.monotonic() + 10
    while not source.engine.linger() and time.monotonic() < end_s:
        pass
    source.poll()
    assert source.saw(PushDone)
    wired.until(lambda: destination.saw(Received))
