"""The one translator between the values of `tandem.messages` and their protobuf twins in `proto/tandem/v1/node.proto`.

A value and its twin have the same name and the same fields, so the codecs are built at import from the values' type
annotations (`tandem.codecs`). What differs is listed there: clocks never travel (`Request.deadline_s` is sent as the
time that is left, `arrival_s` as its age, both against the `now` of whoever translates), tokens and pairs travel as
columns, and `None` is an absent field.

What cannot be translated, in either direction, raises `WireError`; nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from tandem import messages as m
from tandem.codecs import Arguments, Codec, WireError, record
from tandem.v1 import node_pb2

__all__ = [
    "WireError",
    "decode_envelope",
    "encode_envelope",
    "from_wire",
    "parse",
    "reply_to_wire",
    "to_wire",
]

M = TypeVar("M", bound=Message)

# -- the interface ------------------------------------------------------------------------------------------------


def to_wire(value: object, *, now: float) -> Message:
    """The protobuf twin of any value of `tandem.messages`. `now`: this process's monotonic clock, seconds."""
    codec = _codec(type(value))
    return _build(codec.message, codec.encode(value, now))


def from_wire(message: Message, *, now: float) -> Any:
    """The value of a twin, or what a reply holds. The times in it are on this process's monotonic clock."""
    name = message.DESCRIPTOR.name
    if name in _SLOTS:
        return _held(message, now)
    codec = _BY_MESSAGE.get(name)
    if codec is None:
        raise WireError(f"{name} has no value")
    return codec.decode(message, now)


def reply_to_wire(question: m.Question, answer: m.Answer, *, now: float) -> Message:
    """The typed reply to a question's rpc, for example `ExpectReply` to `Expect`; `from_wire` opens it again."""
    reply = _REPLIES[type(question).__name__]
    return _build(reply, {_slot(reply, answer): _codec(type(answer)).encode(answer, now)})


def parse(message: type[M], data: bytes) -> M:
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise WireError(f"these {len(data)} bytes are no {message.DESCRIPTOR.name}") from error


def encode_envelope(ask_id: int, value: object, now: float) -> bytes:
    """One message between a worker's control process and its rank. `Forward` and `FrameFor` set where it goes on."""
    arguments: Arguments = {"ask_id": ask_id}
    if isinstance(value, m.Forward):
        arguments["to"] = _codec(m.WorkerRef).encode(value.to, now)
        value = value.question
    elif isinstance(value, m.FrameFor):
        arguments["gateway_id"] = value.gateway_id
        value = value.frame
    arguments[_slot(node_pb2.Envelope, value)] = _codec(type(value)).encode(value, now)
    return _build(node_pb2.Envelope, arguments).SerializeToString()


def decode_envelope(data: bytes, now: float) -> tuple[int, Any]:
    """(ask_id, value), as it was given to `encode_envelope`."""
    envelope = parse(node_pb2.Envelope, data)
    return envelope.ask_id, _directed(envelope, _held(envelope, now), now)


def _directed(envelope: node_pb2.Envelope, value: Any, now: float) -> Any:
    if envelope.HasField("to"):
        if not isinstance(value, m.Question):
            raise WireError(f"{type(value).__name__} is no question and cannot be forwarded")
        return m.Forward(_codec(m.WorkerRef).decode(envelope.to, now), value)
    if envelope.HasField("gateway_id"):
        if not isinstance(value, m.Frame):
            raise WireError(f"{type(value).__name__} is no frame and goes to no gateway")
        return m.FrameFor(envelope.gateway_id, value)
    return value


# -- tables, built at import ---------------------------------------------------------------------------------------

_CODECS: Mapping[type, Codec] = {
    cls: record(cls)
    for cls in vars(m).values()
    if is_dataclass(cls) and isinstance(cls, type) and cls.__name__ in node_pb2.DESCRIPTOR.message_types_by_name
}
_BY_MESSAGE: Mapping[str, Codec] = {cls.__name__: codec for cls, codec in _CODECS.items()}


def _slots(message: type[Message]) -> dict[str, str]:
    """The alternatives of an envelope or a reply: message name → field name."""
    descriptor: Any = message.DESCRIPTOR
    return {field.message_type.name: field.name for field in descriptor.oneofs_by_name["value"].fields}


def _replies() -> dict[str, type[Message]]:
    """Question → its reply, from the service's rpcs."""
    methods = node_pb2.DESCRIPTOR.services_by_name["Node"].methods
    outputs = {method.input_type.name: method.output_type for method in methods}
    return {name: getattr(node_pb2, out.name) for name, out in outputs.items() if "value" in out.oneofs_by_name}


_REPLIES = _replies()
_HOLDERS: list[type[Message]] = [node_pb2.Envelope, *_REPLIES.values()]
_SLOTS = {message.DESCRIPTOR.name: _slots(message) for message in _HOLDERS}


def _codec(cls: type) -> Codec:
    if cls not in _CODECS:
        raise WireError(f"{cls.__name__} does not travel")
    return _CODECS[cls]


def _slot(holder: type[Message], value: object) -> str:
    name = type(value).__name__
    slot = _SLOTS[holder.DESCRIPTOR.name].get(name)
    if slot is None:
        raise WireError(f"{holder.DESCRIPTOR.name} cannot hold {name}")
    return slot


def _held(holder: Any, now: float) -> Any:
    slot = holder.WhichOneof("value")
    if slot is None:
        raise WireError(f"this {holder.DESCRIPTOR.name} is empty")
    twin = getattr(holder, slot)
    return _BY_MESSAGE[twin.DESCRIPTOR.name].decode(twin, now)


def _build(message: type[M], arguments: Arguments) -> M:
    try:
        return message(**arguments)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{message.DESCRIPTOR.name}: {error}") from error
