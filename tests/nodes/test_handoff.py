"""The source side of a hand-over: every stage, every exit, without I/O."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.types import FinishReason, Token
from prefill_node import handoff as h
from prefill_node.handoff import Handoff, Stage, advance
from tandem.machine import IllegalTransition
from tandem.messages import (
    AskLease,
    Code,
    Commit,
    Committed,
    Declined,
    Delta,
    DropLease,
    FinishedEarly,
    HandedOver,
    LeaseGranted,
    LeaseRenewed,
    RenewLease,
    WorkerInfo,
    WorkerRef,
)

PREFILL = WorkerRef("p0", "i1", "h:1")
DECODE = WorkerRef("d0", "i7", "h:2")
INFO = WorkerInfo(PREFILL, "prefill", "m", "digest", "layers=1", "fp32", 512, 512, 1024, 8, 4, 16, 1, 1)
GRANT = LeaseGranted("r", "r@d0", 3, 16, 3, 6.0, DECODE, "inproc", b"a", 16)
NO_ROOM = Declined(Code.NO_ROOM, "full")
LOST = Declined(Code.UNAVAILABLE, "no answer", by="d0")
STALE = Declined(Code.STALE, "too old", by="d0")
TOKEN = (Token(5),)

FRESH = Handoff(request_id="r", source=INFO, decode=DECODE, prompt_tokens=60, alone=False, submitted_s=0.0)
TO_COMMIT = (h.Scheduled(), h.Granted(GRANT), h.Computed(60), h.FirstToken(TOKEN))
ROADS: dict[Stage, tuple[h.Event, ...]] = {
    Stage.QUEUED: (),
    Stage.ASKING: (h.Scheduled(),),
    Stage.PUSHING: (h.Scheduled(), h.Granted(GRANT), h.Computed(40)),
    Stage.COMMITTING: TO_COMMIT,
    Stage.SETTLING: (*TO_COMMIT, h.CommitAnswered(Committed("r"))),
    Stage.ENDING: (h.Scheduled(), h.Granted(GRANT), h.AbortAsked()),
    Stage.CLOSED: (h.AbortAsked(),),
}
LIVE = (Stage.QUEUED, Stage.ASKING, Stage.PUSHING, Stage.COMMITTING)
EXITS = {
    h.AbortAsked(): Code.ABORTED,
    h.DeadlinePassed(): Code.DEADLINE,
    h.PeerLost("killed"): Code.UNAVAILABLE,
    h.ComputeFailed("boom"): Code.INTERNAL,
}


def play(handoff: Handoff, *events: h.Event, now: float = 1.0) -> tuple[Handoff, list[h.Effect]]:
    effects: list[h.Effect] = []
    for event in events:
        handoff, more = advance(handoff, event, now)
        effects += more
    return handoff, effects


def at(stage: Stage) -> Handoff:
    handoff = play(FRESH, *ROADS[stage])[0]
    assert handoff.stage is stage
    return handoff


def replies(effects: list[h.Effect]) -> list[object]:
    return [effect.answer for effect in effects if isinstance(effect, h.Reply)]


def questions(effects: list[h.Effect]) -> list[object]:
    return [effect.question for effect in effects if isinstance(effect, h.AskDecode)]


def test_a_hand_over_pushes_each_block_once_and_leaves_out_what_decode_holds() -> None:
    handoff, effects = play(FRESH, *TO_COMMIT[:2], h.Computed(35), h.Computed(60), h.FirstToken(TOKEN))
    assert [effect for effect in effects if isinstance(effect, h.Push)] == [h.Push(1, 1), h.Push(2, 2)]
    asked = questions(effects)
    assert isinstance(asked[0], AskLease)
    assert asked[0].layout == INFO.layout
    assert asked[-1] == Commit("r", "r@d0", 3, PREFILL, DECODE, 60, "layers=1", TOKEN, 0)
    handoff, effects = play(handoff, h.PushDone(1, 10, 0.1), h.PushDone(2, 20, 0.1), h.CommitAnswered(Committed("r")))
    [answer] = replies(effects)
    assert isinstance(answer, HandedOver)
    assert (answer.report.kv_blocks, answer.report.kv_bytes, answer.report.decode_held_tokens) == (3, 30, 16)
    assert h.ReleaseSource() in effects
    assert handoff.stage is Stage.ENDING
    assert play(handoff, h.Quiet())[0].stage is Stage.CLOSED


def test_ends_with_blocks_of_two_sizes_count_in_the_smaller_one_and_a_span_for_each_row() -> None:
    rows = INFO.kv_heads * INFO.layers * 2
    large = replace(FRESH, source=replace(INFO, block_size=32, block_bytes=2048))
    grant = replace(GRANT, num_spans=3 * rows)
    _, effects = play(large, h.Scheduled(), h.Granted(grant), h.Computed(35), h.Computed(60), h.FirstToken(TOKEN))
    assert [effect for effect in effects if isinstance(effect, h.Push)] == [h.Push(1, 1), h.Push(2, 2)]
    [question, *_] = questions(effects)
    assert isinstance(question, AskLease)
    assert question.block_size == 32
    _, effects = play(large, h.Scheduled(), h.Granted(GRANT))
    [answer] = replies(effects)
    assert isinstance(answer, Declined)
    assert answer.code is Code.MISMATCH


def test_commit_answered_before_the_last_acknowledgement_settles_first() -> None:
    handoff, effects = play(FRESH, *ROADS[Stage.SETTLING])
    assert h.ReleaseSource() in effects
    assert not replies(effects)
    handoff, effects = play(handoff, h.PushDone(3, 30, 0.1))
    assert [type(answer) for answer in replies(effects)] == [HandedOver]
    assert h.Withdraw() in effects


def test_a_first_token_that_comes_before_the_lease_waits_for_it() -> None:
    handoff, effects = play(FRESH, h.Scheduled(), h.Computed(60), h.FirstToken(TOKEN))
    assert handoff.stage is Stage.ASKING
    handoff, effects = play(handoff, h.Granted(GRANT))
    assert effects[0] == h.Push(1, 3)
    assert isinstance(questions(effects)[-1], Commit)


def test_decode_that_holds_the_whole_prompt_gets_a_commit_and_no_push() -> None:
    whole = replace(GRANT, held_tokens=64, num_spans=0)
    handoff, effects = play(FRESH, h.Scheduled(), h.Granted(whole), h.Computed(60), h.FirstToken(TOKEN))
    assert not [effect for effect in effects if isinstance(effect, h.Push)]
    assert handoff.stage is Stage.COMMITTING


def test_max_tokens_one_never_asks_decode() -> None:
    first = h.FirstToken(TOKEN, (Delta("r", 0, TOKEN, FinishReason.LENGTH),))
    handoff, effects = play(replace(FRESH, alone=True), h.Scheduled(), h.Computed(60), first)
    assert not questions(effects)
    assert [type(answer) for answer in replies(effects)] == [FinishedEarly]
    assert handoff.stage is Stage.CLOSED


@pytest.mark.parametrize("stage", [Stage.ASKING, Stage.PUSHING])
def test_a_first_token_that_ends_the_request_drops_the_lease_and_never_commits(stage: Stage) -> None:
    handoff, effects = play(at(stage), h.Computed(60), h.FirstToken(TOKEN, (Delta("r", 0, TOKEN, FinishReason.STOP),)))
    [answer] = replies(effects)
    assert isinstance(answer, FinishedEarly)
    assert [told.finish for told in answer.deltas] == [FinishReason.STOP]
    assert not any(isinstance(question, Commit) for question in questions(effects))
    late, more = play(handoff, h.Granted(GRANT)) if stage is Stage.ASKING else (handoff, effects)
    assert any(isinstance(question, DropLease) for question in questions(more))
    assert late.stage is (Stage.CLOSED if stage is Stage.ASKING else Stage.ENDING)


@pytest.mark.parametrize("exit_", EXITS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("stage", LIVE)
def test_every_stage_has_every_exit(stage: Stage, exit_: h.Event) -> None:
    handoff, effects = play(at(stage), exit_)
    [answer] = replies(effects)
    assert isinstance(answer, Declined)
    assert answer.code is EXITS[exit_]
    assert any(isinstance(effect, h.AbortSource) for effect in effects)
    leased = stage in (Stage.PUSHING, Stage.COMMITTING)
    assert (h.Withdraw() in effects) is leased
    assert any(isinstance(question, DropLease) for question in questions(effects)) is leased
    for event in (h.Granted(GRANT),) if stage is Stage.ASKING else (h.Quiet(),) if leased else ():
        assert handoff.stage is Stage.ENDING
        handoff, more = play(handoff, event)
        assert not replies(more)
    assert handoff.stage is Stage.CLOSED


@pytest.mark.parametrize("exit_", EXITS, ids=lambda event: type(event).__name__)
def test_once_decode_has_the_request_every_exit_is_a_hand_over(exit_: h.Event) -> None:
    handoff, effects = play(at(Stage.SETTLING), exit_)
    assert [type(answer) for answer in replies(effects)] == [HandedOver]
    assert play(handoff, h.Quiet())[0].stage is Stage.CLOSED


@pytest.mark.parametrize("exit_", EXITS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("stage", [Stage.ENDING, Stage.CLOSED])
def test_nothing_happens_twice(stage: Stage, exit_: h.Event) -> None:
    assert play(at(stage), exit_)[1] == []


@pytest.mark.parametrize("exit_", [e for e in EXITS if not isinstance(e, h.PeerLost)], ids=str)
def test_alone_has_exits_too(exit_: h.Event) -> None:
    handoff, effects = play(replace(FRESH, alone=True), h.Scheduled(), exit_)
    assert [type(answer) for answer in replies(effects)] == [Declined]
    assert handoff.stage is Stage.CLOSED


def test_alone_does_not_care_about_decode() -> None:
    handoff, effects = play(replace(FRESH, alone=True), h.Scheduled(), h.PeerLost("killed"))
    assert (handoff.stage, effects) == (Stage.ALONE, [])


def test_a_denied_lease_sends_the_request_back_and_holds_nothing() -> None:
    handoff, effects = play(at(Stage.ASKING), h.Denied(NO_ROOM))
    assert replies(effects) == [Declined(Code.NO_ROOM, "full", by="d0")]
    assert h.AbortSource(FinishReason.ABORT) in effects
    assert handoff.stage is Stage.CLOSED


def test_a_lease_that_does_not_fit_the_prompt_is_refused() -> None:
    _, effects = play(at(Stage.ASKING), h.Granted(replace(GRANT, num_spans=9)))
    [answer] = replies(effects)
    assert isinstance(answer, Declined)
    assert answer.code is Code.MISMATCH


@pytest.mark.parametrize("stage", [Stage.PUSHING, Stage.COMMITTING])
def test_a_failed_push_fails_the_request(stage: Stage) -> None:
    _, effects = play(at(stage), h.PushFailed("checksum"))
    [answer] = replies(effects)
    assert isinstance(answer, Declined)
    assert answer.code is Code.UNAVAILABLE
    assert "checksum" in answer.message


def test_a_lost_commit_answer_is_asked_for_again_under_the_same_lease() -> None:
    handoff, effects = play(at(Stage.COMMITTING), h.CommitAnswered(LOST), h.Tick())
    assert not effects
    handoff, effects = play(handoff, h.Tick(), now=1.2)
    [commit] = questions(effects)
    assert isinstance(commit, Commit)
    assert (commit.lease_id, commit.generation) == (GRANT.lease_id, GRANT.generation)
    assert play(handoff, h.Tick(), now=1.3)[1] == []
    _, effects = play(handoff, h.PushDone(3, 30, 0.1), h.CommitAnswered(Committed("r")))
    assert [type(answer) for answer in replies(effects)] == [HandedOver]


def test_commit_that_is_never_answered_ends_with_the_lease() -> None:
    _, effects = play(at(Stage.COMMITTING), h.Tick(), now=7.0)
    assert [type(answer) for answer in replies(effects)] == [Declined]


def test_a_declined_commit_is_not_asked_again() -> None:
    _, effects = play(at(Stage.COMMITTING), h.CommitAnswered(STALE))
    [answer] = replies(effects)
    assert isinstance(answer, Declined)
    assert answer.code is Code.STALE


def test_what_decode_says_itself_is_not_a_lost_answer() -> None:
    checksum = Declined(Code.UNAVAILABLE, "checksum", by="p0")
    for event in (h.CommitAnswered(checksum), h.RenewalAnswered(checksum)):
        [answer] = replies(play(at(Stage.COMMITTING), event)[1])
        assert isinstance(answer, Declined)
        assert (answer.code, answer.by) == (Code.UNAVAILABLE, "p0")


def test_leases_are_renewed_per_chunk_and_by_time() -> None:
    handoff, effects = play(at(Stage.ASKING), h.Granted(GRANT), h.Computed(20))
    assert questions(effects) == [RenewLease("r@d0", 3)]
    handoff, effects = play(handoff, h.Computed(24), h.RenewalAnswered(LeaseRenewed(6.0)), h.Tick(), now=2.0)
    assert effects == []
    handoff, effects = play(handoff, h.Tick(), now=4.1)
    assert questions(effects) == [RenewLease("r@d0", 3)]


def test_a_lost_renewal_is_forgiven_until_the_lease_ends() -> None:
    handoff, effects = play(at(Stage.PUSHING), h.RenewalAnswered(LOST))
    assert (handoff.stage, effects) == (Stage.PUSHING, [])
    _, effects = play(handoff, h.Tick(), now=8.0)
    assert [type(answer) for answer in replies(effects)] == [Declined]


def test_a_lease_that_decode_no_longer_knows_fails_the_request() -> None:
    _, effects = play(at(Stage.PUSHING), h.RenewalAnswered(STALE))
    [answer] = replies(effects)
    assert isinstance(answer, Declined)
    assert answer.code is Code.STALE


def test_an_illegal_transition_tells_the_story() -> None:
    with pytest.raises(IllegalTransition, match=r"(?s)hand-over r.*queued: Scheduled.*asking: Quiet"):
        play(FRESH, h.Scheduled(), h.Quiet())


def test_the_story_keeps_addresses_to_itself() -> None:
    assert "address" not in " ".join(at(Stage.PUSHING).history)
