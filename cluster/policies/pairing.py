"""A placement from two rankings: for policies that choose each worker by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.policies import estimates, fetching
from cluster.policies.candidates import candidates
from cluster.policies.estimates import Work
from cluster.snapshot import LOCAL_ALWAYS, LOCAL_ONLY, Estimates, Placement, Refusal, RequestView, Snapshot, WorkerView


def pair(
    request: RequestView, snapshot: Snapshot, rank: Callable[[WorkerView], Any], reason: str
) -> Placement | Refusal:
    """The smallest by `rank` of each pool. Local prefill only where it is the config's rule or the last resort."""
    found = candidates(request, snapshot)
    if isinstance(found, Refusal):
        return found
    decode = min(found.decode, key=rank)
    local = snapshot.knobs.local_prefill == "always"
    prefill = None if local or not found.prefill else min(found.prefill, key=rank)
    if prefill is None:
        reason = LOCAL_ALWAYS if local else LOCAL_ONLY
    computes = prefill or decode
    peers = fetching.peers_for(snapshot, [computes])
    work = fetching.on_prefill(request, computes, peers, snapshot)
    return Placement(
        request_id=request.request_id,
        prefill=prefill.info.ref if prefill else None,
        decode=decode.info.ref,
        estimates=_told(request, work, prefill, decode, snapshot),
        reason=reason,
        prefill_overlap_tokens=snapshot.overlap(prefill or decode),
        decode_overlap_tokens=snapshot.overlap(decode),
        fetch=work.fetch_order(),
        fetch_forgone=work.forgone.told() if work.forgone else "",
    )


def _told(
    request: RequestView, work: Work, prefill: WorkerView | None, decode: WorkerView, snapshot: Snapshot
) -> Estimates:
    """For people and metrics; these policies do not choose by it."""
    wire_s = estimates.transfer_s(request, prefill, decode, snapshot) if prefill else 0.0
    exposed_s = estimates.exposed_s(work, wire_s, snapshot) + snapshot.knobs.handover_s if prefill else 0.0
    return Estimates(
        ttft_s=work.total_s + exposed_s,
        itl_s=estimates.joined_itl_s(request, decode),
        queue_s=work.waiting_s,
        prefill_s=work.own_s,
        transfer_s=wire_s,
        fetch_s=work.fetch_s,
    )
