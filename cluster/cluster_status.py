"""The cluster at a glance: what the router knows of every worker, for `/status`, `tandem status` and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.types import EngineLoad
from tandem.messages import FetchCounters, LinkRate, LoadReport, MigrationCounters, TransferCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker. `load` is None until it has registered."""

    name: str
    role: str
    health: str
    why: str
    incarnation: str = ""
    address: str = ""
    pid: int | None = None
    """Of its control, on its own machine."""
    load: EngineLoad | None = None
    transfers_in_flight: int = 0
    transfers: tuple[TransferCounters, ...] = ()
    """What each of its transports has moved."""
    fetches: tuple[FetchCounters, ...] = ()
    """What it has fetched from others."""
    migrations: MigrationCounters = field(default_factory=MigrationCounters)
    draining: bool = False
    links: tuple[LinkRate, ...] = ()
    """How fast it sent KV to others."""

    def report(self) -> LoadReport | None:
        """Its last report, as far as metrics need it."""
        if self.load is None:
            return None
        return LoadReport(
            self.name,
            self.incarnation,
            0,
            self.load,
            (),
            transfers_in_flight=self.transfers_in_flight,
            draining=self.draining,
            transfers=self.transfers,
            fetches=self.fetches,
            migrations=self.migrations,
            links=self.links,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """`not_ready` is empty when requests can be served. `decisions`: the router's last ones, newest last."""

    not_ready: str
    workers: tuple[WorkerStatus, ...] = ()
    placements: Mapping[str, int] = field(default_factory=dict)
    decisions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"ready": not self.not_ready, **asdict(self)}
