"""Two staged ends in any order of calls, and faults: what is received is what was sent, nothing else is touched."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_transfer_staging import BLOCK, DESTINATION, SOURCE, Pair

from kvtransfer.errors import TransferError
from kvtransfer.faults import Fault
from kvtransfer.layout import block_spans
from kvtransfer.types import LeaseKey, PushDone, PushFailed, Quiet, Received

NAMES = (SOURCE, DESTINATION)
BLOCKS = 24
ENDS = st.sampled_from((0, 1))


class AnyOrder(RuleBasedStateMachine):
    """Each end lends blocks of its pool to pushes and leases, and scribbles over those that come back."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(16, 16, pool_blocks=BLOCKS)
        self.ends = (self.pair.source, self.pair.destination)
        self.random = random.Random(1)
        self.free: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        self.leases: tuple[dict, dict] = ({}, {})
        """At the destination, by key: its blocks."""
        self.offered: dict[LeaseKey, int] = {}
        self.pushes: tuple[dict, dict] = ({}, {})
        """At the source, by push id: key and blocks, until they are let go."""
        self.sent: dict[tuple[LeaseKey, int], bytes] = {}
        self.failed: set[tuple[int, int]] = set()
        self.parted: set[tuple[int, LeaseKey]] = set()
        self.owed: set[tuple[int, LeaseKey]] = set()
        """Leases that were closed or withdrawn, each once, and those of them that are not quiet yet."""
        self.generation = 0
        for end in (0, 1):
            for block in range(BLOCKS):
                self._scribble(end, block)

    def _scribble(self, end: int, block: int) -> None:
        content = self.random.randbytes(16) * (BLOCK // 16)
        self.pair.pools[end].memory[block * BLOCK : (block + 1) * BLOCK] = np.frombuffer(content, np.uint8)
        self.free[end][block] = content

    def _take(self, end: int, count: int) -> list[int]:
        blocks = self.random.sample(sorted(self.free[end]), count)
        return [(block, self.free[end].pop(block))[0] for block in blocks]

    @rule(end=ENDS, count=st.integers(1, 14))
    def open(self, end: int, count: int) -> None:
        if len(self.free[end]) < count:
            return
        blocks, self.generation = self._take(end, count), self.generation + 1
        key = LeaseKey(f"to {end}", self.generation)
        had_room = self.ends[end].has_room(count * BLOCK)
        try:
            self.ends[end].open(key, NAMES[1 - end], block_spans(blocks, BLOCK))
        except TransferError:
            assert not had_room
            for block in blocks:
                self._scribble(end, block)
            return
        assert had_room
        self.leases[end][key], self.offered[key] = blocks, 0

    @rule(end=ENDS, count=st.integers(1, 14), priority=st.integers(-1, 1), soon=st.booleans())
    def push(self, end: int, count: int, priority: int, soon: bool) -> None:
        theirs = self.leases[1 - end]
        keys = [key for key in theirs if self.offered[key] < len(theirs[key]) and (end, key) not in self.parted]
        if not keys or len(self.free[end]) < count:
            return
        key = self.random.choice(keys)
        first = self.offered[key]
        blocks = self._take(end, min(count, len(theirs[key]) - first))
        contents = [self.pair.pools[end].block(block) for block in blocks]
        try:
            self.ends[end].connect(NAMES[1 - end], *self.ends[1 - end].addresses()[0])
            spans, deadline_s = block_spans(blocks, BLOCK), 1.0 if soon else 9.0
            number = self.ends[end].push(key, NAMES[1 - end], first, spans, priority=priority, deadline_s=deadline_s)
        except TransferError:
            for block in blocks:
                self._scribble(end, block)
            return
        self.offered[key] += len(blocks)
        self.pushes[end][number] = key, blocks
        self.sent.update({(key, first + place): content for place, content in enumerate(contents)})

    @rule(end=ENDS)
    def poll(self, end: int) -> None:
        for event in self.ends[end].poll():
            match event:
                case Received(key=key, first=first, count=count):
                    for place in range(first, first + count):
                        block = self.leases[end][key][place]
                        assert self.pair.pools[end].block(block) == self.sent[key, place]
                case PushDone(push_id=number, num_bytes=num_bytes):
                    assert (end, number) not in self.failed
                    _, blocks = self.pushes[end].pop(number)
                    assert num_bytes == len(blocks) * BLOCK
                    for block in blocks:
                        self._scribble(end, block)
                case PushFailed(push_id=number):
                    assert (end, number) not in self.failed
                    self.failed.add((end, number))
                    self.withdraw_of(end, self.pushes[end][number][0])
                case Quiet(key=key):
                    self.owed.remove((end, key))
                    self._quiet(end, key)

    def _quiet(self, end: int, key: LeaseKey) -> None:
        if key.lease_id == f"to {end}":
            for block in self.leases[end].pop(key):
                self._scribble(end, block)
            return
        for number in [number for number, (theirs, _) in self.pushes[end].items() if theirs == key]:
            assert (end, number) in self.failed
            for block in self.pushes[end].pop(number)[1]:
                self._scribble(end, block)

    def withdraw_of(self, end: int, key: LeaseKey) -> None:
        if self._parts(end, key):
            self.ends[end].withdraw(key)

    @rule(end=ENDS, which=st.integers(0, 9))
    def withdraw(self, end: int, which: int) -> None:
        keys = [key for key, _ in self.pushes[end].values()]
        if keys:
            self.withdraw_of(end, keys[which % len(keys)])

    @rule(end=ENDS, which=st.integers(0, 9))
    def close(self, end: int, which: int) -> None:
        keys = sorted(self.leases[end], key=lambda key: key.generation)
        if keys:
            self._close(end, keys[which % len(keys)])

    def _close(self, end: int, key: LeaseKey) -> None:
        if self._parts(end, key):
            self.ends[end].close(key)

    def _parts(self, end: int, key: LeaseKey) -> bool:
        """Whether this is the first time."""
        first = (end, key) not in self.parted
        if first:
            self.parted.add((end, key))
            self.owed.add((end, key))
        return first

    @rule(end=ENDS)
    def cut(self, end: int) -> None:
        self.ends[end].cut(NAMES[1 - end])

    @rule(seconds=st.sampled_from((0.2, 2.0, 10.0)))
    def wait(self, seconds: float) -> None:
        self.pair.now += seconds

    @rule(end=ENDS, fault=st.sampled_from((Fault.CORRUPT, Fault.FAIL, Fault.DELAY)))
    def fault(self, end: int, fault: Fault) -> None:
        self.ends[end].faults.add(fault, delay_s=1.0)

    @invariant()
    def free_blocks_are_untouched(self) -> None:
        for end in (0, 1):
            self.ends[end].check()
            assert all(self.pair.pools[end].block(block) == content for block, content in self.free[end].items())

    def teardown(self) -> None:
        for end in (0, 1):
            for key in tuple(self.leases[end]):
                self._close(end, key)
            for key in {key for key, _ in self.pushes[end].values()}:
                self.withdraw_of(end, key)
        for _ in range(40):
            self.pair.now += 1.0
            self.poll(0)
            self.poll(1)
        assert not self.owed
        for end in (0, 1):
            assert len(self.free[end]) == BLOCKS
            assert self.ends[end]._extents.whole
            assert not self.ends[end].in_flight()
            self.ends[end].shutdown()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
