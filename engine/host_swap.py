"""Moves blocks between the KV pool and swap space in host memory.

The memory is bounded and becomes resident only as it is used; beside a GPU it is pinned, so that copies run at the
link's speed. Pinned pages are resident from the start, so they are allocated in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from engine.errors import too_much
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
        _settle(self._pool.device)


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


class Spans(Protocol):
    """Many runs of bytes; int64 arrays of one length."""

    @property
    def offsets(self) -> NDArray[Any]: ...

    @property
    def lengths(self) -> NDArray[Any]: ...


class PoolSpans:
    """Spans of a pool's bytes, copied to and from host memory; for transports that cannot reach the pool itself.

    Spans of one length that begin at multiples of it, as whole blocks and rows of blocks do, are gathered on the device
    and cross the bus as one copy; others one by one.
    """

    def __init__(self, pool: KVPool) -> None:
        self._device = pool.device
        self._bytes = pool.tensor.view(-1).view(torch.uint8)
        self.nbytes = pool.layout.pool_bytes
        self.address = self._bytes.data_ptr()

    def settle(self) -> None:
        """What kernels have written so far is there when it returns."""
        _settle(self._device)

    def read(self, spans: Spans, into: memoryview) -> None:
        """Complete when it returns."""
        host = torch.frombuffer(into, dtype=torch.uint8)
        if (rows := self._rows(spans)) is not None:
            table, indices = rows
            host.view(len(indices), -1).copy_(table.index_select(0, indices))
            return
        place = 0
        for offset, length in zip(spans.offsets.tolist(), spans.lengths.tolist(), strict=True):
            host[place : place + length].copy_(self._bytes[offset : offset + length])
            place += length

    def write(self, spans: Spans, data: memoryview) -> None:
        """The inverse of `read`."""
        host = torch.frombuffer(data, dtype=torch.uint8)
        if (rows := self._rows(spans)) is not None:
            table, indices = rows
            table.index_copy_(0, indices, host.view(len(indices), -1).to(self._device))
            return
        place = 0
        for offset, length in zip(spans.offsets.tolist(), spans.lengths.tolist(), strict=True):
            self._bytes[offset : offset + length].copy_(host[place : place + length])
            place += length

    def pin(self, region: memoryview) -> bool:
        """Lock host memory, so that copies to and from a GPU run at the bus's speed. False: not needed, or refused."""
        if self._device.type != "cuda":
            return False
        address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
        return int(torch.cuda.cudart().cudaHostRegister(address, region.nbytes, 0)) == 0  # type: ignore[no-untyped-call]

    def _rows(self, spans: Spans) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The pool as rows of the spans' length, and which of them; None when they are no such rows."""
        length = int(spans.lengths[0])
        if (spans.lengths != length).any() or (spans.offsets % length).any():
            return None
        table = self._bytes[: self.nbytes // length * length].view(-1, length)
        return table, torch.from_numpy(spans.offsets // length).to(self._device)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


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
        raise too_much("swap_bytes", blocks * layout.block_bytes, error) from error


def _pinned(layout: KVLayout, blocks: int) -> torch.Tensor:
    return torch.empty((blocks, *layout.shape[1:]), dtype=layout.torch_dtype, pin_memory=True)
