"""Named presets of the engine's settings. Each is a starting point: whatever is given beside it wins.

low-latency     small steps and few seats: the time between tokens first
balanced        the defaults
throughput      large steps and many seats: tokens per second first
disaggregated   by role: a prefill worker takes large steps for few prompts, a decode worker many seats and small
                steps, which only a prompt that it computes itself needs
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError

Settings = Mapping[str, Any]

PROFILES: Mapping[str, Settings] = {
    "low-latency": {"max_num_batched_tokens": 128, "max_num_seqs": 16},
    "balanced": {},
    "throughput": {"max_num_batched_tokens": 2048, "max_num_seqs": 256},
    "disaggregated": {},
}
ROLES: Mapping[str, Settings] = {
    "prefill": {"max_num_batched_tokens": 1024, "max_num_seqs": 16},
    "decode": {"max_num_batched_tokens": 256, "max_num_seqs": 256},
}
"""Of `disaggregated`."""


def profile_settings(name: str, role: str | None = None) -> dict[str, Any]:
    """What the profile sets. Raises ConfigError for an unknown one, or a role that it needs and is not given."""
    if name not in PROFILES:
        raise ConfigError("profile", name, "one of " + ", ".join(PROFILES))
    if name != "disaggregated":
        return dict(PROFILES[name])
    if role is None or role not in ROLES:
        raise ConfigError("role", role, "one of " + ", ".join(ROLES) + " in the profile disaggregated")
    return dict(ROLES[role])


def profiled(name: str, *, role: str | None = None, **settings: Any) -> EngineConfig:
    """An `EngineConfig` by profile; `settings` (the model at least) override it."""
    return EngineConfig(**{**profile_settings(name, role), **settings})
