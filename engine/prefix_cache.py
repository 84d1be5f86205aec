"""Which full block holds which prefix, and what changed since the router was last told.

A block is known by the key of its last granule; the keys of all its granules are announced (with 16-token blocks there
is one), so that a router which counts leading granules needs no block size. Two blocks may share leading granules: a
key is announced stored with its first holder and removed with its last.

Changes are kept as their net effect. A key that came and went between two drains is never mentioned, so `stored` and
`removed` never share a key and may be applied in any order after `cleared`.
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


class PrefixCache:
    """The index from prefix key to block. Knows nothing of references: `BlockPool` says when a block is reassigned."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._keys_of: dict[int, tuple[bytes, ...]] = {}
        self._holders: Counter[bytes] = Counter()
        self._elsewhere: set[bytes] = set()
        """Keys that a lower tier holds; each counts as one more holder."""
        self._changes: dict[bytes, bool] = {}
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
            self._hold(key)
        return True

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        """The granules' keys of a block; nothing when it is unknown."""
        return self._keys_of.get(block, ())

    def hold_elsewhere(self, keys: Iterable[bytes]) -> None:
        """These keys lie in a lower tier: told as stored until `drop_elsewhere`, whatever becomes of the blocks."""
        for key in keys:
            if key not in self._elsewhere:
                self._elsewhere.add(key)
                self._hold(key)

    def drop_elsewhere(self, keys: Iterable[bytes]) -> None:
        """No tier holds these any more. Unknown ones are ignored."""
        for key in keys:
            if key in self._elsewhere:
                self._elsewhere.discard(key)
                self._let_go(key)

    def drop(self, block: int) -> None:
        """Forget a block that is about to hold something else. Unknown blocks are ignored."""
        keys = self._keys_of.pop(block, None)
        if keys is None:
            return
        del self._block_of[keys[-1]]
        for key in keys:
            self._let_go(key)

    def clear(self) -> int:
        """Forget everything; the number of blocks forgotten."""
        count = len(self._keys_of)
        self._block_of.clear()
        self._keys_of.clear()
        self._holders.clear()
        self._elsewhere.clear()
        self._changes.clear()
        self._cleared = True
        return count

    def retell(self) -> int:
        """The next drain tells everything from the start, for a listener that missed some; the number of keys."""
        self._changes = dict.fromkeys(self._holders, True)
        self._cleared = True
        return len(self._changes)

    def drain(self) -> KvChanges:
        """What changed since the last call."""
        stored = tuple(key for key, is_stored in self._changes.items() if is_stored)
        removed = tuple(key for key, is_stored in self._changes.items() if not is_stored)
        changes = KvChanges(stored, removed, self._cleared)
        self._changes.clear()
        self._cleared = False
        return changes

    def check(self) -> None:
        """Both directions of the index agree, and every key counts its holders."""
        held = Counter(key for keys in (*self._keys_of.values(), self._elsewhere) for key in keys)
        assert held == self._holders, "holders of prefix keys are miscounted"
        assert self._block_of == {keys[-1]: block for block, keys in self._keys_of.items()}, "index is not one to one"

    def _hold(self, key: bytes) -> None:
        self._holders[key] += 1
        if self._holders[key] == 1:
            self._note(key, stored=True)

    def _let_go(self, key: bytes) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self._note(key, stored=False)

    def _note(self, key: bytes, *, stored: bool) -> None:
        # The opposite change was not told yet: together they are no news.
        if self._changes.get(key) is (not stored):
            del self._changes[key]
        else:
            self._changes[key] = stored
