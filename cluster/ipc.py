"""The road between a worker's control process and its rank process: one ZeroMQ pair on a private socket of this host.

Each message is one envelope of `tandem.wire`. The rank's settings go first, as JSON on its standard input, because they
say where the socket is. Nothing here is ever pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.fetching import FetchLimits
from cluster.worker import WorkerSettings
from decode_node.service import DecodeLimits
from engine.config import EngineConfig
from kvtransfer.tiers.types import TierSettings
from prefill_node.service import PrefillLimits

LAST_WORD = 0
"""The `ask_id` under which a rank says why it ends: Declined. Questions are counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """All that a rank process is told. `host` is the IP address that transports bind, `advertise` what peers hear."""

    worker: WorkerSettings
    engine: EngineConfig
    endpoint: str = ""
    """The control's end of the pair, `ipc://…`; control fills it in."""
    transports: tuple[str, ...] = ("shm", "ucx", "tcp")
    """Best first. One that this machine lacks is left out, with a warning; none left is an error."""
    checksums: bool = False
    staging: str = "auto"
    staging_bytes: int = 4 << 30
    """See `cluster.config.TransferSection`."""
    tiers: TierSettings | None = None
    """With the worker's own folder."""
    host: str = "127.0.0.1"
    advertise: str | None = None
    net_device: str | None = None
    """See `cluster.config.TransferSection`; its address, if it has one, takes the place of `host` and `advertise`."""
    ucx_error_handling: bool = True
    keys: Mapping[str, str] = field(default_factory=dict)
    """What people call the engine's settings, for errors: `FILE:LINE: KEY`, or the key alone where no file says it."""


def to_json(settings: RankSettings) -> str:
    return json.dumps(asdict(settings))


def from_json(text: str) -> RankSettings:
    """The inverse of `to_json`; TypeError or KeyError for anything else."""
    fields: dict[str, Any] = json.loads(text)
    worker = fields.pop("worker")
    worker["prefill"] = PrefillLimits(**worker["prefill"])
    worker["decode"] = DecodeLimits(**worker["decode"])
    worker["fetch"] = FetchLimits(**worker["fetch"])
    engine = EngineConfig(**fields.pop("engine"))
    transports = tuple(fields.pop("transports"))
    tiers = fields.pop("tiers")
    return RankSettings(
        worker=WorkerSettings(**worker),
        engine=engine,
        transports=transports,
        tiers=None if tiers is None else TierSettings(**tiers),
        **fields,
    )
