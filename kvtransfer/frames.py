"""Control frames between two transports: a fixed header, then a msgpack body or raw payload.

    magic "TKVT" | version u8 | kind u8 | reserved u16 | serial u64 | length u64        (big endian, 24 bytes)

`serial` numbers the pushes of one link. `length` counts the body's bytes, or the payload's in a DATA frame. Nothing is
believed before it is checked: magic, version, kind, a bound on the length, then types and ranges of every field.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtransfer.packing import pack, unpack
from kvtransfer.types import NO_NUMBERS, LeaseKey, Numbers, Offer

MAX_BODY_BYTES = 4 * 2**20
MAX_HANDSHAKE_BYTES = 8 * 2**10
MAX_SPANS = 65_536
MAX_NAME_CHARS = 512
MAX_BITS = 63
"""Of a generation and of a span's number in its lease."""

_MAGIC = b"TKVT"
_VERSION = 3
_HEADER = struct.Struct(">4sBBHQQ")
HEADER_BYTES = _HEADER.size


class FrameError(Exception):
    """These bytes are not a frame that may stand here; the connection ends."""


class Kind(enum.IntEnum):
    """What a frame says. To the destination: HELLO, OFFER, DATA, CONFIRM; the others come back."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    OFFER = 4
    TAKE = 5
    REFUSE = 6
    DATA = 7
    ACK = 8
    CONFIRM = 9


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header."""

    kind: Kind
    serial: int
    length: int


def encode(kind: Kind, serial: int, *fields: Any) -> bytes:
    """A whole frame; the body is the list of fields."""
    body = pack(*fields)
    return _HEADER.pack(_MAGIC, _VERSION, kind, 0, serial, len(body)) + body


def data_header(serial: int, num_bytes: int) -> bytes:
    """The header before `num_bytes` of payload."""
    return _HEADER.pack(_MAGIC, _VERSION, Kind.DATA, 0, serial, num_bytes)


def decode_header(raw: bytes | bytearray | memoryview) -> Header:
    """Raises `FrameError` for foreign bytes."""
    magic, version, kind, _, serial, length = _HEADER.unpack(raw)
    if magic != _MAGIC:
        raise FrameError(f"bad magic {magic!r}")
    if version != _VERSION:
        raise FrameError(f"frame version {version}, this side speaks {_VERSION}")
    if kind not in _KINDS:
        raise FrameError(f"unknown frame kind {kind}")
    return Header(_KINDS[kind], serial, length)


def decode_fields(body: bytes | bytearray | memoryview, *types: type) -> tuple[Any, ...]:
    """The body's fields, exactly these types. Raises `FrameError`."""
    try:
        fields = unpack(body)
    except ValueError as error:
        raise FrameError(f"body: {error}") from error
    if tuple(map(type, fields)) != types:
        found, wanted = (", ".join(kind.__name__ for kind in kinds) for kinds in (map(type, fields), types))
        raise FrameError(f"fields of types ({found}), ({wanted}) expected")
    return fields


def check_names(*names: str) -> str:
    """Why no frame carries these names of peers or leases; empty when it can."""
    longest = max(map(len, names))
    return f"a name of {longest} characters, at most {MAX_NAME_CHARS} travel" if longest > MAX_NAME_CHARS else ""


def check_key(key: LeaseKey, first: int = 0) -> str:
    """Why no frame carries an offer for span `first` of this lease; empty when it can."""
    if first < 0 or max(first.bit_length(), key.generation.bit_length()) > MAX_BITS:
        return f"span {first} of generation {key.generation}: numbers from 0, of at most {MAX_BITS} bits"
    return check_names(key.lease_id)


def encode_offer(serial: int, offer: Offer, announced: bytes) -> bytes:
    """An OFFER frame; `announced` is what the payload road adds (see `kvtransfer.wired.Payload.announce`).

    Raises `OverflowError` or `ValueError` for what no frame can carry.
    """
    key = offer.key
    return encode(
        Kind.OFFER,
        serial,
        key.lease_id,
        key.generation,
        offer.push_id,
        offer.first,
        offer.lengths.pack(),
        offer.source,
        offer.destination,
        offer.checksums.pack(),
        announced,
    )


def decode_offer(body: bytes | bytearray | memoryview) -> tuple[Offer, bytes]:
    """The offer and what the payload road announced. Raises `FrameError`."""
    lease_id, generation, push_id, first, lengths, source, destination, checksums, announced = decode_fields(
        body, str, int, int, int, bytes, str, str, bytes, bytes
    )
    sizes, sums = decode_numbers(lengths), decode_numbers(checksums)
    if not len(sizes) or (len(sums) and len(sums) != len(sizes)):
        raise FrameError("an offer whose lengths and checksums do not fit together")
    if check_names(lease_id, source, destination) or np.count_nonzero(sizes.array) < len(sizes):
        raise FrameError("an offer with an overlong name or an empty span")
    return Offer(LeaseKey(lease_id, generation), push_id, first, sizes, source, destination, sums), announced


def decode_numbers(raw: bytes) -> Numbers:
    """Raises `FrameError` for too many, or for bytes that are no numbers."""
    if not raw:
        return NO_NUMBERS
    if len(raw) > MAX_SPANS * 8:
        raise FrameError(f"a list of {len(raw)} bytes, at most {MAX_SPANS} numbers are read")
    try:
        return Numbers.unpack(raw)
    except ValueError as error:
        raise FrameError(f"not a list of numbers: {error}") from error


def decode_counts(raw: bytes, total: int) -> Numbers:
    """Numbers from 1 that add up to `total`. Raises `FrameError`."""
    counts = decode_numbers(raw)
    within = len(counts) and int(counts.array.min()) > 0 and int(counts.array.max()) <= MAX_SPANS
    if not within or counts.sum() != total:
        raise FrameError(f"counts that do not add up to the {total} spans of the push")
    return counts
