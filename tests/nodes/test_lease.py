"""The destination side of a hand-over: every stage, every exit, without I/O."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_node import lease as d
from decode_node.lease import Intake, Stage, advance, expected
from engine.types import FinishReason, Token
from tandem.machine import IllegalTransition
from tandem.messages import Code, Commit, Committed, Declined, WorkerInfo, WorkerRef

PREFILL = WorkerRef("p0", "i1", "h:1")
DECODE = WorkerRef("d0", "i7", "h:2")
ME = WorkerInfo(DECODE, "decode", "m", "digest", "layers=1", "fp32", 512, 512, 1024, 8, 4, 16, 1, 1)
OPENED = d.LeaseOpened("r@d0", 3, PREFILL, 3, until_s=6.0)
COMMIT = Commit("r", "r@d0", 3, PREFILL, DECODE, 60, "layers=1", (Token(5),), 16)
ARRIVED = d.CommitArrived(COMMIT, 1)
ALL = d.Received(3)

FRESH = expected("r", me=ME, prefill=PREFILL, prompt_tokens=60, deadline_s=20.0, now=0.0, reservation_s=30.0)
ROADS: dict[Stage, tuple[d.Event, ...]] = {
    Stage.EXPECTED: (),
    Stage.LEASED: (OPENED,),
    Stage.RECEIVED: (OPENED, ALL),
    Stage.COMMITTED: (OPENED, ARRIVED),
    Stage.RUNNING: (OPENED, ARRIVED, ALL),
    Stage.ENDING: (OPENED, d.AbortAsked()),
    Stage.DONE: (d.AbortAsked(),),
}
LEASED = (Stage.LEASED, Stage.RECEIVED, Stage.COMMITTED)
EXITS = (d.AbortAsked(), d.DeadlinePassed(), d.PeerLost("killed"))


def play(intake: Intake, *events: d.Event, now: float = 1.0) -> tuple[Intake, list[d.Effect]]:
    effects: list[d.Effect] = []
    for event in events:
        intake, more = advance(intake, event, now)
        effects += more
    return intake, effects


def at(stage: Stage) -> Intake:
    intake = play(FRESH, *ROADS[stage])[0]
    assert intake.stage is stage
    return intake


def answers(effects: list[d.Effect]) -> list[object]:
    return [effect.answer for effect in effects if isinstance(effect, d.AnswerCommit)]


@pytest.mark.parametrize("order", [(ARRIVED, ALL), (ALL, ARRIVED)], ids=["commit first", "bytes first"])
def test_decoding_starts_when_bytes_and_commit_are_in_whichever_comes_first(order: tuple[d.Event, ...]) -> None:
    intake, effects = play(FRESH, OPENED, order[0])
    assert effects == []
    intake, effects = play(intake, order[1])
    assert effects == [d.Adopt((Token(5),), 16), d.CloseLease(), d.AnswerCommit(1, Committed("r"))]
    assert intake.stage is Stage.RUNNING


def test_bytes_that_are_not_all_there_start_nothing() -> None:
    intake, effects = play(FRESH, OPENED, d.Received(2), ARRIVED)
    assert (intake.stage, effects) == (Stage.COMMITTED, [])
    assert play(intake, d.Received(1))[0].stage is Stage.RUNNING


def test_a_prompt_that_is_held_whole_needs_only_the_commit() -> None:
    assert play(FRESH, replace(OPENED, num_spans=0), ARRIVED)[0].stage is Stage.RUNNING


def test_a_repeated_commit_gets_the_same_answer_while_waiting_running_and_after() -> None:
    intake, effects = play(FRESH, OPENED, ARRIVED, d.CommitArrived(COMMIT, 2), ALL)
    assert answers(effects) == [Committed("r")] * 2
    intake, effects = play(intake, d.CommitArrived(COMMIT, 3), d.Quiet(), d.EngineEnded(), d.CommitArrived(COMMIT, 4))
    assert answers(effects) == [Committed("r")] * 2
    assert intake.stage is Stage.DONE
    assert not any(isinstance(effect, d.Adopt) for effect in effects)


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"generation": 2}, Code.STALE, "generation is 2 at prefill but 3 at decode"),
        ({"lease_id": "other"}, Code.STALE, "lease"),
        ({"source": WorkerRef("p0", "i2", "h:1")}, Code.STALE, "source is p0#i2"),
        ({"destination": WorkerRef("d0", "i6", "h:2")}, Code.STALE, "destination is d0#i6"),
        ({"layout": "layers=2"}, Code.MISMATCH, "layers=2 at prefill but layers=1 at decode"),
        ({"prompt_tokens": 61}, Code.MISMATCH, "prompt tokens is 61 at prefill but 60"),
        ({"candidates": ()}, Code.MISMATCH, "first tokens"),
    ],
)
def test_a_commit_that_does_not_belong_here_is_declined_with_both_values(
    change: dict[str, object], code: Code, field: str
) -> None:
    for stage in (*LEASED, Stage.RUNNING):
        intake, effects = play(at(stage), d.CommitArrived(replace(COMMIT, **change), 9))
        [answer] = answers(effects)
        assert isinstance(answer, Declined)
        assert answer.code is code
        assert field in answer.message
        assert intake.stage is stage


@pytest.mark.parametrize(
    ("beams", "candidates", "accepted"),
    [(False, 3, False), (False, 4, True), (False, 5, False), (True, 3, False), (True, 4, True), (True, 8, True)],
)
def test_a_commit_brings_a_first_token_for_each_sequence(beams: bool, candidates: int, accepted: bool) -> None:
    commit = replace(COMMIT, candidates=tuple(Token(i, -0.5) for i in range(candidates)))
    intake, effects = play(replace(FRESH, sequences=4, beams=beams), OPENED, ALL, d.CommitArrived(commit, 9))
    assert (intake.stage is Stage.RUNNING) is accepted
    if accepted:
        assert effects[0] == d.Adopt(commit.candidates, 16)
    else:
        [answer] = answers(effects)
        assert isinstance(answer, Declined)
        assert answer.message == f"first tokens is {candidates} at prefill but 4 at decode"


def test_a_commit_without_a_lease_is_stale() -> None:
    [answer] = answers(play(FRESH, ARRIVED)[1])
    assert isinstance(answer, Declined)
    assert answer.code is Code.STALE


def test_a_commit_after_the_end_is_told_how_it_ended() -> None:
    [answer] = answers(play(at(Stage.ENDING), ARRIVED)[1])
    assert isinstance(answer, Declined)
    assert answer.code is Code.ABORTED
    [answer] = answers(play(FRESH, OPENED, d.ReceiveFailed("checksum"), ARRIVED)[1])
    assert isinstance(answer, Declined)
    assert "checksum" in answer.message


@pytest.mark.parametrize("exit_", EXITS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("stage", [Stage.EXPECTED, *LEASED])
def test_every_stage_before_running_has_every_exit(stage: Stage, exit_: d.Event) -> None:
    intake, effects = play(at(stage), exit_)
    assert len([effect for effect in effects if isinstance(effect, d.Tell)]) == 1
    assert (d.CloseLease() in effects) is (stage in LEASED)
    assert any(isinstance(effect, d.AbortEngine) for effect in effects) is (stage in LEASED)
    assert len(answers(effects)) == (1 if stage is Stage.COMMITTED else 0)
    assert all(isinstance(answer, Declined) for answer in answers(effects))
    if stage in LEASED:
        assert intake.stage is Stage.ENDING
        intake, _ = play(intake, d.Quiet())
    assert intake.stage is Stage.DONE


def test_a_running_request_ends_by_abort_or_deadline_but_not_by_the_loss_of_prefill() -> None:
    for exit_, reason in ((d.AbortAsked(), FinishReason.ABORT), (d.DeadlinePassed(), FinishReason.DEADLINE)):
        intake, effects = play(at(Stage.RUNNING), exit_)
        assert effects == [d.AbortEngine(reason), d.Tell(finish=reason)]
        assert play(intake, d.Quiet())[0].stage is Stage.DONE
    for event in (d.PeerLost("killed"), d.DropAsked("second thoughts"), d.ReceiveFailed("late")):
        assert play(at(Stage.RUNNING), event)[1] == []


@pytest.mark.parametrize("stage", [Stage.ENDING, Stage.DONE])
def test_nothing_happens_twice(stage: Stage) -> None:
    for exit_ in (*EXITS, d.Tick(), ALL, d.DropAsked("late")):
        assert play(at(stage), exit_, now=99.0)[1] == []


@pytest.mark.parametrize("stage", LEASED)
def test_an_unrenewed_lease_ends_by_our_own_clock(stage: Stage) -> None:
    renewed, effects = play(at(stage), d.Renewed(9.0), d.Tick(), now=8.0)
    assert (renewed.stage, effects) == (stage, [])
    intake, effects = play(renewed, d.Tick(), now=9.0)
    [tell] = [effect for effect in effects if isinstance(effect, d.Tell)]
    assert tell.error is not None
    assert tell.error.code is Code.UNAVAILABLE
    assert intake.stage is Stage.ENDING


def test_a_reservation_that_nobody_uses_ends_by_itself() -> None:
    intake = replace(FRESH, deadline_s=None)
    assert play(intake, d.Tick(), now=29.0)[0].stage is Stage.EXPECTED
    assert play(intake, d.Tick(), now=30.0)[0].stage is Stage.DONE


def test_the_deadline_is_seen_while_waiting() -> None:
    _, effects = play(FRESH, d.Tick(), now=20.0)
    assert effects == [d.Tell(finish=FinishReason.DEADLINE)]


@pytest.mark.parametrize("stage", LEASED)
def test_a_failed_receive_or_a_drop_frees_the_lease(stage: Stage) -> None:
    for event, tells in ((d.ReceiveFailed("checksum"), 1), (d.DropAsked("client left"), 0)):
        intake, effects = play(at(stage), event)
        assert d.CloseLease() in effects
        assert len([effect for effect in effects if isinstance(effect, d.Tell)]) == tells
        assert intake.stage is Stage.ENDING


def test_a_local_prefill_runs_from_the_start_and_is_done_with_its_engine() -> None:
    intake = expected("r", me=ME, prefill=None, prompt_tokens=60, deadline_s=None, now=0.0, reservation_s=1.0)
    assert intake.stage is Stage.RUNNING
    assert play(intake, d.Tick(), now=99.0)[1] == []
    assert play(intake, d.EngineEnded())[0].stage is Stage.DONE


def test_an_illegal_transition_tells_the_story() -> None:
    with pytest.raises(IllegalTransition, match=r"(?s)intake r.*leased: Received\(num_spans=1\).*leased: Quiet"):
        play(FRESH, OPENED, d.Received(1), d.Quiet())
