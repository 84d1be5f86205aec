"""Requests that are moving here, and what was told of them before their gateway is known to listen.

A request that moves is told by exactly one worker at any time: by its source, until that one says that it has moved,
and by this one from then on. In between it may decode here already. What there is to tell is sent under the number of
the move, so that the gateway can hold it back until the source's word; and it is kept, for the gateway may not listen
yet. When it knows of the move it asks (`Follow`), and all that was kept is told again. When it does not ask in time,
the source has taken the request back, or died: then it is dropped here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.messages import Delta


@dataclass(slots=True)
class _Unheard:
    until_s: float | None = None
    deltas: list[Delta] = field(default_factory=list)


class Unheard:
    """By request id. Times are the caller's clock."""

    def __init__(self) -> None:
        self._unheard: dict[str, _Unheard] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unheard

    def __len__(self) -> int:
        return len(self._unheard)

    def begin(self, request_id: str) -> None:
        """It may move here."""
        self._unheard[request_id] = _Unheard()

    def arrived(self, request_id: str, until_s: float) -> None:
        """It runs here; whoever wants to hear of it asks before `until_s`."""
        self._unheard[request_id].until_s = until_s

    def keep(self, delta: Delta) -> None:
        """This is told; if it is of such a request, it is kept as well."""
        unheard = self._unheard.get(delta.request_id)
        if unheard is not None:
            unheard.deltas.append(delta)

    def follow(self, request_id: str) -> list[Delta] | None:
        """All that was kept, which is over now. None: there is no such request that runs here."""
        unheard = self._unheard.get(request_id)
        if unheard is None or unheard.until_s is None:
            return None
        return self._unheard.pop(request_id).deltas

    def drop(self, request_id: str) -> None:
        """It does not move here after all."""
        self._unheard.pop(request_id, None)

    def expired(self, now: float) -> Iterator[str]:
        """Requests that run, or ran, here and that nobody has asked for in time."""
        for request_id, unheard in tuple(self._unheard.items()):
            if unheard.until_s is not None and now >= unheard.until_s:
                yield request_id
