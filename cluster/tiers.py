"""Gives a worker's engine its lower tiers, as its pool's section of the config says."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.engine import Engine
from engine.errors import ConfigError, too_much
from engine.info import EngineInfo
from kvtransfer.tiers import block_file
from kvtransfer.tiers.store import TierStore
from kvtransfer.tiers.types import TierSettings


def settings_of(settings: TierSettings | None, worker: str) -> TierSettings | None:
    """Of one worker of the pool: it has a folder of its own, by its name, so that its next incarnation finds it."""
    if settings is None or settings.disk_path is None:
        return settings
    return replace(settings, disk_path=str(Path(settings.disk_path) / worker))


def attach(
    engine: Engine,
    settings: TierSettings,
    role: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    wake: Callable[[], None] = lambda: None,
) -> TierStore:
    """The store, for its owner to shut down. `wake` is called on another thread when the engine should be asked
    again whether it has work.

    A prefill worker's tiered prefixes stay announced, because it loads them for whatever prompt comes. A decode
    worker's are not: only prompts that it computes itself would find them, a handed-over prompt brings its own KV.

    Raises ConfigError when this machine has not the memory, or a tier could not hold one block.
    """
    info = engine.info
    if fault := too_small(settings, info.block_bytes):
        raise fault
    try:
        store = TierStore(info.block_bytes, settings, fingerprint=fingerprint(info), clock=clock, wake=wake)
    except (OSError, OverflowError, MemoryError) as error:
        raise too_much("host_bytes", settings.host_bytes, error) from error
    engine.attach_tiers(store, announce=role == "prefill")
    return store


def too_small(settings: TierSettings, block_bytes: int) -> ConfigError | None:
    """What is wrong with tiers of which one would never hold a block."""
    if settings.host_bytes < block_bytes:
        return ConfigError("host_bytes", settings.host_bytes, f"at least {block_bytes}, the bytes of one KV block")
    file_bytes = block_file.HEADER_BYTES + block_bytes
    if settings.disk_path is not None and settings.disk_bytes < file_bytes:
        return ConfigError(
            "disk_bytes", settings.disk_bytes, f"at least {file_bytes}, the bytes of one KV block's file"
        )
    return None


def fingerprint(info: EngineInfo) -> str:
    """What two engines must have in common for one to read what the other left on disk."""
    return f"{info.model_digest} {info.layout} block={info.block_size} {info.numerics} {info.hash_root.hex()}"
