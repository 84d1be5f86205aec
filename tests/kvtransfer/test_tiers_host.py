"""The host tier: bounded, least recently used out first, what is hot or in use last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.tiers.host import HostTier

SIZE = 64


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def block(number: int) -> memoryview:
    return memoryview(bytes([number % 251]) * SIZE)


@pytest.fixture
def tier() -> Iterator[HostTier]:
    made = HostTier(4 * SIZE, SIZE)
    yield made
    made.check()


def read(tier: HostTier, number: int) -> bytes | None:
    entry = tier.acquire(key(number))
    data = tier.verified(entry)
    found = bytes(data) if data is not None else None
    if found is not None:
        tier.hit(entry)
    tier.release(entry)
    return found


def filled(tier: HostTier, *numbers: int) -> None:
    for number in numbers:
        assert tier.put(key(number), block(number))[0]


def test_the_least_recently_used_makes_room_and_is_named(tier: HostTier) -> None:
    filled(tier, 0, 1, 2, 3)
    tier.touch(key(0))
    assert tier.put(key(4), block(4)) == (True, key(1))
    assert tier.keys() == (key(0), key(2), key(3), key(4))
    assert read(tier, 0) == bytes(block(0))
    assert (tier.counters.stored, tier.counters.evicted) == (5, 1)


def test_what_was_read_often_is_pinned_and_outlives_a_flood_but_pins_are_bounded(tier: HostTier) -> None:
    filled(tier, 0, 1, 2, 3)
    for number in (0, 1, 2):
        read(tier, number)
        read(tier, number)
    filled(tier, *range(10, 30))
    assert key(0) not in tier, "three are hot, two may be pinned: the one read longest ago is cold again"
    assert read(tier, 1) == bytes(block(1))
    assert read(tier, 2) == bytes(block(2))


def test_what_is_in_use_keeps_its_bytes_even_when_it_is_forgotten(tier: HostTier) -> None:
    filled(tier, 0, 1, 2, 3)
    entries = [tier.acquire(key(number)) for number in range(4)]
    assert tier.put(key(9), block(9)) == (False, None)
    assert tier.forget(key(2))
    assert tier.put(key(9), block(9)) == (False, None)
    assert bytes(tier.view(entries[2])) == bytes(block(2))
    tier.release(entries[2])
    assert tier.put(key(9), block(9)) == (True, None)
    for number in (0, 1, 3):
        tier.release(entries[number])


def test_bytes_that_changed_are_not_served_and_leave(tier: HostTier) -> None:
    filled(tier, 0)
    entry = tier.acquire(key(0))
    tier.view(entry)[5] ^= 1
    assert tier.verified(entry) is None
    tier.release(entry)
    assert key(0) not in tier
    assert (tier.counters.failed, tier.counters.hits) == (1, 0)


def test_a_tier_without_room_takes_nothing() -> None:
    tier = HostTier(SIZE - 1, SIZE)
    assert tier.put(key(0), block(0)) == (False, None)
    tier.check()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["put", "read", "touch", "forget", "hold", "let go"]), st.integers(0, 9))),
)
def test_whatever_is_done_it_stays_within_bounds_and_serves_what_was_put(
    slots: int, moves: list[tuple[str, int]]
) -> None:
    tier = HostTier(slots * SIZE, SIZE)
    held = []
    for move, number in moves:
        if move == "put":
            there = key(number) in tier
            stored, victim = tier.put(key(number), block(number))
            assert stored or not there
            assert victim is None or victim not in tier
        elif move == "read" and key(number) in tier:
            assert read(tier, number) == bytes(block(number))
        elif move == "touch":
            tier.touch(key(number))
        elif move == "forget":
            tier.forget(key(number))
            assert key(number) not in tier
        elif move == "hold" and key(number) in tier:
            held.append((number, tier.acquire(key(number))))
        elif move == "let go" and held:
            tier.release(held.pop()[1])
        for kept, entry in held:
            assert bytes(tier.view(entry)) == bytes(block(kept)), "bytes in use were overwritten"
        assert tier.used <= slots
        tier.check()
