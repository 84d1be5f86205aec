"""Moves blocks between the KV pool and swap space in host memory.

The memory is bounded and becomes resident only as it is used; beside a GPU it is pinned, so that copies run at the
link's speed. Pinned pages are resident from the start, so they are allocated in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.errors import ConfigError
from engine.kv import KVLayout, KVPool
from engine.swap import Pairs

_PINNED_TOGETHER_BYTES = 32 << 20


class HostSwap:
    """Moves blocks between `pool` and at most `size` bytes of host memory, in `slots` slots."""

    def __init__(self, pool: KVPool, size: int) -> None:
        layout = pool.layout
        self.slots = size // layout.block_bytes
        self._pool = pool
        self._host = _memory_for(pool, self.slots)

    def out(self, pairs: Pairs) -> None:
        """Pool to swap space: (block, slot)."""
        for block, slot in pairs:
            self._host.slot(slot).copy_(self._pool.tensor[block], non_blocking=True)
        self._settle()

    def copy(self, pairs: Pairs) -> None:
        """Within the pool: (source block, target block)."""
        for source, target in pairs:
            self._pool.tensor[target].copy_(self._pool.tensor[source], non_blocking=True)
        self._settle()

    def back(self, pairs: Pairs) -> None:
        """Swap space to pool: (block, slot)."""
        for block, slot in pairs:
            self._pool.tensor[block].copy_(self._host.slot(slot), non_blocking=True)
        self._settle()

    def _settle(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()


class DeviceBytes:
    """Bytes of single blocks of a pool in a device's memory (`engine.tiering.BlockBytes`), by way of one buffer."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        size, pinned = pool.layout.block_bytes, pool.device.type == "cuda"
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def read(self, block: int) -> memoryview:
        """uint8 (block_bytes,), valid until the next call."""
        self._buffer.copy_(self._bytes(block))
        return self._buffer.numpy().data

    def write(self, block: int, data: memoryview) -> None:
        self._buffer.numpy()[:] = data
        self._bytes(block).copy_(self._buffer)

    def _bytes(self, block: int) -> torch.Tensor:
        return self._pool.tensor[block].reshape(-1).view(torch.uint8)


class SwapMemory:
    """Host memory for `slots` blocks, allocated `together` slots at a time, when the first of them is used.

    `allocate(n)` returns (n, kv_heads, layers, 2, block_size, head_dim) in the pool's dtype.
    """

    def __init__(self, slots: int, together: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self._slots, self._together, self._allocate = slots, together, allocate
        self._segments: dict[int, torch.Tensor] = {}

    def slot(self, slot: int) -> torch.Tensor:
        """(kv_heads, layers, 2, block_size, head_dim). Raises ValueError for a slot that is not there."""
        if not 0 <= slot < self._slots:
            raise ValueError(f"there is no swap slot {slot}; {self._slots} fit into the swap space")
        segment, place = divmod(slot, self._together)
        if segment not in self._segments:
            left = self._slots - segment * self._together
            self._segments[segment] = self._allocate(min(self._together, left))
        return self._segments[segment][place]


def _memory_for(pool: KVPool, slots: int) -> SwapMemory:
    layout = pool.layout
    if pool.device.type != "cuda":  # one mapping: the operating system makes its pages resident one by one
        return SwapMemory(slots, max(1, slots), lambda count: _mapped(layout, count))
    together = max(1, _PINNED_TOGETHER_BYTES // layout.block_bytes)
    return SwapMemory(slots, together, lambda count: _pinned(layout, count))


def _mapped(layout: KVLayout, blocks: int) -> torch.Tensor:
    try:
        return KVPool(replace(layout, num_blocks=blocks)).tensor
    except (OSError, OverflowError, MemoryError) as error:
        remedy = f"no more than this machine has: {str(error) or type(error).__name__}"
        raise ConfigError("swap_bytes", blocks * layout.block_bytes, remedy) from error


def _pinned(layout: KVLayout, blocks: int) -> torch.Tensor:
    return torch.empty((blocks, *layout.shape[1:]), dtype=layout.torch_dtype, pin_memory=True)
