"""The source side of a move: every stage, every exit, without I/O."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_node import migration as m
from decode_node.migration import Migration, MoveLimits, Stage, advance, begin
from engine.types import Request, SamplingParams, Token
from tandem.machine import IllegalTransition
from tandem.messages import (
    AskMove,
    Code,
    Commit,
    Committed,
    Declined,
    DropLease,
    LeaseGranted,
    LeaseRenewed,
    Migrated,
    RenewLease,
    WorkerInfo,
    WorkerRef,
)

HERE = WorkerRef("d0", "i1", "h:1")
THERE = WorkerRef("d1", "i7", "h:2")
INFO = WorkerInfo(HERE, "decode", "m", "digest", "layers=1", "fp32", 512, 512, 1024, 8, 4, 16, 1, 1)
REQUEST = Request(request_id="r", token_ids=tuple(range(60)), sampling=SamplingParams(max_tokens=200))
# 60 + 5 tokens are 5 blocks, 4 of them full; one is held over there, and four more are to spare.
GRANT = LeaseGranted("r", "r@d1", 3, 16, 8, 6.0, THERE, "inproc", b"a", 16)
SO_FAR = tuple(range(5))
LOST = Declined(Code.UNAVAILABLE, "no answer", by="d1")
STALE = Declined(Code.STALE, "too old", by="d1")

FRESH = Migration(request=REQUEST, gateway_id="g", source=INFO, to=THERE, started_s=0.0)
TO_COMMIT: tuple[m.Event, ...] = (m.Granted(GRANT), m.Stepped(66), m.PushDone(), m.Paused(tuple(range(7))))
ROADS: dict[Stage, tuple[m.Event, ...]] = {
    Stage.ASKING: (),
    Stage.COPYING: (m.Granted(GRANT), m.Stepped(65)),
    Stage.COMMITTING: TO_COMMIT,
    Stage.ENDING: (*TO_COMMIT, m.CommitAnswered(Committed("r"))),
    Stage.CLOSED: (m.Denied(Declined(Code.NO_ROOM, "full")),),
}
LIVE = (Stage.ASKING, Stage.COPYING, Stage.COMMITTING)
EXITS = {
    m.Stopped("it was preempted"): Code.ABORTED,
    m.DeadlinePassed(): Code.DEADLINE,
    m.PeerLost("killed"): Code.UNAVAILABLE,
}


def play(migration: Migration, *events: m.Event, now: float = 1.0) -> tuple[Migration, list[m.Effect]]:
    effects: list[m.Effect] = []
    for event in events:
        migration, more = advance(migration, event, now)
        effects += more
    return migration, effects


def asked(limits: MoveLimits | None = None) -> Migration:
    return begin(replace(FRESH, limits=limits or MoveLimits()), SO_FAR)[0]


def at(stage: Stage) -> Migration:
    migration = play(asked(), *ROADS[stage])[0]
    assert migration.stage is stage
    return migration


def replies(effects: list[m.Effect]) -> list[object]:
    return [effect.answer for effect in effects if isinstance(effect, m.Reply)]


def questions(effects: list[m.Effect]) -> list[object]:
    return [effect.question for effect in effects if isinstance(effect, m.AskDestination)]


def pushes(effects: list[m.Effect]) -> list[m.Push]:
    return [effect for effect in effects if isinstance(effect, m.Push)]


def test_full_blocks_go_in_stages_and_the_tail_in_a_pause() -> None:
    migration, effects = begin(FRESH, SO_FAR)
    assert effects == (
        m.AskDestination(
            AskMove(REQUEST, "g", HERE, INFO.transports, "digest", "layers=1", 16, SO_FAR, spare_tokens=64)
        ),
    )
    migration, effects = play(migration, m.Granted(GRANT))
    assert effects == [m.Push(1, 3)]
    migration, effects = play(migration, *(m.Stepped(64 + i) for i in range(1, 40)))
    assert effects == []
    migration, effects = play(migration, m.PushDone())
    assert effects == [m.Push(4, 2)]
    migration, effects = play(migration, m.Stepped(104), m.PushDone(), now=2.0)
    assert effects == [m.Pause()]
    generated = tuple(range(45))
    migration, effects = play(migration, m.Paused(generated), now=2.0)
    assert pushes(effects) == [m.Push(6, 1)]
    tokens = tuple(Token(token_id) for token_id in generated)
    assert questions(effects) == [Commit("r", "r@d1", 3, HERE, THERE, 60, "layers=1", tokens)]
    migration, effects = play(migration, m.PushDone(), m.CommitAnswered(Committed("r")), now=2.5)
    assert effects[0] == m.Leave()
    assert m.Resume() not in effects
    [answer] = replies(effects)
    assert isinstance(answer, Migrated)
    assert (answer.report.stages, answer.report.kv_blocks, answer.report.tail_blocks) == (2, 6, 1)
    assert (answer.report.kv_bytes, answer.report.pause_s, answer.report.copy_s) == (6 * 1024, 0.5, 1.0)
    assert migration.stage is Stage.ENDING
    assert play(migration, m.Quiet())[0].stage is Stage.CLOSED


def test_little_to_send_is_sent_in_the_pause_alone() -> None:
    _, effects = play(asked(), m.Granted(replace(GRANT, held_tokens=48, num_spans=6)))
    assert effects == [m.Pause()]


def test_a_sequence_that_outruns_the_copy_pauses_when_its_room_is_full() -> None:
    tight = replace(GRANT, num_spans=5)
    migration, effects = play(asked(), m.Granted(tight), m.Stepped(95))
    assert effects == [m.Push(1, 3)]
    migration, effects = play(migration, m.Stepped(96))
    assert effects == [m.Pause()]
    _, effects = play(migration, m.Paused(tuple(range(37))))
    assert pushes(effects) == [m.Push(4, 2)]


def test_a_destination_with_larger_blocks_is_filled_in_pieces_of_ours() -> None:
    rows = INFO.kv_heads * INFO.layers * 2
    wide = replace(GRANT, block_size=32, held_tokens=32, num_spans=4 * rows)
    _, effects = play(asked(), m.Granted(wide), m.Stepped(96))
    assert effects == [m.Push(2, 2), m.Pause()], "six pieces of 16 tokens have room, the 97th token has none"


def test_there_is_a_last_stage() -> None:
    _, effects = play(asked(MoveLimits(max_stages=1)), m.Granted(GRANT), m.Stepped(112), m.PushDone())
    assert effects == [m.Push(1, 3), m.Pause()]


def test_a_request_that_is_almost_done_asks_for_no_more_than_it_can_use() -> None:
    short = replace(FRESH, request=replace(REQUEST, sampling=SamplingParams(max_tokens=22)))
    [effect] = begin(short, SO_FAR)[1]
    assert isinstance(effect, m.AskDestination)
    assert isinstance(effect.question, AskMove)
    assert effect.question.spare_tokens == 22 - len(SO_FAR)


@pytest.mark.parametrize("exit_", EXITS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("stage", LIVE)
def test_every_stage_has_every_exit(stage: Stage, exit_: m.Event) -> None:
    migration, effects = play(at(stage), exit_)
    [answer] = replies(effects)
    assert isinstance(answer, Declined)
    assert answer.code is EXITS[exit_]
    assert (m.Resume() in effects) is (stage is Stage.COMMITTING)
    leased = stage is not Stage.ASKING
    assert (m.Withdraw() in effects) is leased
    assert any(isinstance(question, DropLease) for question in questions(effects)) is leased
    assert migration.stage is Stage.ENDING
    migration, more = play(migration, m.Quiet() if leased else m.Granted(GRANT))
    assert any(isinstance(question, DropLease) for question in questions(more)) is not leased
    assert not replies(more)
    assert migration.stage is Stage.CLOSED


@pytest.mark.parametrize("stage", [Stage.COPYING, Stage.COMMITTING])
@pytest.mark.parametrize("failure", [m.PushFailed("checksum"), m.RenewalAnswered(STALE)], ids=str)
def test_a_failure_leaves_the_request_where_it_is(stage: Stage, failure: m.Event) -> None:
    _, effects = play(at(stage), failure)
    [answer] = replies(effects)
    assert isinstance(answer, Declined)
    assert (m.Resume() in effects) is (stage is Stage.COMMITTING)
    assert m.Leave() not in effects


@pytest.mark.parametrize("event", [*EXITS, m.Tick(), m.CommitAnswered(LOST), m.PushFailed("late")], ids=str)
@pytest.mark.parametrize("stage", [Stage.ENDING, Stage.CLOSED])
def test_nothing_happens_twice(stage: Stage, event: m.Event) -> None:
    assert play(at(stage), event, now=100.0)[1] == []


def test_no_room_over_there_costs_nothing() -> None:
    migration, effects = play(asked(), m.Denied(Declined(Code.NO_ROOM, "full")))
    assert effects == [m.Reply(Declined(Code.NO_ROOM, "full", by="d1"))]
    assert migration.stage is Stage.CLOSED


def test_while_commits_answer_is_unknown_it_stays_paused_but_no_longer_than_the_lease() -> None:
    migration, effects = play(at(Stage.COMMITTING), m.CommitAnswered(LOST), m.Tick())
    assert effects == []
    migration, effects = play(migration, m.Tick(), now=1.1)
    [commit] = questions(effects)
    assert isinstance(commit, Commit)
    migration, effects = play(migration, m.Tick(), m.CommitAnswered(LOST), now=1.2)
    assert effects == []
    _, effects = play(migration, m.Tick(), now=7.0)
    assert m.Resume() in effects
    assert any(isinstance(question, DropLease) for question in questions(effects))
    _, effects = play(migration, m.Tick(), m.CommitAnswered(Committed("r")), now=1.4)
    assert m.Leave() in effects


def test_a_declined_commit_is_not_asked_again() -> None:
    _, effects = play(at(Stage.COMMITTING), m.CommitAnswered(STALE))
    assert m.Resume() in effects
    assert [answer.code for answer in replies(effects) if isinstance(answer, Declined)] == [Code.STALE]


def test_the_lease_is_renewed_while_blocks_are_copied() -> None:
    migration, effects = play(at(Stage.COPYING), m.Tick(), now=2.0)
    assert effects == []
    migration, effects = play(migration, m.Tick(), now=3.1)
    assert questions(effects) == [RenewLease("r@d1", 3)]
    assert play(migration, m.Tick(), now=3.2)[1] == []
    migration, effects = play(migration, m.RenewalAnswered(LeaseRenewed(6.0)), m.Tick(), now=3.3)
    assert effects == []
    _, effects = play(migration, m.Tick(), now=9.4)
    assert [answer.code for answer in replies(effects) if isinstance(answer, Declined)] == [Code.UNAVAILABLE]


def test_an_illegal_transition_tells_the_story() -> None:
    with pytest.raises(IllegalTransition, match=r"(?s)move of r.*asking: Granted.*copying: Quiet"):
        play(asked(), m.Granted(GRANT), m.Quiet())
