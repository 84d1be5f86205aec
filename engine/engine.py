"""The engine: one worker's model, KV pool and step loop behind a few calls. Single-threaded, no I/O.

    submit ─▶ queue ─▶ step, step, … ─▶ Progress(finish)            a whole request
    submit(hold) ─▶ … ─▶ first token, blocks held ─▶ release        prefill only: others send the blocks
    lease ─▶ (KV arrives) ─▶ adopt ─▶ step, … ─▶ Progress(finish)   decode only
    generated ─▶ (KV leaves) ─▶ pause ─▶ abort, or resume            decode that goes on elsewhere, or does not
    abort                                                           from anywhere

One `step` is plan → run → sample → apply; the plan is a value and says why. What can fail: a model that raises ends
the sequences of that plan and no others, a row of logits that is not finite ends its sequence. `check` proves after any
of it that every block is free, cached, or held by somebody known.

A preempted sequence starts over in other blocks, or waits in swap space and goes on in other ones: its block table
changes, and where it starts over its `computed_tokens` fall back. Blocks that a transfer still reads stay as they are
until `unretain`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.fetching import PrefixRoom
from engine.hashing import PrefixHasher, hash_root
from engine.info import EngineInfo, ModelFacts
from engine.lengths import LengthWatch
from engine.outcomes import outcomes_of
from engine.prefix_cache import KvChanges
from engine.roster import Roster
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State
from engine.step_times import StepTimeModel, shape_of
from engine.swap import BlockMover, CopyRate, probe
from engine.tiering import BlockBytes, BlockStore, PoolBytes, Tiering
from engine.types import (
    BlockLease,
    EngineLoad,
    FinishReason,
    Progress,
    Request,
    StepPlan,
    StepResult,
    Token,
)
from engine.validate import check_fits, check_token_ids, validate

if TYPE_CHECKING:
    from engine.host_swap import PoolSpans

__all__ = ["Engine", "EngineInfo", "ModelFacts", "Runner"]

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Carries a plan out: writes KV, returns float32 (sum of chunk.rows, vocab), rows in the plan's order."""

    def run(self, plan: StepPlan) -> Tensor: ...


class Engine:
    """`memory` is the KV pool's bytes, block after block, for transfers to read and write. `mover` copies blocks to
    `swap_slots` slots of swap space and back; without it a preempted sequence is always computed again. `blocks` are
    the same bytes for lower tiers to copy, where `memory` cannot be had, and `spans` for transfers to stage."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        facts: ModelFacts,
        *,
        memory: memoryview | None = None,
        mover: BlockMover | None = None,
        swap_slots: int = 0,
        blocks: BlockBytes | None = None,
        spans: PoolSpans | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        root = hash_root(
            name=config.prefix_hash,
            seed=config.hash_seed,
            model_digest=facts.model_digest,
            kv_dtype=config.kv_dtype or config.dtype,
            numerics=config.numerics,
        )
        self.info = EngineInfo(
            model=facts.model,
            model_digest=facts.model_digest,
            layout=facts.layout,
            kv_heads=facts.kv_heads,
            layers=facts.layers,
            numerics=config.numerics,
            max_model_len=min(config.max_model_len or facts.max_model_len, facts.max_model_len),
            vocab_size=facts.vocab_size,
            block_bytes=facts.block_bytes,
            total_blocks=facts.total_blocks,
            block_size=config.block_size,
            eos_token_ids=facts.eos_token_ids,
            hash_root=root,
        )
        hasher = PrefixHasher(config.prefix_hash, root) if config.prefix_caching else None
        self._config = config
        self._runner = runner
        self._clock = clock
        self._memory = memory
        self._spans = spans
        self._blocks = PoolBytes(memory, facts.block_bytes) if blocks is None and memory is not None else blocks
        self._pool = BlockPool(facts.total_blocks)
        self._mover = mover
        self._copy_rate = CopyRate()
        swaps = mover is not None and config.preemption != "recompute"
        self._roster = Roster(self._pool, config.block_size, hasher, swap_slots if swaps else 0)
        self._times = StepTimeModel()
        self._scheduler = Scheduler(
            config,
            self._roster,
            self._times,
            eos_token_ids=frozenset(facts.eos_token_ids),
            max_model_len=self.info.max_model_len,
            block_bytes=facts.block_bytes,
            copy_rate=self._copy_rate,
        )
        if self._roster.slots.total and mover is not None:
            probe(mover, min(swap_slots, facts.total_blocks), facts.block_bytes, self._copy_rate, clock)
        self._tiers: Tiering | None = None
        self._generated = 0
        self._lengths = LengthWatch(self.info.max_model_len)
        # Set when a plan came out empty, cleared by whatever could change that: so that nobody spins.
        self._stuck = False
        self._first_deadline: float | None = None

    @classmethod
    def open(cls, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> Engine:
        """Read the checkpoint, allocate the pool, build the runner. Raises ModelError or ConfigError."""
        from engine.assemble import assemble  # torch models only where one is loaded
        from engine.host_swap import DeviceBytes, HostSwap, PoolSpans

        runner, facts, memory = assemble(config)
        mover = HostSwap(runner.pool, config.swap_bytes)
        return cls(
            config,
            runner,
            facts,
            memory=memory,
            mover=mover,
            swap_slots=mover.slots,
            blocks=DeviceBytes(runner.pool) if memory is None else None,
            spans=PoolSpans(runner.pool),
            clock=clock,
        )

    def attach_tiers(self, store: BlockStore, *, mode: str = "auto", announce: bool = False) -> None:
        """Offer blocks that leave the pool to `store`, and load prompts' prefixes from it where that is faster than
        computing them (`mode`: auto, always, never; see `engine.tiering`). Once, before the first request.

        `announce`: what the store holds is told by `drain_tier_events`. Raises TypeError when the pool's
        bytes cannot be had.
        """
        if self._blocks is None:
            raise TypeError("the KV pool's bytes cannot be copied: no lower tiers")
        self._tiers = self._roster.tiering = Tiering(
            self._pool,
            self._blocks,
            store,
            block_size=self.info.block_size,
            block_bytes=self.info.block_bytes,
            step_tokens=self._config.max_num_batched_tokens,
            clock=self._clock,
            mode=mode,
            announce=announce,
        )

    def pool_bytes(self) -> memoryview:
        """Writable bytes of the KV pool; block i is [i * block_bytes, (i + 1) * block_bytes).

        Raises TypeError when the pool is not in host memory.
        """
        if self._memory is None:
            raise TypeError("the KV pool is not in host memory")
        return self._memory

    @property
    def on_host(self) -> bool:
        """Whether `pool_bytes` can be had."""
        return self._memory is not None

    def pool_spans(self) -> PoolSpans:
        """Copies spans of those bytes, wherever the pool is. Raises TypeError when nobody can."""
        if self._spans is None:
            raise TypeError("the KV pool's bytes cannot be copied")
        return self._spans

    # -- requests ------------------------------------------------------------------------------------------------

    def check_request(self, request: Request, *, prompt_only: bool = False) -> None:
        """Raises InvalidRequest, naming the field, when it can never run here; `prompt_only`: up to its first token."""
        info = self.info
        if self._roster.of(request.request_id):
            raise InvalidRequest("request_id", f"{request.request_id!r} is already here")
        validate(request, vocab_size=info.vocab_size, max_model_len=info.max_model_len, prompt_only=prompt_only)
        if request.branching is not None and not prompt_only:
            self._check_branching(request, request.branching.beam_width)
        capacity = info.total_blocks * info.block_size
        check_fits(request, capacity, "the KV pool", prompt_only=prompt_only)

    def submit(self, request: Request, generated: tuple[int, ...] = (), *, hold: bool = False) -> None:
        """Queue a request; with `hold` it stops after its first token and keeps its blocks until `release`.

        `generated`: the tokens that it has already, from an engine that is lost; it goes on behind them, as if it had
        been preempted here. Its place in the queue follows from its priority and this engine's clock, not from
        `arrival_s`. Raises InvalidRequest when it can never run here: see `engine.validate`; or larger than the KV
        pool; or has several sequences, or nothing to generate, beside what was generated.
        """
        self.check_request(request, prompt_only=hold)
        if generated:
            self._check_generated(request, generated)
        self._roster.add(request, self._clock(), generated, hold=hold)
        self._expect(request)

    def lease(self, request: Request, generated: tuple[int, ...] = (), *, spare_blocks: int = 0) -> BlockLease | None:
        """Real blocks for the whole prompt, those with a known prefix included; None when there is no room now.

        A prompt that the cache holds to its last block needs nothing sent (`held_tokens` equals its length). A lease
        has no deadline here: whoever took it adopts or aborts it. `generated`: tokens of a request that runs elsewhere
        and will move here, with `spare_blocks` for those still to come. Raises InvalidRequest as `submit` does.
        """
        self.check_request(request)
        seq = self._roster.lease(request, self._clock(), generated, spare_blocks)
        if seq is None:
            return None
        return BlockLease(request.request_id, tuple(seq.blocks), seq.computed)

    def adopt(self, request: Request, first: tuple[Token, ...]) -> tuple[Progress, ...]:
        """The leased blocks hold the KV of all but the last token of prompt and `first`: run from there.

        `first` are all tokens generated so far; of a request with several sequences, the alternatives that its held
        prefill told, and what they mean for each sequence is returned (some may end with theirs). Raises ValueError
        when there is no such lease, when `first` is empty or ends the request.
        """
        seq = self._roster.by_id.get(request.request_id)
        if seq is None or seq.state is not State.LEASED:
            raise ValueError(f"{request.request_id} is {seq.state if seq else 'unknown'} here, not leased")
        if request.token_ids != seq.request.token_ids:
            raise ValueError(f"{request.request_id} was leased for another prompt")
        told = tuple(token.token_id for token in first)
        if told[: seq.generated] != tuple(seq.tokens[seq.prompt_len :]):
            raise ValueError(f"{request.request_id} was leased for other tokens than {told}")
        if not seq.family and seq.prompt_len + len(first) - 1 > len(seq.blocks) * self.info.block_size:
            raise ValueError(f"{request.request_id} has outgrown its lease of {len(seq.blocks)} blocks")
        if not first or not self._goes_on(seq, first):
            raise ValueError(f"{request.request_id} has nothing left to generate after {first}")
        self._roster.adopt(seq, () if seq.family else first)
        self._expect(request)
        return self._scheduler.branch(seq, first) if seq.family else ()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, *, index: int | None = None) -> bool:
        """End a request in any state, its blocks come back now; False when it is not here. No Progress follows.

        `index`: of a request that tells its sequences as they go, end this one alone. Of the others (beams,
        `best_of`) none can be spared, and nothing happens.
        """
        sequences = [seq for seq in self._roster.of(request_id) if not seq.done]
        if index is not None:
            sequences = [seq for seq in sequences if _is_own(seq, index)]
        for seq in sequences:
            _log.debug("%s ends as %s while %s", seq.name, reason, seq.state)
            self._roster.end(seq)
        self._stuck = self._stuck and not sequences
        return bool(sequences)

    def release(self, request_id: str) -> None:
        """A held request is done with; its full blocks stay as prefix cache. Unknown ids are ignored."""
        seq = self._roster.by_id.get(request_id)
        if seq is None or seq.done:
            return
        if seq.state is not State.HELD:
            raise ValueError(f"{request_id} is {seq.state}, not held; abort it instead")
        self._roster.end(seq)
        self._stuck = False

    def generated(self, request_id: str) -> tuple[int, ...] | None:
        """Ids of the tokens so far of a request that decodes as one sequence, the KV of all but the last of which is in
        the pool; None while it waits, computes its prompt (again), is one of several, or is not here."""
        seq = self._roster.by_id.get(request_id)
        if seq is None or seq.family is not None or seq.done or seq.state is not State.RUNNING or not seq.decoding:
            return None
        return tuple(seq.tokens[seq.prompt_len :])

    def pause(self, request_id: str) -> tuple[int, ...] | None:
        """As `generated`; and it is not scheduled, preempted or ended by its deadline before `resume`."""
        generated = self.generated(request_id)
        if generated is not None:
            self._roster.park(self._roster.by_id[request_id])
        return generated

    def resume(self, request_id: str) -> None:
        """A paused request goes on as if nothing had been. Ignored for one that is not paused."""
        seq = self._roster.by_id.get(request_id)
        if seq is not None and seq.state is State.HELD and not seq.hold:
            self._roster.unpark(seq)
            self._expect(seq.request)

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """Blocks of the sequence, position by position; empty while it waits. KeyError when it is not here."""
        return tuple(self._roster.by_id[request_id].blocks)

    def retain(self, block_ids: Iterable[int]) -> None:
        """A transfer's own reference: these blocks are not reused before `unretain`, whoever lets go of them."""
        self._roster.retain(block_ids)

    def unretain(self, block_ids: Iterable[int]) -> None:
        self._roster.unretain(block_ids)
        self._stuck = False

    def scratch(self, count: int) -> tuple[int, ...]:
        """`count` blocks that hold nothing, with a transfer's reference: `unretain` them. Empty when fewer than twice
        as many are free; nothing is evicted for them."""
        return self._roster.scratch(count)

    # -- prefixes that others have computed ------------------------------------------------------------------------

    def fetch(self, request_id: str, tokens: int) -> PrefixRoom | None:
        """Blocks to be filled with the KV that this engine lacks of a queued prompt's first `tokens`; None when there
        is nothing to fetch, or no room.

        The prompt waits until `fetch_over`: there is no deadline here. Its end ends the fetch too.
        """
        seq = self._roster.by_id.get(request_id)
        return self._roster.fetch(seq, tokens) if seq is not None else None

    def fetched(self, request_id: str, blocks: int) -> bool:
        """The first `blocks` of the room are complete and verified: from now on anybody finds them. False: nobody
        waits for them any more."""
        self._stuck = False
        return self._roster.fetching.arrived(request_id, blocks)

    def fetch_over(self, request_id: str) -> None:
        """Nothing more comes: what is missing is computed. Ignored when the fetch has ended."""
        self._stuck = False
        self._roster.fetching.end(request_id)

    def fetching(self, request_id: str) -> bool:
        """Whether the prompt waits for its fetch."""
        return request_id in self._roster.fetching

    def retain_prefix(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """The blocks of the leading keys (of each block's last granule) that the pool holds, with a reference for a
        transfer: `unretain` them."""
        blocks = tuple(self._pool.match(keys))
        self._roster.retain(blocks)
        return blocks

    # -- steps ---------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a step now could do anything. False as well while all that waits is waiting for blocks."""
        if self._first_deadline is not None and self._first_deadline <= self._clock():
            return True
        if self._tiers is not None and self._tiers.ready(self._clock()):
            return True
        roster = self._roster
        return not self._stuck and bool(roster.waiting or roster.swapped or roster.running)

    def next_deadline(self) -> float | None:
        """A time at or before which nobody's deadline passes: call `step` again then, even without work."""
        loads = self._tiers.next_deadline() if self._tiers is not None else None
        return min((time for time in (self._first_deadline, loads) if time is not None), default=None)

    def step(self, now: float) -> StepResult | None:
        """Plan, run, sample, apply; None when there was nothing to do."""
        expired = self._expired(now)
        if self._tiers is not None:
            self._tiers.pump(now, decoding=any(seq.decoding for seq in self._roster.running))
        plan = self._scheduler.plan(now)
        moves = plan.preempted or plan.swap_in or plan.copies
        self._stuck = not plan.chunks and not moves
        if not plan.chunks and not moves:
            return StepResult(expired, now, 0.0, plan) if expired else None
        started_s = self._clock()
        progress = self._moved(plan)
        if not progress and plan.chunks:
            progress = self._carried_out(plan)
        if self._tiers is not None:
            self._tiers.write_behind(plan.num_tokens)
        return StepResult(expired + progress, started_s, self._clock() - started_s, plan)

    def _moved(self, plan: StepPlan) -> tuple[Progress, ...]:
        """Carry the plan's swaps out; says something only when that failed."""
        out = [pair for swap in plan.swap_out for pair in swap.pairs]
        back = [pair for swap in plan.swap_in for pair in swap.pairs]
        if self._mover is None or not (out or plan.copies or back):
            return ()
        started_s = self._clock()
        try:
            self._mover.out(out)
            self._mover.copy(plan.copies)
            self._mover.back(back)
        except Exception as error:  # Whatever a device can raise: those whose KV it held end, the engine does not.
            _log.exception("swapping failed")
            return self._scheduler.swap_failed(plan, f"{type(error).__name__}: {error}")
        if not plan.copies:
            self._copy_rate.observe((len(out) + len(back)) * self.info.block_bytes, self._clock() - started_s)
        return ()

    def _carried_out(self, plan: StepPlan) -> tuple[Progress, ...]:
        started_s = self._clock()
        try:
            logits = self._runner.run(plan)
            sequences = [self._roster.by_id[chunk.request_id] for chunk in plan.chunks]
            outcomes = outcomes_of(plan.chunks, sequences, logits, self.info.eos_token_ids)
        except Exception as error:  # Whatever a model can raise: its requests end, the engine does not.
            _log.exception("step failed for %s", ", ".join(chunk.request_id for chunk in plan.chunks))
            return self._scheduler.failed(plan, f"{type(error).__name__}: {error}")
        self._times.observe(shape_of(plan.chunks), self._clock() - started_s)
        progress = self._scheduler.applied(plan, outcomes)
        self._generated += sum(len(one.tokens) for one in progress)
        for one in progress:
            if one.finish is not None:
                self._note_length(one.computed_tokens + len(one.tokens[-1:]))
        return progress

    def _note_length(self, length: int) -> None:
        line = self._lengths.ended(length, self._pool.live, self._pool.total)
        if line is not None:
            _log.info(line)

    # -- state ---------------------------------------------------------------------------------------------------

    def load(self, now: float) -> EngineLoad:
        """This engine's state in numbers. `now` is unused today: nothing in it depends on the time."""
        roster, pool, tiers = self._roster, self._pool, self._tiers
        queues = (roster.waiting, roster.swapped, roster.running)
        pending = [seq for queue in queues for seq in queue if not seq.decoding]
        return EngineLoad(
            total_blocks=pool.total,
            free_blocks=pool.free,
            live_blocks=pool.live,
            cached_blocks=pool.cached,
            block_size=self.info.block_size,
            running=len(roster.running),
            waiting=len(roster.waiting),
            leased_blocks=roster.leased_blocks(),
            queued_prefill_tokens=sum(seq.remaining for seq in pending),
            running_context_tokens=sum(seq.computed for seq in roster.running),
            preemptions=roster.preemptions,
            prefix_queries=roster.prefix_queries,
            prefix_hits=roster.prefix_hits,
            prompt_tokens=roster.prompt_tokens,
            generated_tokens=self._generated,
            step_times=self._times.times,
            swapped=len(roster.swapped),
            swap_preemptions=roster.swap_preemptions,
            swap_total_blocks=roster.slots.total,
            swap_used_blocks=roster.slots.total - roster.slots.free,
            tiers=tiers.load() if tiers is not None else (),
            tier_loads=tiers.loads_delivered if tiers is not None else 0,
            tier_recomputes=tiers.loads_declined if tiers is not None else 0,
        )

    def drain_kv_events(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...], bool]:
        """Prefix keys that the pool holds since the last call and does not hold any more, and whether everything was
        forgotten before that."""
        if self._tiers is not None:
            self._tiers.tell()
        return self._pool.drain_changes()

    def drain_tier_events(self) -> dict[str, KvChanges]:
        """The same of each lower tier that is announced. To be told after `drain_kv_events`, whose "forgotten" is for
        all tiers."""
        return self._pool.drain_elsewhere()

    def retell_kv_events(self) -> int:
        """The next drain tells all prefix keys anew, after a `cleared`; returns how many there are."""
        return self._pool.retell_changes()

    def tier_decisions(self) -> tuple[str, ...]:
        """The last choices between loading a prefix from a lower tier and computing it, in words."""
        return tuple(self._tiers.decisions) if self._tiers is not None else ()

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; running requests are unharmed. The number of blocks forgotten."""
        self._stuck = False
        return self._roster.forget_prefixes()

    def check(self) -> None:
        """Every block is free, cached or held by somebody known. Raises AssertionError with the story."""
        self._roster.check()

    # -- inside --------------------------------------------------------------------------------------------------

    def _check_branching(self, request: Request, width: int) -> None:
        info = self.info
        if self._mover is None:
            raise InvalidRequest("n", "this engine cannot copy blocks, so a request has one sequence")
        if not width:
            return
        # Beams are in the pool all at once. What they share they find again only in a prefix cache.
        shared = len(request.token_ids) // info.block_size if self._config.prefix_caching else 0
        whole = -(-(len(request.token_ids) + request.sampling.max_tokens) // info.block_size)
        needed = shared + width * (whole - shared)
        if needed > info.total_blocks:
            message = f"{width} needs up to {needed} blocks; the KV pool has {info.total_blocks}"
            raise InvalidRequest("beam_width", message)

    def _check_generated(self, request: Request, generated: tuple[int, ...]) -> None:
        check_token_ids("generated", generated, self.info.vocab_size)
        if request.branching is not None:
            raise InvalidRequest("generated", "must be empty for several sequences")
        if self._scheduler.finish_reason(request, Token(generated[-1]), len(generated)) is not None:
            raise InvalidRequest("generated", "has ended the request already")

    def _goes_on(self, seq: Sequence, first: tuple[Token, ...]) -> bool:
        if seq.family:
            return any(self._scheduler.finish_reason(seq.request, token, 1) is None for token in first)
        reasons = (self._scheduler.finish_reason(seq.request, token, i) for i, token in enumerate(first, 1))
        return all(reason is None for reason in reasons)

    def _expect(self, request: Request) -> None:
        self._stuck = False
        if request.deadline_s is not None:
            first = self._first_deadline
            self._first_deadline = request.deadline_s if first is None else min(first, request.deadline_s)

    def _expired(self, now: float) -> tuple[Progress, ...]:
        if self._first_deadline is None or now < self._first_deadline:
            return ()
        expired = self._scheduler.expire(now)
        ahead = [
            seq.request.deadline_s
            for queue in (self._roster.waiting, self._roster.swapped, self._roster.running)
            for seq in queue
            if seq.request.deadline_s is not None
        ]
        self._first_deadline = min(ahead, default=None)
        return expired


def _is_own(seq: Sequence, index: int) -> bool:
    """Whether this is the sequence that is told as `index`, and runs by itself."""
    if seq.family is None:
        return index == 0
    return seq.family.forked and not seq.family.withheld and seq.index == index
