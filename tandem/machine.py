"""What the rooms' state machines share: one table of handlers by stage and event, and a history that tells a bug.

A machine is a frozen value with `stage` and `history`; a handler takes it, an event and the time, and returns its next
value and effects, for somebody else to carry out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from engine.errors import TandemError

MOST_WORDS = 160
"""Longer events are told by their name alone."""


class IllegalTransition(TandemError):
    """An event that its stage does not know: a bug, told with the whole story."""


M = TypeVar("M", bound=Any)
E = TypeVar("E")


def advance(
    machine: M,
    event: object,
    now: float,
    table: Mapping[Any, Mapping[type, Callable[[M, Any, float], tuple[M, tuple[E, ...]]]]],
    *,
    name: str,
    since_s: float,
    usual: tuple[type, ...],
) -> tuple[M, tuple[E, ...]]:
    """The next value and what to do about it. Events of the types `usual` stay out of the history when nothing is to be
    done. Raises `IllegalTransition` for an event that the stage does not know.
    """
    handler = table[machine.stage].get(type(event))
    if handler is None:
        story = "\n  ".join((*machine.history, _line(machine, event, now - since_s)))
        raise IllegalTransition(f"{name}: illegal last event in\n  {story}")
    after, effects = handler(machine, event, now)
    if isinstance(event, usual) and not effects:
        return after, effects
    history = (*machine.history, _line(machine, event, now - since_s))
    return replace(after, history=history), effects


def _line(machine: Any, event: object, age_s: float) -> str:
    words = repr(event)
    return f"{age_s:+.3f}s {machine.stage}: {words if len(words) < MOST_WORDS else type(event).__name__}"
