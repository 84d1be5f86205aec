"""One-sided reads of UCX that the `ucxx` core API leaves out, by the C API itself (`ucp.h` of UCX 1.2x; its structures
are versioned by field masks). A pool is registered once, and whoever holds its key may read it and nothing else.

All functions belong to whoever holds the turn of the UCX worker's loop. Errors are `UcpError` with UCX's own words.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p, cast
from dataclasses import dataclass
from typing import Any

_IN_PROGRESS = 1
_LAST_ERROR = 2**64 - 100
"""UCS_PTR_IS_ERR: the last hundred addresses are negative status codes."""


class UcpError(Exception):
    """UCX refused or failed an operation."""


class _MapParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported", c_void_p),
    )


class _RequestParam(ctypes.Structure):
    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memory", c_void_p),
    )


class _TransportEntry(ctypes.Structure):
    _fields_ = (("transport", c_char_p), ("device", c_char_p))


class _Transports(ctypes.Structure):
    _fields_ = (("entries", POINTER(_TransportEntry)), ("num_entries", c_uint), ("entry_size", c_size_t))


class _EndpointAttributes(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", c_uint64 * 16),
        ("remote", c_uint64 * 16),
        ("transports", _Transports),
        ("user_data", c_void_p),
    )


_ADDRESS, _LENGTH, _PROTECTION = 1 << 0, 1 << 1, 1 << 3
_READ_ONLY = 1 << 0 | 1 << 1 | 1 << 8
"""UCP_MEM_MAP_PROT: we read and write, others read."""
_MEMORY, _MANY = 1 << 8, 1 << 19
"""UCP_OP_ATTR_FIELD_MEMH; UCP_OP_ATTR_FLAG_MULTI_SEND: many operations follow, bandwidth before latency."""
_TRANSPORTS = 1 << 3
_MAX_TRANSPORTS = 32


@dataclass(frozen=True, slots=True)
class Registration:
    """A pool as UCX knows it: where it lies, the handle for our own use, and the packed key for others."""

    address: int
    handle: int
    key: bytes


def register(context: int, address: int, num_bytes: int) -> Registration:
    """Register memory with a context, once; it stays registered as long as the context lives."""
    mask = _ADDRESS | _LENGTH | _PROTECTION
    params = _MapParams(field_mask=mask, address=address, length=num_bytes, prot=_READ_ONLY)
    handle, packed, size = c_void_p(), c_void_p(), c_size_t()
    _check(_lib().ucp_mem_map(c_void_p(context), byref(params), byref(handle)))
    _check(_lib().ucp_rkey_pack(c_void_p(context), handle, byref(packed), byref(size)))
    key = ctypes.string_at(packed, size.value)
    _lib().ucp_rkey_buffer_release(packed)
    assert handle.value is not None
    return Registration(address, handle.value, key)


def unregister(context: int, registration: Registration) -> None:
    """Undo it; nothing may use the memory any more."""
    _lib().ucp_mem_unmap(c_void_p(context), c_void_p(registration.handle))


def unpack_key(endpoint: int, key: bytes) -> int:
    """The peer's key, for use on this endpoint. It lives as long as the endpoint and is never given back by itself."""
    handle = c_void_p()
    _check(_lib().ucp_ep_rkey_unpack(c_void_p(endpoint), key, byref(handle)))
    assert handle.value is not None
    return handle.value


def transports_of(endpoint: int) -> frozenset[str]:
    """The UCX transports that an endpoint has lanes on, by UCX's names (`tcp`, `cma`, `rc_mlx5`, …)."""
    entries = (_TransportEntry * _MAX_TRANSPORTS)()
    room = _Transports(cast(entries, POINTER(_TransportEntry)), _MAX_TRANSPORTS, ctypes.sizeof(_TransportEntry))
    attributes = _EndpointAttributes(field_mask=_TRANSPORTS, transports=room)
    _check(_lib().ucp_ep_query(c_void_p(endpoint), byref(attributes)))
    count = attributes.transports.num_entries
    return frozenset(entry.transport.decode() for entry in entries[:count])


class Reader:
    """Posts reads of one peer's memory into ours."""

    def __init__(self, endpoint: int, key: int, ours: Registration) -> None:
        self._endpoint = endpoint
        self._key = key
        self._ours = ours
        self._param = _RequestParam(op_attr_mask=_MEMORY | _MANY, memory=ours.handle)
        self._get = _lib().ucp_get_nbx

    def read(self, their_address: int, our_offset: int, num_bytes: int) -> int:
        """Begin a read; a request to be asked about by `ended`, or 0 if it is complete."""
        target = self._ours.address + our_offset
        request = self._get(self._endpoint, target, num_bytes, their_address, self._key, self._param) or 0
        if request >= _LAST_ERROR:
            raise UcpError(_words(request - 2**64))
        return int(request)


def ended(request: int) -> bool:
    """Whether a read is complete, then its request is gone. Raises `UcpError` when it failed."""
    status = _lib().ucp_request_check_status(request)
    if status == _IN_PROGRESS:
        return False
    _lib().ucp_request_free(request)
    _check(status)
    return True


def _check(status: int) -> None:
    if status:
        raise UcpError(_words(status))


def _words(status: int) -> str:
    ucs = ctypes.CDLL("libucs.so.0")
    ucs.ucs_status_string.restype = c_char_p
    return str(ucs.ucs_status_string(c_int8(status)).decode())


_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ucp_mem_map": (c_int8, (c_void_p, c_void_p, c_void_p)),
    "ucp_mem_unmap": (c_int8, (c_void_p, c_void_p)),
    "ucp_rkey_pack": (c_int8, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "ucp_rkey_buffer_release": (None, (c_void_p,)),
    "ucp_ep_rkey_unpack": (c_int8, (c_void_p, c_char_p, c_void_p)),
    "ucp_ep_query": (c_int8, (c_void_p, c_void_p)),
    "ucp_get_nbx": (c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(_RequestParam))),
    "ucp_request_check_status": (c_int8, (c_void_p,)),
    "ucp_request_free": (None, (c_void_p,)),
}


@functools.cache
def _lib() -> ctypes.PyDLL:
    """The libucp that ucxx has loaded. Its short calls keep the interpreter lock: giving it away costs more."""
    library = ctypes.PyDLL("libucp.so.0")
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
