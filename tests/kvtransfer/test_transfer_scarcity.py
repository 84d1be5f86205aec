"""No file descriptor is left: pushes end or wait their turn, and nothing is held for ever."""

from __future__ import annotations

import gc
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from test_transfer_strangers import read_frame
from transfer_rig import DEADLINE_S, Clock, transports

from kvtransfer.engine import MAX_REST_S
from kvtransfer.frames import Kind
from kvtransfer.handshake import WiredAddress
from kvtransfer.types import LeaseKey, PushDone, PushFailed, Quiet, Received, Span
from kvtransfer.wired import ACCEPT_REST_S, WiredTransport

KEY = LeaseKey("request-1", 1)
WIRED = transports()[1:4]


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """The process has what it has, and gets no more."""
    gc.collect()  # what is garbage has descriptors too
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.open("/dev/null", os.O_RDONLY)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("rig", WIRED, indirect=True)
def test_a_push_that_finds_no_descriptor_for_its_link_is_tried_again_and_arrives_when_there_is_one(rig):
    source, destination = rig.peer("prefill-0#1"), rig.peer("decode-0#1")
    destination.engine.open(KEY, source.name, [Span(0, 64)])
    with no_descriptor_left():
        rig.connect(source, destination)
        source.engine.push(KEY, destination.name, 0, [Span(128, 64)])
        rig.until(lambda: source.engine._lanes[destination.name].failures)
    assert not source.events
    rig.until(lambda: source.saw(PushDone) and destination.saw(Received))
    assert destination.bytes_of([Span(0, 64)]) == source.bytes_of([Span(128, 64)])


@pytest.mark.parametrize("rig", WIRED, indirect=True)
def test_a_push_that_never_finds_a_descriptor_fails_with_the_reason_and_is_quiet(rig):
    clock = Clock()
    source, destination = rig.peer("prefill-0#1", clock=clock), rig.peer("decode-0#1")

    def failed_after_its_rests() -> object:
        clock.now += MAX_REST_S
        return source.saw(PushFailed)

    with no_descriptor_left():
        rig.connect(source, destination)
        source.engine.push(KEY, destination.name, 0, [Span(0, 64)])
        rig.until(failed_after_its_rests, alarm_s=0.001)
        source.engine.withdraw(KEY)
        rig.until(lambda: source.saw(Quiet))
    assert "Too many open files" in source.saw(PushFailed)[0].reason
    assert source.engine.in_flight() == 0


@pytest.fixture
def knocks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When listeners looked for a caller, in seconds of the machine's clock."""
    times: list[float] = []
    knocked = WiredTransport._knocked

    def noted(transport: WiredTransport, events: int) -> None:
        times.append(time.monotonic())
        knocked(transport, events)

    monkeypatch.setattr(WiredTransport, "_knocked", noted)
    return times


def test_a_caller_for_whom_there_is_no_descriptor_is_let_in_later_and_keeps_no_thread_busy(tcp, knocks):
    address = WiredAddress.unpack(tcp.peer("decode-0#1").engine.addresses()[0][1])
    with socket.socket() as caller:
        caller.settimeout(DEADLINE_S)
        with no_descriptor_left():
            caller.connect((address.host, address.port))
            tcp.until(lambda: len(knocks) >= 3, alarm_s=0.01)
        header, _ = read_frame(caller)
    assert header.kind is Kind.CHALLENGE
    assert all(later - sooner >= ACCEPT_REST_S for sooner, later in pairwise(knocks))


def test_a_transport_that_rests_from_accepting_closes(tcp, knocks):
    address = WiredAddress.unpack(tcp.peer("decode-0#1").engine.addresses()[0][1])
    with socket.socket() as caller, no_descriptor_left():
        caller.connect((address.host, address.port))
        tcp.until(lambda: knocks, alarm_s=0.01)
        tcp.close()
