"""The engine's values: what a request asks for and what a step gives back.

All are frozen and passed forward; nothing here does work. Times are seconds on the monotonic clock of the process
that holds the value (a deadline crosses machines as the time that is left, see `tandem.wire`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended. `STOP` covers EOS, stop token ids and (decided in the gateway) stop strings."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when the sequence ends.

    `temperature` 0 (or below 1e-5) is greedy. `top_k` 0 and -1 mean no limit. `stop` strings are matched in the
    gateway; the engine ends on token ids and counts only. `logprobs=k` returns the sampled token's log-probability
    and the k best ones, taken from the distribution before temperature, penalties and truncation.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """How one request becomes several sequences that share its prompt."""

    n: int = 1
    """Sequences to return; each with its own `sequence_index`, counted from the request's."""
    best_of: int | None = None
    """Sequences to generate, of which the `n` with the best mean log-probability are returned, all at the end."""
    beam_width: int = 0
    """Above 0: beam search, which returns the `n` best of its beams, at the end; temperature plays no part."""
    length_penalty: float = 1.0
    """A finished beam's score is its log-probability divided by its length to this power."""
    early_stopping: str = "no"
    """When beam search ends: `yes`, with the first `beam_width` finished; `no`, when a running beam as it stands is no
    better than the worst finished one; `never`, when it could not become so at any length."""

    @property
    def size(self) -> int:
        """Sequences that are generated."""
        return self.beam_width or self.best_of or self.n

    @property
    def withheld(self) -> bool:
        """Whether results are told at the end only."""
        return self.beam_width > 0 or self.size > self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate, or several by `branching`. Randomness is a pure function of (seed, sequence_index,
    position)."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    model: str = ""
    sla_class: str = "default"
    priority: int = 0
    """Larger is more urgent; ageing in the scheduler keeps the small ones from starving."""
    ttft_s: float | None = None
    itl_s: float | None = None
    """The promised time between tokens; the scheduler sizes its steps to keep the tightest one in the batch."""
    arrival_s: float = 0.0
    deadline_s: float | None = None
    cache_salt: str = ""
    sequence_index: int = 0
    branching: Branching | None = None
    """None: one sequence."""

    @property
    def sequences(self) -> int:
        """Sequences that are generated."""
        return 1 if self.branching is None else self.branching.size

    @property
    def answers(self) -> int:
        """Sequences that are returned."""
        return 1 if self.branching is None else self.branching.n


@dataclass(frozen=True, slots=True)
class Token:
    """One generated (or prompt) token. `logprob` and `top` (id, log-probability; best first) only when asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a step: compute `token_ids` at positions `start`, `start + 1`, …

    `block_ids` is the block table covering positions 0 … start + len(token_ids) - 1. Of the logits only the last
    row is kept (`logits="last"`), every row (`"all"`, for prompt log-probabilities), or none (a chunk in the middle).
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    logits: str = "last"

    @property
    def rows(self) -> int:
        """Rows of logits this chunk yields."""
        return {"last": 1, "all": len(self.token_ids), "none": 0}[self.logits]


@dataclass(frozen=True, slots=True)
class Swap:
    """KV of one sequence to copy between the pool and swap space: (block, slot) pairs."""

    request_id: str
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, decided by the scheduler and printable; the runner only carries it out.

    Before it runs, `swap_out` is copied to swap space, then `copies` within the pool, then `swap_in` back into it.
    `preempted` names all who lost their blocks, swapped out or not. Of a request with several sequences the first goes
    by the request's id, the others by that and `#` and a number, here and in chunks.
    """

    chunks: tuple[Chunk, ...]
    predicted_s: float = 0.0
    preempted: tuple[str, ...] = ()
    reason: str = ""
    swap_out: tuple[Swap, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    """(block, fresh block) of sequences about to write into a block that others hold too."""
    swap_in: tuple[Swap, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for one sequence.

    `computed_tokens` counts positions whose KV is now in the pool; every block wholly below it is final and may be
    sent away. `tokens` are newly sampled ones. A sequence with a `finish` is gone from the engine unless it was
    submitted with `hold`, in which case its blocks stay until `Engine.release`. Of a held request with several
    sequences `tokens` are the alternatives for its first token, unless all of them end it: then each result is told.
    """

    request_id: str
    computed_tokens: int
    tokens: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    error: str = ""
    prompt_logprobs: tuple[Token, ...] = ()
    """Complete, on the step that ends the prompt, when asked for; entry 0 has no log-probability."""
    cached_tokens: int = 0
    index: int = 0
    """Which of the request's sequences; after beam search or `best_of` its rank."""
    score: float | None = None
    """Of beam search and `best_of`, with all tokens of the sequence."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step, in the order of the plan."""

    progress: tuple[Progress, ...]
    started_s: float
    duration_s: float
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class BlockLease:
    """Real blocks set aside for a sequence whose KV will arrive from elsewhere.

    `block_ids` is the whole table for the prompt. The first `held_tokens // block_size` of them were found in the
    prefix cache and already hold their KV; the rest are to be filled.
    """

    request_id: str
    block_ids: tuple[int, ...]
    held_tokens: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Coefficients (seconds) fitted online; the router estimates with them.

    prefill: a + b * tokens + c * tokens * context.  decode: a + b * batch + c * total_context.
    `error` is the mean relative error of recent predictions; `samples` 0 means the numbers are priors.
    """

    prefill: tuple[float, float, float] = (0.005, 0.0015, 0.0)
    decode: tuple[float, float, float] = (0.03, 0.002, 0.0)
    prefill_error: float = 1.0
    decode_error: float = 1.0
    samples: int = 0

    def prefill_s(self, tokens: int, context: int) -> float:
        a, b, c = self.prefill
        return a + b * tokens + c * tokens * context

    def decode_s(self, batch: int, context: int) -> float:
        a, b, c = self.decode
        return a + b * batch + c * context


@dataclass(frozen=True, slots=True)
class TierLoad:
    """What one lower tier of KV holds, and has done since the start. `hits` are blocks that were read, verified and
    used; `misses` were counted on and did not come; of the `evicted` no tier had the `dropped` any more; `failed` are
    reads and writes that went wrong or came too late."""

    name: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    stored: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    dropped: int = 0
    failed: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A worker's state in numbers, for the router and for metrics. Blocks: total = free + live + cached.

    `live` blocks are held by a sequence, a lease or a transfer; `cached` only by the prefix cache (reclaimable).
    """

    total_blocks: int
    free_blocks: int
    live_blocks: int
    cached_blocks: int
    block_size: int
    running: int
    waiting: int
    leased_blocks: int
    queued_prefill_tokens: int
    running_context_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    """Tokens looked up / found in the prefix cache since start."""
    prompt_tokens: int
    generated_tokens: int
    step_times: StepTimes = StepTimes()
    swapped: int = 0
    """Sequences that wait in swap space."""
    swap_preemptions: int = 0
    """Of `preemptions`, those that swapped; the others compute again."""
    swap_total_blocks: int = 0
    swap_used_blocks: int = 0
    tiers: tuple[TierLoad, ...] = ()
    tier_loads: int = 0
    """Prompts of whose prefix lower tiers brought some, and those that computed because that was estimated faster."""
    tier_recomputes: int = 0
