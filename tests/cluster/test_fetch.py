"""The fetch's machine: every stage has its exits, what came in order counts, and it resumes and closes exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import fetch as f
from cluster.fetch import Arrival, Stage
from tandem.machine import IllegalTransition
from tandem.messages import Code, Committed, Declined, PrefixComing, WorkerRef

COMING = f.Answered(PrefixComing("x", 4))
ENDS: dict[str, f.Event] = {
    "declined": f.Answered(Declined(Code.NOT_FOUND, "gone")),
    "unasked": f.Answered(Declined(Code.UNAVAILABLE, "no answer")),
    "nonsense": f.Answered(Committed("r")),
    "too many": f.Answered(PrefixComing("x", 5)),
    "none": f.Answered(PrefixComing("x", 0)),
    "failed": f.ReceiveFailed("checksum"),
    "given up": f.SourceGaveUp("a push failed"),
    "lost": f.PeerLost("gone"),
    "request over": f.RequestEnded(),
}


def arrival(**changes: object) -> Arrival:
    base = {
        "request_id": "r",
        "source": WorkerRef("prefill-0", "i1", "x:1"),
        "wanted_spans": 4,
        "asked_s": 10.0,
        "deadline_s": 11.0,
    }
    return Arrival(**(base | changes))  # type: ignore[arg-type]


def told(state: Arrival, *events: f.Event, now: float = 10.1) -> tuple[Arrival, list[f.Effect]]:
    effects: list[f.Effect] = []
    for event in events:
        state, more = f.advance(state, event, now)
        effects += more
    return state, effects


def test_blocks_enter_as_they_come_and_the_last_one_ends_it() -> None:
    state, effects = told(arrival(), COMING, f.Received(0, 2), f.Received(2, 2))
    assert effects == [f.Enter(2), f.Enter(4), f.Resume(), f.Close()]
    assert (state.stage, state.reason, state.whole) == (Stage.ENDING, "", True)
    assert told(state, f.Quiet())[0].stage is Stage.CLOSED


def test_bytes_may_overtake_the_answer_and_each_other() -> None:
    state, effects = told(arrival(), f.Received(2, 2), f.Received(0, 1))
    assert effects == [f.Enter(1)]
    state, effects = told(state, f.Received(1, 1))
    assert effects == [f.Enter(4), f.Resume(), f.Close()], "all is there, whatever the answer would be"
    assert told(state, COMING)[1] == []


def test_a_source_that_has_less_ends_it_with_what_it_had() -> None:
    state, effects = told(arrival(), f.Received(0, 2), f.Answered(PrefixComing("x", 2)))
    assert effects == [f.Enter(2), f.Resume(), f.Close()]
    assert "had no more" in state.reason
    assert not state.whole


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("before", [(), (f.Received(0, 1),), (f.Received(1, 3),)])
def test_whatever_ends_it_lets_the_prompt_go_on_with_what_came(end: str, before: tuple[f.Event, ...]) -> None:
    state, _ = told(arrival(), *before)
    state, effects = told(state, ENDS[end])
    assert effects == [f.Resume(), f.Close()]
    assert (state.stage, state.arrived_spans) == (Stage.ENDING, 1 if before == (f.Received(0, 1),) else 0)
    assert state.reason


def test_it_ends_at_its_deadline_and_not_before() -> None:
    state, _ = told(arrival(), COMING, f.Received(0, 1))
    assert told(state, f.Tick(), now=10.9)[1] == []
    state, effects = told(state, f.Tick(), now=11.0)
    assert effects == [f.Resume(), f.Close()]
    late, effects = told(state, f.Received(1, 3), f.PeerLost("x"), f.ReceiveFailed("x"), f.RequestEnded(), f.Tick())
    assert (effects, late.arrived_spans) == ([], 1), "what comes late enters nowhere"


def test_a_second_answer_is_a_bug_told_with_its_story() -> None:
    state, _ = told(arrival(), COMING)
    with pytest.raises(IllegalTransition, match=r"PrefixComing.*\n.*PrefixComing"):
        told(state, COMING)


EVENTS = st.one_of(
    st.sampled_from([*ENDS.values(), f.Tick()]),
    st.builds(lambda first: f.Received(first, 1), st.integers(0, 3)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=12), st.lists(st.floats(0.0, 0.3), min_size=12, max_size=12))
def test_any_order_of_news_resumes_and_closes_once(events: list[f.Event], pauses: list[float]) -> None:
    state, effects, seen, answers = arrival(), list[f.Effect](), set[int](), 0
    for event, now in zip(events, itertools.accumulate(pauses, initial=10.0), strict=False):
        if isinstance(event, f.Received):
            if event.first in seen:
                continue  # the transfer takes each span once
            seen.add(event.first)
        answers += isinstance(event, f.Answered)
        if isinstance(event, f.Answered) and answers > 1:
            continue  # each question gets one answer
        state, more = f.advance(state, event, now)
        effects += more
    ended = state.stage is Stage.ENDING
    assert effects.count(f.Resume()) == effects.count(f.Close()) == ended
    entered = [effect.spans for effect in effects if isinstance(effect, f.Enter)]
    assert entered == sorted(set(entered))
    assert state.arrived_spans == max(entered, default=0)
    assert set(range(state.arrived_spans)) <= seen
