"""Who may get a request at all: the part that all policies share.

A request that no known worker could ever hold is INVALID, whoever is alive. Nobody there, or nobody that this request
has not tried in vain, is UNAVAILABLE. Somebody there, but behind its queue bound, is NO_ROOM.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.snapshot import Refusal, RequestView, Snapshot, WorkerView
from tandem.messages import Code


@dataclass(frozen=True, slots=True)
class Candidates:
    """`prefill` may be empty: then only local prefill is left (and allowed)."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]


def candidates(request: RequestView, snapshot: Snapshot) -> Candidates | Refusal:
    """The workers to choose from, or why there are none."""
    too_large = _never_fits(request, snapshot)
    if too_large is not None:
        return too_large
    decode = _able(request, snapshot, snapshot.decode)
    prefill = _able(request, snapshot, snapshot.prefill)
    if not decode:
        return _nobody("decode", snapshot.decode, snapshot)
    if not prefill and snapshot.knobs.local_prefill == "never":
        return _nobody("prefill", snapshot.prefill, snapshot)
    return Candidates(prefill, decode)


def needed_tokens(request: RequestView, view: WorkerView) -> int:
    """KV positions that the request can come to need on this worker."""
    return request.prompt_tokens + (request.max_tokens if view.info.role == "decode" else 0)


def _able(request: RequestView, snapshot: Snapshot, views: tuple[WorkerView, ...]) -> tuple[WorkerView, ...]:
    """Those that fit, are allowed and have a short enough queue; late ones only when nobody else is left."""
    able = tuple(
        view
        for view in views
        if view.name not in snapshot.excluded and view.waiting < snapshot.knobs.max_waiting and _fits(request, view)
    )
    return tuple(view for view in able if view.healthy) or able


def _fits(request: RequestView, view: WorkerView) -> bool:
    tokens = needed_tokens(request, view)
    return view.blocks_for(tokens) <= view.load.total_blocks and tokens <= view.info.max_model_len


def _never_fits(request: RequestView, snapshot: Snapshot) -> Refusal | None:
    """A prompt too large for prefill alone may still be computed where it will be decoded."""
    pools = (snapshot.decode, snapshot.prefill if snapshot.knobs.local_prefill == "never" else ())
    for views in pools:
        if views and not any(_fits(request, view) for view in views):
            largest = max(views, key=lambda view: view.load.total_blocks)
            room = min(largest.load.total_blocks * largest.load.block_size, largest.info.max_model_len)
            what = f"prompt and max_tokens need {needed_tokens(request, largest)} tokens of KV cache"
            return Refusal(Code.INVALID, f"{what}, but the largest {largest.info.role} worker has room for {room}")
    return None


def _nobody(role: str, views: tuple[WorkerView, ...], snapshot: Snapshot) -> Refusal:
    if not views:
        why = "none is alive, or all are draining (`tandem undrain NAME` ends that)"
        return Refusal(Code.UNAVAILABLE, f"no {role} worker takes requests: {why}; try again soon")
    allowed = [view for view in views if view.name not in snapshot.excluded]
    if not allowed:
        return Refusal(Code.UNAVAILABLE, f"every {role} worker ({len(views)}) has been tried; try again soon")
    waiting = min(view.waiting for view in allowed)
    bound = f"waiting is at least {waiting}, the bound is {snapshot.knobs.max_waiting}"
    return Refusal(Code.NO_ROOM, f"every {role} worker that could hold the request is full ({bound}); try again later")
