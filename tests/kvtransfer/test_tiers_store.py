"""Both tiers as one store: round trips through them, loads that end early, and a disk thread that hangs or dies."""

from __future__ import annotations

import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import kvtransfer.tiers
from kvtransfer.tiers.block_file import HEADER_BYTES
from kvtransfer.tiers.faults import TierFault
from kvtransfer.tiers.store import STAGING_BLOCKS, TierStore
from kvtransfer.tiers.types import TierSettings

SIZE = 1024
HOST_BLOCKS = 10
WAIT_S = 20.0


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> memoryview:
    return memoryview(bytes((number * 7 + i) % 251 for i in range(SIZE)))


class Rig:
    """A store with its real thread, and a clock that only tests move."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.bell = threading.Event()
        self.now = 100.0
        sizes = {"host_bytes": HOST_BLOCKS * SIZE, "disk_bytes": 1 << 20}
        made = TierSettings(disk_path=str(folder), **sizes | settings)  # type: ignore[arg-type]
        self.store = TierStore(SIZE, made, fingerprint="m", clock=lambda: self.now, wake=self.bell.set)
        self.until(self.store._disk.__class__.answering.fget)  # type: ignore[union-attr,attr-defined]

    def until(self, happened: Callable[[object], object]) -> None:
        """Until it holds of the disk tier."""
        disk = self.store._disk
        ends_s = time.monotonic() + WAIT_S
        while not happened(disk):
            assert time.monotonic() < ends_s, "it does not happen"
            self.bell.wait(0.05)
            self.bell.clear()
            self.store.poll(self.now)
            self.store.check()

    def settled(self) -> None:
        self.until(lambda disk: not self.store.busy())

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.store.put(key(number), block(number))
            self.settled()

    def load(self, numbers: Sequence[int], most: int = 3) -> list[bytes]:
        got: list[bytes] = []
        number = self.store.open([key(one) for one in numbers], self.now + 1.0)

        def write(index: int, data: memoryview) -> None:
            assert index == len(got), "in order"
            got.append(bytes(data))

        def over(disk: object) -> bool:
            while self.store.deliver(number, write, most):
                pass
            return self.store.ended(number)

        self.until(over)
        assert self.store.delivered(number) == len(got)
        self.store.close(number)
        return got


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "kv")
    yield made
    made.store.faults.clear()
    made.settled()
    made.store.check()
    made.store.shutdown()


def of(rig: Rig, tier: str) -> object:
    return next(one for one in rig.store.counters() if one.name == tier)


def test_the_packages_own_example_works_word_for_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (kvtransfer.tiers.__doc__ or "").splitlines()
    names: dict[str, object] = {"folder": str(tmp_path)}
    exec(textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line)), names)
    assert names["got"] == [b"v" * 4096]
    assert capsys.readouterr().out == "('host',)\n"


def test_a_block_of_another_size_or_a_key_that_no_file_could_hold_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="1024 bytes, not 1023"):
        rig.store.put(key(1), block(1)[:-1])
    for wrong in (b"", b"k" * 65):
        with pytest.raises(ValueError, match="1 to 64 bytes"):
            rig.store.put(wrong, block(1))


def test_what_is_put_comes_back_from_wherever_it_is(rig: Rig) -> None:
    numbers = list(range(40))
    rig.put(*numbers)
    where = rig.store.where(map(key, numbers))
    assert set(where) == {"host", "disk"}
    assert len(where) == 40, "nothing was lost: there was time to write behind"
    assert where.count("host") <= HOST_BLOCKS
    assert rig.load(numbers) == [bytes(block(number)) for number in numbers]
    assert rig.load([3, 39, 7]) == [bytes(block(number)) for number in (3, 39, 7)]
    host, disk = of(rig, "host"), of(rig, "disk")
    assert host.hits + disk.hits == 43  # type: ignore[attr-defined]
    assert host.misses == disk.misses == host.failed == disk.failed == 0  # type: ignore[attr-defined]


def test_a_block_that_a_lagging_disk_has_no_place_for_yet_is_counted_as_dropped(rig: Rig) -> None:
    rig.put(*range(40))
    host = of(rig, "host")
    assert host.evicted >= 30  # type: ignore[attr-defined]
    assert host.dropped == 0, "all went to disk"  # type: ignore[attr-defined]
    rig.store.faults.add("write", TierFault.DELAY)
    for number in range(40, 80):
        assert rig.store.put(key(number), block(number))
    gone = [number for number in range(80) if key(number) not in rig.store]
    assert host.dropped == len(gone) > 0  # type: ignore[attr-defined]


def test_what_leaves_the_disk_is_dropped_only_where_host_memory_has_it_no_more(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk_bytes=2 * (HEADER_BYTES + SIZE))
    rig.store.faults.add("write", TierFault.DELAY)
    for number in range(HOST_BLOCKS):
        assert rig.store.put(key(number), block(number))
    rig.store.touch(key(0))  # on its way to disk: it is to stay here too
    rig.store.faults.clear()
    rig.settled()
    disk = of(rig, "disk")
    assert (disk.stored, disk.evicted) == (2, 0)  # type: ignore[attr-defined]
    rig.put(10)
    assert rig.store.where([key(0)]) == ("host",)
    assert key(1) not in rig.store
    assert (disk.evicted, disk.dropped) == (2, 1)  # type: ignore[attr-defined]
    rig.put(*range(11, 60))
    gone = [number for number in range(60) if key(number) not in rig.store]
    assert sum(one.dropped for one in rig.store.counters()) == len(gone)
    rig.store.shutdown()


def test_a_load_ends_at_the_block_that_fails_and_counts_what_did_not_come(rig: Rig) -> None:
    rig.put(*range(30))
    rig.store.faults.add("read", TierFault.FAIL, 4)
    assert rig.load(range(10)) == [bytes(block(number)) for number in range(3)]
    disk = of(rig, "disk")
    assert (disk.hits, disk.misses, disk.failed) == (3, 7, 1)  # type: ignore[attr-defined]
    assert rig.load([0, 1, 2]) == [bytes(block(number)) for number in range(3)]


def test_a_block_that_changed_in_host_memory_is_not_delivered(rig: Rig) -> None:
    rig.put(0, 1, 2)
    rig.store.faults.add("put", TierFault.CORRUPT)
    rig.put(3)
    assert rig.load(range(4)) == [bytes(block(number)) for number in range(3)]
    assert len(rig.store.where([key(3)])) == 0
    assert of(rig, "host").failed == 1  # type: ignore[attr-defined]


def test_a_disk_that_hangs_is_not_asked_again_until_it_answers(rig: Rig) -> None:
    rig.put(*range(30))
    rig.store.faults.add("read", TierFault.DELAY)
    number = rig.store.open([key(0), key(1)], rig.now + 1.0)
    assert rig.store.deliver(number, lambda index, data: None, 2) == 0
    rig.now += 1.5
    rig.store.poll(rig.now)
    assert rig.store.where([key(2)]) == ()
    assert rig.store.where([key(29)]) == ("host",)
    rig.store.close(number)
    assert len(rig.store._free_staging) < STAGING_BLOCKS, "the thread may still write there"
    rig.store.faults.clear()
    rig.settled()
    assert rig.load([0, 1]) == [bytes(block(0)), bytes(block(1))]
    assert of(rig, "disk").failed >= 1  # type: ignore[attr-defined]


def test_a_thread_that_dies_costs_what_it_had_and_another_takes_over(rig: Rig) -> None:
    rig.put(*range(30))
    rig.store.faults.add("read", TierFault.DIE)
    assert rig.load(range(4)) == []
    assert rig.store.where([key(0)]) == ()
    rig.now += 1.0
    rig.until(lambda disk: disk.answering)  # type: ignore[attr-defined]
    assert rig.load(range(4)) == [bytes(block(number)) for number in range(4)]


def test_a_thread_that_dies_writing_loses_no_host_block(rig: Rig) -> None:
    rig.put(*range(HOST_BLOCKS - 1))
    rig.store.faults.add("write", TierFault.DIE)
    rig.store.put(key(HOST_BLOCKS - 1), block(HOST_BLOCKS - 1))
    rig.until(lambda disk: not disk.answering)  # type: ignore[attr-defined]
    rig.store.poll(rig.now)
    rig.now += 1.0
    rig.settled()
    assert rig.load(range(HOST_BLOCKS)) == [bytes(block(number)) for number in range(HOST_BLOCKS)]


def test_what_is_forgotten_is_not_delivered_even_to_a_load_that_waits_for_it(rig: Rig) -> None:
    rig.put(*range(30))
    got: list[int] = []
    number = rig.store.open([key(28), key(29), key(0)], rig.now + 1.0)
    rig.store.forget([key(29), key(0)])
    rig.store.deliver(number, lambda index, data: got.append(index), 9)
    assert got == [0]
    assert rig.store.ended(number)
    rig.store.close(number)
    assert rig.store.where([key(0)]) == rig.store.where([key(29)]) == ()


def test_changes_are_told_as_their_net_effect(rig: Rig) -> None:
    rig.put(*range(30))
    known: dict[bytes, str] = {}

    def hear() -> None:
        changes = rig.store.drain_changes()
        for tier, (_, removed) in changes.items():
            for gone in removed:
                assert known.pop(gone) == tier
        for tier, (stored, _) in changes.items():
            for new in stored:
                assert known.setdefault(new, tier) == tier
        assert all(rig.store.where([one]) == (tier,) for one, tier in known.items())

    hear()
    assert sorted(known) == [key(number) for number in range(30)]
    assert {"host", "disk"} == set(known.values())
    rig.store.forget([key(2), key(28)])
    rig.put(50)
    hear()
    assert sorted(known) == [key(number) for number in range(30) if number not in (2, 28)] + [key(50)]
    rig.store.clear()
    rig.settled()
    hear()
    assert not known
    assert rig.store.drain_changes() == {}


def test_the_disk_tier_of_a_store_outlives_it(tmp_path: Path) -> None:
    first = Rig(tmp_path)
    first.put(*range(30))
    first.store.shutdown()
    second = Rig(tmp_path)
    kept = second.store.where(map(key, range(30)))
    assert len(kept) > 15
    assert second.load(range(len(kept))) == [bytes(block(number)) for number in range(len(kept))]
    second.store.shutdown()
