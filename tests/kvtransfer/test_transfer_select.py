"""Which transports exist, which one is chosen, and what they leave open on this machine."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import kvtransfer
from kvtransfer import select
from kvtransfer.engine import TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.handshake import UNIX, WiredAddress, new_token
from kvtransfer.memory import SharedMemory
from kvtransfer.select import choose, make_transport, ucx_available
from kvtransfer.transport import Refused
from kvtransfer.types import LeaseKey, PeerLost, PushDone, Span

LISTENING = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_the_best_common_scheme_is_chosen():
    theirs = {"inproc": b"", "tcp": b"", "ucx": b""}
    assert choose(["inproc", "ucx", "tcp"], theirs) == "inproc"
    assert choose(["ucx", "tcp"], theirs) == "ucx"
    assert choose(["tcp", "ucx"], theirs) == "tcp", "the order is ours"
    assert choose(["shm", "tcp"], theirs) == "tcp"


def test_the_packages_own_example_works_word_for_word(capsys):
    example = "\n".join(line for line in (kvtransfer.__doc__ or "").splitlines() if line.startswith("    ") or not line)
    exec(textwrap.dedent(example), {})
    assert [line.count("(key=LeaseKey(") for line in capsys.readouterr().out.splitlines()] == [2, 2]


@pytest.mark.parametrize(
    ("region", "why"),
    [
        (np.zeros(64, np.float32).data, "single bytes"),
        (np.zeros((8, 64), np.uint8).data, "single bytes"),
        (np.zeros(64, np.uint8)[::2].data, "contiguous"),
        (memoryview(bytes(64)), "writable"),
        (bytearray(64), "memoryview"),
        (np.zeros(64, np.uint8), "memoryview"),
    ],
)
def test_a_region_whose_offsets_are_no_bytes_or_that_cannot_be_written_is_refused(region, why):
    with pytest.raises(TransferError, match=why):
        make_transport("tcp", "decode-0#1", region)
    with pytest.raises(TransferError, match=why):
        TransferEngine("decode-0#1", region, [])


def test_shm_is_chosen_only_between_processes_of_one_host_and_user():
    region = memoryview(SharedMemory(4_096))
    transport = make_transport("shm", "decode-0#1", region)
    transport.start(lambda offer: Refused("no"), lambda: None)
    here = transport.address()
    transport.close()
    elsewhere = WiredAddress("shm", UNIX + "0123456789abcdef/name", 0, new_token()).pack()
    assert choose(["shm", "tcp"], {"shm": here, "tcp": b""}) == "shm"
    assert choose(["shm", "tcp"], {"shm": elsewhere, "tcp": b""}) == "tcp"
    assert choose(["shm", "tcp"], {"shm": b"nonsense", "tcp": b""}) == "tcp"
    with pytest.raises(TransferError, match="shm on another host"):
        choose(["shm"], {"shm": elsewhere})


@pytest.mark.skipif(not ucx_available()[0], reason="no ucxx here")
def test_a_ucxx_that_imports_but_lacks_a_call_that_is_needed_counts_as_absent(monkeypatch):
    monkeypatch.setattr(select, "_UCXX_NEEDED", (("UCXAddress", "tobytes"), ("UCXAddress", "read_minds")))
    usable, why = ucx_available()
    assert not usable
    assert "lacks UCXAddress.read_minds" in why
    with pytest.raises(TransferError, match="read_minds"):
        make_transport("ucx", "decode-0#1", memoryview(SharedMemory(4_096)))


@pytest.mark.parametrize(("theirs", "ours"), [("tcp", "shm"), ("shm", "tcp"), ("tcp", "ucx")])
def test_an_address_of_another_transport_is_refused_when_it_is_connected(theirs, ours):
    if ours == "ucx" and not ucx_available()[0]:
        pytest.skip("no ucxx here")
    region = memoryview(SharedMemory(4_096))
    engines = {
        scheme: TransferEngine(f"{scheme}#1", region, [make_transport(scheme, f"{scheme}#1", region)])
        for scheme in (theirs, ours)
    }
    address = dict(engines[theirs].addresses())[theirs]
    with pytest.raises(TransferError, match=f"an address of the transport {theirs}, not of {ours}"):
        engines[ours].connect(f"{theirs}#1", ours, address)
    with pytest.raises(TransferError, match="not connected"):
        engines[ours].push(LeaseKey("request-1", 1), f"{theirs}#1", 0, [Span(0, 64)])
    for engine in engines.values():
        engine.shutdown()


def test_no_common_scheme_names_both_sides():
    with pytest.raises(TransferError, match=r"here \['tcp'\], there \['ucx'\]"):
        choose(["tcp"], {"ucx": b""})


@pytest.mark.parametrize(
    ("scheme", "host", "reason"),
    [
        ("pigeon", "127.0.0.1", "no transport 'pigeon'"),
        ("inproc", "127.0.0.1", "needs the hub"),
        ("shm", "127.0.0.1", "needs a region that is shared memory"),
        ("tcp", "localhost", "IP addresses"),
        ("tcp", "203.0.113.7", "cannot listen"),
    ],
)
def test_a_transport_that_cannot_be_had_says_why(scheme, host, reason):
    with pytest.raises(TransferError, match=reason):
        make_transport(scheme, "decode-0#1", memoryview(bytearray(8)), host=host)


def test_without_ucxx_the_reason_and_the_remedy_are_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvtransfer.ucx", None)
    usable, why = ucx_available()
    assert not usable
    assert "install ucxx" in why
    with pytest.raises(TransferError, match="install ucxx"):
        make_transport("ucx", "decode-0#1", memoryview(bytearray(8)))


def test_choosing_does_not_import_ucxx():
    code = "import sys, kvtransfer.engine, kvtransfer.select; print('ucxx' in sys.modules, 'torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "False False\n"


def test_a_transport_listens_on_loopback_only(rig):
    before = listeners()
    source, destination = rig.pair()
    destination.engine.open(LeaseKey("request-1", 1), source.name, [Span(0, 64)])
    source.engine.push(LeaseKey("request-1", 1), destination.name, 0, [Span(0, 64)])
    rig.until(lambda: source.saw(PushDone))
    ours = listeners() - before
    assert rig.scheme in ("inproc", "shm") or ours
    assert all(address in LOOPBACK for _, address in ours), f"listeners beyond loopback: {ours}"


def test_links_that_ended_leave_no_descriptors(rig):
    source = rig.peer("prefill-0#1")
    counts = []
    for incarnation in range(4):
        destination = rig.peer(f"decode-0#{incarnation}")
        rig.connect(source, destination)
        key = LeaseKey("request", incarnation)
        destination.engine.open(key, source.name, [Span(0, 64)])
        source.engine.push(key, destination.name, 0, [Span(0, 64)])
        rig.until(lambda key=key: source.saw(PushDone, key))
        rig.peers.pop(destination.name).engine.shutdown()
        rig.until(lambda lost=incarnation + 1: len(source.saw(PeerLost)) == lost)
        del destination
        gc.collect()  # its memory has descriptors of its own
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[1], f"open descriptors after each link: {counts}"


def listeners() -> set[tuple[str, str]]:
    """(inode, local address) of each TCP socket of this process that listens."""
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_socket(fd)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in mine:
                found.add((fields[9], fields[1].split(":")[0]))
    return found


def _is_socket(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except FileNotFoundError:
        return False
