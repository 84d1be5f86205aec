"""The policy by promises: of all pairs the one that serves this request soonest and breaks nobody's promise.

Pairs (prefill, decode) and, where allowed, decode workers alone (local prefill) are compared in this order:

1. room: a decode worker whose KV is not promised away already;
2. promises: ITL of the request and of its neighbours to be, then the request's TTFT;
3. cost in seconds: TTFT + expected tokens * ITL + what others lose. Local prefill delays every running neighbour by
   its own length, which is its price (the cost form of conditional disaggregation, Dynamo's rule made continuous).

A prefix that a worker holds shortens its estimate, and a long queue lengthens it: so affinity yields before it makes a
hot spot, and no threshold is needed. A prefix that a peer holds does so too, as far as fetching it is faster than
computing: a short queue and a fetch may beat the holder's long queue. Of options that cost nearly the same the one with
the least to compute wins (a prefix that is being computed elsewhere right now is worth waiting for), then the worker
chosen longest ago: a burst on an idle cluster spreads. Local prefill must win by a margin: an estimate is no
measurement, and an idle decode worker is wanted for decoding.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cluster.policies import estimates, fetching
from cluster.policies.candidates import Candidates, candidates
from cluster.policies.estimates import Work
from cluster.policies.fetching import Peers
from cluster.snapshot import (
    AT_RISK,
    FASTEST,
    FETCHED,
    FULL,
    LOCAL_ALWAYS,
    LOCAL_FASTER,
    LOCAL_ONLY,
    PREFIX,
    Estimates,
    Placement,
    Refusal,
    RequestView,
    Snapshot,
    WorkerView,
)

SHORTLIST = 8
"""Workers of each pool that are paired with each other: the best by themselves."""
NEAR = 0.05
NEAR_S = 0.0005
"""Costs above the best by less than this part of its TTFT, plus this, count as equal to it."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve the request. `flaws`: no room, ITL broken, TTFT broken; fewer and later is better."""

    prefill: WorkerView | None
    decode: WorkerView
    told: Estimates
    flaws: tuple[bool, bool, bool]
    work: Work
    tokens_s: float
    """All expected tokens at the estimated ITL."""
    others_lose_s: float

    @property
    def cost_s(self) -> float:
        return self.told.ttft_s + self.tokens_s + self.others_lose_s


def choose(request: RequestView, snapshot: Snapshot, now: float) -> Placement | Refusal:
    """The best pair, or decode alone; see the module's head for what "best" means."""
    found = candidates(request, snapshot)
    if isinstance(found, Refusal):
        return found
    peers = fetching.peers_for(snapshot, (*found.prefill, *found.decode))
    remote = _best(_remote_options(request, found, peers, snapshot))
    local = _best(_local_options(request, found, peers, snapshot, forced=remote is None))
    chosen = _prefer(remote, local, snapshot)
    rival = remote if chosen is local else local
    return _placement(request, chosen, rival, snapshot)


def _remote_options(request: RequestView, found: Candidates, peers: Peers, snapshot: Snapshot) -> Iterator[Option]:
    if snapshot.knobs.local_prefill == "always":
        return
    works = {view.name: fetching.on_prefill(request, view, peers, snapshot) for view in found.prefill}
    prefills = heapq.nsmallest(SHORTLIST, found.prefill, key=lambda view: (works[view.name].total_s, *_turn(view)))
    decodes = _decode_shortlist(request, found, snapshot, prefills)
    for prefill in prefills:
        work = works[prefill.name]
        for decode in decodes:
            wire_s = estimates.transfer_s(request, prefill, decode, snapshot)
            exposed_s = estimates.exposed_s(work, wire_s, snapshot) + snapshot.knobs.handover_s
            told = Estimates(
                ttft_s=work.total_s + exposed_s,
                itl_s=estimates.joined_itl_s(request, decode),
                queue_s=work.waiting_s,
                prefill_s=work.own_s,
                transfer_s=wire_s,
                fetch_s=work.fetch_s,
            )
            yield _option(request, prefill, decode, work, told, snapshot, others_lose_s=0.0)


def _decode_shortlist(
    request: RequestView, found: Candidates, snapshot: Snapshot, prefills: list[WorkerView]
) -> list[WorkerView]:
    def rank(view: WorkerView) -> tuple[bool, bool, float, int, str]:
        itl_s = estimates.joined_itl_s(request, view)
        wire_s = estimates.transfer_s(request, prefills[0], view, snapshot)
        cost_s = wire_s + itl_s * request.expected_output_tokens
        flaws = estimates.lacks_room(request, view, snapshot), estimates.breaks_itl(request, view, itl_s)
        return (*flaws, cost_s, *_turn(view))

    return heapq.nsmallest(SHORTLIST, found.decode, key=rank) if prefills else []


def _local_options(
    request: RequestView, found: Candidates, peers: Peers, snapshot: Snapshot, *, forced: bool
) -> Iterator[Option]:
    """`forced`: nobody else can compute the prompt, so a broken promise is better than no answer."""
    if snapshot.knobs.local_prefill == "never":
        return
    for view in found.decode:
        work = fetching.on_decode(request, view, peers, snapshot)
        broken = work is None
        if work is None:
            if not forced:
                continue
            work = fetching.on_prefill(request, view, peers, snapshot)
        told = Estimates(
            ttft_s=work.total_s,
            itl_s=estimates.joined_itl_s(request, view),
            queue_s=work.waiting_s,
            prefill_s=work.own_s,
            fetch_s=work.fetch_s,
        )
        ready = request.prompt_tokens - work.tokens
        lost_s = view.batch * estimates.on_prefill(request, view, snapshot, ready).own_s
        yield _option(request, None, view, work, told, snapshot, others_lose_s=lost_s, broken=broken)


def _option(
    request: RequestView,
    prefill: WorkerView | None,
    decode: WorkerView,
    work: Work,
    told: Estimates,
    snapshot: Snapshot,
    *,
    others_lose_s: float,
    broken: bool = False,
) -> Option:
    flaws = (
        estimates.lacks_room(request, decode, snapshot),
        broken or estimates.breaks_itl(request, decode, told.itl_s),
        request.ttft_s is not None and told.ttft_s > request.ttft_s,
    )
    tokens_s = request.expected_output_tokens * told.itl_s
    return Option(prefill, decode, told, flaws, work, tokens_s, others_lose_s)


def _best(options: Iterable[Option]) -> Option | None:
    """Fewest flaws, then cheapest; of nearly equal ones the least to compute, then one without a fetch, then whoever
    was chosen longest ago."""
    listed = list(options)
    if not listed:
        return None
    flaws = min(option.flaws for option in listed)
    sound = [option for option in listed if option.flaws == flaws]
    cheapest = min(sound, key=lambda option: option.cost_s)
    limit_s = cheapest.cost_s + NEAR * cheapest.told.ttft_s + NEAR_S
    near = (option for option in sound if option.cost_s <= limit_s)
    return min(near, key=lambda option: (option.work.tokens, option.work.fetch_s > 0, *_pair_turn(option)))


def _prefer(remote: Option | None, local: Option | None, snapshot: Snapshot) -> Option:
    if remote is None or local is None:
        chosen = remote or local
        assert chosen is not None, "candidates() leaves at least one of remote and local"
        return chosen
    if remote.flaws != local.flaws:
        return min(remote, local, key=lambda option: option.flaws)
    # The tokens' own time is nearly the same for both and would drown the difference.
    shared_s = min(remote.tokens_s, local.tokens_s)
    gain = snapshot.knobs.local_prefill_gain
    return local if remote.cost_s - shared_s >= gain * (local.cost_s - shared_s) else remote


def _placement(request: RequestView, chosen: Option, rival: Option | None, snapshot: Snapshot) -> Placement:
    prefill, decode = chosen.prefill, chosen.decode
    return Placement(
        request_id=request.request_id,
        prefill=prefill.info.ref if prefill else None,
        decode=decode.info.ref,
        estimates=chosen.told,
        reason=_reason(chosen, rival, snapshot),
        detail="; ".join(_details(chosen, rival)),
        prefill_overlap_tokens=snapshot.overlap(prefill or decode),
        decode_overlap_tokens=snapshot.overlap(decode),
        fetch=chosen.work.fetch_order(),
        fetch_forgone=chosen.work.forgone.told() if chosen.work.forgone else "",
    )


def _reason(chosen: Option, rival: Option | None, snapshot: Snapshot) -> str:
    if chosen.prefill is None:
        if snapshot.knobs.local_prefill == "always":
            return LOCAL_ALWAYS
        return LOCAL_FASTER if rival else LOCAL_ONLY
    if any(chosen.flaws):
        return FULL if chosen.flaws[0] else AT_RISK
    if chosen.work.fetch is not None:
        return FETCHED
    return PREFIX if snapshot.overlap(chosen.prefill) or snapshot.overlap(chosen.decode) else FASTEST


def _details(chosen: Option, rival: Option | None) -> Iterator[str]:
    if rival is not None:
        where = "local prefill" if rival.prefill is None else f"prefill on {rival.prefill.name}"
        yield f"{where} would cost {rival.cost_s - chosen.cost_s:+.3f} s"
    yield from (word for word, flawed in zip(_FLAWS, chosen.flaws, strict=True) if flawed)


_FLAWS = ("waits for KV room", "an ITL promise is at risk", "the TTFT promise is at risk")


def _pair_turn(option: Option) -> tuple[int, int, str, str]:
    prefill_turn, prefill_name = _turn(option.prefill) if option.prefill else (0, "")
    decode_turn, decode_name = _turn(option.decode)
    return (decode_turn, prefill_turn, decode_name, prefill_name)


def _turn(view: WorkerView) -> tuple[int, str]:
    return view.last_placed, view.name
