"""The tiers' settings and counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """`host_bytes` 0: no host tier. `disk_path` None: no disk tier. All bytes are upper bounds."""

    host_bytes: int = 0
    disk_path: str | None = None
    disk_bytes: int = 4 << 30
    io_timeout_s: float = 1.0
    """A read or write that takes longer has failed."""
    fsync: bool = False
    """Whether a block is on the medium before it is published; without, a crash may cost it (never its truth)."""


@dataclass(slots=True)
class TierCounters:
    """What one tier did since it was made. `failed` never counts as hit, nor does what was evicted or late."""

    name: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    stored: int = 0
    """Blocks written."""
    hits: int = 0
    """Blocks read, verified and handed over."""
    misses: int = 0
    """Blocks that were asked for, counted on and not delivered."""
    evicted: int = 0
    """Blocks that made room for others."""
    dropped: int = 0
    """Of these, the ones that no tier had any more: the next one had no place for them, or there is none."""
    failed: int = 0
    """Reads and writes that went wrong or came too late."""
    stored_bytes: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
