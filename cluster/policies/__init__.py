"""Routing policies: each one pure function in a module of its own, found by name in `POLICIES`.

    choose(request, snapshot, now) -> Placement | Refusal

The same snapshot gives the same answer: no clock, no chance, no memory. Ties go to the worker that was chosen longest
ago, then to the smaller name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cluster.policies import least_loaded, round_robin, sla
from cluster.snapshot import Placement, Refusal, RequestView, Snapshot

Policy = Callable[[RequestView, Snapshot, float], Placement | Refusal]

POLICIES: Mapping[str, Policy] = {
    "sla": sla.choose,
    "round_robin": round_robin.choose,
    "least_loaded": least_loaded.choose,
}
