"""Whether to look again and again for what comes next, or to sleep (or to work on) until it wakes somebody.

Waking a thread costs more than moving a small block, and Linux may keep two processes that only ever wake each other on
one core. So both ends of a small push look for a moment: the source's owner for its end, the destination's I/O thread
for the next one. They look behind whoever else wants the core, and less often where it was in vain.
"""

from __future__ import annotations

LINGER_S, LINGER_BYTES = 0.0005, 2**20
"""For how long, after a push of so few bytes at most."""
MAX_IN_VAIN = 6
"""Times in vain in a row that still double how many are spared."""


class Lingering:
    """Whether it pays: after each time in vain, twice as many are spared."""

    def __init__(self) -> None:
        self._in_vain = 0
        self._to_spare = 0

    def spared(self) -> bool:
        """Whether this time is one of them; counted."""
        self._to_spare -= 1
        return self._to_spare >= 0

    def ended(self, *, well: bool) -> None:
        """What came of a time that was not spared."""
        self._in_vain = 0 if well else min(self._in_vain + 1, MAX_IN_VAIN)
        self._to_spare = 2**self._in_vain - 1
