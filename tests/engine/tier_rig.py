"""An engine with lower tiers, and a loop that waits for their thread instead of sleeping."""

from __future__ import annotations

import struct
import threading
import time
from pathlib import Path

from fakes import MASK, Clock, FakeRunner, Story, make_engine, runner_of

from engine.engine import Engine
from kvtransfer.tiers.faults import TierFaults
from kvtransfer.tiers.io_thread import Inline
from kvtransfer.tiers.store import TierStore
from kvtransfer.tiers.types import TierSettings

WAIT_S = 20.0


class FakeBytes:
    """The numbers of a `FakeRunner` as bytes, eight each."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def read(self, block: int) -> memoryview:
        numbers = [number & MASK for number in self._runner.memory[block]]
        return memoryview(struct.pack(f"<{len(numbers)}Q", *numbers))

    def write(self, block: int, data: memoryview) -> None:
        numbers = struct.unpack(f"<{len(data) // 8}Q", data)
        self._runner.memory[block] = [-1 if number == MASK else number for number in numbers]


def store_for(
    engine: Engine,
    *,
    host_blocks: int,
    disk: Path | None = None,
    disk_blocks: int = 256,
    clock: Clock | None = None,
    bell: threading.Event | None = None,
    io_timeout_s: float = 5.0,
) -> TierStore:
    """With a clock of its own the disk's work is done at once and on this thread; with a bell, on its thread."""
    size = engine.info.block_bytes
    settings = TierSettings(
        host_bytes=host_blocks * size,
        disk_path=str(disk) if disk else None,
        disk_bytes=disk_blocks * (size + 256),
        io_timeout_s=io_timeout_s,
    )
    if clock is not None:
        io = lambda: Inline(clock)  # noqa: E731
        return TierStore(size, settings, fingerprint=engine.info.layout, clock=clock, make_io=io, faults=TierFaults())
    return TierStore(size, settings, fingerprint=engine.info.layout, wake=bell.set if bell else lambda: None)


def tiered(num_blocks: int, store_settings: dict[str, object], **settings: object) -> tuple[Engine, TierStore]:
    """A fake-model engine whose disk, if any, works inline."""
    mode = settings.pop("mode", "always")
    announce = settings.pop("announce", False)
    clock = Clock()
    engine = make_engine(num_blocks, clock=clock, **settings)
    engine._blocks = FakeBytes(runner_of(engine))
    store = store_for(engine, clock=clock, **store_settings)  # type: ignore[arg-type]
    engine.attach_tiers(store, mode=str(mode), announce=bool(announce))
    return engine, store


def run_waiting(engine: Engine, bell: threading.Event, story: Story | None = None) -> Story:
    """Step until nobody is left; waits for the tiers' thread while only it has work."""
    story = story or Story(engine)
    for _ in range(20_000):
        load = engine.load(0.0)
        if not load.running and not load.waiting:
            return story
        if engine.has_work():
            story.step()
        else:
            due_s = engine.next_deadline()
            wait_s = WAIT_S if due_s is None else max(0.0, due_s - time.monotonic())
            assert bell.wait(wait_s) or due_s is not None, "neither the engine nor its tiers have anything to do"
            bell.clear()
    raise AssertionError("not done after 20000 turns")
