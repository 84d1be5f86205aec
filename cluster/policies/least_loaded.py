"""The least load of each pool, with no regard to prefixes or promises: what a load balancer would do."""

from __future__ import annotations

from cluster.policies.pairing import pair
from cluster.snapshot import LEAST_LOADED, Placement, Refusal, RequestView, Snapshot, WorkerView


def choose(request: RequestView, snapshot: Snapshot, now: float) -> Placement | Refusal:
    """Prefill with the fewest queued prompt tokens; decode with the smallest batch, then the most room."""
    return pair(request, snapshot, _load, LEAST_LOADED)


def _load(view: WorkerView) -> tuple[int, int, int, str]:
    load = view.queued_prefill_tokens if view.info.role == "prefill" else view.batch
    return (load, -view.room_blocks, view.last_placed, view.name)
