"""Memory that a peer may read: what the seals keep it from, and what a reader insists on."""

from __future__ import annotations

import mmap
import os
import socket
from array import array

import pytest
from transfer_rig import Rig

from kvtransfer import frames, handshake
from kvtransfer.errors import TransferError
from kvtransfer.frames import Kind
from kvtransfer.handshake import WiredAddress
from kvtransfer.memory import SharedMemory, descriptor_of, map_readable
from kvtransfer.packing import pack
from kvtransfer.types import LeaseKey, PushDone, Received, Span

KEY = LeaseKey("request-1", 1)


def test_a_reader_sees_what_the_owner_writes_and_cannot_write_shrink_or_grow_it():
    memory = SharedMemory(8_192)
    reader = map_readable(memory.fileno(), 8_192)
    memory[100:103] = b"abc"
    assert reader[100:103] == b"abc"
    with pytest.raises(TypeError):
        reader[0] = 1
    with pytest.raises(OSError):
        mmap.mmap(memory.fileno(), 8_192)
    for size in (0, 4_096, 16_384):
        with pytest.raises(OSError):
            os.ftruncate(memory.fileno(), size)
    with pytest.raises(OSError):
        os.pwrite(memory.fileno(), b"x", 0)


def test_what_a_reader_has_mapped_outlives_the_owner():
    memory = SharedMemory(4_096)
    memory[:3] = b"abc"
    reader = map_readable(memory.fileno(), 4_096)
    memory.close()
    del memory
    assert reader[:3] == b"abc"


def test_a_file_that_could_shrink_or_has_another_size_is_not_mapped():
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4_096)
    memory = SharedMemory(4_096)
    try:
        for descriptor, size in ((loose, 4_096), (memory.fileno(), 8_192)):
            with pytest.raises(TransferError, match="not sealed, or not of"):
                map_readable(descriptor, size)
    finally:
        os.close(loose)
    with pytest.raises(TransferError, match="cannot be mapped"):
        map_readable(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)


def test_only_a_view_of_the_whole_memory_is_shareable():
    memory = SharedMemory(4_096)
    assert descriptor_of(memoryview(memory)) == memory.fileno()
    assert descriptor_of(memoryview(memory)[:100]) is None
    assert descriptor_of(memoryview(bytearray(16))) is None


def greeted(rig: Rig, descriptor: int | None, size: int) -> socket.socket:
    """A peer that knows the token and hands over this descriptor; what the destination answers is up to the test."""
    destination = rig.peer("decode-0#1")
    address = WiredAddress.unpack(destination.engine.addresses()[0][1])
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(address.where)
    header = frames.decode_header(sock.recv(frames.HEADER_BYTES, socket.MSG_WAITALL))
    (challenge,) = frames.decode_fields(sock.recv(header.length, socket.MSG_WAITALL), bytes)
    nonce, blob = handshake.new_nonce(), pack(size)
    proof = handshake.proof(address.token, "hello", challenge, nonce, "prefill-9#1", "decode-0#1", blob)
    hello = frames.encode(Kind.HELLO, 0, nonce, "prefill-9#1", "decode-0#1", "shm", blob, proof)
    rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]).tobytes())]
    sock.sendmsg([hello], rights)
    return sock


@pytest.fixture
def shm():
    rig = Rig("shm")
    yield rig
    rig.close()


def test_a_greeting_with_memory_that_could_shrink_ends_its_link_and_leaves_no_descriptor(shm):
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4_096)
    with greeted(shm, loose, 4_096) as sock:
        assert sock.recv(1) == b"", "hung up without a welcome"
    assert links_to("memfd:loose") == 1, "ours"
    os.close(loose)


def links_to(name: str) -> int:
    """Open descriptors of this process with that name."""
    return sum(name in os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path))


def test_an_offer_of_bytes_outside_the_pool_that_was_handed_over_ends_its_link(shm):
    memory = SharedMemory(4_096)
    with greeted(shm, memory.fileno(), 4_096) as sock:
        header = frames.decode_header(sock.recv(frames.HEADER_BYTES, socket.MSG_WAITALL))
        assert header.kind is Kind.WELCOME
        sock.recv(header.length, socket.MSG_WAITALL)
        destination = shm.peers["decode-0#1"]
        destination.engine.open(KEY, "prefill-9#1", [Span(0, 64)])
        before = destination.memory.copy()
        lengths = frames.Numbers([64])
        offer = frames.Offer(KEY, 1, 0, lengths, "prefill-9#1", "decode-0#1")
        sock.sendall(frames.encode_offer(1, offer, frames.Numbers([4_090]).pack()))
        assert sock.recv(1) == b""
        assert (destination.memory == before).all()


def test_neighbours_are_copied_as_one_and_long_spans_in_turns(shm):
    source, destination = shm.pair(region_bytes=20 << 20)
    reads = [Span(offset, 1_000) for offset in range(0, 9_000, 1_000)] + [Span(1 << 20, 10 << 20)]
    writes = [Span(offset, 1_000) for offset in range(50_000, 59_000, 1_000)] + [Span(2 << 20, 10 << 20)]
    destination.engine.open(KEY, source.name, writes)
    source.engine.push(KEY, destination.name, 0, reads)
    shm.until(lambda: destination.saw(Received) and source.saw(PushDone))
    assert destination.bytes_of(writes) == source.bytes_of(reads)
