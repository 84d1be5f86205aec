"""Says in one log line when the context allowed is far above the lengths that come.

KV is taken block by block as sequences grow, so a large `max_model_len` reserves no memory; but whoever sizes a pool by
it buys too much.
"""

from __future__ import annotations

SAY_AFTER = 100
"""Requests seen before the line is written."""
FAR = 4
"""The context is far above the lengths when it is this many times the longest."""


class LengthWatch:
    """Watches how long sequences became."""

    def __init__(self, max_model_len: int) -> None:
        self.longest = 0
        self._max_model_len = max_model_len
        self._seen = 0

    def ended(self, length: int, live_blocks: int, total_blocks: int) -> str | None:
        """A sequence of `length` tokens ended. The line to log, once, when there is something to say."""
        self._seen += 1
        self.longest = max(self.longest, length)
        if self._seen != SAY_AFTER or self._max_model_len < FAR * self.longest:
            return None
        return (
            f"max_model_len is {self._max_model_len}, the longest of {self._seen} sequences had {self.longest} tokens;"
            f" KV is taken as they grow: {live_blocks} of {total_blocks} blocks are in use now"
        )
