"""How the kinds of field translate: one `Codec` for each dataclass, built from its type annotations.

Fields whose value is the same on both sides are copied all at once; each other kind (optional, enum, nested value,
sequence, tokens, pairs, times) has a small `Field` maker here. A new kind is added beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from engine.errors import TandemError
from engine.types import Request, SamplingParams, Token
from tandem.v1 import node_pb2

Arguments = dict[str, Any]


class WireError(TandemError):
    """Bytes, a message or a value that have no meaning on the other side."""


class Codec(NamedTuple):
    """`encode` gives the arguments of the message's constructor, nested ones as dicts."""

    message: type[Message]
    encode: Callable[[Any, float], Arguments]
    decode: Callable[[Any, float], Any]


class Field(NamedTuple):
    """A field that is more than a copy. `put` is not called for None and (): they are absent on the wire."""

    put: Callable[[Arguments, Any, float], None]
    get: Callable[[Any, float], Any]


@cache
def record(cls: type) -> Codec:
    """The codec of a dataclass: plain fields copied all at once, the others each by its `Field`."""
    message: type[Message] = getattr(node_pb2, cls.__name__)
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    plain = [name for name in names if hints[name] in _PLAIN and (cls, name) not in _SPECIAL]
    others = [(name, _field(cls, name, hints[name])) for name in names if name not in plain]
    copy = _copier(plain)

    def encode(value: Any, now: float) -> Arguments:
        arguments = copy(value)
        for name, field in others:
            item = getattr(value, name)
            if item is not None and item != ():
                field.put(arguments, item, now)
        return arguments

    def decode(twin: Any, now: float) -> Any:
        arguments = copy(twin)
        for name, field in others:
            arguments[name] = field.get(twin, now)
        return cls(**arguments)

    return Codec(message, encode, decode)


def _copier(names: list[str]) -> Callable[[Any], Arguments]:
    if len(names) < 2:
        return lambda source: {name: getattr(source, name) for name in names}
    read = attrgetter(*names)
    return lambda source: dict(zip(names, read(source), strict=True))


def _field(cls: type, name: str, hint: Any) -> Field:
    special = _SPECIAL.get((cls, name))
    if special is not None:
        return special
    if get_origin(hint) is tuple:
        return _sequence(name, get_args(hint))
    inner = [kind for kind in get_args(hint) if kind is not NoneType]
    kind, optional = (inner[0], True) if inner else (hint, False)
    if kind in _PLAIN:
        return _optional(name)
    if issubclass(kind, StrEnum):
        return _enum(cls, name, kind, optional)
    return _nested(cls, name, kind, optional)


def _optional(name: str) -> Field:
    def put(arguments: Arguments, item: Any, now: float) -> None:
        arguments[name] = item

    def get(twin: Any, now: float) -> Any:
        return getattr(twin, name) if twin.HasField(name) else None

    return Field(put, get)


def _enum(cls: type, name: str, kind: type[StrEnum], optional: bool) -> Field:
    numbers = _numbers(kind)
    members: dict[int, StrEnum | None] = {number: member for member, number in numbers.items()}
    if optional:
        members[0] = None

    def put(arguments: Arguments, item: Any, now: float) -> None:
        arguments[name] = numbers[item]

    def get(twin: Any, now: float) -> StrEnum | None:
        number = getattr(twin, name)
        try:
            return members[number]
        except KeyError:
            raise WireError(f"{cls.__name__}.{name} is {number}, which names nothing") from None

    return Field(put, get)


def _numbers(kind: type[StrEnum]) -> Mapping[StrEnum, int]:
    """FinishReason.STOP is FINISH_REASON_STOP on the wire, and so on."""
    prefix = "".join("_" + letter if letter.isupper() else letter for letter in kind.__name__).lstrip("_").upper()
    values: Any = getattr(node_pb2, kind.__name__)
    return {member: values.Value(f"{prefix}_{member.name}") for member in kind}


def _nested(cls: type, name: str, kind: type, optional: bool) -> Field:
    codec = record(kind)

    def put(arguments: Arguments, item: Any, now: float) -> None:
        arguments[name] = codec.encode(item, now)

    def get(twin: Any, now: float) -> Any:
        if twin.HasField(name):
            return codec.decode(getattr(twin, name), now)
        if optional:
            return None
        raise WireError(f"{cls.__name__}.{name} is missing")

    return Field(put, get)


def _sequence(name: str, kinds: tuple[Any, ...]) -> Field:
    kind = kinds[0]
    if kind is Token:
        return _tokens(name)
    if kind in _PLAIN:
        return _repeated(name, length=None if kinds[1] is ... else len(kinds))
    if kind == tuple[str, bytes]:
        return _transports(name)
    return _records(name, record(kind))


def _repeated(name: str, *, length: int | None) -> Field:
    def put(arguments: Arguments, item: Any, now: float) -> None:
        arguments[name] = item

    def get(twin: Any, now: float) -> tuple[Any, ...]:
        items = tuple(getattr(twin, name))
        if length is not None and len(items) != length:
            raise WireError(f"{name} has {len(items)} entries instead of {length}")
        return items

    return Field(put, get)


def _records(name: str, codec: Codec) -> Field:
    def put(arguments: Arguments, item: Any, now: float) -> None:
        arguments[name] = [codec.encode(entry, now) for entry in item]

    def get(twin: Any, now: float) -> tuple[Any, ...]:
        return tuple([codec.decode(entry, now) for entry in getattr(twin, name)])

    return Field(put, get)


def _transports(name: str) -> Field:
    def put(arguments: Arguments, item: Any, now: float) -> None:
        arguments[name] = [{"scheme": scheme, "address": address} for scheme, address in item]

    def get(twin: Any, now: float) -> tuple[tuple[str, bytes], ...]:
        return tuple((entry.scheme, entry.address) for entry in getattr(twin, name))

    return Field(put, get)


def _tokens(name: str) -> Field:
    def put(arguments: Arguments, item: Any, now: float) -> None:
        columns: Arguments = {"ids": [token.token_id for token in item]}
        if any(token.logprob is not None or token.top for token in item):
            columns["scores"] = [_scores(token) for token in item]
        arguments[name] = columns

    def get(twin: Any, now: float) -> tuple[Token, ...]:
        if not twin.HasField(name):
            return ()
        columns = getattr(twin, name)
        if not columns.scores:
            return tuple([Token(token_id) for token_id in columns.ids])
        return tuple(_scored(token_id, scores) for token_id, scores in _pairs(name, columns.ids, columns.scores))

    return Field(put, get)


def _scores(token: Token) -> Arguments:
    columns: Arguments = {} if token.logprob is None else {"logprob": token.logprob}
    if token.top:
        columns["top_ids"], columns["top_logprobs"] = zip(*token.top, strict=True)
    return columns


def _scored(token_id: int, scores: Any) -> Token:
    logprob = scores.logprob if scores.HasField("logprob") else None
    return Token(token_id, logprob, _pairs("top", scores.top_ids, scores.top_logprobs))


def _columns(first: str, second: str) -> Field:
    """Pairs as two columns."""

    def put(arguments: Arguments, item: Any, now: float) -> None:
        arguments[first], arguments[second] = zip(*item, strict=True)

    def get(twin: Any, now: float) -> tuple[tuple[Any, Any], ...]:
        return _pairs(first, getattr(twin, first), getattr(twin, second))

    return Field(put, get)


def _pairs(name: str, left: Any, right: Any) -> tuple[tuple[Any, Any], ...]:
    if len(left) != len(right):
        raise WireError(f"{name} has {len(left)} entries but {len(right)} partners")
    return tuple(zip(left, right, strict=True))


def _age(wire_name: str) -> Field:
    def put(arguments: Arguments, item: Any, now: float) -> None:
        arguments[wire_name] = _finite(wire_name, now - item)

    def get(twin: Any, now: float) -> float:
        return now - _finite(wire_name, getattr(twin, wire_name))

    return Field(put, get)


def _time_left(wire_name: str) -> Field:
    def put(arguments: Arguments, item: Any, now: float) -> None:
        arguments[wire_name] = _finite(wire_name, item - now)

    def get(twin: Any, now: float) -> float | None:
        return now + _finite(wire_name, getattr(twin, wire_name)) if twin.HasField(wire_name) else None

    return Field(put, get)


def _finite(name: str, seconds: float) -> float:
    """A deadline of NaN never passes, so it must not enter."""
    if not math.isfinite(seconds):
        raise WireError(f"{name} is {seconds}")
    return seconds


_PLAIN = frozenset({str, int, float, bool, bytes})

_SPECIAL: Mapping[tuple[type, str], Field] = {
    (Request, "arrival_s"): _age("age_s"),
    (Request, "deadline_s"): _time_left("time_left_s"),
    (SamplingParams, "logit_bias"): _columns("logit_bias_ids", "logit_biases"),
}
