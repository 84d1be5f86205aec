"""The router: where every request goes, and what is known to decide that.

It holds four things and one rule book: who is alive (`Membership`), each worker's last report, which prefixes it holds
(`PrefixIndex`), what was promised since (`Ledger`), and a policy. `place` freezes them into a `Snapshot`, asks the
policy (pure) and writes the answer down before it leaves, so that the next request of a burst sees it.

All state can be lost: workers register again, reports carry the live request ids, and an index without a past matches
nothing until it is told. No I/O, no clock, one thread; whoever hosts it (an actor, a test) passes messages and time in.
What a host must do with the decisions of `tick` is said in `cluster.membership`.
"""

from __future__ import annotations

import logging
from collections import ChainMap, Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cluster.config import TandemConfig
from cluster.evacuation import Evacuation, Move, Resident
from cluster.index import DEVICE, PrefixIndex, Slots, tokens_of
from cluster.ledger import Claim, Ledger
from cluster.membership import Decision, Fence, Health, HealthBounds, Membership
from cluster.policies import POLICIES, Policy
from cluster.policies.estimates import uncached
from cluster.probe_turns import Pair, ProbeTurns
from cluster.replay import Replays
from cluster.snapshot import RESUMED, Placement, Refusal, RequestView, RoutingKnobs, Snapshot, WorkerView
from engine.types import EngineLoad, StepTimes
from kvtransfer.plan import sizes_fit
from tandem.messages import (
    Answer,
    Code,
    Declined,
    FetchCounters,
    HandoffReport,
    KvEvents,
    LinkRate,
    LoadReport,
    MigrationCounters,
    TransferCounters,
    WorkerInfo,
    WorkerRef,
)

log = logging.getLogger(__name__)

MUST_MATCH = ("model", "model_digest", "layout", "numerics", "max_model_len")
"""Fields of `WorkerInfo` that are equal on all workers, or KV cannot be exchanged."""
PROVEN_SAMPLES = 32
"""Steps after which a worker's own step times are believed."""
LINK_STEP = 0.2
"""Weight of a new measurement of a pair's bandwidth."""
LINK_DOUBTED = 16
"""A pair that never moved bytes faster than this part of a copy in memory may have been measured in a busy moment."""
LINK_MIN_BYTES = 1 << 20
"""Smaller transfers measure the latency of messages."""
LINK_TRUST_S = 60.0
"""A fetch's measurement is forgotten after this: a pair that had a bad moment would never be measured again."""


@dataclass(slots=True)
class _Known:
    """A registered worker, its newest report, and its place in the turn."""

    info: WorkerInfo
    load: EngineLoad
    number: int = -1
    reported_s: float = 0.0
    transfers_in_flight: int = 0
    transfers: tuple[TransferCounters, ...] = ()
    fetches: Mapping[str, FetchCounters] = field(default_factory=dict)
    """By source."""
    draining: bool = False
    migrations: MigrationCounters = field(default_factory=MigrationCounters)
    links: tuple[LinkRate, ...] = ()
    last_placed: int = 0


class Loaded(NamedTuple):
    """A worker's last report."""

    info: WorkerInfo
    load: EngineLoad
    transfers_in_flight: int
    transfers: tuple[TransferCounters, ...]
    fetches: tuple[FetchCounters, ...]
    migrations: MigrationCounters
    draining: bool
    links: tuple[LinkRate, ...]


def place(request: RequestView, snapshot: Snapshot, now: float, policy: Policy) -> Placement | Refusal:
    """The decision itself, pure: the same arguments give the same answer. A request that lost its worker is computed
    where it goes on, whatever the config says of others."""
    if not request.resumed:
        return policy(request, snapshot, now)
    alone = replace(snapshot, knobs=replace(snapshot.knobs, local_prefill="always"))
    decision = policy(request, alone, now)
    return replace(decision, reason=RESUMED) if isinstance(decision, Placement) else decision


class RouterState:
    """Everything the router knows. `now` is the host's monotonic clock in every call."""

    def __init__(self, config: TandemConfig) -> None:
        self._config = config
        self._policy = POLICIES[config.routing.policy]
        self._knobs = knobs_of(config)
        slots = Slots()
        self.index = PrefixIndex(slots)
        self.ledger = Ledger(slots, adopted_itl_s=_tightest_itl_s(config))
        self.membership = Membership(bounds_of(config))
        self._replays = Replays()
        self._evacuation = Evacuation()
        self._known: dict[str, _Known] = {}
        self._links: dict[tuple[str, str], float] = {}
        self._fetch_links: dict[tuple[str, str], tuple[float, float]] = {}
        """(source, destination) → bytes per second, and when that was measured."""
        self._rates: dict[tuple[str, str], float] = {}
        """What the transfer alone achieved at best, as the source says, for pairs of which nothing better is known: a
        start is a busy moment, and its last measurement may be far off."""
        self._probes = ProbeTurns()
        self._placed: dict[str, tuple[str, str]] = {}
        self._turn = 0
        self.placements: Counter[str] = Counter()
        """By reason; refusals by their code."""
        self.recent: deque[str] = deque(maxlen=256)
        """The last decisions, explained."""

    # -- workers -------------------------------------------------------------------------------------------------

    def register(self, info: WorkerInfo, now: float) -> Declined | None:
        """A worker says that it is here. Declined: another model, layout or context than the others', or fenced."""
        name = info.ref.name
        refusal = self._mismatch(info)
        if refusal is not None:
            log.error("%s: %s", name, refusal.message)
            return refusal
        if not self.membership.joined(info.ref, now):
            return Declined(Code.STALE, f"incarnation {info.ref.incarnation} of {name} was fenced; start anew", name)
        known = self._known.get(name)
        if known is not None and known.info.ref.incarnation == info.ref.incarnation:
            known.info = info
            return None
        self._forget(name)
        self._known[name] = _Known(info, _empty_load(info), reported_s=now)
        self.index.add(name, info.ref.incarnation)
        return None

    def hold_back(self, name: str) -> None:
        """A worker is about to be drained: it is not chosen, until it reports that it does not drain."""
        self._known[name].draining = True

    def report(self, report: LoadReport, now: float) -> bool:
        """A worker's state and heartbeat. False: refused (unknown, old incarnation, or older than the last)."""
        known = self._known.get(report.worker)
        if known is None or not self.membership.heard(report.worker, report.incarnation, now):
            return False
        if report.number <= known.number:
            return False
        known.number, known.load, known.reported_s = report.number, report.load, now
        known.transfers_in_flight, known.draining = report.transfers_in_flight, report.draining
        known.transfers = report.transfers
        known.migrations = report.migrations
        self._learn_rates(known, report)
        self._learn_links(known, report, now)
        self.index.told_up_to(report.worker, report.incarnation, report.kv_events)
        decode = known.info.role == "decode"
        self.ledger.reported(report.worker, report.request_ids, decode=decode, now=now)
        return True

    def kv_events(self, events: KvEvents) -> bool:
        """News of a prefix cache. False: refused. See `replays_due` for what to do after a gap."""
        return self.index.apply(events)

    def stale_indexes(self) -> tuple[WorkerRef, ...]:
        """Workers of whose cache a part is unknown; their retelling (an event with `cleared`) mends it."""
        return tuple(self._known[name].info.ref for name in self.index.incomplete())

    def replays_due(self, now: float) -> tuple[WorkerRef, ...]:
        """Workers to be asked now (`ReplayPrefixes`) for all that they hold; see `cluster.replay`."""
        return self._replays.due(self.stale_indexes(), now)

    def probes_due(self, now: float) -> tuple[Pair, ...]:
        """Pairs to be measured now, for nobody is at work there: each destination is to be asked (`ProbeLink`)."""
        if not self._config.transfer.link_probes:
            return ()
        idle = [known for known in self._known.values() if self._routable(known) and _is_idle(known)]
        fetch = self._knobs.fetch != "never"
        unmeasured = [
            Pair(source.info.ref, there.info.ref)
            for there in idle
            for source in idle
            if source is not there
            and (fetch if there.info.role == "prefill" else source.info.role == "prefill")
            and not _is_measured(source, there.info.ref.name)
        ]
        return self._probes.due(unmeasured, now)

    def present(self, ref: WorkerRef, now: float) -> bool:
        """A worker's control asks whether it is known. False: register (again), or end, for it was fenced."""
        known = self._known.get(ref.name)
        return known is not None and known.info.ref == ref and self.membership.present(ref.name, ref.incarnation, now)

    def suspect(self, ref: WorkerRef, why: str, now: float) -> None:
        """Somebody got no answer from this worker: it gets no request until it is heard again."""
        self.membership.accused(ref.name, ref.incarnation, why, now)

    def lost(self, ref: WorkerRef, why: str, now: float) -> None:
        """Its process is gone. Nothing it held counts any more."""
        self.membership.exited(ref.name, ref.incarnation, why, now)
        self._forget_incarnation(ref.name, ref.incarnation)

    def expect(self, name: str, now: float) -> None:
        """This worker is being started: if it does not join in time, `tick` says what to do."""
        self.membership.expect(name, now)

    def remove(self, name: str) -> None:
        """Taken out of the cluster on purpose."""
        self.membership.forget(name)
        self._forget(name)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Everybody registered and not fenced."""
        return tuple(known.info for known in self._known.values())

    def tick(self, now: float) -> tuple[Decision, ...]:
        """Time passes: what is to be done about workers. What a fence implies for routing is done already."""
        decisions = self.membership.tick(now)
        for decision in decisions:
            if isinstance(decision, Fence):
                log.warning("%s#%s is fenced: %s", decision.worker, decision.incarnation, decision.why)
                self._forget_incarnation(decision.worker, decision.incarnation)
        for request_id in self.ledger.sweep(now):
            self._placed.pop(request_id, None)
            log.warning("%s was placed and no worker has ever shown it; its reservation is dropped", request_id)
        return decisions

    def readiness(self) -> tuple[bool, str]:
        """Whether a request can be served now, and if not, why."""
        for role in ("decode", "prefill"):
            if not any(self._routable(known) and known.info.role == role for known in self._known.values()):
                if role == "prefill" and self._knobs.local_prefill != "never":
                    continue
                return False, f"no {role} worker is ready ({self._why_not(role)})"
        return True, "ready"

    # -- requests ------------------------------------------------------------------------------------------------

    def place(self, request: RequestView, exclude: frozenset[str], now: float) -> Placement | Refusal:
        """Decide, and write the promise down."""
        decision = place(request, self.snapshot(request, exclude, now), now, self._policy)
        self.recent.append(decision.explain())
        log.debug("%s", self.recent[-1])
        if isinstance(decision, Refusal):
            self.placements[str(decision.code)] += 1
            return decision
        self.placements[decision.reason] += 1
        self._write_down(request, decision, now)
        return decision

    def finished(self, request_id: str, report: HandoffReport | None = None) -> None:
        """The request is over, however it went. Its transfer, if one was measured, teaches the pair's bandwidth."""
        self.ledger.finished(request_id)
        pair = self._placed.pop(request_id, None)
        if pair is None or report is None or report.kv_bytes < LINK_MIN_BYTES or report.transfer_s <= 0:
            return
        rate = report.kv_bytes / report.transfer_s
        self._links[pair] = self._links.get(pair, rate) * (1 - LINK_STEP) + rate * LINK_STEP

    # -- draining workers ----------------------------------------------------------------------------------------

    def evacuations(self, now: float) -> tuple[Move, ...]:
        """Running requests that shall leave draining decode workers now: each source is to be asked to `Migrate`, and
        its answer told to `moved`. Room is reserved at the destination at once."""
        leaving = [known for known in self._known.values() if known.draining and known.info.role == "decode"]
        if not leaving:
            return ()
        proven = self._proven_times()
        views = [
            self._view(known, proven, now)
            for known in self._known.values()
            if known.info.role == "decode" and self._routable(known)
        ]
        residents = [
            Resident(request_id, known.info.ref, claim)
            for known in leaving
            for request_id, claim in self.ledger.decoding_on(known.info.ref.name)
        ]
        moves = self._evacuation.due(residents, views, now)
        claims = {resident.request_id: resident.claim for resident in residents}
        for move in moves:
            log.info("%s", move.explain())
            there = replace(claims[move.request_id], worker=move.to.name, prefill_tokens=0, keys=())
            self.ledger.moves(move.request_id, there)
        return moves

    def moved(self, move: Move, answer: Answer, now: float) -> None:
        """What the source said: the reservation stays at the destination, or goes."""
        if self._evacuation.over(move, answer, now):
            return
        self.ledger.stays(move.request_id, move.to.name)
        why = answer.message if isinstance(answer, Declined) else repr(answer)
        log.info("%s stays at %s: %s", move.request_id, move.source.name, why)

    def snapshot(self, request: RequestView, exclude: frozenset[str], now: float) -> Snapshot:
        """What is known at this moment, for this request."""
        proven = self._proven_times()
        views = [self._view(known, proven, now) for known in self._known.values() if self._routable(known)]
        overlaps: dict[str, int] = {}
        held: dict[str, int] = {}
        loads: dict[str, float] = {}
        if self._config.routing.prefix_affinity and self._config.model.prefix_caching:
            overlaps = self._matched(request, DEVICE, self.ledger.underway.masks)
            if self.index.has_lower_tiers():
                pool, overlaps = overlaps, self._matched(request, None, self.ledger.underway.masks)
                loads = self._loading(overlaps, pool)
            held = self._matched(request, DEVICE) if self._knobs.fetch != "never" else {}
        return Snapshot(
            prefill=tuple(view for view in views if view.info.role == "prefill"),
            decode=tuple(view for view in views if view.info.role == "decode"),
            overlaps=overlaps,
            held=held,
            loads=loads,
            links=self._links_now(now),
            excluded=exclude,
            knobs=self._knobs,
        )

    def loads(self) -> dict[str, Loaded]:
        """What each worker last reported, for status and metrics."""
        return {
            name: Loaded(
                known.info,
                known.load,
                known.transfers_in_flight,
                known.transfers,
                tuple(known.fetches.values()),
                known.migrations,
                known.draining,
                known.links,
            )
            for name, known in self._known.items()
        }

    def check(self) -> None:
        """Invariants of the parts and between them. Raises AssertionError with the story."""
        self.index.check()
        self.ledger.check()
        for name in self._known:
            assert self.membership.health(name) in (Health.ALIVE, Health.SUSPECT, Health.FENCED, Health.FAILED), name

    # -- inside --------------------------------------------------------------------------------------------------

    def _matched(
        self, request: RequestView, tier: str | None, underway: Mapping[bytes, int] | None = None
    ) -> dict[str, int]:
        """Leading prompt tokens held, by worker."""
        matches = self.index.match(request.prefix_keys, tier=tier, underway=underway)
        return {name: tokens_of(granules, request.prompt_tokens) for name, granules in matches.items()}

    def _loading(self, overlaps: Mapping[str, int], pool: Mapping[str, int]) -> dict[str, float]:
        """Seconds to load what lies in lower tiers, by worker, at the rate that its loads have had."""
        loads = {}
        for name, tokens in overlaps.items():
            known, lower = self._known.get(name), tokens - pool.get(name, 0)
            if known is not None and lower > 0:
                moved = sum(tier.loaded_bytes for tier in known.load.tiers)
                took_s = sum(tier.load_seconds for tier in known.load.tiers)
                rate = moved / took_s if moved and took_s else self._knobs.assumed_bytes_per_s
                loads[name] = lower / known.load.block_size * known.info.block_bytes / rate
        return loads

    def _learn_rates(self, known: _Known, report: LoadReport) -> None:
        """What this worker's transfers achieved; a peer that it has lost is not known any more."""
        before, known.links = known.links, report.links
        for lost in {rate.peer for rate in before}.difference(rate.peer for rate in known.links):
            self._rates.pop((report.worker, lost), None)
        self._rates.update({(report.worker, rate.peer): rate.best_bytes_per_s for rate in known.links})

    def _learn_links(self, known: _Known, report: LoadReport, now: float) -> None:
        """What this worker's fetches since its last report say of its links."""
        before, known.fetches = known.fetches, {counters.source: counters for counters in report.fetches}
        for source, counters in known.fetches.items():
            last = before.get(source, FetchCounters(source))
            num_bytes, seconds = counters.kv_bytes - last.kv_bytes, counters.seconds - last.seconds
            control_s = (counters.fetches - last.fetches) * self._knobs.handover_s
            if num_bytes >= LINK_MIN_BYTES and seconds > 0:
                # The estimate adds the control messages; a short fetch is little else.
                pair, rate = (source, report.worker), num_bytes / max(seconds - control_s, seconds / 10)
                old, _ = self._fetch_links.get(pair, (rate, now))
                self._fetch_links[pair] = (old * (1 - LINK_STEP) + rate * LINK_STEP, now)

    def _links_now(self, now: float) -> Mapping[tuple[str, str], float]:
        old = [pair for pair, (_, measured_s) in self._fetch_links.items() if now > measured_s + LINK_TRUST_S]
        for pair in old:
            del self._fetch_links[pair]
        return ChainMap(self._links, {pair: rate for pair, (rate, _) in self._fetch_links.items()}, self._rates)

    def _mismatch(self, info: WorkerInfo) -> Declined | None:
        others = [known.info for name, known in self._known.items() if name != info.ref.name]
        why = next(filter(None, (mismatch(info, other) for other in others)), "")
        return Declined(Code.MISMATCH, why, info.ref.name) if why else None

    def _routable(self, known: _Known) -> bool:
        name = known.info.ref.name
        return not known.draining and (self.membership.usable(name) or self.membership.late(name))

    def _why_not(self, role: str) -> str:
        states = []
        for member in self.membership.members():
            known = self._known.get(member.name)
            if known is None or known.info.role == role:
                drains = known is not None and known.draining and member.health is Health.ALIVE
                states.append(f"{member.name} is {'draining' if drains else f'{member.health}: {member.why}'}")
        return "; ".join(states) or "none has registered"

    def _proven_times(self) -> dict[str, StepTimes]:
        """The step times of each pool's most measured worker, by role."""
        proven: dict[str, StepTimes] = {}
        for known in self._known.values():
            times, role = known.load.step_times, known.info.role
            if times.samples > proven.get(role, StepTimes()).samples:
                proven[role] = times
        return proven

    def _view(self, known: _Known, proven: Mapping[str, StepTimes], now: float) -> WorkerView:
        """Until a worker has measured itself it is taken to be like its pool's most measured one: the priors may be far
        off, and a worker that only looks slow would never get anything to measure."""
        name, load = known.info.ref.name, known.load
        if load.step_times.samples < PROVEN_SAMPLES:
            load = replace(load, step_times=proven.get(known.info.role, load.step_times))
        return WorkerView(
            info=known.info,
            load=load,
            age_s=now - known.reported_s,
            healthy=self.membership.usable(name),
            unseen=self.ledger.unseen(name),
            promised=self.ledger.promised(name),
            last_placed=known.last_placed,
            transfers_in_flight=known.transfers_in_flight,
        )

    def _write_down(self, request: RequestView, placement: Placement, now: float) -> None:
        self._turn += 1
        decode = self._known[placement.decode.name]
        prefill = self._known[placement.prefill.name] if placement.prefill else None
        decode.last_placed = self._turn
        if prefill is None:
            tokens = uncached(request, placement.ready_tokens)
            claims = [self._claim(request, decode, tokens)]
        else:
            prefill.last_placed = self._turn
            tokens = uncached(request, placement.ready_tokens)
            claims = [self._claim(request, decode, 0), self._claim(request, prefill, tokens)]
            self._placed[request.request_id] = (prefill.info.ref.name, decode.info.ref.name)
        self.ledger.place(request.request_id, claims, now)

    def _claim(self, request: RequestView, known: _Known, prefill_tokens: int) -> Claim:
        decode = known.info.role == "decode"
        tokens = request.expected_tokens if decode else request.prompt_tokens
        return Claim(
            worker=known.info.ref.name,
            decode=decode,
            prefill_tokens=prefill_tokens,
            blocks=-(-tokens // known.load.block_size),
            context_tokens=request.sequences * request.prompt_tokens if decode else 0,
            siblings=request.sequences - 1 if decode else 0,
            itl_s=request.itl_s if decode else None,
            keys=request.prefix_keys if prefill_tokens else (),
        )

    def _forget_incarnation(self, name: str, incarnation: str) -> None:
        known = self._known.get(name)
        if known is not None and known.info.ref.incarnation == incarnation:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        self._rates = {pair: rate for pair, rate in self._rates.items() if name not in pair}
        self._probes.forget(name)
        self.index.remove(name)
        self.ledger.lost(name)


def _is_idle(known: _Known) -> bool:
    return known.number >= 0 and not (known.load.running or known.load.waiting or known.transfers_in_flight)


def _is_measured(source: _Known, peer: str) -> bool:
    """Whether it is known how fast the source sends to that peer. A doubtful rate must not stay because it keeps away
    the traffic that would mend it."""
    return any(
        link.peer == peer and link.best_bytes_per_s * LINK_DOUBTED >= link.limit_bytes_per_s for link in source.links
    )


def knobs_of(config: TandemConfig) -> RoutingKnobs:
    """The policies' part of the config."""
    routing = config.routing
    return RoutingKnobs(
        local_prefill=routing.local_prefill,
        local_prefill_gain=routing.local_prefill_gain,
        fetch=routing.fetch,
        fetch_gain=routing.fetch_gain,
        max_waiting=routing.max_waiting,
        assumed_bytes_per_s=float(routing.assumed_bytes_per_s),
        prefill_step_tokens=config.pools.prefill.max_num_batched_tokens,
        decode_step_tokens=config.pools.decode.max_num_batched_tokens,
    )


def bounds_of(config: TandemConfig) -> HealthBounds:
    """The bounds of health in the config."""
    times = config.timeouts
    return HealthBounds(
        suspect_s=times.suspect_s,
        fence_s=times.fence_s,
        start_s=times.start_s,
        backoff_s=times.restart_backoff_s,
        backoff_max_s=times.restart_backoff_max_s,
        max_start_failures=times.max_start_failures,
    )


def _tightest_itl_s(config: TandemConfig) -> float | None:
    """What requests of an earlier router may have been promised: the most that anybody is."""
    return min((sla.itl_s for sla in config.classes.values() if sla.itl_s is not None), default=None)


def mismatch(info: WorkerInfo, other: WorkerInfo) -> str:
    """Why these two cannot exchange KV; empty when they can."""
    for name in MUST_MATCH:
        mine, theirs = getattr(info, name), getattr(other, name)
        if mine != theirs:
            return f"{name} of {info.ref.name} is {mine!r}, of {other.ref.name} {theirs!r}; they must be equal"
    if not sizes_fit(info.block_size, other.block_size):
        sizes = f"block_size of {info.ref.name} is {info.block_size}, of {other.ref.name} {other.block_size}"
        return f"{sizes}; the larger must be a multiple of the smaller"
    return ""


def _empty_load(info: WorkerInfo) -> EngineLoad:
    """Before the first report: nothing to do and everything free, with the step times' priors."""
    return EngineLoad(
        total_blocks=info.total_blocks,
        free_blocks=info.total_blocks,
        live_blocks=0,
        cached_blocks=0,
        block_size=info.block_size,
        running=0,
        waiting=0,
        leased_blocks=0,
        queued_prefill_tokens=0,
        running_context_tokens=0,
        preemptions=0,
        prefix_queries=0,
        prefix_hits=0,
        prompt_tokens=0,
        generated_tokens=0,
    )
