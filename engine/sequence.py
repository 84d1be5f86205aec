"""One sequence on its way through the engine: the mutable half of a request.

    WAITING → RUNNING → (end)          a whole request, or one that was preempted and is computed again
    WAITING → LOADING → WAITING        blocks of its prefix come from a lower tier; it keeps its place in the queue
              RUNNING → SWAPPED → RUNNING   preempted, its KV kept in swap space
              RUNNING → HELD → (end)   prefill only: the first token is there, the blocks wait to be sent
              RUNNING → HELD → RUNNING or (end)   paused while the rest of it moves to another worker
    LEASED  → RUNNING → (end)          decode only: the KV comes from elsewhere, then it is adopted

Progress is one number, `computed`: positions whose KV is in the pool. A sequence with one token to compute that has
generated before is decoding; everything else is prompt work. There are no other modes. `engine.roster` moves sequences
between states and owns their blocks; the scheduler only reads them.
"""

from __future__ import annotations

from enum import StrEnum

from engine.family import Family
from engine.hashing import GRANULE, PrefixHasher
from engine.penalties import TokenCounts
from engine.types import FinishReason, Request, SamplingParams, Token

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""
AGEING_S = 5.0
"""Waiting this long is worth one level of priority."""


class State(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    SWAPPED = "swapped"
    HELD = "held"
    LEASED = "leased"
    ENDED = "ended"


class Sequence:
    """A request with its tokens, its block table and how far it has come."""

    __slots__ = (
        "_table",
        "arrived_s",
        "blocks",
        "cached_tokens",
        "computed",
        "counts",
        "done",
        "family",
        "hold",
        "index",
        "keys",
        "loads",
        "name",
        "order",
        "passes",
        "paused",
        "plain_greedy",
        "preemptions",
        "prompt_len",
        "prompt_logprobs",
        "published",
        "request",
        "slots",
        "state",
        "tokens",
        "wants_prompt_logprobs",
    )

    def __init__(self, request: Request, *, arrived_s: float, number: int, state: State, hold: bool = False) -> None:
        sampling = request.sampling
        self.request = request
        self.name = request.request_id
        self.index = 0
        self.family = Family(request, request.branching) if request.branching is not None else None
        self.paused = False
        """A beam whose continuations are known, while those of others are not."""
        self.state = state
        self.hold = hold
        self.arrived_s = arrived_s
        # Priority plus age at any moment sorts as priority minus arrival, which never changes.
        self.order = (arrived_s / AGEING_S - request.priority, number, 0)
        self.tokens = list(request.token_ids)
        self.prompt_len = len(request.token_ids)
        self.computed = 0
        self.done = False
        """Ended, but its row is computed on until its static batch ends."""
        self.cached_tokens = 0
        self.blocks: list[int] = []
        self.slots: list[int] = []
        self.published = 0
        self.keys: list[bytes] = []
        self.passes = 0
        self.preemptions = 0
        self.loads = 0
        """One more than the preemptions when this stay in the queue has had its load from lower tiers, or none."""
        self.wants_prompt_logprobs = sampling.prompt_logprobs is not None and state is State.WAITING
        self.prompt_logprobs: list[Token] = []
        self.counts = TokenCounts(request.token_ids) if penalised(sampling) else None
        self.plain_greedy = is_plain_greedy(sampling) and not (self.family is not None and self.family.withheld)
        self._table: tuple[int, ...] = ()

    def fork(self, index: int, number: int) -> Sequence:
        """Another sequence of the same request at the same place, without blocks."""
        twin = Sequence(self.request, arrived_s=self.arrived_s, number=0, state=self.state)
        twin.name, twin.index, twin.family = f"{self.request_id}#{number}", index, self.family
        twin.order = (*self.order[:2], number)
        twin.tokens, twin.computed, twin.keys = list(self.tokens), self.computed, list(self.keys)
        twin.published, twin.preemptions, twin.cached_tokens = self.published, self.preemptions, self.cached_tokens
        twin.wants_prompt_logprobs = False
        twin.counts = self.counts.copy() if self.counts is not None else None
        return twin

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return len(self.tokens) - self.computed == 1 and len(self.tokens) > self.prompt_len

    def table(self, blocks: int) -> tuple[int, ...]:
        """The first `blocks` entries of the block table; built anew only when they change."""
        if len(self._table) != blocks:
            self._table = tuple(self.blocks[:blocks])
        return self._table

    def set_blocks(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self._table = ()

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    def hash_up_to(self, length: int, hasher: PrefixHasher) -> list[bytes]:
        """Prefix keys of the full granules within the first `length` tokens (and maybe more); each is hashed once."""
        done = len(self.keys)
        if length // GRANULE > done:
            parent = self.keys[-1] if self.keys else hasher.start(self.request.cache_salt)
            self.keys.extend(hasher.extend(parent, self.tokens[done * GRANULE : length]))
        return self.keys


def finish_reason(
    sampling: SamplingParams, token_id: int, generated: int, length: int, eos: frozenset[int], max_model_len: int
) -> FinishReason | None:
    """Whether `token_id`, the `generated`-th one of a sequence now `length` tokens long, ends it."""
    if generated >= sampling.min_tokens and (
        token_id in sampling.stop_token_ids or (token_id in eos and not sampling.ignore_eos)
    ):
        return FinishReason.STOP
    if generated >= sampling.max_tokens or length >= max_model_len:
        return FinishReason.LENGTH
    return None


def penalised(sampling: SamplingParams) -> bool:
    """Whether choosing a token needs the counts of earlier ones."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def is_plain_greedy(sampling: SamplingParams) -> bool:
    """Whether the next token is the largest raw logit, nothing else (once `min_tokens` are there)."""
    return (
        sampling.temperature < GREEDY_BELOW
        and not penalised(sampling)
        and not sampling.logit_bias
        and sampling.logprobs is None
    )
