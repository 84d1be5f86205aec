"""Lower tiers under a real (tiny) model, with their real thread: whatever is done to them, the text is the one that an
engine without any cache writes, and nobody waits longer than the I/O deadline."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fakes import Story, make_request, run_all
from tier_rig import run_waiting, store_for

from engine.config import EngineConfig
from engine.engine import Engine
from engine.host_swap import DeviceBytes
from engine.toy import make_toy_checkpoint
from engine.types import Request
from kvtransfer.tiers.faults import TierFault
from kvtransfer.tiers.store import TierStore

PROMPTS = [tuple((number * 29 + i * i * 3 + i) % 250 for i in range(160)) for number in range(12)]
ANSWER = 4
IO_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return Path(make_toy_checkpoint(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[list[int]]:
    """The answers without any cache."""
    engine = Engine.open(EngineConfig(model=str(checkpoint), num_blocks=64, prefix_caching=False))
    return [run_all(engine, asked(number, f"w{number}")).tokens(f"w{number}") for number in range(len(PROMPTS))]


def asked(number: int, name: str) -> Request:
    return make_request(PROMPTS[number], name, max_tokens=ANSWER)


class Rig:
    """16 blocks in the pool, 32 in host memory, 256 on disk."""

    def __init__(self, checkpoint: Path, folder: Path, wanted: list[list[int]], *, by_device: bool = False) -> None:
        self.folder = folder
        self.wanted = wanted
        self.bell = threading.Event()
        self.engine = Engine.open(EngineConfig(model=str(checkpoint), num_blocks=16, max_num_batched_tokens=64))
        if by_device:
            self.engine._blocks = DeviceBytes(self.engine._runner.pool)  # type: ignore[attr-defined]
        self.store = self.attach()
        self.asked = 0
        self.slowest_s = 0.0

    def attach(self) -> TierStore:
        store = store_for(
            self.engine, host_blocks=32, disk=self.folder, disk_blocks=256, bell=self.bell, io_timeout_s=IO_TIMEOUT_S
        )
        self.engine.attach_tiers(store, mode="always")
        return store

    def ask(self, *numbers: int) -> None:
        """All of them at once; each must get its text, in time."""
        self.asked += 1
        names = [f"{self.asked}.{place}" for place in range(len(numbers))]
        started_s = time.monotonic()
        for number, name in zip(numbers, names, strict=True):
            self.engine.submit(asked(number, name))
        story = run_waiting(self.engine, self.bell)
        self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
        for number, name in zip(numbers, names, strict=True):
            assert story.tokens(name) == self.wanted[number], f"prompt {number} got another text"
        self.store.check()

    def tour(
        self,
        turns: int = 50,
        seed: int = 0,
        *,
        early: Callable[[Rig], None] = lambda rig: None,
        at_half: Callable[[Rig], None] = lambda rig: None,
    ) -> None:
        """Every prompt once, then `turns` in random order; `early` happens after half of the first."""
        chance = random.Random(seed)
        for number in range(len(PROMPTS)):
            if number == len(PROMPTS) // 2:
                early(self)
            self.ask(number)
        for turn in range(turns):
            if turn == turns // 2:
                at_half(self)
            self.ask(chance.randrange(len(PROMPTS)))

    def failed(self) -> int:
        return sum(one.failed for one in self.engine.load(0.0).tiers)

    def hits(self) -> int:
        return sum(one.hits for one in self.engine.load(0.0).tiers)

    def blocks(self) -> list[Path]:
        return sorted(self.folder.rglob("*.kv"))

    def settled(self) -> None:
        while self.store.busy():
            self.bell.wait(0.05)
            self.bell.clear()
            self.store.poll(time.monotonic())


@pytest.fixture
def rig(checkpoint: Path, wanted: list[list[int]], tmp_path: Path) -> Iterator[Rig]:
    made = Rig(checkpoint, tmp_path / "kv", wanted)
    yield made
    made.store.faults.clear()
    made.engine.check()
    load = made.engine.load(0.0)
    assert load.live_blocks == 0
    assert load.free_blocks + load.cached_blocks == load.total_blocks
    assert made.slowest_s < IO_TIMEOUT_S + 5.0, "somebody hung"
    made.store.shutdown()


def test_prompts_come_back_from_every_tier_with_the_same_text(rig: Rig) -> None:
    rig.tour()
    host, disk = rig.engine.load(0.0).tiers
    assert host.hits > 50
    assert disk.hits > 20
    assert len(rig.blocks()) <= 256


def test_a_pool_whose_bytes_are_copied_by_the_device_does_the_same(
    checkpoint: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    rig = Rig(checkpoint, tmp_path, wanted, by_device=True)
    rig.tour(turns=12)
    assert rig.hits() > 30
    rig.store.shutdown()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for index in range(400, 500):
        data[index] ^= 0xFF
    path.write_bytes(data)


def every(change: Callable[[Path], object]) -> Callable[[Rig], None]:
    def all_files(rig: Rig) -> None:
        rig.settled()
        for path in rig.blocks():
            change(path)

    return all_files


def no_folder(rig: Rig) -> None:
    rig.settled()
    rig.folder.rename(rig.folder.with_name("moved"))
    rig.folder.write_text("this is no folder")


def no_space(rig: Rig) -> None:
    rig.store.faults.add("write", TierFault.FAIL, count=10_000, code=errno.ENOSPC)


def read_only(rig: Rig) -> None:
    rig.store.faults.add("write", TierFault.FAIL, count=10_000, code=errno.EROFS)


def dead_thread(rig: Rig) -> None:
    rig.store.faults.add("read", TierFault.DIE, 3)


def hung(rig: Rig) -> None:
    rig.store.faults.add("read", TierFault.DELAY, 3)


def wrong_host_memory(rig: Rig) -> None:
    rig.store.faults.add("put", TierFault.CORRUPT, count=30)


HARMS: dict[str, Callable[[Rig], None]] = {
    "a hundred flipped bytes in every file": every(flip),
    "every file cut short": every(lambda path: os.truncate(path, 1000)),
    "the folder is gone": no_folder,
    "the thread dies": dead_thread,
    "a read that hangs": hung,
}


EARLY: dict[str, Callable[[Rig], None]] = {
    "no space left": no_space,
    "a disk that has become read-only": read_only,
    "the folder is gone": no_folder,
    "wrong bytes in host memory": wrong_host_memory,
}


@pytest.mark.parametrize("harm", EARLY)
def test_a_tier_that_takes_no_more_serves_what_it_has_and_costs_the_rest(rig: Rig, harm: str) -> None:
    rig.tour(turns=20, early=EARLY[harm])
    assert rig.failed() > 0


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_tier_is_a_miss_a_counter_and_never_another_text(rig: Rig, harm: str) -> None:
    rig.tour(turns=20, at_half=HARMS[harm])
    assert rig.failed() > 0
    delivered = rig.engine.load(0.0).prefix_hits // 16
    assert rig.hits() <= delivered, "a failed load is no hit"


def test_the_same_prompts_at_once_get_the_same_text(rig: Rig) -> None:
    rig.tour(turns=0)
    for number in (0, 3, 0, 5):
        rig.ask(number, number)
        rig.ask(number, 11 - number, number)


def test_the_same_prompt_again_while_the_first_loads(rig: Rig) -> None:
    rig.tour(turns=0)
    rig.settled()
    rig.store.faults.add("read", TierFault.DELAY, delay_s=0.005)
    rig.engine.submit(asked(0, "first"))
    story = Story(rig.engine)
    story.step()
    rig.engine.submit(asked(0, "second"))
    run_waiting(rig.engine, rig.bell, story)
    assert story.tokens("first") == story.tokens("second") == rig.wanted[0]


def test_what_is_on_disk_serves_the_next_start(rig: Rig, checkpoint: Path) -> None:
    rig.tour(turns=0)
    rig.settled()
    kept = len(rig.blocks())
    rig.store.shutdown()
    after = Rig(checkpoint, rig.folder, rig.wanted)
    after.settled()
    assert kept > 50
    for number in range(len(PROMPTS)):
        after.ask(number)
    assert after.engine.load(0.0).tiers[1].hits > 20
    after.engine.check()
    after.store.shutdown()
