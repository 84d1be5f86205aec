"""How often a sequence has used each token, kept so that one more token costs O(1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of prompt and output, and how often each was generated."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._ids: NDArray[np.int64] = np.unique(np.asarray(prompt, dtype=np.int64))
        self._counts: NDArray[np.float32] = np.zeros(len(self._ids), dtype=np.float32)
        self._size = len(self._ids)
        self._slot_of: dict[int, int] = {int(token): slot for slot, token in enumerate(self._ids)}

    def copy(self) -> TokenCounts:
        """The same counts, going their own way from here."""
        twin = TokenCounts(())
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        twin._size, twin._slot_of = self._size, dict(self._slot_of)
        return twin

    @property
    def ids(self) -> NDArray[np.int64]:
        """int64 (distinct,), a view: tokens seen in prompt or output."""
        return self._ids[: self._size]

    @property
    def generated(self) -> NDArray[np.float32]:
        """float32 (distinct,), a view: how often each of `ids` was generated."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """One more generated token."""
        slot = self._slot_of.get(token)
        if slot is None:
            slot = self._append(token)
        self._counts[slot] += 1

    def _append(self, token: int) -> int:
        slot = self._size
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(slot + 16, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(slot + 16, dtype=np.float32)])
        self._ids[slot] = token
        self._slot_of[token] = slot
        self._size += 1
        return slot
