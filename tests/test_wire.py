"""Every value survives the wire, whatever it holds; bytes that mean nothing raise `WireError` and nothing else."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.types import FinishReason, Request, SamplingParams, Token
from tandem import messages as m
from tandem import wire
from tandem.errors import RequestError, ServerError, error_for
from tandem.status import GRPC_STATUS, HTTP_STATUS
from tandem.v1 import inference_pb2, node_pb2

NOW = 1000.0
WITHIN_OTHERS = (Token, m.Forward, m.FrameFor)
VALUES = [cls for cls in vars(m).values() if isinstance(cls, type) and is_dataclass(cls) and cls not in WITHIN_OTHERS]
ENVELOPED = [getattr(m, field.message_type.name) for field in node_pb2.Envelope.DESCRIPTOR.oneofs[0].fields]
REF = m.WorkerRef("decode-0", "a1", "127.0.0.1:7000")

# Sixty-fourths are exact in binary, so that times survive the two subtractions without rounding.
times = st.integers(0, 1 << 26).map(lambda ticks: ticks / 64)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
}


@cache
def strategy(hint: Any) -> st.SearchStrategy[Any]:
    if hint in PLAIN:
        return PLAIN[hint]
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if kinds[-1] is ...:
            return st.lists(strategy(kinds[0]), max_size=4).map(tuple)
        return st.tuples(*map(strategy, kinds))
    if alternatives := get_args(hint):
        return st.one_of([st.none() if kind is NoneType else strategy(kind) for kind in alternatives])
    return st.sampled_from(hint) if issubclass(hint, StrEnum) else values_of(hint)


@cache
def values_of(cls: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    arguments = {field.name: st.deferred(lambda hint=hints[field.name]: strategy(hint)) for field in fields(cls)}
    if cls is Request:
        arguments |= {"arrival_s": times, "deadline_s": st.none() | times}
    return st.builds(cls, **arguments)


def over_the_wire(value: object, now: float = NOW) -> Any:
    message = wire.to_wire(value, now=now)
    return wire.from_wire(type(message).FromString(message.SerializeToString()), now=now)


quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__name__)
@quick
@given(data=st.data())
def test_every_value_comes_back_as_it_was(cls: type, data: st.DataObject) -> None:
    value = data.draw(values_of(cls))
    back = over_the_wire(value)
    assert back == value
    assert repr(back) == repr(value), "-0.0 and 0.0 are equal but not the same"


@pytest.mark.parametrize("cls", ENVELOPED, ids=lambda cls: cls.__name__)
@quick
@given(data=st.data(), ask_id=st.integers(0, (1 << 64) - 1))
def test_every_enveloped_value_comes_back_with_its_number(cls: type, data: st.DataObject, ask_id: int) -> None:
    value = data.draw(values_of(cls))
    assert wire.decode_envelope(wire.encode_envelope(ask_id, value, NOW), NOW) == (ask_id, value)


@quick
@given(to=values_of(m.WorkerRef), question=st.one_of([values_of(cls) for cls in get_args(m.Question)]))
def test_a_forwarded_question_keeps_its_addressee(to: m.WorkerRef, question: m.Question) -> None:
    value = m.Forward(to, question)
    assert wire.decode_envelope(wire.encode_envelope(7, value, NOW), NOW) == (7, value)


@quick
@given(gateway_id=st.text(max_size=8), frame=values_of(m.Frame))
def test_a_frame_keeps_its_gateway_even_an_unnamed_one(gateway_id: str, frame: m.Frame) -> None:
    value = m.FrameFor(gateway_id, frame)
    assert wire.decode_envelope(wire.encode_envelope(0, value, NOW), NOW) == (0, value)


def test_every_value_and_field_has_a_twin_of_the_same_name() -> None:
    renamed = {"arrival_s": "age_s", "deadline_s": "time_left_s", "logit_bias": "logit_bias_ids"}
    for cls in [*VALUES, SamplingParams]:
        twin = node_pb2.DESCRIPTOR.message_types_by_name[cls.__name__]
        names = {renamed.get(field.name, field.name) for field in fields(cls)}
        assert names == set(twin.fields_by_name) - {"logit_biases"}, cls


def test_every_question_and_answer_fits_an_envelope_and_a_reply() -> None:
    assert set(ENVELOPED) >= {*get_args(m.Question), *get_args(m.Answer)}
    methods = node_pb2.DESCRIPTOR.services_by_name["Node"].methods_by_name
    assert {cls.__name__ for cls in get_args(m.Question)} <= set(methods)
    replies = [methods[cls.__name__].output_type.oneofs_by_name["value"].fields for cls in get_args(m.Question)]
    answers = {field.message_type.name for reply in replies for field in reply}
    assert answers == {cls.__name__ for cls in get_args(m.Answer)}


def test_clocks_do_not_travel() -> None:
    request = Request(request_id="r", token_ids=(1,), arrival_s=90.0, deadline_s=130.0)
    twin = wire.to_wire(request, now=100.0)
    there = wire.from_wire(twin, now=5000.0)
    assert (there.arrival_s, there.deadline_s) == (4990.0, 5030.0)


def test_a_deadline_that_has_passed_stays_passed() -> None:
    late = Request(request_id="r", token_ids=(1,), deadline_s=99.0)
    assert wire.from_wire(wire.to_wire(late, now=100.0), now=7.0).deadline_s == 6.0


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_a_deadline_that_never_comes_is_refused_on_both_sides(seconds: float) -> None:
    request = Request(request_id="r", token_ids=(1,), deadline_s=seconds)
    with pytest.raises(wire.WireError, match="time_left_s"):
        wire.to_wire(request, now=NOW)
    twin = node_pb2.Request(request_id="r", time_left_s=seconds, sampling=node_pb2.SamplingParams())
    with pytest.raises(wire.WireError, match="time_left_s"):
        wire.from_wire(twin, now=NOW)


def test_nan_numbers_reach_the_validator_instead_of_vanishing() -> None:
    request = Request(request_id="r", token_ids=(1,), sampling=SamplingParams(temperature=math.nan))
    assert math.isnan(over_the_wire(request).sampling.temperature)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (m.Commit("r", "l", 1, REF, REF, 3, "x", (Token(5),)), m.Committed("r")),
        (m.Abort("r", again=True), m.Aborted("r", known=False)),
        (m.ResetPrefixCache(), m.PrefixCacheReset(0)),
        (m.InjectFault(m.FaultKind.DROP, 3), m.FaultInjected()),
        (m.RenewLease("l", 2), m.Declined(m.Code.STALE, "generation 2 is gone; ask for a lease again", "decode-0")),
    ],
)
def test_a_reply_holds_its_answer(question: m.Question, answer: m.Answer) -> None:
    reply = wire.reply_to_wire(question, answer, now=NOW)
    assert type(reply).__name__ == f"{type(question).__name__}Reply"
    assert wire.from_wire(reply, now=NOW) == answer


def test_a_question_is_not_answered_by_another_questions_answer() -> None:
    with pytest.raises(wire.WireError, match="AbortReply cannot hold Expected"):
        wire.reply_to_wire(m.Abort("r"), m.Expected("r"), now=NOW)


@settings(max_examples=400, deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes_raise_wire_errors_only(data: bytes) -> None:
    assert decodes_or_refuses(data)


SAMPLES = [
    m.Forward(REF, m.Submit(Request(request_id="r", token_ids=tuple(range(40)), deadline_s=2000.0), REF)),
    m.FrameFor("g", m.Frame("d", "i", 1, (m.Delta("r", 0, (Token(1, -0.5, ((2, -0.5),)),), FinishReason.STOP),))),
    m.WorkerInfo(
        REF, "decode", "m", "d", "l", "n", 8192, 49152, 4096, 10, 4, 16, 3, 30, transports=(("ucx", b"\x00\xff"),)
    ),
]


@settings(max_examples=400, deadline=None)
@given(sample=st.sampled_from(SAMPLES), at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_envelopes_raise_wire_errors_only(sample: object, at: int, byte: int, cut: bool) -> None:
    data = bytearray(wire.encode_envelope(3, sample, NOW))
    at %= len(data)
    data[at] = byte
    assert decodes_or_refuses(bytes(data[:at] if cut else data))


def decodes_or_refuses(data: bytes) -> bool:
    """True when the bytes give a value that can travel again, or a `WireError`; anything else raises."""
    try:
        ask_id, value = wire.decode_envelope(data, NOW)
    except wire.WireError as error:
        return bool(str(error))
    return bool(wire.encode_envelope(ask_id, value, NOW))


@pytest.mark.parametrize(
    ("twin", "story"),
    [
        (node_pb2.Envelope(ask_id=1), "empty"),
        (node_pb2.ExpectReply(), "empty"),
        (node_pb2.DescribeRequest(), "has no value"),
        (node_pb2.Submit(request={"sampling": {}}), "Submit.decode is missing"),
        (node_pb2.Declined(message="no"), "Declined.code is 0"),
        (node_pb2.Delta(finish=99), "Delta.finish is 99"),
        (node_pb2.Delta(tokens={"ids": [1, 2], "scores": [{}]}), "2 entries but 1"),
        (node_pb2.Delta(tokens={"ids": [1], "scores": [{"top_ids": [4]}]}), "1 entries but 0"),
        (node_pb2.Request(sampling={"logit_bias_ids": [4]}), "logit_bias_ids"),
        (node_pb2.EngineLoad(step_times={"prefill": [1.0], "decode": [1.0, 2.0, 3.0]}), "1 entries instead of 3"),
    ],
)
def test_a_message_without_meaning_says_what_is_wrong(twin: Any, story: str) -> None:
    with pytest.raises(wire.WireError, match=story):
        wire.from_wire(twin, now=NOW)


def test_directions_must_fit_what_they_are_on() -> None:
    to, gateway = node_pb2.WorkerRef(name="d"), "g"
    for envelope in (
        node_pb2.Envelope(to=to, expected=node_pb2.Expected(request_id="r")),
        node_pb2.Envelope(gateway_id=gateway, expected=node_pb2.Expected(request_id="r")),
    ):
        with pytest.raises(wire.WireError, match="Expected is no"):
            wire.decode_envelope(envelope.SerializeToString(), NOW)


@pytest.mark.parametrize(
    "value",
    [m.Expected("\ud83d"), m.RenewLease("l", 1 << 63), m.RenewLease("l", "two"), object(), Token(1)],  # type: ignore[arg-type]
)
def test_what_has_no_twin_is_refused(value: object) -> None:
    with pytest.raises(wire.WireError):
        wire.to_wire(value, now=NOW)


def test_a_prompt_of_1500_tokens_is_small() -> None:
    request = Request(request_id="r" * 32, token_ids=tuple(range(47_000, 48_500)), deadline_s=1030.0)
    assert len(wire.encode_envelope(1, m.Submit(request, REF), NOW)) < 1500 * 3 + 300


def test_a_token_without_scores_costs_a_few_bytes() -> None:
    def frame(tokens: int) -> bytes:
        delta = m.Delta("r" * 32, 100, tuple(Token(40_000 + i) for i in range(tokens)))
        return wire.to_wire(m.Frame("d", "i", 1, (delta,)), now=NOW).SerializeToString()

    assert len(frame(101)) - len(frame(1)) < 100 * 3 + 5


def test_the_public_sampling_fields_are_those_of_the_engine_and_know_when_they_are_absent() -> None:
    twin = inference_pb2.SamplingParams.DESCRIPTOR
    assert set(twin.fields_by_name) == {field.name for field in fields(SamplingParams)}
    assert all(field.has_presence or field.is_repeated for field in twin.fields)


def test_each_code_has_a_status_on_both_front_ends_and_an_error_in_the_client() -> None:
    assert set(HTTP_STATUS) == set(GRPC_STATUS) == set(m.Code)
    for code in m.Code:
        error = error_for(GRPC_STATUS[code], "why", request_id="r")
        assert isinstance(error, RequestError)
        assert (str(error), error.request_id) == ("why", "r")
        assert isinstance(error, ServerError) == (HTTP_STATUS[code] == 500)
        assert error.retryable == (HTTP_STATUS[code] in (429, 503))
