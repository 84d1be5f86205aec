"""What a placement would cost, in seconds, from step times that the workers measured themselves.

    prefill on p    queue(p) + T(prompt - overlap(p)) + exposed transfer + hand-over
                    with a fetch (`cluster.policies.fetching`) the longer of queue and fetch, and a larger overlap
    local on d      the same work in the time that the promises of d's running sequences leave in each step
    tokens on d     a + b * (batch + sequences) + c * (context + sequences * prompt)

T adds the cost of a step for every chunk. A transfer runs while later chunks compute, so only what sticks out behind
the last chunk counts. Tokens of KV that decode holds already are not sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cluster.snapshot import RequestView, Snapshot, WorkerView
from engine.budget import prompt_tokens_within, step_limit_s
from engine.hashing import GRANULE
from engine.step_times import StepShape, predict_s
from tandem.messages import Fetch, WorkerRef

LEAST_PATIENCE_S = 0.05
"""A fetch has at least this long, whatever computing would take."""


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The first `tokens` of a prompt come from `source` in `cost_s`; computing what that adds would take `saved_s`."""

    source: WorkerRef
    tokens: int
    cost_s: float
    saved_s: float
    block_size: int
    """Of the source."""

    def told(self) -> str:
        times = f"in {self.cost_s * 1e3:.1f} ms, computing {self.saved_s * 1e3:.1f} ms"
        return f"{self.tokens} tokens from {self.source.name} {times}"


@dataclass(frozen=True, slots=True)
class Work:
    """Prompt work on one worker. `waiting_s` before its turn, `own_s` for itself (its overlap left out, and what is
    fetched)."""

    waiting_s: float
    own_s: float
    tokens: int
    fetch: FetchPlan | None = None
    forgone: FetchPlan | None = None
    """What could have been fetched, but computing is estimated to be faster."""

    @property
    def fetch_s(self) -> float:
        return self.fetch.cost_s if self.fetch else 0.0

    @property
    def total_s(self) -> float:
        return max(self.waiting_s, self.fetch_s) + self.own_s

    def fetch_order(self) -> Fetch | None:
        """For whoever computes. Waiting longer than computing would take, once it is its turn, could only lose."""
        plan = self.fetch
        if plan is None:
            return None
        patience_s = self.waiting_s + max(LEAST_PATIENCE_S, plan.saved_s)
        return Fetch(plan.source, plan.tokens, patience_s, plan.block_size)


def uncached(request: RequestView, overlap: int) -> int:
    """Prompt tokens to compute: always at least one, also when everything is cached."""
    return max(1, request.prompt_tokens - overlap)


def prompt_s(view: WorkerView, tokens: int, context: float, step_tokens: int) -> float:
    """Time for `tokens` that look back at `context` positions in the mean, in steps of at most `step_tokens`."""
    per_step, per_token, per_pair = view.load.step_times.prefill
    return per_step * math.ceil(tokens / step_tokens) + per_token * tokens + per_pair * tokens * context


def step_in_hand_s(view: WorkerView, snapshot: Snapshot) -> float:
    """The most until this worker's step loop looks up from the step it is in."""
    if view.queued_prefill_tokens:
        step = snapshot.knobs.decode_step_tokens if view.info.role == "decode" else snapshot.knobs.prefill_step_tokens
        tokens = min(view.queued_prefill_tokens, step)
        return prompt_s(view, tokens, tokens / 2, step)
    return view.load.step_times.decode_s(view.batch, view.context_tokens) if view.batch else 0.0


def on_prefill(request: RequestView, view: WorkerView, snapshot: Snapshot, overlap: int) -> Work:
    """The prompt on a worker that does nothing else, behind what is queued there. `overlap` tokens are there."""
    step = snapshot.knobs.prefill_step_tokens
    tokens, queued = uncached(request, overlap), view.queued_prefill_tokens
    return Work(
        waiting_s=prompt_s(view, queued, queued / 2, step) if queued else 0.0,
        own_s=prompt_s(view, tokens, overlap + tokens / 2, step),
        tokens=tokens,
    )


def on_decode(request: RequestView, view: WorkerView, snapshot: Snapshot, overlap: int) -> Work | None:
    """The prompt beside running sequences, as slowly as their promises ask. None: a promise would be broken."""
    step = snapshot.knobs.decode_step_tokens
    tokens, queued = uncached(request, overlap), view.queued_prefill_tokens
    times, promise_s = view.load.step_times, view.promised.itl_s
    beside = StepShape(decodes=view.batch, decode_context=view.context_tokens)
    if view.batch and promise_s is not None:
        limit_s = step_limit_s(promise_s, times)
        step = min(step, prompt_tokens_within(times, beside, overlap + tokens // 2, limit_s))
        if step < GRANULE:
            return None
    # What the running sequences add to each of its steps; the cost of a step itself is in prompt_s.
    beside_s = predict_s(times, replace(beside, prefill_tokens=1)) - predict_s(times, StepShape(prefill_tokens=1))
    return Work(
        waiting_s=prompt_s(view, queued, queued / 2, step) + beside_s * (queued / step) if queued else 0.0,
        own_s=prompt_s(view, tokens, overlap + tokens / 2, step) + beside_s * math.ceil(tokens / step),
        tokens=tokens,
    )


def transfer_s(request: RequestView, prefill: WorkerView, decode: WorkerView, snapshot: Snapshot) -> float:
    """Time on the wire for the KV that decode does not hold."""
    missing = max(0, request.prompt_tokens - snapshot.overlap(decode))
    num_bytes = decode.blocks_for(missing) * decode.info.block_bytes
    rate = snapshot.links.get((prefill.name, decode.name), snapshot.knobs.assumed_bytes_per_s)
    return num_bytes / rate


def exposed_s(work: Work, wire_s: float, snapshot: Snapshot) -> float:
    """The part of a transfer that prefill's compute cannot hide: at least the last chunk's."""
    chunks = max(1, math.ceil(work.tokens / snapshot.knobs.prefill_step_tokens))
    return max(wire_s / chunks, wire_s - work.own_s)


def joined_itl_s(request: RequestView, view: WorkerView) -> float:
    """Time between tokens on this worker once the request has joined."""
    sequences = request.sequences
    context_tokens = view.context_tokens + sequences * request.prompt_tokens
    return view.load.step_times.decode_s(view.batch + sequences, context_tokens)


def breaks_itl(request: RequestView, view: WorkerView, itl_s: float) -> bool:
    """The joined batch would be too slow for the request, or for somebody who is promised more."""
    promises = [promise for promise in (request.itl_s, view.promised.itl_s) if promise is not None]
    return bool(promises) and itl_s > min(promises)


def lacks_room(request: RequestView, view: WorkerView, snapshot: Snapshot) -> bool:
    """Prompt and expected answer exceed what nobody else was promised."""
    tokens = request.expected_tokens - snapshot.overlap(view)
    return view.blocks_for(tokens) > view.room_blocks
