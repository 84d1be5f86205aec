"""How the values of an SLA file are read: a plain YAML value in, a checked one out, or `Unreadable` with the remedy.

Durations and sizes need their unit, lists their order; nothing is guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any


class Unreadable(Exception):
    """A value that its reader refuses; the message names what it must be."""


Reader = Callable[[Any], Any]
_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SIZE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE_UNITS |= {"TB": 10**12, "TiB": 1 << 40}
_MOST_BYTES = 1 << 50
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]+)\s*")


def duration(value: Any) -> float:
    """`200ms`, `0.2s`, `5m` → seconds, above zero and finite."""
    if _is_number(value):
        raise Unreadable(f"a duration with its unit: {value}ms or {value}s?")
    seconds = _quantity(value, _DURATION_UNITS, "a duration above zero such as 200ms, 0.2s or 5m")
    if not 0 < seconds < math.inf:
        raise Unreadable("a duration above zero such as 200ms, 0.2s or 5m")
    return seconds


def size(value: Any) -> int:
    """`512MiB`, `1GiB`, `1GB` → bytes, above zero."""
    num_bytes = size_or_none(value)
    if num_bytes < 1:
        raise Unreadable("a size above zero such as 512MiB or 1GiB")
    return num_bytes


def size_or_none(value: Any) -> int:
    """As `size`; `0B` is none."""
    if _is_number(value):
        raise Unreadable(f"a size with its unit: {value}MiB or {value}B?")
    num_bytes = int(_quantity(value, _SIZE_UNITS, "a size above zero such as 512MiB or 1GiB"))
    if num_bytes > _MOST_BYTES:
        raise Unreadable(f"a size of at most {_MOST_BYTES >> 40}TiB")
    return num_bytes


def integer(least: int, most: int | None = None) -> Reader:
    """A whole number within bounds."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(value: Any) -> int:
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or value < least
            or (most is not None and value > most)
        ):
            raise Unreadable(f"a whole number {bounds}")
        return value

    return read


def number(least: float) -> Reader:
    def read(value: Any) -> float:
        if not _is_number(value) or not least <= value < math.inf:
            raise Unreadable(f"a number of at least {least:g}")
        return float(value)

    return read


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unreadable("true or false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Unreadable("a text that is not empty (in quotes if it looks like a number)")
    return value


def folder(value: Any) -> str:
    """A relative path, or one with a `~`, would be another place for each worker, and gone with its scratch folder."""
    if not isinstance(value, str) or not value.startswith("/"):
        raise Unreadable("an absolute path, such as /var/lib/tandem")
    return value


def one_of(allowed: tuple[str, ...], aliases: Mapping[str, str] | None = None) -> Reader:
    def read(value: Any) -> str:
        name = (aliases or {}).get(value, value) if isinstance(value, str) else value
        if name not in allowed:
            raise Unreadable("one of " + ", ".join(allowed))
        return str(name)

    return read


def some_of(allowed: tuple[str, ...]) -> Reader:
    """A list without repetition, in order of preference."""
    remedy = "a list of at least one of " + ", ".join(allowed) + ", each once"

    def read(value: Any) -> tuple[str, ...]:
        items = value if isinstance(value, tuple) else ()
        names = tuple(item.value for item in items)
        if not names or any(name not in allowed for name in names) or len(set(names)) != len(names):
            raise Unreadable(remedy)
        return names

    return read


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _quantity(value: Any, units: Mapping[str, float], remedy: str) -> float:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise Unreadable(remedy)
    if match[2] not in units:
        raise Unreadable(f"{remedy}; known units: {', '.join(units)}")
    return float(match[1]) * units[match[2]]
