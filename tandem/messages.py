"""What the rooms say to each other: between gateway and workers, and between two workers.

Frozen values; `tandem.wire` turns each into its protobuf twin and back. Questions are imperative (`Submit`), answers
and events past tense (`HandedOver`). The life of a request in messages:

    gateway → decode   Expect        → Expected | Declined
    gateway → prefill  Submit        → HandedOver | FinishedEarly | Declined      (answered when prefill is through)
    prefill → decode   AskLease      → LeaseGranted | Declined
    prefill → decode   RenewLease    → LeaseRenewed | Declined
    prefill → decode   Commit        → Committed | Declined                       (idempotent by lease and generation)
    prefill → decode   DropLease     → Dropped
    any     → any      FetchPrefix   → PrefixComing | Declined                    (KV that somebody has computed before;
                                                                                  DropLease when it will not come)
    decode  → gateway  Frame         (one per gateway and step, all its new tokens)
    router  → decode   Migrate       → Migrated | Declined                        (answered when the request has moved)
    decode  → decode   AskMove       → LeaseGranted | Declined                    (then RenewLease, Commit, DropLease)
    gateway → decode   Follow        → Followed | Declined                        (a request that has moved there)
    gateway → any      Abort         → Aborted
    any     → router   LoadReport, KvEvents                                       (pushed)
    router  → any      ReplayPrefixes → Replaying                                 (when some were missed)
    router  → any      ProbeLink      → ProbingLink | Declined                     (how fast KV comes from that worker)
    any     → any      SendProbe      → ProbeSent | Declined

A worker is a control process and a rank process: between them the same values travel, and `Forward` and `FrameFor`
say where the rank's own have to go.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.types import EngineLoad, FinishReason, Request, Token


class Code(StrEnum):
    """Why something was declined or failed; each has one HTTP status and one gRPC code (`tandem.status`)."""

    INVALID = "invalid"  # 400 INVALID_ARGUMENT
    NOT_FOUND = "not_found"  # 404 NOT_FOUND
    NO_ROOM = "no_room"  # 429 RESOURCE_EXHAUSTED; the router may try another worker
    UNAVAILABLE = "unavailable"  # 503 UNAVAILABLE; the router may try another worker
    DEADLINE = "deadline"  # 504 DEADLINE_EXCEEDED
    ABORTED = "aborted"  # 499 CANCELLED
    STALE = "stale"  # a dead lease, generation or incarnation: never retried as it is
    MISMATCH = "mismatch"  # model or layout of the two ends differ
    INTERNAL = "internal"  # 500 INTERNAL


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """How to reach a worker: its name, its incarnation and its control address (host:port of its Node service)."""

    name: str
    incarnation: str
    address: str

    @property
    def peer(self) -> str:
        """The peer id of `kvtransfer`: a restarted worker is another peer."""
        return f"{self.name}#{self.incarnation}"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself when it registers. Two workers are compatible when `model_digest`, `layout` and
    `numerics` are equal, and the larger `block_size` is a multiple of the smaller; `layout` is readable, so that a
    refusal can show both values."""

    ref: WorkerRef
    role: str
    """"prefill" or "decode"."""
    model: str
    model_digest: str
    layout: str
    """Of one token's KV, for example `layers=30 kv_heads=3 head_dim=64 dtype=float32`."""
    numerics: str
    max_model_len: int
    vocab_size: int
    block_bytes: int
    total_blocks: int
    max_num_seqs: int
    block_size: int
    """Tokens in a block."""
    kv_heads: int
    layers: int
    site: str = "local"
    transports: tuple[tuple[str, bytes], ...] = ()
    """(scheme, address), best first. Secret: only over the authenticated control plane."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """To whoever computes a prompt: the KV of its first `tokens` is faster had from `source`, whose blocks have
    `block_size` tokens. What has not come after `patience_s` is computed."""

    source: WorkerRef
    tokens: int
    patience_s: float
    block_size: int


# -- gateway → worker --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expect:
    """To decode: this request will come to you; its tokens go to `gateway_id`. `prefill` None: prefill it yourself.
    `generated`: the tokens that it has from a worker that was lost; go on behind them (without `prefill` only)."""

    request: Request
    gateway_id: str
    prefill: WorkerRef | None
    fetch: Fetch | None = None
    generated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    request_id: str


@dataclass(frozen=True, slots=True)
class Submit:
    """To prefill: compute this prompt and hand it over to `decode`, which expects it."""

    request: Request
    decode: WorkerRef
    fetch: Fetch | None = None


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """What the hand-over did, for the client's usage, the demo's table and metrics. Seconds are durations."""

    prefill_cached_tokens: int = 0
    decode_held_tokens: int = 0
    computed_tokens: int = 0
    kv_bytes: int = 0
    kv_blocks: int = 0
    """Where the two ends have blocks of two sizes: of the smaller one."""
    transport: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    """From the end of the last prefill step to Commit's answer."""
    fetched_tokens: int = 0
    """Of the cached ones: those that came from another worker for this request."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    request_id: str
    report: HandoffReport
    prompt_logprobs: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedEarly:
    """Every sequence of the request ended with its first token: decode was never started. `deltas` are what it would
    have told."""

    request_id: str
    deltas: tuple[Delta, ...]
    report: HandoffReport
    prompt_logprobs: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Declined:
    """No. `message` is for people and names the remedy; `by` is the worker at fault, if one is."""

    code: Code
    message: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """`index`: of a request with several sequences end this one only. `again`: this attempt is over, but another one
    follows, so that its claim on room stands; without it the request is over."""

    request_id: str
    reason: FinishReason = FinishReason.ABORT
    index: int | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class Aborted:
    request_id: str
    known: bool


# -- prefill → decode --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskLease:
    """Room for this expected request, please. `source` will push; its `transports` are how to reach it back."""

    request_id: str
    source: WorkerRef
    transports: tuple[tuple[str, bytes], ...]
    model_digest: str
    layout: str
    block_size: int


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Spans 0 … `num_spans` - 1 stand for the prompt's KV after the first `held_tokens`, piece by piece as a
    `kvtransfer.plan.Side` numbers it. `block_size` is the destination's."""

    request_id: str
    lease_id: str
    generation: int
    held_tokens: int
    num_spans: int
    expires_in_s: float
    destination: WorkerRef
    scheme: str
    address: bytes
    block_size: int


@dataclass(frozen=True, slots=True)
class RenewLease:
    lease_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class Commit:
    """All spans are pushed; here is the first token. Accepted only when every receive of the lease is complete.

    `candidates`: one first token for each sequence; of beams the likeliest ones with their log-probabilities, from
    which `beam_width` go on; of a request that moves all tokens generated so far, the last of which has no KV yet.
    """

    request_id: str
    lease_id: str
    generation: int
    source: WorkerRef
    destination: WorkerRef
    prompt_tokens: int
    layout: str
    candidates: tuple[Token, ...]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    request_id: str


@dataclass(frozen=True, slots=True)
class DropLease:
    """The source gives up; the destination frees the blocks as soon as they are quiet."""

    lease_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    lease_id: str


# -- any worker → another ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchPrefix:
    """Push me what you hold of these tokens. `keys`: of each granule of them, in order, from the start of a block of
    yours on; it stands for model, salt and all tokens before. The lease `fetch_id` is open for you already, with spans
    for all but the first `skipped_tokens`, as a `kvtransfer.plan.Side` numbers them. `block_size` is the asker's."""

    fetch_id: str
    generation: int
    keys: tuple[bytes, ...]
    skipped_tokens: int
    destination: WorkerRef
    transports: tuple[tuple[str, bytes], ...]
    model_digest: str
    layout: str
    block_size: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class PrefixComing:
    """The first `num_spans` of the lease are on their way, in several pushes."""

    fetch_id: str
    num_spans: int


# -- a running request moves from one decode worker to another ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Migrate:
    """To the worker that runs it: move this request to `to`, and say how that went. Until it has moved, and whenever
    it cannot, it runs on where it is."""

    request_id: str
    to: WorkerRef


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """`pause_s`: from the end of its last step at the source to Commit's answer; `copy_s`: from the lease to the pause.
    Blocks that the destination held already are in neither count."""

    stages: int = 0
    kv_blocks: int = 0
    kv_bytes: int = 0
    tail_blocks: int = 0
    """Of `kv_blocks`, those that were sent during the pause."""
    transport: str = ""
    copy_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Migrated:
    request_id: str
    report: MigrationReport


@dataclass(frozen=True, slots=True)
class AskMove:
    """Room for this running request, please, whose KV `source` will push while it goes on decoding. `generated`: the
    token ids so far. The lease is for these and `spare_tokens` more, for those still to come."""

    request: Request
    gateway_id: str
    source: WorkerRef
    transports: tuple[tuple[str, bytes], ...]
    model_digest: str
    layout: str
    block_size: int
    generated: tuple[int, ...]
    spare_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Follow:
    """The source's last delta said that this request has moved to you. Tell me once more what you have told so far, for
    I may not have listened. What nobody follows in time is dropped: its source has taken it back, or has died."""

    request_id: str
    gateway_id: str


@dataclass(frozen=True, slots=True)
class Followed:
    request_id: str


# -- how fast a pair is ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProbeLink:
    """Let `source` send you a few blocks of nothing. Declined when either of you has anything to do."""

    source: WorkerRef


@dataclass(frozen=True, slots=True)
class ProbingLink:
    """It is asked for that much; what it measures is in the source's `LoadReport.links`."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Push me `rounds` times `num_spans` spans of any content, one round after the other. The lease `probe_id` is open,
    with a span of `span_bytes`, a block's part that all block sizes are multiples of, for each of each round."""

    probe_id: str
    generation: int
    num_spans: int
    rounds: int
    destination: WorkerRef
    transports: tuple[tuple[str, bytes], ...]
    span_bytes: int


@dataclass(frozen=True, slots=True)
class ProbeSent:
    """The first round is on its way."""

    probe_id: str


# -- worker → gateway --------------------------------------------------------------------------------------------

ENDS_ALL = frozenset({FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR})
"""Ends that no sequence has by itself."""


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one sequence of a request: new tokens, and at its end why. `seq` counts the sequence's tokens before
    this delta, so a repeated or missing delta is seen. The request is over when each of its sequences has stopped or
    reached its length; any other `finish`, and an `error`, is the end of all of them (`ends_request`)."""

    request_id: str
    seq: int
    tokens: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    error: Declined | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[Token, ...] = ()
    index: int = 0
    """Which sequence; after beam search or `best_of` its rank."""
    score: float | None = None
    """Of beam search and `best_of`, which tell a sequence only once it has ended."""
    moved: WorkerRef | None = None
    """The last delta of this worker: the request goes on over there."""
    move: int = 0
    """Which move: the generation of its lease over there. The news from there bear it too, and count for nothing before
    the source has told of this move."""

    @property
    def ends_request(self) -> bool:
        """Whether no sequence of the request goes on after this."""
        return self.error is not None or self.finish in ENDS_ALL


@dataclass(frozen=True, slots=True)
class Frame:
    """One worker's news for one gateway, at most one a step."""

    worker: str
    incarnation: str
    number: int
    deltas: tuple[Delta, ...]


# -- worker → router ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferCounters:
    """What one transport of a worker has moved since its start, both ways. `push_seconds`: from push to its
    acknowledgement, summed; `staged_bytes`: of all bytes those that went by way of staging memory."""

    scheme: str
    pushes: int = 0
    push_bytes: int = 0
    push_seconds: float = 0.0
    receives: int = 0
    receive_bytes: int = 0
    in_flight: int = 0
    failed: int = 0
    staged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FetchCounters:
    """What a worker has fetched from one peer since its start. `seconds`: from question to last block, summed over
    those `fetches` that brought something; `failed` ones brought less than was wanted, or nothing."""

    source: str
    fetches: int = 0
    blocks: int = 0
    kv_bytes: int = 0
    seconds: float = 0.0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class LinkRate:
    """How fast a worker has sent KV to one peer: when traffic lasted last, and the best so far; beside it what one
    thread copies there from memory to memory."""

    peer: str
    scheme: str
    bytes_per_s: float
    best_bytes_per_s: float
    limit_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class MigrationCounters:
    """Running requests that this worker has moved elsewhere since its start, or failed to; seconds are summed over
    those that moved."""

    moved: int = 0
    failed: int = 0
    kv_bytes: int = 0
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's state, pushed on change and at least once a heartbeat; `number` rises by one."""

    worker: str
    incarnation: str
    number: int
    load: EngineLoad
    request_ids: tuple[str, ...]
    transfers_in_flight: int = 0
    draining: bool = False
    kv_events: int = 0
    """The number of the last `KvEvents` before this report: whoever has seen fewer has missed some."""
    transfers: tuple[TransferCounters, ...] = ()
    fetches: tuple[FetchCounters, ...] = ()
    migrations: MigrationCounters = MigrationCounters()
    links: tuple[LinkRate, ...] = ()


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Prefix-cache changes since event `number - 1`, in order. A gap in `number` voids what is known of the worker."""

    worker: str
    incarnation: str
    number: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    cleared: bool = False
    tier: str = "device"


# -- router → worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayPrefixes:
    """Tell all prefixes that you hold anew, as `KvEvents` that begin with a cleared one: I have missed some."""


@dataclass(frozen=True, slots=True)
class Replaying:
    """The retelling is on its way; it has this many keys."""

    keys: int


# -- operator → worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetDraining:
    """Take no new requests (or take them again). What runs moves to other workers if they have room (the router sees to
    that), and is finished here if not."""

    draining: bool


@dataclass(frozen=True, slots=True)
class DrainingSet:
    draining: bool


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget every cached block that nobody uses."""


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    blocks: int


class FaultKind(StrEnum):
    DELAY = "delay"
    DROP = "drop"
    FAIL = "fail"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class InjectFault:
    """For tests: what shall happen to the `nth` transfer from now on, counted from 1. `seconds` is for delays."""

    kind: FaultKind
    nth: int = 1
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultInjected:
    pass


Question = (
    Expect
    | Submit
    | Abort
    | AskLease
    | RenewLease
    | Commit
    | DropLease
    | FetchPrefix
    | ProbeLink
    | SendProbe
    | Migrate
    | AskMove
    | Follow
    | ReplayPrefixes
    | SetDraining
    | ResetPrefixCache
    | InjectFault
)
Answer = (
    Expected
    | HandedOver
    | FinishedEarly
    | Declined
    | Aborted
    | LeaseGranted
    | LeaseRenewed
    | Committed
    | Dropped
    | PrefixComing
    | ProbingLink
    | ProbeSent
    | Migrated
    | Followed
    | Replaying
    | DrainingSet
    | PrefixCacheReset
    | FaultInjected
)


# -- rank → its control process ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forward:
    """Carry this question to another worker and bring me the answer."""

    to: WorkerRef
    question: Question


@dataclass(frozen=True, slots=True)
class FrameFor:
    """A frame and the gateway that waits for it."""

    gateway_id: str
    frame: Frame
