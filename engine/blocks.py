"""The block pool: who holds which KV block. Every operation is O(1) per block.

A block is free (holds nothing), live (counted references: a sequence, a lease, a transfer in flight) or cached (no
reference, but its content is known under a prefix key and may be taken up again). Free blocks are handed out first,
then the cached one that was let go longest ago; at that moment its key leaves the index and its generation rises, so
whoever remembers (block, generation) can see that it is another block now.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.prefix_cache import KvChanges, PrefixCache


class Watcher(Protocol):
    """Who is told of blocks that can be found, for as long as their bytes are there. `keys` are a block's granules'."""

    def published(self, block: int, keys: tuple[bytes, ...]) -> None: ...

    def evicting(self, block: int, keys: tuple[bytes, ...]) -> None:
        """The block still holds its bytes until this returns."""
        ...

    def forgotten(self, keys: tuple[bytes, ...]) -> None:
        """The block is not to be found any more because its content is wrong."""
        ...


class BlockPool:
    """Block ids 0 … `total` - 1; their bytes live elsewhere."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._references = [0] * total
        self._generations = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._cache = PrefixCache()
        self._watcher: Watcher | None = None

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` from now on."""
        self._watcher = watcher

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks without a reference whose content is still known."""
        return len(self._idle)

    @property
    def live(self) -> int:
        return self.total - len(self._free) - len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self._free) + len(self._idle)

    def generation(self, block: int) -> int:
        return self._generations[block]

    def is_live(self, block: int) -> bool:
        return self._references[block] > 0

    def is_shared(self, block: int) -> bool:
        """Whether more than one holds it."""
        return self._references[block] > 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, all or none."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference on each; a cached block becomes live again."""
        for block in blocks:
            if not self._references[block]:
                if block not in self._idle:
                    raise ValueError(f"block {block} is free: there is nothing to retain")
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each. The last of `blocks` is let go first, so that leaves are evicted before roots."""
        for block in reversed(blocks):
            if not self._references[block]:
                raise ValueError(f"block {block} is released once too often")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._cache:
                self._idle[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, keys: tuple[bytes, ...]) -> bool:
        """Make a live, full block findable under its granules' keys; False when that prefix is known already."""
        if not self._references[block]:
            raise ValueError(f"block {block} is not live: its content is nobody's")
        entered = self._cache.put(block, keys)
        if entered and self._watcher is not None:
            self._watcher.published(block, keys)
        return entered

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        """The keys under which a block was published; nothing when it is not to be found."""
        return self._cache.keys_of(block)

    def hold_elsewhere(self, tier: str, keys: Iterable[bytes]) -> None:
        """A lower tier holds these keys: they are told as its own."""
        self._cache.hold_elsewhere(tier, keys)

    def drop_elsewhere(self, tier: str, keys: Iterable[bytes]) -> None:
        self._cache.drop_elsewhere(tier, keys)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the leading keys (one per block) that are known, without a reference taken."""
        found = []
        for key in keys:
            block = self._cache.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def forget(self, blocks: Iterable[int]) -> None:
        """Make live blocks unfindable; their holders keep them."""
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"block {block} is not live: it would be neither free nor cached")
            keys = self._cache.keys_of(block)
            self._cache.drop(block)
            if keys and self._watcher is not None:
                self._watcher.forgotten(keys)

    def drain_changes(self) -> KvChanges:
        return self._cache.drain()

    def drain_elsewhere(self) -> dict[str, KvChanges]:
        """The same of each lower tier, after `drain_changes`, whose `cleared` is for all of them."""
        return self._cache.drain_elsewhere()

    def retell_changes(self) -> int:
        """The next `drain_changes` tells all that is cached; the number of keys."""
        return self._cache.retell()

    def reset_cache(self) -> int:
        """Forget all prefixes; live blocks stay with their holders. The number of blocks forgotten."""
        self._free.extend(self._idle)
        self._idle.clear()
        return self._cache.clear()

    def check(self, owners: Counter[int]) -> None:
        """`owners` counts, per block, the references its holders believe to have. Raises AssertionError otherwise."""
        held = Counter({block: count for block, count in enumerate(self._references) if count})
        assert held == +owners, f"references {dict(held)} are not what the owners hold: {dict(owners)}"
        assert len(held) == self.live, f"{len(held)} referenced blocks, {self.live} live ones"
        apart = sorted([*self._free, *self._idle, *held])
        assert apart == list(range(self.total)), f"free, cached and live do not make up the pool: {apart}"
        assert not any(block in self._cache for block in self._free), "a free block is still in the prefix cache"
        assert all(block in self._cache for block in self._idle), "a cached block is not in the prefix cache"
        self._cache.check()

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            if self._watcher is not None:
                self._watcher.evicting(block, self._cache.keys_of(block))
        self._cache.drop(block)
        self._generations[block] += 1
        self._references[block] = 1
        return block
