"""msgpack with types: values in, bytes out, and back with nothing believed."""

from __future__ import annotations

from typing import Any

import msgpack

_msgpack: Any = msgpack


def pack(*fields: Any) -> bytes:
    """The list of fields as bytes."""
    return bytes(_msgpack.packb(fields, use_bin_type=True))


def unpack(raw: bytes | bytearray | memoryview) -> tuple[Any, ...]:
    """The fields. Raises `ValueError` when the bytes are anything but one packed list."""
    try:
        fields = _msgpack.unpackb(raw, use_list=False)
    except Exception as error:  # msgpack raises several unrelated kinds for foreign bytes
        raise ValueError(f"not msgpack: {error}") from error
    if not isinstance(fields, tuple):
        raise ValueError("not a packed list")
    return fields
