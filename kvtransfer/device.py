"""Memory that only its address tells: a pool on a GPU, which UCX reads and writes and this process cannot.

UCX finds out by itself what kind of memory an address is, and takes CUDA IPC, GPUDirect or copies of its own. The other
transports, and checksums, need memory that can be looked at: for them there is `kvtransfer.staging`.
"""

from __future__ import annotations

import ctypes
from typing import Any


class DeviceRegion:
    """`nbytes` bytes from `address` on; `owner` keeps them alive. A slice is a region too."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self._owner = owner

    def __getitem__(self, place: slice) -> DeviceRegion:
        start, stop, step = place.indices(self.nbytes)
        assert step == 1, "bytes of a region lie one behind the other"
        return DeviceRegion(self.address + start, max(0, stop - start), self._owner)

    def __len__(self) -> int:
        return self.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "strides": None, "version": 3}


Region = memoryview | DeviceRegion


def address_of(region: Region) -> int:
    if isinstance(region, DeviceRegion):
        return region.address
    return ctypes.addressof(ctypes.c_char.from_buffer(region))
