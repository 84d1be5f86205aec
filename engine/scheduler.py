"""Decides what the next step computes. There are no prefill or decode modes, only tokens not yet computed.

Each step has `max_num_batched_tokens` tokens and `max_num_seqs` seats to give:

1. Running sequences that decode get one token each, most urgent first. One that needs a block when none is left takes
   it from the least urgent running sequence, which leaves its KV in swap space or is computed again later, whichever is
   cheaper (`engine.preemption`). The most urgent sequence is never preempted, so somebody always gets on.
2. Swapped-out sequences come back as soon as blocks for all their tokens are there; nobody enters before them.
3. Prompt work gets the rest, or less: beside decodes with a promised time between tokens, only what keeps the tightest
   promise (`engine.budget`). Half of it goes to the most urgent prompt and the other half to the shortest first, so
   that neither a long prompt blocks short ones nor a stream of short ones starves it: it takes at most about twice the
   time that it would take alone.
4. A waiting sequence enters when blocks for all its tokens are there, and one more for each running sequence to grow.
   One for which there is no room lets at most `MOST_PASSES` later ones go first, none once it was preempted. One whose
   next block is just being computed by another sequence waits for it, and finds it in the prefix cache; one whose next
   blocks lie in a lower tier waits for them where that is faster than computing them (`engine.tiering`).

With `batching` static, a batch is admitted when the last one has ended: its prompts are computed first, then all rows
decode, the finished ones too, until the last has ended. Whom another worker hands over meanwhile is in the next batch.
It is kept to be measured against.

With `chunked_prefill` off, prompts are computed in steps of their own, whole as far as the token budget reaches, and
such steps alternate with decodes. `plan` changes only the roster; `applied` and `failed` take the step's outcome back.
Urgency is priority plus age, see `engine.sequence`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.beams import Beam, BeamSearch
from engine.budget import least_share, prompt_tokens_within, step_limit_s
from engine.config import EngineConfig
from engine.family import Family
from engine.preemption import cost_of, swaps, told
from engine.roster import Copies, Roster
from engine.sequence import Sequence, State, finish_reason
from engine.step_times import StepShape, StepTimeModel, shape_of
from engine.swap import CopyRate
from engine.types import Chunk, FinishReason, Progress, Request, StepPlan, Swap, Token

MOST_PASSES = 8
"""Later sequences that may enter before one for which there is no room."""
MOST_REFUSALS = 4
"""Waiting sequences found to have no room in one step before it stops looking."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the step brought for one chunk: the sampled token, if the chunk reached the end, and the log-probabilities
    of the prompt tokens at positions start + 1 …, if they were asked for. `error` ends the sequence."""

    token: Token | None = None
    alternatives: tuple[Token, ...] = ()
    """In place of `token`, when the request has several sequences: first tokens, or a beam's likeliest next ones."""
    prompt_logprobs: tuple[Token, ...] = ()
    error: str = ""


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    now: float
    tokens: int
    seats: int
    shares: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    swap_out: list[Swap] = field(default_factory=list)
    copies: Copies = ()
    swap_in: list[Swap] = field(default_factory=list)
    blocked: Sequence | None = None
    refusals: int = 0
    coming: dict[bytes, Sequence] | None = None
    """Who is computing which block at the moment."""
    notes: list[str] = field(default_factory=list)

    def give(self, seq: Sequence, tokens: int) -> None:
        if tokens <= 0:
            return
        if seq.name not in self.shares:
            self.seats -= 1
        self.shares[seq.name] = self.shares.get(seq.name, 0) + tokens
        self.tokens -= tokens

    def take_back(self, seq: Sequence) -> None:
        tokens = self.shares.pop(seq.name, 0)
        self.tokens += tokens
        self.seats += bool(tokens)


class Scheduler:
    """Owns the order of work; the roster owns the sequences."""

    def __init__(
        self,
        config: EngineConfig,
        roster: Roster,
        times: StepTimeModel,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        block_bytes: int = 0,
        copy_rate: CopyRate | None = None,
    ) -> None:
        self._config = config
        self._roster = roster
        self._times = times
        self._eos = eos_token_ids
        self._max_model_len = max_model_len
        self._block_bytes = block_bytes
        self._copy_rate = copy_rate or CopyRate()
        self._static = config.batching == "static"
        self._batch: set[str] = set()
        """Of static batching: the requests in the batch."""
        self._prompts_had_a_step = False

    # -- before the step -----------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """The next step; without chunks when nothing can run now."""
        draft = _Draft(now, self._config.max_num_batched_tokens, self._config.max_num_seqs)
        if self._static:
            self._give_batch(draft)
        elif self._config.chunked_prefill:
            self._give_decodes(draft)
            self._bring_back(draft)
            self._give_prompts(draft)
        else:
            self._give_one_kind(draft)
        return self._written(draft)

    def _give_one_kind(self, draft: _Draft) -> None:
        if not self._prompts_had_a_step:
            self._give_prompts(draft)
        self._prompts_had_a_step = bool(draft.shares)
        if not draft.shares:
            self._give_decodes(draft)
            self._bring_back(draft)
        if not draft.shares and not draft.preempted:
            self._give_prompts(draft)

    def _give_batch(self, draft: _Draft) -> None:
        self._close_batch()
        if not self._roster.swapped and not any(map(self._joined, self._roster.running)):
            self._open_batch()
        self._give_prompts(draft)
        if not draft.shares:
            self._give_decodes(draft)
            self._bring_back(draft)
        if not draft.shares and not draft.preempted and self._roster.running:
            # The batch waits for blocks that others hold, who would wait for the batch.
            self._open_batch()
            self._give_decodes(draft)

    def _open_batch(self) -> None:
        """Those that hold KV here, then the front of the queue, as many as there are seats."""
        roster = self._roster
        self._batch = {seq.request_id for seq in (*roster.swapped, *roster.running)[: self._config.max_num_seqs]}
        for seq in tuple(roster.waiting):
            if len(roster.running) >= self._config.max_num_seqs or not roster.admit(seq):
                return
            self._batch.add(seq.request_id)

    def _close_batch(self) -> None:
        """When nobody in the batch has anything left to do, all leave."""
        members = [seq for seq in self._roster.running if self._joined(seq)]
        if all(seq.done for seq in members):
            for seq in members:
                self._roster.end(seq)

    def _joined(self, seq: Sequence) -> bool:
        return not self._static or seq.request_id in self._batch

    def _give_decodes(self, draft: _Draft) -> None:
        # Rows of a static batch that are done keep their seats, but from nobody in it.
        for seq in sorted(self._roster.running, key=_is_done) if self._static else tuple(self._roster.running):
            if not draft.tokens or not draft.seats:
                return
            # An earlier one in this loop may have taken its blocks.
            if seq.state is State.RUNNING and seq.decoding and self._joined(seq) and self._has_block(seq, draft):
                draft.give(seq, 1)

    def _has_block(self, seq: Sequence, draft: _Draft) -> bool:
        roster = self._roster
        while roster.needs_block(seq):
            copies = roster.grow(seq)
            if copies is not None:
                draft.copies += copies
                continue
            done = next((other for other in roster.running if other.done), None)
            if done is not None:  # A row kept only because its batch goes on yields first.
                roster.end(done)
                draft.take_back(done)
                if done is seq:
                    return False
                continue
            victim = roster.running[-1]
            if all(other in _together(seq) for other in roster.running):
                return False  # Held, leased or in transfer: those end without our help, and giving up gains nothing.
            for one in _together(victim):
                if one.state is State.RUNNING:
                    self._preempt(one, draft)
            if seq.state is not State.RUNNING:
                return False
        return True

    def _preempt(self, victim: Sequence, draft: _Draft) -> None:
        draft.take_back(victim)
        roster, config = self._roster, self._config
        kept = roster.kept_by_others(victim)
        rate = self._copy_rate.bytes_per_s
        cost = cost_of(victim.computed, kept, config.block_size, self._block_bytes, self._times.times, rate)
        # Beams share most of what they hold: they find it again in the prefix cache, not in copies for each.
        room = len(_together(victim)) == 1 and roster.may_swap_out(victim)
        swapped = swaps(config.preemption, cost, room=room)
        if swapped:
            draft.swap_out.append(roster.swap_out(victim))
        else:
            roster.preempt(victim)
        draft.preempted.append(victim.name)
        draft.notes.append(told(victim.name, cost, swapped=swapped))

    def _bring_back(self, draft: _Draft) -> None:
        """Swapped-out sequences, most urgent first, as far as there is room. Who was just preempted would only take
        back what it gave."""
        roster = self._roster
        while roster.swapped and not draft.preempted and draft.tokens and draft.seats:
            seq = roster.swapped[0]
            swap = roster.swap_in(seq) if len(roster.running) < self._config.max_num_seqs else None
            if swap is None:
                return
            draft.swap_in.append(swap)
            if seq.decoding:
                draft.give(seq, 1)

    def _give_prompts(self, draft: _Draft) -> None:
        candidates = sorted(self._candidates(draft), key=lambda seq: seq.order)
        if not candidates or not draft.tokens:
            return
        spare = draft.tokens - self._prompt_limit(draft, candidates[0])
        draft.tokens -= spare
        most_urgent = self._most_urgent(candidates, draft)
        if most_urgent is None:
            return
        others = sorted((seq for seq in candidates if seq is not most_urgent), key=lambda seq: seq.remaining)
        whole = not self._config.chunked_prefill
        self._give_share(most_urgent, draft, draft.tokens if whole or not others else -(-draft.tokens // 2))
        for seq in others:
            if not draft.tokens or (whole and seq.remaining > draft.tokens):
                break
            if self._enters(seq, draft):
                self._give_share(seq, draft, draft.tokens)
        self._give_share(most_urgent, draft, draft.tokens)

    def _most_urgent(self, candidates: list[Sequence], draft: _Draft) -> Sequence | None:
        """The first who can run; or, when that one waits for a neighbour's prefix, the neighbour in its place."""
        for seq in candidates:
            if self._enters(seq, draft):
                return seq
            neighbour = self._neighbour(seq, draft)
            if neighbour is not None:
                return neighbour
        return None

    def _candidates(self, draft: _Draft) -> Iterator[Sequence]:
        """Who has prompt work: running ones, and the front of the queue."""
        for seq in self._roster.running:
            if not seq.decoding and not seq.paused and seq.name not in draft.shares:
                yield seq
        # Who was just preempted would only take back what it gave.
        if not draft.preempted:
            front = self._roster.waiting[: 2 * self._config.max_num_seqs]
            yield from (seq for seq in front if not seq.paused and (seq.preemptions or not self._static))

    def _give_share(self, seq: Sequence, draft: _Draft, tokens: int) -> None:
        if draft.seats or seq.name in draft.shares:
            draft.give(seq, min(tokens, draft.tokens, seq.remaining - draft.shares.get(seq.name, 0)))

    def _enters(self, seq: Sequence, draft: _Draft) -> bool:
        """Whether this sequence is running, or can be from now on."""
        if seq.state is State.RUNNING:
            return True
        roster = self._roster
        if not draft.seats or len(roster.running) >= self._config.max_num_seqs:
            return False
        if roster.swapped or not self._may_pass(draft):
            return False
        if self._neighbour(seq, draft) is not None:
            return False
        if seq.state is State.LOADING or roster.fetches(seq, self._times.times, draft.now):
            return False  # The blocks of its prefix are on their way from a lower tier.
        if not roster.admit(seq):
            draft.blocked = draft.blocked or seq
            draft.refusals += 1
            return False
        if draft.blocked is not None and draft.blocked.order < seq.order:
            draft.blocked.passes += 1
        if draft.coming is not None:
            draft.coming.update(dict.fromkeys(self._still_to_come(seq), seq))
        return True

    def _may_pass(self, draft: _Draft) -> bool:
        blocked = draft.blocked
        if blocked is None:
            return True
        return not blocked.preemptions and blocked.passes < MOST_PASSES and draft.refusals < MOST_REFUSALS

    def _neighbour(self, seq: Sequence, draft: _Draft) -> Sequence | None:
        """Who is computing the first block that the cache lacks: waiting is cheaper than computing it twice."""
        roster = self._roster
        keys = [] if seq.wants_prompt_logprobs else roster.block_keys(seq, len(seq.tokens) - 1)
        if not keys:
            return None
        if draft.coming is None:
            draft.coming = {key: other for other in roster.running for key in self._still_to_come(other)}
        if not draft.coming:
            return None
        found = len(roster.pool.match(keys))
        return draft.coming.get(keys[found]) if found < len(keys) else None

    def _still_to_come(self, seq: Sequence) -> list[bytes]:
        if seq.decoding:
            return []
        return self._roster.block_keys(seq, len(seq.tokens))[seq.computed // self._roster.block_size :]

    def _prompt_limit(self, draft: _Draft, most_urgent: Sequence) -> int:
        """Prompt tokens for this step, by the tightest promise of those who decode in it."""
        decodes = [self._roster.by_id[request_id] for request_id in draft.shares]
        promises = [seq.request.itl_s for seq in decodes if seq.request.itl_s is not None]
        if not promises:
            return draft.tokens
        tightest = min(promises)
        beside = StepShape(decodes=len(decodes), decode_context=sum(seq.computed for seq in decodes))
        times = self._times.times
        kept = prompt_tokens_within(times, beside, most_urgent.computed, step_limit_s(tightest, times))
        waited = draft.now - most_urgent.arrived_s
        least = least_share(self._roster.block_size, waited, most_urgent.request.ttft_s)
        allowed = min(draft.tokens, max(kept, least))
        draft.notes.append(f"ITL {tightest * 1e3:.0f} ms allows {kept} prompt tokens, at least {least}")
        return allowed

    def _written(self, draft: _Draft) -> StepPlan:
        chunks = tuple(self._chunk(self._roster.by_id[request_id], n) for request_id, n in draft.shares.items())
        roster = self._roster
        reason = f"{len(chunks)} of {len(roster.running)} running, {len(roster.waiting)} waiting"
        if roster.swapped:
            reason += f", {len(roster.swapped)} swapped out"
        return StepPlan(
            chunks,
            self._times.predict_s(shape_of(chunks)) if chunks else 0.0,
            tuple(draft.preempted),
            "; ".join([reason if chunks else "nothing can run", *draft.notes]),
            tuple(draft.swap_out),
            draft.copies,
            tuple(draft.swap_in),
        )

    def _chunk(self, seq: Sequence, tokens: int) -> Chunk:
        start, end = seq.computed, seq.computed + tokens
        ends = end == len(seq.tokens)
        logits = "last" if ends else "none"
        # Row i tells about position start + i + 1; after a preemption only those not told yet are of interest.
        if seq.wants_prompt_logprobs and start < seq.prompt_len - 1 and end >= len(seq.prompt_logprobs):
            logits = "all"
        table = seq.table(-(-end // self._roster.block_size))
        return Chunk(seq.name, tuple(seq.tokens[start:end]), start, table, logits)

    # -- after the step ------------------------------------------------------------------------------------------

    def applied(self, plan: StepPlan, outcomes: Seq[Outcome]) -> tuple[Progress, ...]:
        """Take the step's outcome in: one `Outcome` per chunk, in the plan's order."""
        told: list[Progress] = []
        for chunk, outcome in zip(plan.chunks, outcomes, strict=True):
            seq = self._roster.by_id.get(chunk.request_id)
            if seq is not None and not seq.done:  # Else a sibling's error ended it.
                told += self._apply(seq, chunk, outcome)
        if self._static:
            self._close_batch()
        return tuple(told)

    def _apply(self, seq: Sequence, chunk: Chunk, outcome: Outcome) -> tuple[Progress, ...]:
        if outcome.error:
            # Logits that are not finite come from KV that is not: nobody else shall find it.
            return (self.end(seq, FinishReason.ERROR, outcome.error, spoilt=True),)
        self._roster.advance(seq, len(chunk.token_ids))
        told = self._told(seq, chunk.start, outcome.prompt_logprobs)
        if outcome.alternatives:
            return self.branch(seq, outcome.alternatives, told)
        if outcome.token is None:
            return (Progress(seq.request_id, seq.computed, cached_tokens=seq.cached_tokens, index=seq.index),)
        return self._took(seq, outcome.token, told)

    def _took(self, seq: Sequence, token: Token, told: tuple[Token, ...] = ()) -> tuple[Progress, ...]:
        """The next token of a sequence is there."""
        family = seq.family
        seq.append(token.token_id)
        finish = self.finish_reason(seq.request, token, seq.generated)
        progress = Progress(
            seq.request_id,
            seq.computed,
            (token,),
            finish,
            prompt_logprobs=told,
            cached_tokens=seq.cached_tokens,
            index=seq.index,
        )
        if seq.hold:
            self._roster.park(seq)
        elif finish is not None and self._static:
            seq.done = True
        elif finish is not None:
            self._roster.end(seq)
        if family is None or not family.withheld:
            return (progress,)
        family.collect(seq.index, token, finish)
        return () if any(not member.done for member in family.members) else family.results()

    def branch(
        self, seq: Sequence, alternatives: tuple[Token, ...], told: tuple[Token, ...] = ()
    ) -> tuple[Progress, ...]:
        """A sequence of several has reached its end: `alternatives` are the first tokens of all of them, or the
        likeliest next ones of this beam."""
        family = seq.family
        assert family is not None, f"{seq.name} has no family"
        if seq.hold:
            self._roster.park(seq)
            reasons = [self.finish_reason(seq.request, token, 1) for token in alternatives]
            if None not in reasons:
                return _ended_at_once(seq, family, list(zip(alternatives, reasons, strict=True)), told)
            return (Progress(seq.request_id, seq.computed, alternatives, None, "", told, seq.cached_tokens),)
        note = (
            (Progress(seq.request_id, seq.computed, prompt_logprobs=told, cached_tokens=seq.cached_tokens),)
            if told
            else ()
        )
        if family.search is not None:
            return note + self._beam(seq, family, family.search, alternatives)
        family.forked = True
        forks = [seq, *(self._roster.fork(seq, index) for index in range(1, len(alternatives)))]
        return note + tuple(
            one for twin, token in zip(forks, alternatives, strict=True) for one in self._took(twin, token)
        )

    def _beam(
        self, seq: Sequence, family: Family, search: BeamSearch, continuations: tuple[Token, ...]
    ) -> tuple[Progress, ...]:
        family.ready[seq.name] = continuations
        seq.paused = True
        if len(family.ready) < len(family.members):
            return ()
        beams = tuple(family.members)
        beams_on = search.advance(
            [family.ready[beam.name] for beam in beams],
            [beam.tokens[beam.prompt_len :] for beam in beams],
            lambda token_id, length: self.finish_reason(seq.request, Token(token_id), length),
        )
        family.ready.clear()
        if search.over:
            results = family.results()
            for beam in beams:
                self._roster.end(beam)
            return results
        self._go_on(family, beams, beams_on)
        return ()

    def _go_on(self, family: Family, beams: tuple[Sequence, ...], going: list[Beam]) -> None:
        """Each continuation gets a sequence: the first of a beam its own, others a fork; a beam without one ends."""
        children: list[Sequence] = []
        for beam in going:
            parent = beams[beam.parent]
            children.append(self._roster.fork(parent, 0) if parent in children else parent)
        for beam, child in zip(going, children, strict=True):
            child.append(beam.token_id)
            child.paused = False
        for parent in beams:
            if parent not in children:
                self._roster.end(parent)
        family.members = children

    def finish_reason(self, request: Request, token: Token, generated: int) -> FinishReason | None:
        """Whether this token, the `generated`-th one, ends the request."""
        length = len(request.token_ids) + generated
        return finish_reason(request.sampling, token.token_id, generated, length, self._eos, self._max_model_len)

    def _told(self, seq: Sequence, start: int, logprobs: tuple[Token, ...]) -> tuple[Token, ...]:
        """Collect prompt log-probabilities by position; all of them on the step that ends the prompt, once."""
        if not seq.wants_prompt_logprobs:
            return ()
        if not seq.prompt_logprobs:
            seq.prompt_logprobs.append(Token(seq.tokens[0]))
        known = len(seq.prompt_logprobs)
        seq.prompt_logprobs.extend(logprobs[max(0, known - start - 1) : seq.prompt_len - start - 1])
        if seq.computed < len(seq.tokens):
            return ()
        seq.wants_prompt_logprobs = False
        return tuple(seq.prompt_logprobs)

    def failed(self, plan: StepPlan, error: str) -> tuple[Progress, ...]:
        """The step itself failed: everybody in it ends, their blocks come back."""
        return self._end_all((chunk.request_id for chunk in plan.chunks), error)

    def swap_failed(self, plan: StepPlan, error: str) -> tuple[Progress, ...]:
        """Copies before the step failed: nobody knows what is where, so those concerned and the step's own end."""
        moved = (swap.request_id for swap in (*plan.swap_out, *plan.swap_in))
        return self._end_all(dict.fromkeys((*moved, *(chunk.request_id for chunk in plan.chunks))), error)

    def _end_all(self, names: Iterable[str], error: str) -> tuple[Progress, ...]:
        return self._end_each([self._roster.by_id[name] for name in names], FinishReason.ERROR, error)

    def _end_each(self, sequences: Iterable[Sequence], reason: FinishReason, error: str = "") -> tuple[Progress, ...]:
        # One that ends may take its siblings with it.
        return tuple(self.end(seq, reason, error) for seq in sequences if seq.state is not State.ENDED)

    def expire(self, now: float) -> tuple[Progress, ...]:
        """End everybody waiting, swapped out or running whose deadline has passed."""
        late = [
            seq
            for queue in (self._roster.waiting, self._roster.swapped, self._roster.running)
            for seq in queue
            if seq.request.deadline_s is not None and seq.request.deadline_s <= now and not seq.done
        ]
        return self._end_each(late, FinishReason.DEADLINE)

    def end(self, seq: Sequence, reason: FinishReason, error: str = "", *, spoilt: bool = False) -> Progress:
        """End a sequence in any state, and say so. Where results are told at the end only, its siblings end too."""
        progress = Progress(
            seq.request_id, seq.computed, (), reason, error, cached_tokens=seq.cached_tokens, index=seq.index
        )
        withheld = seq.family is not None and seq.family.withheld
        for one in tuple(seq.family.members) if seq.family is not None and withheld else (seq,):
            self._roster.end(one, spoilt=spoilt)
        return progress


def _is_done(seq: Sequence) -> bool:
    return seq.done


def _together(seq: Sequence) -> tuple[Sequence, ...]:
    """Who is preempted when it is: all beams of a search, which can only go on together."""
    if seq.family is not None and seq.family.search is not None:
        return tuple(seq.family.members)
    return (seq,)


def _ended_at_once(
    seq: Sequence, family: Family, ends: list[tuple[Token, FinishReason | None]], told: tuple[Token, ...]
) -> tuple[Progress, ...]:
    """The results of a held request each of whose first tokens ends it."""
    if family.search is not None:
        reasons = {token.token_id: reason for token, reason in ends}
        family.search.advance([[token for token, _ in ends]], [()], lambda token_id, length: reasons[token_id])
    elif family.withheld:
        for index, (token, reason) in enumerate(ends):
            family.collect(index, token, reason)
    each = (Progress(seq.request_id, seq.computed, (token,), end, index=i) for i, (token, end) in enumerate(ends))
    results = family.results() if family.withheld else tuple(each)
    return tuple(replace(one, prompt_logprobs=told, cached_tokens=seq.cached_tokens) for one in results)
