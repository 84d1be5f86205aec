"""Every sequence of the engine, the blocks it holds, and the only ways in and out.

The scheduler decides, the roster does: each move of a sequence between states takes or gives back its blocks in the
same function, so that nothing leaks whatever the order of events. `end` is the one exit and works from every state.
A sequence is given blocks for all its tokens when it is admitted, then one at a time as it grows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from engine.blocks import BlockPool
from engine.family import Family
from engine.fetching import Fetching, PrefixRoom
from engine.hashing import GRANULE, PrefixHasher
from engine.sequence import Sequence, State
from engine.swap import SwapSlots
from engine.tiering import Tiering
from engine.types import Request, StepTimes, Swap, Token

_by_order = attrgetter("order")

_QUEUED = (State.WAITING, State.LOADING)

Copies = tuple[tuple[int, int], ...]
"""(block, fresh block) pairs."""


class Roster:
    """`hasher` None switches prefix caching off; without `swap_slots` nobody is swapped out."""

    def __init__(self, pool: BlockPool, block_size: int, hasher: PrefixHasher | None, swap_slots: int = 0) -> None:
        self.pool = pool
        self.slots = SwapSlots(swap_slots)
        self.block_size = block_size
        self.by_id: dict[str, Sequence] = {}
        """By name, which is the request's id for all but the forks."""
        self.families: dict[str, Family] = {}
        self.waiting: list[Sequence] = []
        """Most urgent first, as the next two."""
        self.swapped: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.swap_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0
        self.tiering: Tiering | None = None
        """Lower tiers, if there are any."""
        self.fetching = Fetching(pool)
        """Prefixes that come from other workers."""
        self._hasher = hasher
        self._number = 0
        self._leases = 0
        self._retained: Counter[int] = Counter()

    # -- in ------------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float, generated: Iterable[int] = (), *, hold: bool = False) -> Sequence:
        """A new sequence joins the queue; what was `generated` elsewhere is computed with the prompt."""
        seq = self._new(request, now, State.WAITING, hold=hold)
        for token_id in generated:
            seq.append(token_id)
        insort(self.waiting, seq, key=_by_order)
        return seq

    def admit(self, seq: Sequence) -> bool:
        """Waiting → running, with blocks for all its tokens; False when they and room to grow are not there."""
        # Prompt log-probabilities come out of computing; one token at least always does.
        hits = [] if seq.wants_prompt_logprobs else self._match(seq, len(seq.tokens) - 1)
        if not self._provide(seq, hits, self._headroom(seq)):
            return False
        self._leave(self.waiting, seq)
        seq.state = State.RUNNING
        seq.computed = len(hits) * self.block_size
        if not seq.preemptions:
            self._count_lookup(seq, seq.computed)
        insort(self.running, seq, key=_by_order)
        return True

    def fetches(self, seq: Sequence, times: StepTimes, now: float) -> bool:
        """Whether a waiting sequence that could be admitted waits for blocks that another's fetch is about to bring, or
        for some from a lower tier, instead."""
        if seq.wants_prompt_logprobs:
            return False
        length = len(seq.tokens) - 1
        if self.fetching and self._is_brought(seq, length):
            return True
        if self.tiering is None:
            return False
        if not self._has_room(seq, self._match(seq, length), self._headroom(seq)):
            return False
        return self.tiering.fetches(seq, self._block_granules(seq, length), times, now)

    def fetch(self, seq: Sequence, tokens: int) -> PrefixRoom | None:
        """Waiting → loading, with blocks for what the pool lacks of the prompt's first `tokens`; None when it lacks
        nothing, when another's fetch brings it already, or when it or the first in the queue would lack room."""
        if seq.state is not State.WAITING or seq.preemptions or seq.wants_prompt_logprobs:
            return None
        keys = self._block_granules(seq, min(tokens, len(seq.tokens) - 1))
        found = self.pool.match(granules[-1] for granules in keys)
        first = next(iter(self.swapped or self.waiting), seq)
        promised = self._blocks_for(first) if first is not seq else 0
        if len(found) == len(keys) or self.fetching.brings(keys[len(found)][-1]):
            return None
        if not self._has_room(seq, found, self._headroom(seq) + promised):
            return None
        return self.fetching.begin(seq, found, keys)

    def lease(
        self, request: Request, now: float, generated: Iterable[int] = (), spare_blocks: int = 0
    ) -> Sequence | None:
        """A new sequence with blocks for its whole prompt, whose KV will come from elsewhere; None: no room now.

        With what was `generated` elsewhere already it gets blocks for that too, and `spare_blocks` to grow before it is
        here. The first in the queue has first call on free blocks: leases granted past it would starve it.
        """
        first = next(iter(self.swapped or self.waiting), None)
        promised = self._blocks_for(first) if first else 0
        seq = self._new(request, now, State.LEASED)
        for token_id in generated:
            seq.append(token_id)
        hits = self._match(seq, max(seq.prompt_len, len(seq.tokens) - 1))
        if not self._provide(seq, hits, self._headroom(seq) + promised + spare_blocks):
            self._forget(seq)
            return None
        seq.set_blocks([*seq.blocks, *(self.pool.allocate(spare_blocks) or ())])
        self._leases += 1
        seq.computed = len(hits) * self.block_size
        self._count_lookup(seq, min(seq.computed, seq.prompt_len))
        return seq

    def adopt(self, seq: Sequence, first: tuple[Token, ...]) -> None:
        """Leased → running: `first` was already generated, and the KV is complete for all tokens but the last of it.
        Blocks to spare go back."""
        seq.state = State.RUNNING
        self._leases -= 1
        for token in first[seq.generated :]:
            seq.append(token.token_id)
        seq.computed = max(seq.prompt_len, len(seq.tokens) - 1)
        needed = self._blocks_for(seq)
        self.pool.release(seq.blocks[needed:])
        seq.set_blocks(seq.blocks[:needed])
        self._publish(seq)
        insort(self.running, seq, key=_by_order)

    # -- on ------------------------------------------------------------------------------------------------------

    def grow(self, seq: Sequence) -> Copies | None:
        """A block of its own for a running sequence's next token, and what must be copied into it first; None when
        there is no block."""
        blocks = self.pool.allocate(1)
        if blocks is None:
            return None
        index = seq.computed // self.block_size
        if index == len(seq.blocks):
            seq.blocks.extend(blocks)
            return ()
        shared = seq.blocks[index]
        seq.set_blocks([*seq.blocks[:index], *blocks, *seq.blocks[index + 1 :]])
        self.pool.release([shared])
        return ((shared, blocks[0]),)

    def needs_block(self, seq: Sequence) -> bool:
        """Whether the next token's KV has no place yet, or one that others hold too."""
        index = seq.computed // self.block_size
        return index >= len(seq.blocks) or (seq.family is not None and self.pool.is_shared(seq.blocks[index]))

    def fork(self, seq: Sequence, index: int) -> Sequence:
        """Another sequence of the request that shares all blocks of `seq` and its place in the queues."""
        assert seq.family is not None, f"{seq.name} has no family"
        seq.family.numbered += 1
        twin = seq.fork(index, seq.family.numbered)
        self.pool.retain(seq.blocks)
        twin.set_blocks(list(seq.blocks))
        self.by_id[twin.name] = twin
        seq.family.members.append(twin)
        insort(self.running if seq.state is State.RUNNING else self.waiting, twin, key=_by_order)
        return twin

    def of(self, request_id: str) -> tuple[Sequence, ...]:
        """The request's sequences that are here."""
        family = self.families.get(request_id)
        if family is not None:
            return tuple(family.members)
        seq = self.by_id.get(request_id)
        return () if seq is None else (seq,)

    def advance(self, seq: Sequence, tokens: int) -> None:
        """`tokens` more positions are in the pool; full blocks become findable."""
        if seq.computed < seq.prompt_len:
            self.prompt_tokens += min(tokens, seq.prompt_len - seq.computed)
        seq.computed += tokens
        self._publish(seq)

    def preempt(self, seq: Sequence) -> None:
        """Running → waiting; its blocks go back and are computed again, except what the prefix cache keeps."""
        self._leave(self.running, seq)
        self._give_back(seq)
        seq.state = State.WAITING
        seq.computed = 0
        seq.preemptions += 1
        seq.passes = 0
        self.preemptions += 1
        insort(self.waiting, seq, key=_by_order)

    def kept_by_others(self, seq: Sequence) -> int:
        """Leading tokens of a running sequence whose blocks somebody else holds too, so that they stay findable."""
        blocks = 0
        while blocks < seq.published and self.pool.is_shared(seq.blocks[blocks]):
            blocks += 1
        return blocks * self.block_size

    def may_swap_out(self, seq: Sequence) -> bool:
        """Whether it has KV to keep and swap space has room for it."""
        return 0 < -(-seq.computed // self.block_size) <= self.slots.free

    def swap_out(self, seq: Sequence) -> Swap:
        """Running → swapped; its blocks go back, and what they hold must be copied before anybody writes there."""
        used = seq.blocks[: -(-seq.computed // self.block_size)]
        slots = self.slots.take(len(used))
        assert slots is not None, f"{seq.request_id} finds no room in swap space"
        self._leave(self.running, seq)
        self._give_back(seq)
        seq.slots = slots
        seq.state = State.SWAPPED
        seq.preemptions += 1
        self.preemptions += 1
        self.swap_preemptions += 1
        insort(self.swapped, seq, key=_by_order)
        return Swap(seq.name, tuple(zip(used, slots, strict=True)))

    def swap_in(self, seq: Sequence) -> Swap | None:
        """Swapped → running in other blocks, into which the pairs must be copied; None when they are not there.

        What the prefix cache still holds needs no copy.
        """
        hits = self._match(seq, seq.computed)
        if not self._provide(seq, hits, self._headroom(seq)):
            return None
        pairs = tuple(zip(seq.blocks, seq.slots, strict=False))[len(hits) :]
        self.slots.give_back(seq.slots)
        seq.slots = []
        self._leave(self.swapped, seq)
        seq.state = State.RUNNING
        insort(self.running, seq, key=_by_order)
        return Swap(seq.name, pairs)

    def park(self, seq: Sequence) -> None:
        """Running → held: blocks stay until `end`, or `unpark`."""
        self._leave(self.running, seq)
        seq.state = State.HELD

    def unpark(self, seq: Sequence) -> None:
        """Held → running."""
        seq.state = State.RUNNING
        insort(self.running, seq, key=_by_order)

    # -- out -----------------------------------------------------------------------------------------------------

    def end(self, seq: Sequence, *, spoilt: bool = False) -> None:
        """Out of any state. Full blocks stay behind as prefix cache, unless their content is `spoilt`."""
        if spoilt:
            self.pool.forget(seq.blocks)
        if seq.state is State.LOADING:
            self._stop_loading(seq)
        if seq.state is State.WAITING:
            self._leave(self.waiting, seq)
        elif seq.state is State.RUNNING:
            self._leave(self.running, seq)
        elif seq.state is State.SWAPPED:
            self._leave(self.swapped, seq)
        elif seq.state is State.LEASED:
            self._leases -= 1
        self._give_back(seq)
        self.slots.give_back(seq.slots)
        seq.state = State.ENDED
        self._forget(seq)

    def _stop_loading(self, seq: Sequence) -> None:
        if self.tiering is not None and seq.name not in self.fetching:
            self.tiering.cancel(seq)
        self.fetching.end(seq.name)

    # -- references of transfers ---------------------------------------------------------------------------------

    def retain(self, blocks: Iterable[int]) -> None:
        blocks = tuple(blocks)
        self.pool.retain(blocks)
        self._retained.update(blocks)

    def scratch(self, count: int) -> tuple[int, ...]:
        blocks = self.pool.allocate(count) if 2 * count <= self.pool.free else None
        self._retained.update(blocks or ())
        return tuple(blocks or ())

    def unretain(self, blocks: Iterable[int]) -> None:
        """Give back what `retain` took; ValueError when it was not taken."""
        blocks = tuple(blocks)
        wanted = Counter(blocks)
        if any(self._retained[block] < count for block, count in wanted.items()):
            raise ValueError(f"blocks {sorted(wanted)} are not all retained: {dict(self._retained)}")
        self._retained -= wanted
        self.pool.release(blocks)

    # -- what others ask -----------------------------------------------------------------------------------------

    def block_keys(self, seq: Sequence, length: int) -> list[bytes]:
        """Keys of the full blocks within the first `length` tokens, one per block; empty without prefix caching."""
        if self._hasher is None:
            return []
        keys = seq.hash_up_to(length, self._hasher)
        per_block = self.block_size // GRANULE
        return keys[per_block - 1 : length // self.block_size * per_block : per_block]

    def _block_granules(self, seq: Sequence, length: int) -> list[tuple[bytes, ...]]:
        """As `block_keys`, with the keys of all granules of each block."""
        if self._hasher is None:
            return []
        keys = seq.hash_up_to(length, self._hasher)
        per_block = self.block_size // GRANULE
        ends = range(per_block, length // self.block_size * per_block + 1, per_block)
        return [tuple(keys[end - per_block : end]) for end in ends]

    def leased_blocks(self) -> int:
        return sum(len(seq.blocks) for seq in self.by_id.values() if seq.state is State.LEASED)

    def forget_prefixes(self) -> int:
        """Empty the prefix cache, lower tiers included. Blocks computed so far are not entered again, only those still
        to come."""
        if self.tiering is not None:
            self.tiering.clear()
        self.fetching.clear()
        return self.pool.reset_cache()

    def check(self) -> None:
        """Every list, state and reference agrees; raises AssertionError with the story."""
        self.fetching.check()
        owners = Counter(self._retained) + self.fetching.owners()
        if self.tiering is not None:
            self.tiering.check()
            owners.update(self.tiering.owners())
        for seq in self.by_id.values():
            owners.update(seq.blocks)
            story = f"{seq.name} ({seq.state}, computed {seq.computed} of {len(seq.tokens)}, blocks {seq.blocks})"
            assert (seq in self.waiting) == (seq.state in _QUEUED), f"{story}: waiting list disagrees"
            assert (seq in self.running) == (seq.state is State.RUNNING), f"{story}: running list disagrees"
            assert (seq in self.swapped) == (seq.state is State.SWAPPED), f"{story}: swapped list disagrees"
            kept = seq.slots if seq.state is State.SWAPPED else seq.blocks
            assert seq.computed <= len(kept) * self.block_size, f"{story}: computed beyond its blocks"
            assert not (seq.slots and seq.blocks), f"{story}: in the pool and in swap space"
            assert seq.state not in (*_QUEUED, State.SWAPPED) or not seq.blocks, f"{story}: waits with blocks"
            assert seq.state in (State.WAITING, State.LEASED) or seq.computed <= len(seq.tokens), f"{story}: too far"
        leases = sum(seq.state is State.LEASED for seq in self.by_id.values())
        assert leases == self._leases, f"{leases} leases, {self._leases} counted"
        self.slots.check([slot for seq in self.by_id.values() for slot in seq.slots])
        for queue in (self.waiting, self.swapped, self.running):
            assert queue == sorted(queue, key=_by_order), "a queue is out of order"
            assert all(self.by_id.get(seq.name) is seq for seq in queue), "a queue holds a stranger"
        self.pool.check(owners)

    # -- inside --------------------------------------------------------------------------------------------------

    def _new(self, request: Request, now: float, state: State, *, hold: bool = False) -> Sequence:
        self._number += 1
        seq = Sequence(request, arrived_s=now, number=self._number, state=state, hold=hold)
        self.by_id[seq.name] = seq
        if seq.family is not None:
            self.families[request.request_id] = seq.family
            seq.family.members.append(seq)
        return seq

    def _forget(self, seq: Sequence) -> None:
        del self.by_id[seq.name]
        if seq.family is not None:
            seq.family.members.remove(seq)
            if not seq.family.members:
                self.families.pop(seq.request_id, None)

    def _headroom(self, seq: Sequence) -> int:
        """One block for each sequence that will grow, so that a newcomer is not preempted at once. Siblings wait for
        it instead."""
        siblings = sum(other.family is seq.family for other in self.running) if seq.family is not None else 0
        return len(self.running) - siblings + self._leases

    def _blocks_for(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // self.block_size)

    def _match(self, seq: Sequence, length: int) -> list[int]:
        return self.pool.match(self.block_keys(seq, length))

    def _has_room(self, seq: Sequence, hits: list[int], headroom: int) -> bool:
        taken = self._blocks_for(seq) - sum(self.pool.is_live(block) for block in hits)
        return taken + headroom <= self.pool.available

    def _provide(self, seq: Sequence, hits: list[int], headroom: int) -> bool:
        """Blocks for all tokens: `hits` and fresh ones. All or none."""
        if not self._has_room(seq, hits, headroom):
            return False
        self.pool.retain(hits)
        fresh = self.pool.allocate(self._blocks_for(seq) - len(hits))
        assert fresh is not None, "the pool gave less than it promised"
        seq.set_blocks(hits + fresh)
        seq.published = len(hits)
        return True

    def _is_brought(self, seq: Sequence, length: int) -> bool:
        keys = self.block_keys(seq, length)
        found = len(self.pool.match(keys))
        return found < len(keys) and self.fetching.brings(keys[found])

    def _publish(self, seq: Sequence) -> None:
        full = seq.computed // self.block_size
        if self._hasher is None or full <= seq.published:
            return
        keys = seq.hash_up_to(full * self.block_size, self._hasher)
        per_block = self.block_size // GRANULE
        for index in range(seq.published, full):
            self.pool.publish(seq.blocks[index], tuple(keys[index * per_block : (index + 1) * per_block]))
        seq.published = full

    def _count_lookup(self, seq: Sequence, hit_tokens: int) -> None:
        seq.cached_tokens = hit_tokens
        if self._hasher is not None:
            self.prefix_queries += seq.prompt_len
            self.prefix_hits += hit_tokens

    def _give_back(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.set_blocks([])
        seq.published = 0

    def _leave(self, queue: list[Sequence], seq: Sequence) -> None:
        index = bisect_left(queue, seq.order, key=_by_order)
        assert queue[index] is seq, f"{seq.request_id} is not where its order says"
        del queue[index]
