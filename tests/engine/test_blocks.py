"""The block pool against a model that keeps the same books naively."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from engine.prefix_cache import PrefixCache

TOTAL = 8


def keys(number: int) -> tuple[bytes, ...]:
    return (number.to_bytes(16, "big"),)


class PoolMachine(RuleBasedStateMachine):
    """Owners are lists of blocks; `content` is what a block holds since it was last handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.owners: list[list[int]] = []
        self.content: dict[int, int] = {}
        self.findable: dict[int, int] = {}
        self.let_go: list[int] = []
        self.told: set[bytes] = set()

    @rule(count=st.integers(1, TOTAL + 1))
    def allocate(self, count: int) -> None:
        held = {block for owner in self.owners for block in owner}
        before = {block: self.pool.generation(block) for block in range(TOTAL)}
        blocks = self.pool.allocate(count)
        if count > TOTAL - len(held):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert not held & set(blocks)
        evicted = [block for block in blocks if block in self.content.keys() & set(self.findable.values())]
        assert evicted == self.let_go[: len(evicted)], "the block let go longest ago is taken first"
        for block in blocks:
            assert self.pool.generation(block) == before[block] + 1
            number = self.content.pop(block, None)
            if number is not None and self.findable.get(number) == block:
                del self.findable[number]
            if block in self.let_go:
                self.let_go.remove(block)
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), number=st.integers(0, 30))
    def publish(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.owners))))
        if block in self.content:
            return
        fresh = self.pool.publish(block, keys(number))
        assert fresh == (number not in self.findable)
        if fresh:
            self.findable[number] = block
            self.content[block] = number

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(owner)
        held = {block for other in self.owners for block in other}
        for block in reversed(owner):
            if block not in held and block in self.content:
                self.let_go.append(block)

    @rule(number=st.integers(0, 30))
    def take_up(self, number: int) -> None:
        found = self.pool.match(keys(number))
        assert found == ([self.findable[number]] if number in self.findable else [])
        if found:
            self.pool.retain(found)
            self.owners.append(found)
            if found[0] in self.let_go:
                self.let_go.remove(found[0])

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache() == len(self.findable)
        self.findable.clear()
        self.content.clear()
        self.let_go.clear()

    @rule()
    def drain(self) -> None:
        stored, removed, cleared = self.pool.drain_changes()
        assert not set(stored) & set(removed)
        if cleared:
            self.told.clear()
        assert self.told.isdisjoint(stored)
        assert self.told.issuperset(removed)
        self.told = (self.told | set(stored)) - set(removed)
        assert self.told == {keys(number)[0] for number in self.findable}

    @invariant()
    def books_agree(self) -> None:
        owners = Counter(block for owner in self.owners for block in owner)
        self.pool.check(owners)
        assert self.pool.live == len(owners)
        assert self.pool.cached == len(self.let_go)
        assert self.pool.free + self.pool.cached + self.pool.live == TOTAL


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolKeepsItsBooks = PoolMachine.TestCase


def test_releasing_once_too_often_raises() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="once too often"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="free"):
        pool.retain(blocks)
    with pytest.raises(ValueError, match="not live"):
        pool.publish(blocks[0], keys(1))
    pool.check(Counter())


def test_a_sequences_leaves_are_evicted_before_its_root() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for number, block in enumerate(blocks):
        pool.publish(block, keys(number))
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match([keys(0)[0], keys(1)[0], keys(2)[0]]) == blocks[:2]


def test_a_key_leaves_the_index_the_moment_its_block_is_reassigned() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], keys(7))
    pool.release(blocks)
    assert pool.match(keys(7)) == blocks
    pool.allocate(1)
    assert pool.match(keys(7)) == []


def test_check_tells_a_lost_reference() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="owners hold"):
        pool.check(Counter())


def test_granules_shared_by_two_blocks_are_announced_once_and_removed_with_the_last() -> None:
    cache = PrefixCache()
    cache.put(0, (b"a", b"ab"))
    cache.put(1, (b"a", b"ac"))
    assert set(cache.drain().stored) == {b"a", b"ab", b"ac"}
    cache.drop(0)
    assert cache.drain().removed == (b"ab",)
    cache.drop(1)
    assert set(cache.drain().removed) == {b"a", b"ac"}
    cache.check()


def test_a_key_that_came_and_went_is_no_news() -> None:
    cache = PrefixCache()
    cache.put(0, (b"a",))
    cache.drop(0)
    assert cache.drain() == ((), (), False)
    cache.put(0, (b"a",))
    cache.clear()
    cache.put(1, (b"b",))
    assert cache.drain() == ((b"b",), (), True)
