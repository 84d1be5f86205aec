"""Each pool in turn: the worker that was chosen longest ago. The plainest baseline; it looks at nothing else."""

from __future__ import annotations

from cluster.policies.pairing import pair
from cluster.snapshot import IN_TURN, Placement, Refusal, RequestView, Snapshot


def choose(request: RequestView, snapshot: Snapshot, now: float) -> Placement | Refusal:
    """The next prefill and the next decode worker."""
    return pair(request, snapshot, lambda view: (view.last_placed, view.name), IN_TURN)
