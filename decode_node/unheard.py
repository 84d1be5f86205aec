"""News of requests that are moving here, kept back until the gateway asks for them.

A request that moves is told by exactly one worker at any time: by its source, until that one says that it has moved,
and by this one from the gateway's `Follow` on. In between it may decode here already; what there is to tell waits, also
when it has ended meanwhile. When nobody asks in time, the source has taken it back, or died: nobody ever hears of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.messages import Delta


@dataclass(slots=True)
class _Waiting:
    until_s: float | None = None
    deltas: list[Delta] = field(default_factory=list)


class Unheard:
    """By request id. Times are the caller's clock."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, request_id: str) -> None:
        """It may move here: nothing is told of it from now on."""
        self._waiting[request_id] = _Waiting()

    def arrived(self, request_id: str, until_s: float) -> None:
        """It runs here; whoever wants to hear of it asks before `until_s`."""
        self._waiting[request_id].until_s = until_s

    def keep(self, delta: Delta) -> bool:
        """Whether this is news of such a request: then it is kept here."""
        waiting = self._waiting.get(delta.request_id)
        if waiting is not None:
            waiting.deltas.append(delta)
        return waiting is not None

    def follow(self, request_id: str) -> list[Delta] | None:
        """All that was kept; from here on it is told at once. None: there is no such request that runs here."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.until_s is None:
            return None
        return self._waiting.pop(request_id).deltas

    def drop(self, request_id: str) -> None:
        """It does not move here after all."""
        self._waiting.pop(request_id, None)

    def expired(self, now: float) -> Iterator[str]:
        """Requests that run, or ran, here and that nobody has asked for in time."""
        for request_id, waiting in tuple(self._waiting.items()):
            if waiting.until_s is not None and now >= waiting.until_s:
                yield request_id
