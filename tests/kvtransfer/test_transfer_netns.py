"""A real link that goes down, or is slow: the destination lives in a network namespace behind a veth pair.

Payload over UCX is held to TCP here, since processes of one host would read each other's memory beside the link. One
link serves all tests, because UCX asks for the routes of a process once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from netns_peer import BLOCK_BYTES, BLOCKS_PER_LEASE, LEASES, lease
from transfer_rig import Rig

from kvtransfer.select import make_transport, ucx_available
from kvtransfer.types import LeaseKey, PushDone, PushFailed, Quiet, Received

HERE, THERE = "10.213.77.1", "10.213.77.2"
HEARTBEAT_S = 1.0
"""The bound after which a push that is not acknowledged counts as failed, as the node services set it."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


class Link:
    """A namespace of its own, joined to this one by a veth pair that can be cut and slowed."""

    def __init__(self) -> None:
        self.name = f"kv-{os.getpid()}"
        self.near, self.far = f"kvn{os.getpid() % 100_000}", f"kvf{os.getpid() % 100_000}"

    def make(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.name)
        ip("addr", "add", f"{HERE}/30", "dev", self.near)
        ip("-n", self.name, "addr", "add", f"{THERE}/30", "dev", self.far)
        ip("-n", self.name, "link", "set", self.far, "up")
        self.up()

    def up(self) -> None:
        ip("link", "set", self.near, "up")

    def down(self) -> None:
        ip("link", "set", self.near, "down")

    def slow(self, rate: str) -> None:
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", self.near, *shape], check=True, capture_output=True, timeout=10)

    def mend(self) -> None:
        subprocess.run(["tc", "qdisc", "del", "dev", self.near, "root"], check=False, capture_output=True, timeout=10)
        self.up()

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True, timeout=10)
        subprocess.run(["ip", "link", "del", self.near], check=False, capture_output=True, timeout=10)


class Far:
    """The destination behind the link."""

    def __init__(self, link: Link, transport: str) -> None:
        script = str(Path(__file__).with_name("netns_peer.py"))
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", link.name, sys.executable, script, transport, THERE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.address = bytes.fromhex(self._hear())

    def do(self, line: str) -> dict[str, int]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer: dict[str, int] = json.loads(self._hear())
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the far peer ended with {self.process.wait()}"
        return line.strip()


@pytest.fixture(scope="module")
def one_link() -> Iterator[Link]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("no ip and tc (iproute2) here")
    link = Link()
    try:
        link.make()
    except (subprocess.SubprocessError, OSError) as error:
        link.remove()
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}".strip())
    yield link
    link.remove()


@pytest.fixture
def link(one_link: Link) -> Iterator[Link]:
    yield one_link
    one_link.mend()


@pytest.fixture(params=["tcp", "ucx"])
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    usable, why = ucx_available()
    if request.param == "ucx" and not usable:
        pytest.skip(why)
    monkeypatch.setenv("UCX_TLS", "tcp")
    return str(request.param)


class Pairs:
    """One source with a destination behind the link, and a neighbour beside it that must not notice anything."""

    def __init__(self, link: Link, scheme: str) -> None:
        self.rig = Rig("tcp")
        self.scheme = scheme
        self.far = Far(link, scheme)
        self.source = self.rig.peer("prefill-0#1", region_bytes=LEASES * BLOCKS_PER_LEASE * BLOCK_BYTES)
        self.neighbour = self.rig.peer("decode-1#1", region_bytes=LEASES * BLOCKS_PER_LEASE * BLOCK_BYTES)
        self.rig.connect(self.source, self.neighbour)
        region = memoryview(self.source.memory)
        other = make_transport(scheme, "prefill-0#1", region, host=HERE)
        self.over_link = self.rig.adopt("prefill-0#1", self.source.memory, other)
        self.over_link.engine.connect("decode-0#1", scheme, self.far.address)
        self._served = 0

    def push(self, number: int, generation: int, deadline_s: float | None = HEARTBEAT_S) -> LeaseKey:
        key = LeaseKey(str(number), generation)
        self.over_link.engine.push(key, "decode-0#1", 0, lease(number), deadline_s=deadline_s)
        return key

    def neighbour_is_served(self) -> float:
        """Seconds that a lease of the other pair took."""
        self._served += 1
        key = LeaseKey("neighbour", self._served)
        self.neighbour.engine.open(key, self.source.name, lease(0))
        start_s = time.monotonic()
        self.source.engine.push(key, self.neighbour.name, 0, lease(0))
        self.rig.until(lambda: self.source.saw(PushDone, key) and self.neighbour.saw(Received, key))
        took_s = time.monotonic() - start_s
        self.neighbour.engine.close(key)
        self.rig.until(lambda: self.neighbour.saw(Quiet, key))
        assert self.neighbour.bytes_of(lease(0)) == self.source.bytes_of(lease(0))
        return took_s

    def close(self) -> None:
        self.far.close()
        self.rig.close()


@pytest.fixture
def pairs(link: Link, scheme: str) -> Iterator[Pairs]:
    pairs = Pairs(link, scheme)
    yield pairs
    pairs.close()


def test_a_cut_link_is_seen_within_the_heartbeat_costs_its_pair_only_and_heals(link: Link, pairs: Pairs) -> None:
    source = pairs.over_link
    first = pairs.push(0, 1, deadline_s=None)
    pairs.rig.until(lambda: source.saw(PushDone, first))
    assert pairs.far.do(f"wait {BLOCKS_PER_LEASE}")["received"] == BLOCKS_PER_LEASE
    link.down()
    start_s = time.monotonic()
    lost = pairs.push(1, 1)
    assert pairs.neighbour_is_served() < HEARTBEAT_S
    pairs.rig.until(lambda: source.saw(PushFailed, lost), alarm_s=HEARTBEAT_S)
    assert time.monotonic() - start_s < HEARTBEAT_S + 1.0
    source.engine.cut("decode-0#1")
    source.engine.withdraw(lost)
    pairs.rig.until(lambda: source.saw(Quiet, lost))
    assert source.engine.in_flight() == 0
    ended = pairs.far.do("end")
    assert (ended["free"], ended["in_flight"]) == (ended["total"], 0)

    link.up()
    pairs.far.do("reopen")
    pairs.rig.until(lambda: source.engine.cooling_s("decode-0#1") == 0, alarm_s=0.6)
    source.engine.connect("decode-0#1", pairs.scheme, pairs.far.address)
    again = pairs.push(1, 2, deadline_s=None)
    pairs.rig.until(lambda: source.saw(PushDone, again))
    assert pairs.far.do(f"wait {2 * BLOCKS_PER_LEASE}")["received"] == 2 * BLOCKS_PER_LEASE


def test_a_slow_link_delays_its_pair_only_and_ends_what_misses_its_deadline(link: Link, pairs: Pairs) -> None:
    source = pairs.over_link
    first = pairs.push(0, 1, deadline_s=None)
    pairs.rig.until(lambda: source.saw(PushDone, first))
    link.slow("8mbit")
    start_s = time.monotonic()
    slow = pairs.push(1, 1, deadline_s=None)
    assert pairs.neighbour_is_served() < 0.4, "512 KiB beside a link on which they take half a second"
    pairs.rig.until(lambda: source.saw(PushDone, slow))
    assert time.monotonic() - start_s > 0.3
    late = pairs.push(2, 1, deadline_s=0.1)
    pairs.rig.until(lambda: source.saw(PushFailed, late), alarm_s=0.1)
    source.engine.withdraw(late)
    source.engine.cut("decode-0#1")
    pairs.rig.until(lambda: source.saw(Quiet, late))
    assert source.engine.in_flight() == 0
    ended = pairs.far.do("end")
    assert (ended["free"], ended["in_flight"]) == (ended["total"], 0)
