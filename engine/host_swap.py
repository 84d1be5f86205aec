"""Moves blocks between the KV pool and swap space in host memory.

The memory is bounded and becomes resident only as it is used; beside a GPU it is pinned, so that copies run at the
link's speed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kv import KVLayout, KVPool
from engine.swap import Pairs


class HostSwap:
    """Moves blocks between `pool` and at most `size` bytes of host memory, in `slots` slots."""

    def __init__(self, pool: KVPool, size: int) -> None:
        layout = pool.layout
        self.slots = size // layout.block_bytes
        self._pool = pool
        self._host = _host_memory(layout, self.slots, pinned=pool.device.type == "cuda") if self.slots else None

    def out(self, pairs: Pairs) -> None:
        """Pool to swap space: (block, slot)."""
        host = self._memory()
        for block, slot in pairs:
            host[slot].copy_(self._pool.tensor[block], non_blocking=True)
        self._settle()

    def copy(self, pairs: Pairs) -> None:
        """Within the pool: (source block, target block)."""
        for source, target in pairs:
            self._pool.tensor[target].copy_(self._pool.tensor[source], non_blocking=True)
        self._settle()

    def back(self, pairs: Pairs) -> None:
        """Swap space to pool: (block, slot)."""
        host = self._memory()
        for block, slot in pairs:
            self._pool.tensor[block].copy_(host[slot], non_blocking=True)
        self._settle()

    def _memory(self) -> torch.Tensor:
        if self._host is None:
            raise ValueError("there is no swap space")
        return self._host

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


def _host_memory(layout: KVLayout, slots: int, *, pinned: bool) -> torch.Tensor:
    """(slots, kv_heads, layers, 2, block_size, head_dim) in the pool's dtype."""
    shape = (slots, *layout.shape[1:])
    if pinned:
        return torch.empty(shape, dtype=layout.torch_dtype, pin_memory=True)
    return KVPool(replace(layout, num_blocks=slots)).tensor
