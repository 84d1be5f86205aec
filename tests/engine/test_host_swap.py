"""Swap space keeps what it is given, and takes memory only as it is used."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ConfigError
from engine.host_swap import HostSwap, SwapMemory
from engine.kv import KVLayout, KVPool
from engine.swap import SwapSlots

LAYOUT = KVLayout(6, 2, 2, 4, 16, "float32")


def test_memory_is_allocated_piece_by_piece_when_a_slot_of_it_is_first_used() -> None:
    asked: list[int] = []

    def allocate(count: int) -> torch.Tensor:
        asked.append(count)
        return torch.zeros(count, 3)

    memory = SwapMemory(7, 3, allocate)
    assert asked == []
    memory.slot(1).fill_(1)
    memory.slot(0).fill_(2)
    assert asked == [3]
    memory.slot(6).fill_(3)
    assert asked == [3, 1], "the last piece is as long as is left"
    assert memory.slot(1).tolist() == [1] * 3
    assert memory.slot(0).tolist() == [2] * 3
    with pytest.raises(ValueError, match="no swap slot 7"):
        memory.slot(7)


def test_blocks_come_back_as_they_went_into_other_places() -> None:
    pool = KVPool(LAYOUT)
    pool.tensor.normal_()
    before = pool.tensor.clone()
    swap = HostSwap(pool, 4 * LAYOUT.block_bytes + 1)
    assert swap.slots == 4
    swap.out([(1, 3), (2, 0)])
    pool.tensor[[1, 2]] = 0
    swap.back([(4, 3), (5, 0)])
    swap.copy([(0, 1)])
    assert torch.equal(pool.tensor[[4, 5, 1, 3]], before[[1, 2, 0, 3]])


def test_slots_that_were_not_used_cost_nothing_and_those_given_back_are_used_first() -> None:
    slots = SwapSlots(1 << 60)
    first = slots.take(3)
    assert first == [0, 1, 2]
    slots.give_back([1])
    assert slots.take(2) == [1, 3]
    assert slots.free == (1 << 60) - 4
    slots.check([0, 1, 2, 3])
    small = SwapSlots(2)
    assert small.take(3) is None
    assert small.take(2) == [0, 1]
    assert small.take(1) is None
    small.check([0, 1])


def test_more_memory_than_there_is_is_refused_by_the_setting_that_asks_for_it() -> None:
    swap = HostSwap(KVPool(LAYOUT), 1 << 62)
    with pytest.raises(ConfigError, match=r"swap_bytes is .*; it must be no more than this machine has"):
        swap.out([(0, 0)])


def test_without_swap_space_nothing_can_be_swapped() -> None:
    swap = HostSwap(KVPool(LAYOUT), 0)
    assert swap.slots == 0
    with pytest.raises(ValueError, match="no swap slot 0; 0 fit"):
        swap.out([(0, 0)])
