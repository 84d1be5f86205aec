"""Faults on purpose in the lower tiers: a test asks for the Nth put, read or write to fail, wait, come out wrong, or
kill the thread that does it. Empty in production.
"""

from __future__ import annotations

import enum
import errno
import os
import threading
from dataclasses import dataclass, field


class TierFault(enum.Enum):
    """What goes wrong."""

    FAIL = "fail"
    DELAY = "delay"
    CORRUPT = "corrupt"
    DIE = "die"
    """The I/O thread ends without a word."""


class ThreadKilled(BaseException):
    """Ends the I/O thread, as `TierFault.DIE` wants it."""


@dataclass(frozen=True, slots=True)
class TierRule:
    """`fault` hits operations number `first` … `last` of their kind, counted from 1: "put" into host memory, "read"
    and "write" of the disk."""

    op: str
    fault: TierFault
    first: int
    last: int
    delay_s: float
    code: int


@dataclass(slots=True)
class TierFaults:
    """The faults a test wants. Called from the owner's thread and from the I/O thread."""

    rules: list[TierRule] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=lambda: {"put": 0, "read": 0, "write": 0})
    _cleared: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        op: str,
        fault: TierFault,
        nth: int = 1,
        *,
        count: int = 1,
        delay_s: float = 60.0,
        code: int = errno.EIO,
    ) -> None:
        """From now on, the `nth` `op` and `count - 1` after it. `delay_s` ends early with `clear`."""
        with self._lock:
            seen = self.seen[op]
            self._cleared.clear()
            self.rules.append(TierRule(op, fault, seen + nth, seen + nth + count - 1, delay_s, code))

    def clear(self) -> None:
        """No more faults; delays end now."""
        with self._lock:
            self.rules.clear()
            self._cleared.set()

    def pass_through(self, op: str) -> bool:
        """Count an operation and let it suffer; True when its bytes shall come out wrong. Raises OSError or
        ThreadKilled as a rule says."""
        with self._lock:
            self.seen[op] += 1
            number = self.seen[op]
            rule = next((rule for rule in self.rules if rule.op == op and rule.first <= number <= rule.last), None)
        if rule is None:
            return False
        if rule.fault is TierFault.DELAY:
            self._cleared.wait(rule.delay_s)
        elif rule.fault is TierFault.FAIL:
            raise OSError(rule.code, os.strerror(rule.code))
        elif rule.fault is TierFault.DIE:
            raise ThreadKilled
        return rule.fault is TierFault.CORRUPT
