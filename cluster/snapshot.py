"""What the router decides on, and what it decides: frozen values, each printable in a line.

A `RequestView` (what matters of a request) meets a `Snapshot` (what is known of every worker at this moment) in a
policy, and a `Placement` or a `Refusal` comes out. Nothing here does work beyond arithmetic on its own fields.

A worker's report is always a little old, so a view carries two tallies of the router's own ledger beside it: `unseen`,
the requests sent there that no report has shown yet (add them to the report), and `promised`, all requests the router
placed there that have not ended (the report cannot be lower than they will become: a request that waits for its KV
holds no blocks yet, but will).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from engine.types import EngineLoad, Request
from tandem.messages import Code, Fetch, WorkerInfo, WorkerRef

EXPECTED_OUTPUT_TOKENS = 256
"""Growth that is reserved for a request: its `max_tokens`, but no more than this, since few use a large limit up."""

FASTEST = "estimated fastest"
PREFIX = "prefix held"
FETCHED = "prefix fetched"
LOCAL_FASTER = "local prefill faster"
LOCAL_ALWAYS = "local prefill by config"
LOCAL_ONLY = "no prefill worker"
RESUMED = "goes on after a loss"
AT_RISK = "promise at risk"
FULL = "all full, waits"
IN_TURN = "next in turn"
LEAST_LOADED = "least loaded"
REASONS = (
    FASTEST,
    PREFIX,
    FETCHED,
    LOCAL_FASTER,
    LOCAL_ALWAYS,
    LOCAL_ONLY,
    RESUMED,
    AT_RISK,
    FULL,
    IN_TURN,
    LEAST_LOADED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A request as the router sees it. `prefix_keys`: one key per full granule of 16 tokens (`engine.hashing`).

    `ttft_s` and `itl_s` are the promises of its class (None: none), `deadline_s` is on the router's clock.
    """

    request_id: str
    prompt_tokens: int
    prefix_keys: tuple[bytes, ...] = field(default=(), repr=False)
    max_tokens: int = 16
    sequences: int = 1
    """Answers that are generated from the one prompt, each up to `max_tokens`."""
    sla_class: str = "default"
    ttft_s: float | None = None
    itl_s: float | None = None
    priority: int = 0
    deadline_s: float | None = None
    resumed: bool = False
    """It lost its decode worker, and another is to compute prompt and answer so far (both are `prompt_tokens`) and to
    go on."""

    @classmethod
    def of(cls, request: Request, prefix_keys: tuple[bytes, ...]) -> Self:
        return cls(
            request_id=request.request_id,
            prompt_tokens=len(request.token_ids),
            prefix_keys=prefix_keys,
            max_tokens=request.sampling.max_tokens,
            sequences=request.sequences,
            sla_class=request.sla_class,
            ttft_s=request.ttft_s,
            itl_s=request.itl_s,
            priority=request.priority,
            deadline_s=request.deadline_s,
        )

    def resume(self, generated: int) -> Self:
        """The same request, of which so many tokens are there already."""
        tokens, left = self.prompt_tokens + generated, max(1, self.max_tokens - generated)
        return replace(self, prompt_tokens=tokens, max_tokens=left, resumed=True)

    @property
    def expected_output_tokens(self) -> int:
        """Of each sequence."""
        return min(self.max_tokens, EXPECTED_OUTPUT_TOKENS)

    @property
    def expected_tokens(self) -> int:
        """KV positions that it comes to hold where it decodes: the prompt, which all share, and every answer."""
        return self.prompt_tokens + self.sequences * self.expected_output_tokens


@dataclass(frozen=True, slots=True)
class Tally:
    """Requests of the ledger on one worker, summed. `itl_s` is the tightest promise among them, None when none."""

    requests: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    context_tokens: int = 0
    itl_s: float | None = None
    siblings: int = 0
    """Sequences beyond the first of each request."""

    @property
    def sequences(self) -> int:
        return self.requests + self.siblings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker: what it said of itself, its last report (`age_s` ago), and what the ledger knows better.

    `last_placed` is the number of the last placement that chose this worker, 0 for never. `healthy` is False for a
    worker whose heartbeat is late: it is chosen only when no other is left.
    """

    info: WorkerInfo
    load: EngineLoad
    age_s: float = 0.0
    healthy: bool = True
    unseen: Tally = Tally()
    promised: Tally = Tally()
    last_placed: int = 0
    transfers_in_flight: int = 0

    @property
    def name(self) -> str:
        return self.info.ref.name

    @property
    def queued_prefill_tokens(self) -> int:
        return self.load.queued_prefill_tokens + self.unseen.prefill_tokens

    @property
    def waiting(self) -> int:
        return self.load.waiting + self.unseen.requests

    @property
    def batch(self) -> int:
        """Sequences that decode here now or will once their KV has arrived."""
        return max(self.load.running + self.unseen.sequences, self.promised.sequences)

    @property
    def context_tokens(self) -> int:
        return max(self.load.running_context_tokens + self.unseen.context_tokens, self.promised.context_tokens)

    @property
    def room_blocks(self) -> int:
        """Blocks that nobody holds or was promised; cached ones count as room. Negative: more is promised than is."""
        return self.load.total_blocks - max(self.load.live_blocks + self.unseen.blocks, self.promised.blocks)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.load.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingKnobs:
    """Settings of the policies (`cluster.config.RoutingSection` and the pools')."""

    local_prefill: str = "auto"
    """"auto", "never" or "always"."""
    local_prefill_gain: float = 1.25
    """Local prefill is chosen when remote is estimated to cost at least this many times as much."""
    max_waiting: int = 1024
    """Requests that may wait on one worker; a worker above it is not chosen."""
    fetch: str = "auto"
    """"auto" or "never"."""
    fetch_gain: float = 1.25
    """A prefix is fetched from a peer when computing it is estimated to cost at least this many times as much."""
    assumed_bytes_per_s: float = float(1 << 30)
    """KV transfer between a pair that was not measured yet."""
    handover_s: float = 0.005
    """Control messages on the way from the last chunk to Commit's answer."""
    prefill_step_tokens: int = 512
    decode_step_tokens: int = 512
    """Token budget of one step, by pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything a policy may look at.

    `overlaps[name]` is the number of leading prompt tokens whose KV that worker holds (or will hold before this
    request's turn), `held[name]` those that it holds now; `links[(source, destination)]` the measured bytes per second.
    An overlap may lie in lower tiers, from which `loads[name]` seconds bring it back; `held` never does, for only what
    is in the pool can be sent.
    `excluded` names workers that this request must not get: they still tell whether it could ever fit.
    """

    prefill: tuple[WorkerView, ...] = ()
    decode: tuple[WorkerView, ...] = ()
    overlaps: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    loads: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    knobs: RoutingKnobs = RoutingKnobs()

    def overlap(self, view: WorkerView) -> int:
        return self.overlaps.get(view.name, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What a policy expects of its choice, in seconds. `ttft_s` = the longer of queue and fetch + prefill + the exposed
    part of transfer."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    fetch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request goes. `prefill` None: the decode worker computes the prompt itself.

    `reason` is one of `REASONS` (so it may be a label of a metric), `detail` says more to people. `*_overlap_tokens`
    are the prompt tokens whose KV each side is thought to hold; `fetch`: where whoever computes gets more of them;
    `fetch_forgone`: where they could be had, when computing them is estimated to be faster.
    """

    request_id: str
    prefill: WorkerRef | None
    decode: WorkerRef
    estimates: Estimates
    reason: str
    detail: str = ""
    prefill_overlap_tokens: int = 0
    decode_overlap_tokens: int = 0
    fetch: Fetch | None = None
    fetch_forgone: str = ""

    @property
    def ready_tokens(self) -> int:
        """Prompt tokens that need no computing."""
        return max(self.prefill_overlap_tokens, self.fetch.tokens if self.fetch else 0)

    def explain(self) -> str:
        """The decision in one line."""
        where = f"prefill={self.prefill.name if self.prefill else 'local'} decode={self.decode.name}"
        told = self.estimates
        numbers = (
            f"ttft={_ms(told.ttft_s)} (queue {_ms(told.queue_s)}, prefill {_ms(told.prefill_s)}, "
            f"transfer {_ms(told.transfer_s)}) itl={_ms(told.itl_s)}"
        )
        overlap = f"overlap={self.prefill_overlap_tokens}/{self.decode_overlap_tokens} tokens"
        if self.fetch is not None:
            overlap += f" fetch={self.fetch.tokens} tokens from {self.fetch.source.name} ({_ms(told.fetch_s)})"
        if self.fetch_forgone:
            overlap += f" computes rather than fetch {self.fetch_forgone}"
        why = f"{self.reason} ({self.detail})" if self.detail else self.reason
        return f"{self.request_id}: {where} {numbers} {overlap}: {why}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """No worker for this request: INVALID (never), UNAVAILABLE (nobody there), NO_ROOM (not now)."""

    code: Code
    reason: str

    def explain(self) -> str:
        return f"refused ({self.code}): {self.reason}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}ms"
