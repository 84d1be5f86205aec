"""Which full block holds which prefix, and what changed since the router was last told.

A block is known by the key of its last granule; the keys of all its granules are announced (with 16-token blocks there
is one), so that a router which counts leading granules needs no block size. Two blocks may share leading granules: a
key is announced stored with its first holder and removed with its last.

What lower tiers hold is told beside it, tier by tier. Changes are kept as their net effect. A key that came and went
between two drains is never mentioned, so `stored` and `removed` never share a key and may be applied in any order
after `cleared`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class KvChanges(NamedTuple):
    """Net changes since the last drain; `cleared` comes before the other two."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    cleared: bool


class _Told:
    """What one tier holds, counted by holders, and the net change since its last drain."""

    def __init__(self) -> None:
        self.holders: Counter[bytes] = Counter()
        self._changes: dict[bytes, bool] = {}

    def hold(self, key: bytes) -> None:
        self.holders[key] += 1
        if self.holders[key] == 1:
            self._note(key, stored=True)

    def let_go(self, key: bytes) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key]
            self._note(key, stored=False)

    def retell(self) -> int:
        self._changes = dict.fromkeys(self.holders, True)
        return len(self._changes)

    def drain(self, cleared: bool = False) -> KvChanges:
        stored = tuple(key for key, is_stored in self._changes.items() if is_stored)
        removed = tuple(key for key, is_stored in self._changes.items() if not is_stored)
        self._changes.clear()
        return KvChanges(stored, removed, cleared)

    def _note(self, key: bytes, *, stored: bool) -> None:
        # The opposite change was not told yet: together they are no news.
        if self._changes.get(key) is (not stored):
            del self._changes[key]
        else:
            self._changes[key] = stored


class PrefixCache:
    """The index from prefix key to block. Knows nothing of references: `BlockPool` says when a block is reassigned."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._keys_of: dict[int, tuple[bytes, ...]] = {}
        self._told = _Told()
        self._elsewhere: dict[str, _Told] = {}
        """What lower tiers hold, by tier; each key once."""
        self._cleared = False

    def __len__(self) -> int:
        return len(self._keys_of)

    def __contains__(self, block: int) -> bool:
        return block in self._keys_of

    def find(self, key: bytes) -> int | None:
        """The block whose last granule has this key."""
        return self._block_of.get(key)

    def put(self, block: int, keys: tuple[bytes, ...]) -> bool:
        """Enter a full block under its granules' keys; False when the same prefix is known in another block."""
        if keys[-1] in self._block_of or block in self._keys_of:
            return False
        self._block_of[keys[-1]] = block
        self._keys_of[block] = keys
        for key in keys:
            self._told.hold(key)
        return True

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        """The granules' keys of a block; nothing when it is unknown."""
        return self._keys_of.get(block, ())

    def hold_elsewhere(self, tier: str, keys: Iterable[bytes]) -> None:
        """These keys lie in a lower tier, until `drop_elsewhere`. Known ones are ignored."""
        told = self._elsewhere.setdefault(tier, _Told())
        for key in keys:
            if key not in told.holders:
                told.hold(key)

    def drop_elsewhere(self, tier: str, keys: Iterable[bytes]) -> None:
        """That tier holds these no more. Unknown ones are ignored."""
        told = self._elsewhere.setdefault(tier, _Told())
        for key in keys:
            if key in told.holders:
                told.let_go(key)

    def drop(self, block: int) -> None:
        """Forget a block that is about to hold something else. Unknown blocks are ignored."""
        keys = self._keys_of.pop(block, None)
        if keys is None:
            return
        del self._block_of[keys[-1]]
        for key in keys:
            self._told.let_go(key)

    def clear(self) -> int:
        """Forget everything; the number of blocks forgotten."""
        count = len(self._keys_of)
        self._block_of.clear()
        self._keys_of.clear()
        self._told = _Told()
        self._elsewhere.clear()
        self._cleared = True
        return count

    def retell(self) -> int:
        """The next drains tell everything from the start, for a listener that missed some; the number of keys."""
        self._cleared = True
        return sum(told.retell() for told in (self._told, *self._elsewhere.values()))

    def drain(self) -> KvChanges:
        """What changed in the pool since the last call; `cleared` is for the lower tiers too."""
        changes = self._told.drain(self._cleared)
        self._cleared = False
        return changes

    def drain_elsewhere(self) -> dict[str, KvChanges]:
        """What changed in each lower tier since the last call."""
        return {tier: told.drain() for tier, told in self._elsewhere.items()}

    def check(self) -> None:
        """Both directions of the index agree, and every key counts its holders."""
        held = Counter(key for keys in self._keys_of.values() for key in keys)
        assert held == self._told.holders, "holders of prefix keys are miscounted"
        assert self._block_of == {keys[-1]: block for block, keys in self._keys_of.items()}, "index is not one to one"
