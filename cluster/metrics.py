"""What Prometheus sees. Every name starts with `tandem_`; times are seconds, sizes bytes.

Requests are counted where they enter and where they end, so that the sums agree at rest:
`received = ended{outcome="success"} + ended{outcome=<each code>}`, and `in_progress` is the difference.
Workers are shown from their last report when somebody scrapes: a worker that is gone leaves no series behind.

Labels are bounded: worker, role, scheme, reason, outcome, SLA class and model come from lists that we own; whatever a
client invents is "unknown". Nothing that a client wrote is ever a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.config import SlaClass, TandemConfig
from cluster.membership import Health
from cluster.outcome import Outcome
from cluster.snapshot import REASONS
from engine.types import EngineLoad
from tandem.messages import Code, FetchCounters, LinkRate, LoadReport, MigrationCounters, TransferCounters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNKNOWN = "unknown"
SUCCESS = "success"

_FINE_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_COARSE_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """All series of one process, on a registry of their own. Call its methods from one thread."""

    def __init__(self, config: TandemConfig) -> None:
        self.registry = CollectorRegistry()
        self._classes = config.classes
        self._model = config.model.name
        self.workers = WorkerSeries()
        self.registry.register(self.workers)

        self._received = self._counter("requests_received", "Requests that entered", "model", "sla_class")
        self._ended = self._counter("requests_ended", "Requests that ended, by outcome", "outcome", "sla_class")
        self._in_progress = Gauge("tandem_requests_in_progress", "Received, not ended", registry=self.registry)
        self._ttft = self._histogram("ttft", "From arrival to the first token", _COARSE_S)
        self._itl = self._histogram("itl", "Between two tokens of a request", _FINE_S)
        self._e2e = self._histogram("e2e", "From arrival to the end", _COARSE_S)
        self._placed = self._histogram("placement", "From arrival to the router's answer", _FINE_S)
        self._queue = self._histogram("prefill_queue", "In prefill's queue", _COARSE_S)
        self._exposed = self._histogram("handover_exposed", "From the end of prefill to Commit's answer", _FINE_S)
        self._promises = self._counter("promises", "Requests by promise and whether it was kept", *_PROMISE_LABELS)
        self._tokens = self._counter("tokens", "Tokens by kind: prompt, completion, cached", "kind", "sla_class")
        self._placements = self._counter("placements", "Requests placed, by the router's reason", "reason")
        self._retries = self._counter("placement_retries", "Placements after the first one of a request")
        self._fetches = self._counter(
            "prefix_fetches", "Requests whose prefix a peer held: fetching it was chosen, or forgone", "decision"
        )
        self._handovers = self._counter("handovers", "Requests whose KV moved, by transport", "transport")
        self._moved = self._counter("handover_kv_bytes", "KV bytes moved, by transport", "transport")
        self._moves = self._counter("request_moves", "How often requests went on at another decode worker")
        self._moving = self._counter("handover_transfer_seconds", "Time on the wire, by transport", "transport")

    # -- requests ------------------------------------------------------------------------------------------------

    def received(self, model: str, sla_class: str) -> None:
        """A request (each sequence of it) entered. Exactly one of `refused` and `observe_outcome` must follow."""
        self._received.labels(model if model == self._model else UNKNOWN, self._class(sla_class)).inc()
        self._in_progress.inc()

    def refused(self, code: Code, sla_class: str) -> None:
        """A received request ended before it was dispatched."""
        self._end(str(code), sla_class)

    def observe_outcome(self, outcome: Outcome) -> None:
        """A received request ended in dispatch."""
        self._end(SUCCESS if outcome.code is None else str(outcome.code), outcome.sla_class)
        name = self._class(outcome.sla_class)
        self._observe_times(outcome, name)
        self._observe_promises(outcome, self._classes.get(outcome.sla_class))
        self._observe_placement(outcome)
        self._observe_handover(outcome)
        kinds = {
            "prompt": outcome.prompt_tokens,
            "completion": outcome.completion_tokens,
            "cached": outcome.cached_tokens,
        }
        for kind, tokens in kinds.items():
            self._tokens.labels(kind, name).inc(tokens)

    # -- workers -------------------------------------------------------------------------------------------------

    def observe_report(self, role: str, report: LoadReport) -> None:
        self.workers.report(role, report)

    def observe_health(self, worker: str, role: str, health: Health) -> None:
        self.workers.health(worker, role, health)

    def forget(self, worker: str) -> None:
        """The worker is gone, and with it its series."""
        self.workers.forget(worker)

    def expose(self) -> bytes:
        """The text that `/metrics` answers, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    # -- inside --------------------------------------------------------------------------------------------------

    def _end(self, outcome: str, sla_class: str) -> None:
        self._ended.labels(outcome, self._class(sla_class)).inc()
        self._in_progress.dec()

    def _observe_times(self, outcome: Outcome, name: str) -> None:
        """Each histogram counts the requests that reached its stage."""
        self._e2e.labels(name).observe(outcome.e2e_s)
        if outcome.placed_s is not None:
            self._placed.labels(name).observe(outcome.placed_s)
        if outcome.ttft_s is not None:
            self._ttft.labels(name).observe(outcome.ttft_s)
        for gap_s in outcome.itl_s:
            self._itl.labels(name).observe(gap_s)
        if outcome.prefill and outcome.report.computed_tokens:
            self._queue.labels(name).observe(outcome.queue_s)

    def _observe_promises(self, outcome: Outcome, promised: SlaClass | None) -> None:
        """ITL is kept when the 99th percentile of the request's gaps is within the promise."""
        if promised is None or outcome.code is Code.ABORTED:
            return
        worst_s = outcome.itl_quantile(0.99)
        pairs = (("ttft", promised.ttft_s, outcome.ttft_s), ("itl", promised.itl_s, worst_s))
        for promise, limit_s, actual_s in pairs:
            if limit_s is not None and (actual_s is not None or (promise == "ttft" and outcome.code is not None)):
                kept = "yes" if actual_s is not None and actual_s <= limit_s else "no"
                self._promises.labels(promised.name, promise, kept).inc()

    def _observe_placement(self, outcome: Outcome) -> None:
        if outcome.placement_reason:
            reason = outcome.placement_reason if outcome.placement_reason in REASONS else UNKNOWN
            self._placements.labels(reason).inc()
        if outcome.fetch:
            self._fetches.labels(outcome.fetch).inc()
        if outcome.attempts > 1:
            self._retries.inc(outcome.attempts - 1)

    def _observe_handover(self, outcome: Outcome) -> None:
        report = outcome.report
        self._moves.inc(outcome.moves)
        if not report.transport:
            return
        self._handovers.labels(report.transport).inc()
        self._moved.labels(report.transport).inc(report.kv_bytes)
        self._moving.labels(report.transport).inc(report.transfer_s)
        self._exposed.labels(self._class(outcome.sla_class)).observe(report.exposed_s)

    def _class(self, name: str) -> str:
        return name if name in self._classes else UNKNOWN

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"tandem_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        full_name = f"tandem_{name}_seconds"
        return Histogram(full_name, help_text, ("sla_class",), buckets=buckets, registry=self.registry)


_PROMISE_LABELS = ("sla_class", "promise", "kept")
_NO_MIGRATIONS = MigrationCounters()


@dataclass(slots=True)
class _Shown:
    """What is known of one worker."""

    role: str = UNKNOWN
    load: EngineLoad | None = None
    transfers_in_flight: int = 0
    transfers: tuple[TransferCounters, ...] = ()
    fetches: tuple[FetchCounters, ...] = ()
    migrations: MigrationCounters = _NO_MIGRATIONS
    links: tuple[LinkRate, ...] = ()
    health: Health | None = None


class WorkerSeries(Collector):
    """Series made from the last reports at the moment of a scrape."""

    def __init__(self) -> None:
        self._shown: dict[str, _Shown] = {}

    def report(self, role: str, report: LoadReport) -> None:
        shown = self._shown.setdefault(report.worker, _Shown())
        shown.role, shown.load = role, report.load
        shown.transfers_in_flight, shown.transfers = report.transfers_in_flight, report.transfers
        shown.fetches, shown.migrations, shown.links = report.fetches, report.migrations, report.links

    def health(self, worker: str, role: str, health: Health) -> None:
        shown = self._shown.setdefault(worker, _Shown())
        shown.role, shown.health = role, health

    def forget(self, worker: str) -> None:
        self._shown.pop(worker, None)

    def collect(self) -> Iterator[Metric]:
        shown = sorted(self._shown.items())
        yield from self._loads(shown)
        yield from self._transfers(shown)
        yield from self._rates(shown)
        yield from self._tiers(shown)
        yield from self._fetched(shown)
        yield from self._migrations(shown)
        up = GaugeMetricFamily(
            "tandem_worker_health", "1 for the state a worker is in", labels=("worker", "role", "state")
        )
        for worker, state in shown:
            if state.health is not None:
                up.add_metric((worker, state.role, str(state.health)), 1)
        yield up

    def _loads(self, shown: list[tuple[str, _Shown]]) -> Iterator[Metric]:
        loads = [(worker, state, state.load) for worker, state in shown if state.load is not None]
        for make, name, help_text, label, parts in _SPLIT_SERIES:
            family = make(name, help_text, labels=(*_WORKER, label))
            for worker, state, load in loads:
                for part, value_of in parts.items():
                    family.add_metric((worker, state.role, part), value_of(load))
            yield family
        in_flight = GaugeMetricFamily("tandem_worker_transfers_in_flight", "KV transfers running", labels=_WORKER)
        for worker, state, _ in loads:
            in_flight.add_metric((worker, state.role), state.transfers_in_flight)
        yield in_flight
        for make, name, help_text, field in _LOAD_SERIES:
            family = make(name, help_text, labels=_WORKER)
            for worker, state, load in loads:
                family.add_metric((worker, state.role), getattr(load, field))
            yield family

    def _transfers(self, shown: list[tuple[str, _Shown]]) -> Iterator[Metric]:
        for make, name, help_text, field in _TRANSFER_SERIES:
            family = make(name, help_text, labels=("worker", "scheme"))
            for worker, state in shown:
                for stats in state.transfers:
                    family.add_metric((worker, stats.scheme), getattr(stats, field))
            yield family

    def _rates(self, shown: list[tuple[str, _Shown]]) -> Iterator[Metric]:
        for name, help_text, field in _RATE_SERIES:
            family = GaugeMetricFamily(name, help_text, labels=("worker", "peer", "scheme"))
            for worker, state in shown:
                for rate in state.links:
                    family.add_metric((worker, rate.peer, rate.scheme), getattr(rate, field))
            yield family

    def _fetched(self, shown: list[tuple[str, _Shown]]) -> Iterator[Metric]:
        for name, help_text, value_of in _FETCH_SERIES:
            family = CounterMetricFamily(name, help_text, labels=("worker", "source"))
            for worker, state in shown:
                size = state.load.block_size if state.load is not None else 0
                for counters in state.fetches:
                    family.add_metric((worker, counters.source), value_of(counters, size))
            yield family

    def _migrations(self, shown: list[tuple[str, _Shown]]) -> Iterator[Metric]:
        moves = CounterMetricFamily(
            "tandem_worker_migrations", "Running requests moved to another worker, or not", labels=("worker", "result")
        )
        for worker, state in shown:
            if state.role == "decode":
                moves.add_metric((worker, "moved"), state.migrations.moved)
                moves.add_metric((worker, "failed"), state.migrations.failed)
        yield moves
        for name, help_text, field in _MIGRATION_SERIES:
            family = CounterMetricFamily(name, help_text, labels=("worker",))
            for worker, state in shown:
                if state.role == "decode":
                    family.add_metric((worker,), getattr(state.migrations, field))
            yield family

    def _tiers(self, shown: list[tuple[str, _Shown]]) -> Iterator[Metric]:
        for make, name, help_text, field in _TIER_SERIES:
            family = make(name, help_text, labels=("worker", "tier"))
            for worker, state in shown:
                for tier in state.load.tiers if state.load is not None else ():
                    family.add_metric((worker, tier.name), getattr(tier, field))
            yield family


_WORKER = ("worker", "role")
_Family = Callable[..., GaugeMetricFamily | CounterMetricFamily]
_GAUGE: _Family = GaugeMetricFamily
_COUNTER: _Family = CounterMetricFamily

_SPLIT_SERIES: tuple[tuple[_Family, str, str, str, Mapping[str, Callable[[EngineLoad], float]]], ...] = (
    (
        _GAUGE,
        "tandem_worker_blocks",
        "KV blocks by state",
        "state",
        {
            "live": lambda load: load.live_blocks,
            "cached": lambda load: load.cached_blocks,
            "free": lambda load: load.free_blocks,
            "leased": lambda load: load.leased_blocks,
        },
    ),
    (
        _GAUGE,
        "tandem_worker_swap_blocks",
        "Blocks of swap space by state",
        "state",
        {
            "used": lambda load: load.swap_used_blocks,
            "free": lambda load: load.swap_total_blocks - load.swap_used_blocks,
        },
    ),
    (
        _COUNTER,
        "tandem_worker_preemptions",
        "Sequences put back for want of KV room, by how they get it again",
        "way",
        {
            "swap": lambda load: load.swap_preemptions,
            "recompute": lambda load: load.preemptions - load.swap_preemptions,
        },
    ),
    (
        _GAUGE,
        "tandem_worker_step_time_error",
        "Mean relative error of recent predictions of a step's time",
        "kind",
        {
            "prefill": lambda load: load.step_times.prefill_error,
            "decode": lambda load: load.step_times.decode_error,
        },
    ),
)
_LOAD_SERIES: tuple[tuple[_Family, str, str, str], ...] = (
    (_GAUGE, "tandem_worker_running", "Sequences in the batch", "running"),
    (_GAUGE, "tandem_worker_waiting", "Sequences in the queue", "waiting"),
    (_GAUGE, "tandem_worker_queued_prefill_tokens", "Prompt tokens not computed yet", "queued_prefill_tokens"),
    (_GAUGE, "tandem_worker_swapped", "Sequences that wait in swap space", "swapped"),
    (_COUNTER, "tandem_worker_prefix_query_tokens", "Tokens looked up in the prefix cache", "prefix_queries"),
    (_COUNTER, "tandem_worker_prefix_hit_tokens", "Tokens found in the prefix cache", "prefix_hits"),
    (_COUNTER, "tandem_worker_prompt_tokens", "Prompt tokens computed", "prompt_tokens"),
    (_COUNTER, "tandem_worker_generated_tokens", "Tokens generated", "generated_tokens"),
    (_COUNTER, "tandem_worker_tier_loads", "Prompts of whose prefix lower tiers brought some", "tier_loads"),
    (_COUNTER, "tandem_worker_tier_recomputes", "Prompts for which computing was estimated faster", "tier_recomputes"),
)
_FETCH_SERIES: tuple[tuple[str, str, Callable[[FetchCounters, int], float]], ...] = (
    ("tandem_worker_fetches", "Prefixes of which a peer sent some", lambda one, size: one.fetches),
    ("tandem_worker_fetch_failures", "Prefixes that did not come, or not whole", lambda one, size: one.failed),
    ("tandem_worker_fetched_tokens", "Tokens whose KV a peer sent", lambda one, size: one.blocks * size),
    ("tandem_worker_fetched_kv_bytes", "Bytes of it", lambda one, size: one.kv_bytes),
    ("tandem_worker_fetch_seconds", "From question to last block", lambda one, size: one.seconds),
)
_MIGRATION_SERIES: tuple[tuple[str, str, str], ...] = (
    ("tandem_worker_migration_kv_bytes", "KV bytes of requests that moved away", "kv_bytes"),
    ("tandem_worker_migration_pause_seconds", "Time that they paused for, at their source", "pause_seconds"),
)
_TIER_SERIES: tuple[tuple[_Family, str, str, str], ...] = (
    (_GAUGE, "tandem_tier_capacity_bytes", "Most that the tier may hold", "capacity_bytes"),
    (_GAUGE, "tandem_tier_used_bytes", "What the tier holds", "used_bytes"),
    (_COUNTER, "tandem_tier_stored", "KV blocks written", "stored"),
    (_COUNTER, "tandem_tier_stored_bytes", "Bytes written", "stored_bytes"),
    (_COUNTER, "tandem_tier_hits", "KV blocks read, verified and used", "hits"),
    (_COUNTER, "tandem_tier_misses", "KV blocks counted on that did not come", "misses"),
    (_COUNTER, "tandem_tier_loaded_bytes", "Bytes read", "loaded_bytes"),
    (_COUNTER, "tandem_tier_load_seconds", "Time in reads", "load_seconds"),
    (_COUNTER, "tandem_tier_evicted", "KV blocks that made room for others", "evicted"),
    (_COUNTER, "tandem_tier_dropped", "Of the evicted KV blocks, those that no tier had any more", "dropped"),
    (_COUNTER, "tandem_tier_failed", "Reads and writes that failed or came too late", "failed"),
)
_RATE_SERIES: tuple[tuple[str, str, str], ...] = (
    ("tandem_transfer_rate_bytes_per_second", "KV sent to a peer, when last measured", "bytes_per_s"),
    ("tandem_transfer_best_rate_bytes_per_second", "The best of it so far", "best_bytes_per_s"),
    ("tandem_transfer_rate_limit_bytes_per_second", "What one thread copies there", "limit_bytes_per_s"),
)
_TRANSFER_SERIES: tuple[tuple[_Family, str, str, str], ...] = (
    (_COUNTER, "tandem_transfer_pushes", "Pushes acknowledged", "pushes"),
    (_COUNTER, "tandem_transfer_push_bytes", "Bytes pushed", "push_bytes"),
    (_COUNTER, "tandem_transfer_push_seconds", "Time from push to acknowledgement", "push_seconds"),
    (_COUNTER, "tandem_transfer_receives", "Receives completed", "receives"),
    (_COUNTER, "tandem_transfer_receive_bytes", "Bytes received", "receive_bytes"),
    (_COUNTER, "tandem_transfer_staged_bytes", "Bytes that went by way of staging memory", "staged_bytes"),
    (_COUNTER, "tandem_transfer_failed", "Transfers that failed", "failed"),
    (_GAUGE, "tandem_transfer_in_flight", "Transfers running", "in_flight"),
)
