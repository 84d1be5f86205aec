"""The disk tier: what is served is what was written, by the same model, whatever happened to the files or the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtransfer.checksum import checksum
from kvtransfer.tiers.block_file import HEADER_BYTES
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.faults import TierFault, TierFaults
from kvtransfer.tiers.io_thread import Inline

SIZE = 4096
ROOM = HEADER_BYTES + SIZE


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> memoryview:
    return memoryview(bytes((number * 7 + i) % 251 for i in range(SIZE)))


class Rig:
    """A tier whose work is done at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.faults = TierFaults()
        self.tier = self.opened()

    def opened(self, files: int = 8, fingerprint: str = "model 1", fsync: bool = False) -> DiskTier:
        clock = self.clock
        self.tier = DiskTier(
            self.root,
            files * ROOM,
            SIZE,
            fingerprint,
            make_io=lambda: Inline(clock),
            clock=clock,
            timeout_s=1.0,
            fsync=fsync,
            faults=self.faults,
        )
        self.turn()
        return self.tier

    def reopened(self, **settings: object) -> DiskTier:
        self.tier.close()
        return self.opened(**settings)  # type: ignore[arg-type]

    def turn(self) -> None:
        for _ in range(3):  # what ended may have begun something that ends too
            self.tier.poll(self.clock())
        self.tier.check()

    def write(self, number: int) -> bool:
        told: list[bool] = []
        taken = self.tier.write(key(number), block(number), checksum(block(number)), told.append)
        self.turn()
        assert len(told) == taken
        return told == [True]

    def read(self, number: int) -> bytes | None:
        told: list[bool] = []
        into = memoryview(bytearray(SIZE))
        self.tier.read(key(number), into, self.clock() + 1.0, told.append)
        self.turn()
        return bytes(into) if told == [True] else None

    def file(self, number: int) -> Path:
        return next(self.root.rglob(key(number).hex() + ".kv"))

    def files(self) -> int:
        return len(list(self.root.rglob("*.kv")))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "kv")
    yield made
    made.turn()
    assert not made.tier.busy
    made.tier.close()


@pytest.mark.parametrize("fsync", [False, True])
def test_a_block_comes_back_after_a_restart_the_last_used_last_to_go(rig: Rig, fsync: bool) -> None:
    rig.reopened(fsync=fsync)
    for number in range(4):
        assert rig.write(number)
        os.utime(rig.file(number), (number, number))
    assert rig.read(0) == bytes(block(0))
    tier = rig.reopened(files=2)
    assert len(tier) == 2
    assert rig.files() == 2
    assert key(0) in tier
    assert key(3) in tier
    assert rig.read(0) == bytes(block(0))


def test_bytes_are_bounded_and_the_least_recently_used_goes(rig: Rig) -> None:
    for number in range(8):
        assert rig.write(number)
    assert rig.read(0) == bytes(block(0))
    for number in range(8, 12):
        assert rig.write(number)
        assert rig.files() <= 8
        assert sum(path.stat().st_size for path in rig.root.rglob("*.kv")) <= 8 * ROOM
    assert key(0) in rig.tier
    assert all(key(number) not in rig.tier for number in range(1, 5))
    assert rig.tier.counters.evicted == rig.tier.counters.dropped == 4
    assert rig.tier.counters.used_bytes == 8 * ROOM


def flipped(path: Path, at: int = 300) -> None:
    data = bytearray(path.read_bytes())
    for index in range(at, at + 100):
        data[index] ^= 0xFF
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a hundred flipped bytes": flipped,
    "a flipped header": lambda path: flipped(path, 100),
    "cut short": lambda path: os.truncate(path, ROOM - 10),
    "cut within its header": lambda path: os.truncate(path, 100),
    "empty": lambda path: os.truncate(path, 0),
    "longer than it was": lambda path: os.truncate(path, ROOM + 1),
    "gone": lambda path: path.unlink(),
    "another block's bytes": lambda path: path.write_bytes(path.with_name(key(1).hex() + ".kv").read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_and_is_removed_the_others_are_served(rig: Rig, damage: str) -> None:
    for number in range(3):
        assert rig.write(number)
    DAMAGES[damage](rig.file(0))
    assert rig.read(0) is None
    assert key(0) not in rig.tier
    assert rig.files() == 2
    assert (rig.tier.counters.failed, rig.tier.counters.hits) == (1, 0)
    assert rig.read(1) == bytes(block(1))
    assert rig.write(0), "it can be stored again"
    assert rig.read(0) == bytes(block(0))


@pytest.mark.parametrize("damage", set(DAMAGES) - {"gone", "a hundred flipped bytes"})
def test_a_restart_removes_what_it_can_see_is_damaged(rig: Rig, damage: str) -> None:
    for number in range(3):
        assert rig.write(number)
    DAMAGES[damage](rig.file(0))
    rig.file(1).with_name(key(9).hex() + ".tmp").write_bytes(b"half a block")
    tier = rig.reopened()
    assert key(0) not in tier
    assert len(tier) == rig.files() == 2
    assert not list(rig.root.rglob("*.tmp"))
    assert rig.read(2) == bytes(block(2))


def test_a_restart_removes_nothing_that_the_tier_cannot_have_written(rig: Rig) -> None:
    elsewhere = rig.root.parent / "elsewhere"
    elsewhere.mkdir()
    name = key(0).hex()
    kept = [elsewhere / f"{name}.tmp", elsewhere / f"{name}.kv"]
    (rig.root / "ab").mkdir()
    kept += [rig.root / "ab" / strange for strange in ("app.kv", "notes.tmp", f"{name}.kv", "abc.kv", "AB.kv")]
    (rig.root / "my").mkdir()
    kept += [rig.root / "my" / "notes.tmp", rig.root / "my" / f"{name}.kv"]
    for path in kept:
        path.write_text("precious")
    (rig.root / "00").symlink_to(elsewhere)
    (rig.root / "ab" / "abab.kv").symlink_to(kept[0])
    assert len(rig.reopened()) == 0
    assert [path.read_text() for path in kept] == ["precious"] * len(kept)


def test_a_pipe_under_a_blocks_name_holds_nobody_up(rig: Rig) -> None:
    assert rig.write(0)
    os.mkfifo(rig.file(0).with_name(key(1).hex() + ".kv"))
    tier = rig.reopened()
    assert len(tier) == 1
    assert rig.write(1), "it stands there no longer"
    rig.file(0).unlink()
    os.mkfifo(rig.root / "00" / (key(0).hex() + ".kv"))
    assert rig.read(0) is None
    assert rig.read(1) == bytes(block(1))


def test_another_models_files_are_never_served_and_are_removed(rig: Rig) -> None:
    assert rig.write(0)
    tier = rig.reopened(fingerprint="model 2")
    assert len(tier) == rig.files() == 0
    assert rig.read(0) is None


def test_a_file_changed_to_another_models_while_it_is_open_is_not_served(rig: Rig) -> None:
    assert rig.write(0)
    foreign = Rig(rig.root.parent / "other")
    foreign.reopened(fingerprint="model 2")
    assert foreign.write(0)
    rig.file(0).write_bytes(foreign.file(0).read_bytes())
    assert rig.read(0) is None
    foreign.tier.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_rests_longer_each_time_and_is_used_again(
    rig: Rig, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert rig.write(0)
    rig.faults.add("write", TierFault.FAIL, count=2, code=code)
    assert not rig.write(1)
    assert rig.read(0) == bytes(block(0)), "what is there is served meanwhile"
    assert not rig.tier.takes_writes
    rig.clock.now += 0.6
    assert not rig.write(1)
    rig.clock.now += 0.6
    assert not rig.tier.takes_writes, "the second rest is longer"
    rig.clock.now += 0.6
    assert rig.write(1)
    assert rig.tier.counters.failed == 2
    assert rig.files() == 2
    assert not list(rig.root.rglob("*.tmp"))
    assert len([line for line in caplog.records if os.strerror(code) in line.message]) == 1, "one line for both"


def test_what_a_write_was_to_displace_goes_even_when_the_write_never_begins(rig: Rig) -> None:
    for number in range(8):
        assert rig.write(number)
    told: list[bool] = []
    assert rig.tier.takes_writes
    rig.tier._timeout_s = 0.0
    assert rig.tier.write(key(9), block(9), checksum(block(9)), told.append)
    rig.turn()
    assert told == [False]
    assert rig.files() == len(rig.tier) == 7


def test_a_folder_that_is_lost_while_it_is_in_use_costs_blocks_and_nothing_else(rig: Rig) -> None:
    assert rig.write(0)
    moved = rig.root.rename(rig.root.parent / "moved")
    rig.root.write_text("no folder")
    assert rig.read(0) is None
    assert not rig.write(1)
    rig.root.unlink()
    moved.rename(rig.root)
    rig.clock.now += 100.0
    rig.turn()
    assert rig.read(0) == bytes(block(0)), "it was never damaged"
    assert rig.write(1)
    assert rig.read(1) == bytes(block(1))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_removed_or_replaced_is_noticed_forgotten_and_made_anew(rig: Rig, replaced: bool) -> None:
    assert rig.write(0)
    moved = rig.root.rename(rig.root.parent / "moved")
    if replaced:
        rig.root.mkdir()
    assert not rig.write(1), "where it is not known who else writes"
    assert (len(rig.tier), rig.tier.counters.used_bytes) == (0, 0)
    assert not rig.tier.answering
    rig.clock.now += 0.6
    rig.turn()
    assert rig.write(1)
    assert rig.read(1) == bytes(block(1))
    assert rig.files() == 1
    assert len(list(moved.rglob("*.kv"))) == 1, "what was moved away is left alone"
    second = Rig(rig.root)
    assert not second.tier.answering, "the new folder is locked like the old one"
    second.tier.close()


def test_a_disk_that_cannot_be_opened_is_tried_again_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv").write_text("in the way")
    rig = Rig(tmp_path / "kv")
    (line,) = caplog.messages
    assert "cannot be opened, KV is kept in host memory alone and it is tried again: " in line
    assert os.strerror(errno.EEXIST) in line
    assert not rig.tier.answering
    assert not rig.write(0)
    (tmp_path / "kv").unlink()
    rig.clock.now += 1.0
    rig.turn()
    assert rig.write(0)
    rig.tier.close()


def test_two_owners_do_not_share_a_folder_and_the_second_gets_it_when_the_first_is_gone(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    assert rig.write(0)
    second = Rig(rig.root)
    assert not second.tier.answering
    assert "another process uses this folder" in caplog.text
    rig.tier.close()
    second.clock.now += 1.0
    second.turn()
    assert second.read(0) == bytes(block(0))
    second.tier.close()


def test_what_is_forgotten_is_not_served_and_its_file_goes(rig: Rig) -> None:
    for number in range(3):
        assert rig.write(number)
    rig.tier.forget(key(1))
    rig.turn()
    assert key(1) not in rig.tier
    assert rig.files() == 2
    rig.tier.clear()
    rig.turn()
    assert len(rig.tier) == rig.files() == 0


def test_wrong_bytes_on_the_way_are_a_miss_both_ways(rig: Rig) -> None:
    rig.faults.add("write", TierFault.CORRUPT)
    assert rig.write(0), "a disk does not say so"
    assert rig.read(0) is None
    assert rig.write(1)
    rig.faults.add("read", TierFault.CORRUPT)
    assert rig.read(1) is None
    assert rig.files() == 0
