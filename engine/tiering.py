"""The lower tiers as the engine sees them: blocks that leave the pool are offered to a store, prompts get them back.

    out   a full block that nobody holds is copied to the store when blocks run short, a few with each step; one that
          must go before its turn came is copied at that moment, as far as this step's allowance reaches
    back  a prompt about to enter whose next blocks lie in a tier, where loading beats computing (`engine.tier_choice`),
          waits as LOADING; its load holds the blocks it fills and those already found. As they arrive they enter the
          prefix cache; when it ends, whole or not, the prompt waits again, enters, and computes what is missing.

Who owns what: a load its blocks, until it ends; the store its copies. A load ends by its deadline, by a failed block,
by the end of its sequence, and every way gives its blocks back in `_end`. The store never writes into the pool by
itself: bytes are copied here, between steps, into blocks that the load still owns. A failure is a miss.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from engine.blocks import BlockPool
from engine.sequence import Sequence, State
from engine.swap import CopyRate
from engine.tier_choice import Prompt, TierChoice, TierSpeed, choose
from engine.types import StepTimes, TierLoad

SPARE_BLOCKS = 4
"""Blocks written behind with each step, beyond as many as the step computed."""
BURST_BYTES = 32 << 20
"""Most that evictions may copy between two steps, and loads in a step which others decode in."""
LEAST_WAIT_S = 0.05
"""A load has at least this long, whatever computing would take: threads need their turn."""
_PRIORS = {"host": TierSpeed(2e-4, 2e9), "disk": TierSpeed(2e-3, 5e8)}
_NEW = TierSpeed(5e-3, 2e8)
"""Of a tier that was never heard of."""
_HOPE = 0.02
"""A tier found too slow is believed to be this much nearer to its prior each time, so that it gets another try."""

_log = logging.getLogger(__name__)


class BlockBytes(Protocol):
    """The pool's bytes, block by block."""

    def read(self, block: int) -> memoryview:
        """`block_bytes` bytes, valid until the block or this is used again."""
        ...

    def write(self, block: int, data: memoryview) -> None: ...


class PoolBytes:
    """`BlockBytes` of a pool in host memory."""

    def __init__(self, memory: memoryview, block_bytes: int) -> None:
        self._memory = memory
        self._block_bytes = block_bytes

    def read(self, block: int) -> memoryview:
        return self._memory[block * self._block_bytes : (block + 1) * self._block_bytes]

    def write(self, block: int, data: memoryview) -> None:
        self._memory[block * self._block_bytes : (block + 1) * self._block_bytes] = data


class Counters(Protocol):
    """Of one tier; see `engine.types.TierLoad` for the meanings."""

    name: str
    capacity_bytes: int
    used_bytes: int
    stored: int
    hits: int
    misses: int
    evicted: int
    dropped: int
    failed: int
    stored_bytes: int
    loaded_bytes: int
    load_seconds: float


class BlockStore(Protocol):
    """Where blocks go; `kvtransfer.tiers.store.TierStore` is one. No call waits for a disk, none raises OSError."""

    def __contains__(self, key: bytes) -> bool: ...

    def where(self, keys: Iterable[bytes]) -> tuple[str, ...]:
        """The tier of each leading key that can be loaded now."""
        ...

    def put(self, key: bytes, data: memoryview) -> bool:
        """Copy a block in, before returning."""
        ...

    def touch(self, key: bytes) -> None: ...

    def forget(self, keys: Iterable[bytes]) -> None: ...

    def clear(self) -> None: ...

    def open(self, keys: Seq[bytes], deadline_s: float) -> int: ...

    def deliver(self, number: int, write: Callable[[int, memoryview], None], most: int) -> int:
        """Hand over what has arrived, in order; how many blocks."""
        ...

    def ready(self, number: int) -> bool: ...

    def ended(self, number: int) -> bool: ...

    def close(self, number: int) -> None: ...

    def poll(self, now: float) -> None: ...

    def counters(self) -> Seq[Counters]: ...

    def drain_changes(self) -> Mapping[str, tuple[Seq[bytes], Seq[bytes]]]:
        """By tier: keys that it holds since the last call, and does not hold any more."""
        ...

    def check(self) -> None: ...


@dataclass(slots=True)
class _Load:
    """`found` and `fresh` blocks belong to it. The first `published` fresh ones are in the prefix cache."""

    seq: Sequence
    number: int
    found: list[int]
    fresh: list[int]
    keys: list[tuple[bytes, ...]]
    tiers: tuple[str, ...]
    started_s: float
    deadline_s: float
    arrived: int = 0


class Tiering:
    """Between one block pool and one store. `announce`: keys that only a tier holds are told to the router too."""

    def __init__(
        self,
        pool: BlockPool,
        blocks: BlockBytes,
        store: BlockStore,
        *,
        block_size: int,
        block_bytes: int,
        step_tokens: int,
        clock: Callable[[], float],
        mode: str = "auto",
        announce: bool = False,
    ) -> None:
        self.loads_delivered = 0
        """Ended ones that brought a block or more."""
        self.loads_declined = 0
        self.decisions: deque[str] = deque(maxlen=64)
        """The last ones, for those who ask why."""
        self.mode = mode
        self._pool = pool
        self._blocks = blocks
        self._store = store
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._step_tokens = step_tokens
        self._clock = clock
        self._announce = announce
        self._rates: dict[str, CopyRate] = {}
        self._loads: dict[str, _Load] = {}
        self._unwritten: deque[tuple[int, int, bytes]] = deque()
        """Blocks with their generations, the first entered first."""
        self._granules: dict[bytes, tuple[bytes, ...]] = {}
        self._burst = max(1, BURST_BYTES // block_bytes)
        self._evictions = self._arrivals = self._burst
        """Blocks that may still be copied out as they are evicted, and in as they arrive, before the next step."""
        pool.watch(self)

    # -- what the pool tells ---------------------------------------------------------------------------------------

    def published(self, block: int, keys: tuple[bytes, ...]) -> None:
        """A full block can be found from now on."""
        if keys[-1] in self._store:
            self._store.touch(keys[-1])
        else:
            self._unwritten.append((block, self._pool.generation(block), keys[-1]))

    def evicting(self, block: int, keys: tuple[bytes, ...]) -> None:
        """A cached block is about to be somebody else's: the last chance to copy it."""
        if keys[-1] in self._store:
            self._store.touch(keys[-1])
        elif self._evictions > 0:
            self._evictions -= 1
            self._put(block, keys)

    def forgotten(self, keys: tuple[bytes, ...]) -> None:
        """Its content is not to be trusted."""
        self._store.forget(keys[-1:])

    # -- out -------------------------------------------------------------------------------------------------------

    def write_behind(self, tokens: int) -> None:
        """After a step of so many tokens: copy some blocks out, if the pool is about to run short of free ones."""
        most = -(-tokens // self._block_size) + SPARE_BLOCKS
        self._evictions = self._burst
        if 4 * self._pool.free > self._pool.total:
            return
        while self._unwritten and most:
            block, generation, key = self._unwritten.popleft()
            keys = self._pool.keys_of(block)
            if self._pool.generation(block) == generation and keys and keys[-1] == key and key not in self._store:
                self._put(block, keys)
                most -= 1

    # -- back ------------------------------------------------------------------------------------------------------

    def fetches(self, seq: Sequence, keys: Seq[tuple[bytes, ...]], times: StepTimes, now: float) -> bool:
        """Before `seq` enters, for whose full blocks these are the granules' keys: whether it shall wait for a load,
        its own or another's. Each stay in the queue is worth one load."""
        if seq.loads > seq.preemptions or not keys:
            return False
        found = self._pool.match(granules[-1] for granules in keys)
        missing = keys[len(found) :]
        if not missing:
            return False
        if any(missing[0] in load.keys[load.arrived :] for load in self._loads.values()):
            return True
        tiers = self._store.where(granules[-1] for granules in missing)
        if not tiers:
            return False
        choice = self._chosen(seq, len(found), tiers, times)
        if choice.blocks and self._begin(seq, found, missing, tiers, choice, now):
            self._take_in(self._loads[seq.name], now)
        return seq.state is State.LOADING

    def pump(self, now: float, *, decoding: bool) -> None:
        """Take in what arrived and end what is over. `decoding`: others wait for this step."""
        self._store.poll(now)
        self._arrivals = self._burst if decoding else self._pool.total
        for load in tuple(self._loads.values()):
            self._take_in(load, now)
        self.tell()

    def ready(self, now: float) -> bool:
        """Whether `pump` has something to do."""
        if self._loads:
            self._store.poll(now)
        return any(self._store.ready(load.number) or now >= load.deadline_s for load in self._loads.values())

    def next_deadline(self) -> float | None:
        return min((load.deadline_s for load in self._loads.values()), default=None)

    def cancel(self, seq: Sequence) -> None:
        """The sequence ends: so does its load."""
        self._end(self._loads[seq.name], cancelled=True)

    def clear(self) -> None:
        """Forget every prefix in every tier; who waits for a load computes."""
        for load in tuple(self._loads.values()):
            self._end(load, cancelled=True)
        self._store.clear()
        self._unwritten.clear()
        self._granules.clear()
        self._store.drain_changes()

    def tell(self) -> None:
        """Tell the pool's listeners which keys which tier holds."""
        changes = self._store.drain_changes()
        if not self._announce:
            return
        for tier, (stored, removed) in changes.items():
            self._pool.hold_elsewhere(tier, self._all_granules(stored))
            self._pool.drop_elsewhere(tier, self._all_granules(removed))
        for key in (key for _, removed in changes.values() for key in removed):
            if key not in self._store:
                self._granules.pop(key, None)

    # -- what others ask -------------------------------------------------------------------------------------------

    def load(self) -> tuple[TierLoad, ...]:
        """The store's counters."""
        return tuple([TierLoad(**{name: getattr(one, name) for name in _FIELDS}) for one in self._store.counters()])

    def owners(self) -> Counter[int]:
        """The blocks that loads hold."""
        return Counter(block for load in self._loads.values() for block in (*load.found, *load.fresh))

    def check(self) -> None:
        """Loads and sequences agree. Raises AssertionError."""
        for name, load in self._loads.items():
            assert load.seq.state is State.LOADING, f"{name} has a load and is {load.seq.state}"
            assert not load.seq.blocks, f"{name} holds blocks while it loads"
        self._store.check()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _put(self, block: int, keys: tuple[bytes, ...]) -> None:
        if self._store.put(keys[-1], self._blocks.read(block)) and self._announce and len(keys) > 1:
            self._granules[keys[-1]] = keys

    def _chosen(self, seq: Sequence, found: int, tiers: tuple[str, ...], times: StepTimes) -> TierChoice:
        size = self._block_size
        prompt = Prompt(len(seq.tokens), found * size, size, self._block_bytes, self._step_tokens)
        choice = choose(prompt, tiers, {tier: self._speed(tier) for tier in tiers}, times, self.mode)
        if not choice.blocks:
            self.loads_declined += 1
            seq.loads = seq.preemptions + 1
            for tier in set(tiers):
                self._rate(tier).relax(_HOPE)
        line = choice.told(seq.name, tiers)
        self.decisions.append(line)
        _log.debug("%s", line)
        return choice

    def _begin(
        self,
        seq: Sequence,
        found: list[int],
        missing: Seq[tuple[bytes, ...]],
        tiers: tuple[str, ...],
        choice: TierChoice,
        now: float,
    ) -> bool:
        self._pool.retain(found)
        # Opened first: what the store is asked for stays there while blocks are evicted to make room for it.
        patience_s = max(LEAST_WAIT_S, choice.load_s + choice.compute_s)
        keys = list(missing[: choice.blocks])
        number = self._store.open([granules[-1] for granules in keys], now + patience_s)
        fresh = self._pool.allocate(len(keys))
        if fresh is None:
            self._store.close(number)
            self._pool.release(found)
            return False
        seq.state = State.LOADING
        seq.loads = seq.preemptions + 1
        started_s = self._clock()
        load = _Load(seq, number, found, fresh, keys, tiers[: len(keys)], started_s, now + patience_s)
        self._loads[seq.name] = load
        return True

    def _take_in(self, load: _Load, now: float) -> None:
        """What has arrived for a load enters the prefix cache; a load that is over ends."""

        def write(index: int, data: memoryview) -> None:
            self._blocks.write(load.fresh[index], data)

        arrived = self._store.deliver(load.number, write, self._arrivals)
        self._arrivals -= arrived
        for index in range(load.arrived, load.arrived + arrived):
            self._pool.publish(load.fresh[index], load.keys[index])
        load.arrived += arrived
        if self._store.ended(load.number) or now >= load.deadline_s:
            self._end(load)

    def _end(self, load: _Load, *, cancelled: bool = False) -> None:
        del self._loads[load.seq.name]
        load.seq.state = State.WAITING
        self.loads_delivered += load.arrived > 0
        self._store.close(load.number)
        self._pool.release([*load.found, *load.fresh])
        if not cancelled:
            self._learn(load)

    def _learn(self, load: _Load) -> None:
        """The time that the load took, put down to its slowest tier and what came from there."""
        tier = max(load.tiers, key=lambda tier: 1 / self._speed(tier).bytes_per_s)
        took_s = self._clock() - load.started_s - self._speed(tier).setup_s
        blocks = max(1, load.tiers[: load.arrived].count(tier))
        self._rate(tier).observe(blocks * self._block_bytes, max(took_s, 1e-6))

    def _rate(self, tier: str) -> CopyRate:
        if tier not in self._rates:
            self._rates[tier] = CopyRate(_PRIORS.get(tier, _NEW).bytes_per_s)
        return self._rates[tier]

    def _speed(self, tier: str) -> TierSpeed:
        return replace(_PRIORS.get(tier, _NEW), bytes_per_s=self._rate(tier).bytes_per_s)

    def _all_granules(self, keys: Iterable[bytes]) -> Iterator[bytes]:
        for key in keys:
            yield from self._granules.get(key, (key,))


_FIELDS = tuple(TierLoad.__dataclass_fields__)
