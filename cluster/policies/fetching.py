"""Whether a prompt's prefix is better fetched from a peer that holds it than computed where the prompt goes.

    cost    until the source's step loop looks up + hand-over of control + bytes / rate of the pair, shared with what
            either end is moving already
    saving  T(prompt, what is held here) - T(prompt, what the source holds)

It is fetched when computing costs at least `fetch_gain` times as much (Mooncake's rule with measured terms; the gain is
its balancing threshold). While the prompt waits for its turn the fetch costs nothing, so it counts only where it sticks
out behind the queue. Every fetch leaves a copy: prefixes in demand replicate by themselves, and the cache's order of
eviction takes away what is not used.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cluster.policies import estimates
from cluster.policies.estimates import FetchPlan, Work
from cluster.snapshot import RequestView, Snapshot, WorkerView

MOST_SOURCES = 3
"""Peers that are looked at: those that hold the longest part, the idlest of them first."""
MOST_DESTINATIONS = 8
"""Workers of each pool that may fetch: more than these cost the router time and win nothing."""
MOST_TRANSFERS = 16
"""A peer that is moving more than this at once is not asked."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Between whom fetching is considered for one request."""

    sources: tuple[WorkerView, ...] = ()
    destinations: frozenset[str] = frozenset()


def peers_for(snapshot: Snapshot, candidates: Iterable[WorkerView]) -> Peers:
    """`candidates`: who might compute the prompt. Of each pool the idlest are looked at: a short queue is what a
    destination has over the holder."""
    sources = _sources(snapshot)
    if not sources:
        return Peers()
    pools: dict[str, list[WorkerView]] = {}
    for view in candidates:
        pools.setdefault(view.info.role, []).append(view)
    idlest = (view for pool in pools.values() for view in heapq.nsmallest(MOST_DESTINATIONS, pool, key=_idle_first))
    return Peers(sources, frozenset(view.name for view in idlest))


def _sources(snapshot: Snapshot) -> tuple[WorkerView, ...]:
    """Workers of either pool that could send something of this prompt now."""
    if snapshot.knobs.fetch == "never" or not snapshot.held:
        return ()
    able = (
        view
        for view in (*snapshot.prefill, *snapshot.decode)
        if view.healthy and snapshot.held.get(view.name, 0) and view.transfers_in_flight <= MOST_TRANSFERS
    )
    return tuple(heapq.nsmallest(MOST_SOURCES, able, key=lambda view: (-snapshot.held[view.name], _busy(view))))


def on_prefill(request: RequestView, view: WorkerView, peers: Peers, snapshot: Snapshot) -> Work:
    """`estimates.on_prefill`, with a fetch where that is faster. What lies in lower tiers there costs its loading, or
    its computing if that is less."""

    def given(overlap: int) -> Work:
        return estimates.on_prefill(request, view, snapshot, overlap)

    plain = given(snapshot.overlap(view))
    if (load_s := snapshot.loads.get(view.name, 0.0)) > 0:
        plain = replace(plain, own_s=min(plain.own_s + load_s, given(0).own_s))
    return _cheapest(request, view, peers, snapshot, plain, given)


def on_decode(request: RequestView, view: WorkerView, peers: Peers, snapshot: Snapshot) -> Work | None:
    """`estimates.on_decode`, with a fetch where that is faster."""

    def given(overlap: int) -> Work | None:
        return estimates.on_decode(request, view, snapshot, overlap)

    plain = given(snapshot.overlap(view))
    return None if plain is None else _cheapest(request, view, peers, snapshot, plain, given)


def cost_s(source: WorkerView, view: WorkerView, tokens: int, snapshot: Snapshot) -> float:
    """Seconds from the question to the last of so many tokens' blocks."""
    rate = snapshot.links.get((source.name, view.name), snapshot.knobs.assumed_bytes_per_s)
    sharing = 1 + max(source.transfers_in_flight, view.transfers_in_flight)
    num_bytes = view.blocks_for(tokens) * view.info.block_bytes
    return estimates.step_in_hand_s(source, snapshot) + snapshot.knobs.handover_s + num_bytes * sharing / rate


def _cheapest(
    request: RequestView,
    view: WorkerView,
    peers: Peers,
    snapshot: Snapshot,
    plain: Work,
    given: Callable[[int], Work | None],
) -> Work:
    if view.name not in peers.destinations:
        return plain
    fetched, here = list[Work](), snapshot.overlap(view)
    size = view.info.block_size
    for source in peers.sources:
        there = source.info.block_size
        unit = max(there, size)  # whole blocks of either end
        tokens = min(snapshot.held[source.name], request.prompt_tokens - 1) // unit * unit
        if source.name == view.name or tokens < here + size:
            continue
        rest = given(tokens)
        if rest is None:
            continue
        takes_s, saved_s = cost_s(source, view, tokens - here, snapshot), plain.own_s - rest.own_s
        plan = FetchPlan(source.info.ref, tokens, takes_s, saved_s, there)
        if takes_s * snapshot.knobs.fetch_gain < saved_s:
            fetched.append(replace(rest, fetch=plan))
        elif plain.forgone is None:
            plain = replace(plain, forgone=plan)
    return min(fetched, key=lambda work: work.total_s, default=plain)


def _idle_first(view: WorkerView) -> tuple[int, int, int, str]:
    return view.queued_prefill_tokens, view.batch, view.last_placed, view.name


def _busy(view: WorkerView) -> tuple[int, int, str]:
    return view.transfers_in_flight, view.queued_prefill_tokens + view.batch, view.name
