"""The KV pool: one allocation that holds every block of this worker.

Page-first: a block carries all layers of its tokens contiguously, `(kv_heads, layers, 2, block_size, head_dim)`, keys
at 0 and values at 1. So one block is one run of bytes for the transfer, and a run of heads inside it is one too. Who
may use a block is decided elsewhere (`engine.blocks`); here are only the bytes. On the host the pool is page-aligned
anonymous memory, zero by the operating system and not resident before its first use. A *shared* pool (on Linux) is a
file without a name: its owner has a `fileno`, with which another process of this host may read it, and nobody may
shrink it or write. Any other pool is private, because the kernel gives huge pages to private memory on most machines
and to files on few.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a pool. `dtype` is one of float32, bfloat16, float16. Raises KeyError for another one."""

    num_blocks: int
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        _DTYPES[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """(num_blocks, kv_heads, layers, 2, block_size, head_dim)."""
        return (self.num_blocks, self.kv_heads, self.layers, 2, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers and heads, keys and values."""
        values = self.kv_heads * self.layers * 2 * self.block_size * self.head_dim
        return values * self.torch_dtype.itemsize

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def describe(self) -> str:
        """What two workers must have in common to read each other's KV; how many blocks of how many tokens it is cut
        into is not part of it."""
        return (
            f"order=page-first layers={self.layers} kv_heads={self.kv_heads} head_dim={self.head_dim}"
            f" dtype={str(self.dtype).removeprefix('torch.')}"
        )


class KVPool:
    """The memory of a layout on one device.

    `tensor` has the layout's shape and dtype, is contiguous and starts as zeros; block i is the bytes
    [i * block_bytes, (i + 1) * block_bytes).
    """

    def __init__(self, layout: KVLayout, device: str | torch.device = "cpu", *, shared: bool = False) -> None:
        """`shared`: other processes of this host may read it, where the operating system can do that."""
        self.layout = layout
        self.device = torch.device(device)
        self._memory = _anonymous(layout.pool_bytes, shared) if self.device.type == "cpu" else None
        if self._memory is None:
            self.tensor = torch.zeros(layout.shape, dtype=layout.torch_dtype, device=self.device)
        else:
            self.tensor = torch.frombuffer(self._memory, dtype=layout.torch_dtype).view(layout.shape)

    def bytes(self) -> memoryview:
        """The whole pool as a writable view of uint8. Raises TypeError when the pool is not in host memory."""
        if self._memory is None:
            raise TypeError(f"the KV pool is on {self.device}; only a pool in host memory has a memoryview")
        return memoryview(self._memory)


_SEALS = 0x1 | 0x2 | 0x4 | 0x10
"""fcntl(2): no more seals, no shrinking, no growing, and (Linux 5.1) no writing but through mappings made so far."""


class _Shared(mmap.mmap):
    """Zeroed memory that whoever is given `fileno()` can map, read-only."""

    _descriptor = -1

    def __new__(cls, size: int) -> _Shared:
        descriptor = os.memfd_create("kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            memory = super().__new__(cls, descriptor, size, flags=mmap.MAP_SHARED)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(descriptor)
            raise
        memory._descriptor = descriptor
        return memory

    def fileno(self) -> int:
        return self._descriptor

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _anonymous(size: int, shared: bool) -> mmap.mmap:
    if shared and hasattr(os, "memfd_create"):
        memory: mmap.mmap = _Shared(size)
    else:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # attention jumps from block to block: spare the TLB
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
