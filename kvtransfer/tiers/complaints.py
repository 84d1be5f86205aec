"""Log lines about things that fail again and again: the first at once, then one in a while with how many there were."""

from __future__ import annotations

import logging
from collections.abc import Callable


class Complaints:
    """At most one line per kind in `every_s` seconds."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float], every_s: float = 10.0) -> None:
        self._log = log
        self._clock = clock
        self._every_s = every_s
        self._last: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def say(self, kind: str, message: str) -> None:
        now = self._clock()
        if now - self._last.get(kind, float("-inf")) < self._every_s:
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return
        self._last[kind] = now
        unsaid = self._unsaid.pop(kind, 0)
        self._log.warning("%s%s", message, f" (and {unsaid} more like it before)" if unsaid else "")
