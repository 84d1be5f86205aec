"""What lies on disk: one file per block, a header of 256 bytes and then the block.

A file is written under a temporary name and renamed when it is whole, so a name means a block that was written to its
end. The header tells the format's version, whose block it is (a fingerprint of model and layout) and a checksum of
itself and of the block; a file that does not agree with all of it is `Damaged`, whatever the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from kvtransfer.checksum import checksum

MAGIC = b"KVBLOCK\n"
VERSION = 1
HEADER_BYTES = 256
MOST_KEY_BYTES = 64
SUFFIX = ".kv"
TEMPORARY = ".tmp"

_OURS_ONLY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A block's file is a regular one: a link in its place is not followed, and a pipe not waited for."""
_HEADER = struct.Struct("<8sII32sH64sQQ")
_SEAL = struct.Struct("<Q")
_FOLDER = re.compile("[0-9a-f]{2}")
_NAME = re.compile(rf"([0-9a-f]{{2}}){{1,{MOST_KEY_BYTES}}}({re.escape(SUFFIX)}|{re.escape(TEMPORARY)})")


class Damaged(Exception):
    """A file that is not the block it should be."""


def digest_of(fingerprint: str) -> bytes:
    """32 bytes that stand for a fingerprint."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=32).digest()


def path_of(root: Path, key: bytes) -> Path:
    name = key.hex()
    return root / name[:2] / (name + SUFFIX)


def write(root: Path, key: bytes, data: memoryview, digest: int, fingerprint: bytes, *, fsync: bool) -> None:
    """Publish a block whose XXH3-64 is `digest`. Raises OSError, and leaves nothing half done under the key's name."""
    path = path_of(root, key)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(TEMPORARY)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OURS_ONLY, 0o600)
    try:
        try:
            _write_all(descriptor, _header(key, len(data), digest, fingerprint), data)
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise
    if fsync:
        _sync_folder(path.parent)


def read(root: Path, key: bytes, into: memoryview, fingerprint: bytes) -> None:
    """Fill `into` with the key's block, verified. Raises Damaged or OSError; then `into` may hold anything."""
    header = bytearray(HEADER_BYTES)
    descriptor = os.open(path_of(root, key), os.O_RDONLY | _OURS_ONLY)
    try:
        _read_all(descriptor, header, into)
        if os.fstat(descriptor).st_size != HEADER_BYTES + len(into):
            raise Damaged("has another length than its block")
    finally:
        os.close(descriptor)
    found, length, digest = _parsed(bytes(header), fingerprint)
    if found != key or length != len(into):
        raise Damaged("holds another block")
    if checksum(into) != digest:
        raise Damaged("has another checksum than its header says")


def expect(root: Path, key: bytes) -> None:
    """Have the system begin to read the file, without waiting. Never raises OSError.

    A few files ahead this made cold reads of 360 KiB blocks 1.6 times faster (1.1 instead of 0.65 GB/s), as much as
    direct I/O or four threads did, and keeps the system's cache.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path_of(root, key), os.O_RDONLY | _OURS_ONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def scan(root: Path, block_bytes: int, fingerprint: bytes) -> Iterator[bytes]:
    """Keys of the blocks below `root` that may be served, the one used longest ago first; removes all other files of
    the tier, and nothing that the tier cannot have written. Headers are checked here, contents when they are read."""
    found: list[tuple[float, bytes]] = []
    for path in _files(root):
        try:
            found.append((path.stat().st_mtime, _served_key(path, block_bytes, fingerprint)))
        except (Damaged, OSError):
            _unlink(path)
    return (key for _, key in sorted(found))


def _files(root: Path) -> Iterator[Path]:
    """Regular files under the names that `write` gives, in folders that are no links."""
    for folder in list(os.scandir(root)):
        if _FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
            yield from [Path(entry) for entry in os.scandir(folder) if _is_ours(folder.name, entry)]


def _is_ours(folder: str, entry: os.DirEntry[str]) -> bool:
    named = entry.name.startswith(folder) and _NAME.fullmatch(entry.name) is not None
    return named and entry.is_file(follow_symlinks=False)


def remove(root: Path, key: bytes) -> None:
    _unlink(path_of(root, key))


def note_use(root: Path, key: bytes) -> None:
    """So that a scan after a restart knows what was used last. Never raises OSError."""
    try:
        os.utime(path_of(root, key))
    except OSError:
        return


def _header(key: bytes, length: int, digest: int, fingerprint: bytes) -> bytes:
    fields = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, fingerprint, len(key), key, length, digest)
    body = fields.ljust(HEADER_BYTES - _SEAL.size, b"\0")
    return body + _SEAL.pack(checksum(body))


def _parsed(header: bytes, fingerprint: bytes) -> tuple[bytes, int, int]:
    """Key, length and checksum of the block. Raises Damaged."""
    body, seal = header[: -_SEAL.size], header[-_SEAL.size :]
    magic, version, size, whose, key_bytes, key, length, digest = _HEADER.unpack_from(body)
    if magic != MAGIC or version != VERSION or size != HEADER_BYTES or _SEAL.pack(checksum(body)) != seal:
        raise Damaged("has no header of this version")
    if whose != fingerprint:
        raise Damaged("belongs to another model or layout")
    return key[:key_bytes], length, digest


def _served_key(path: Path, block_bytes: int, fingerprint: bytes) -> bytes:
    header = bytearray(HEADER_BYTES)
    with open(os.open(path, os.O_RDONLY | _OURS_ONLY), "rb", buffering=0) as file:
        if file.readinto(header) != HEADER_BYTES:
            raise Damaged("ends within its header")
        size = os.fstat(file.fileno()).st_size
    key, length, _ = _parsed(bytes(header), fingerprint)
    if path.name != key.hex() + SUFFIX or length != block_bytes or size != HEADER_BYTES + block_bytes:
        raise Damaged("is not the block its name says")
    return key


def _write_all(descriptor: int, header: bytes, data: memoryview) -> None:
    written = os.writev(descriptor, [header, data])
    while written < len(header) + len(data):  # a signal, or a disk about to be full: the next write says which
        written += os.pwrite(descriptor, (header + bytes(data))[written:], written)


def _read_all(descriptor: int, header: bytearray, into: memoryview) -> None:
    whole = len(header) + len(into)
    done = os.preadv(descriptor, [header, into], 0)
    while len(header) <= done < whole:
        more = os.preadv(descriptor, [into[done - len(header) :]], done)
        if not more:
            break
        done += more
    if done < whole:
        raise Damaged("ends too early")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # It stays, is never served, and the next scan tries again.
        return
