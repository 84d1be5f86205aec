"""A running request moves between two decode workers: the same tokens, told once each, whatever fails on the way."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cluster.worker import Worker
from decode_node.migration import Stage
from engine.types import FinishReason, Request
from kvtransfer.faults import Fault
from tandem.messages import (
    Abort,
    AskMove,
    Code,
    Commit,
    Declined,
    DropLease,
    Follow,
    Migrate,
    Migrated,
    RenewLease,
    SetDraining,
)
from tests.nodes.ledger_model import ledger_engine
from tests.nodes.pair import Net, declined, prompt, request, single

MOVES = (AskMove, Commit, RenewLease, DropLease)


@pytest.fixture
def net() -> Net:
    net = Net()
    net.add("p0", "prefill", ledger_engine(num_blocks=96))
    net.add("d0", "decode", ledger_engine(num_blocks=96))
    net.add("d1", "decode", ledger_engine(num_blocks=96))
    return net


def started(net: Net, req: Request, tokens: int = 1) -> None:
    """The request decodes on d0 and has told so many tokens."""
    net.start(req, "p0", "d0")
    net.until(lambda: len(net.told[req.request_id].tokens) >= tokens)


def move(net: Net, request_id: str, source: str = "d0", to: str = "d1") -> int:
    return net.ask(source, Migrate(request_id, net.workers[to].info.ref))


def stage_is(net: Net, stage: Stage) -> Callable[[], bool]:
    def holds() -> bool:
        moves = net.workers["d0"].decode._mover._unanswered.values()
        return any(one.migration.stage is stage for one in moves)

    return holds


def migrated(answer: object) -> Migrated:
    assert isinstance(answer, Migrated), answer
    return answer


@pytest.mark.parametrize("seed", range(8))
def test_at_any_moment_a_move_changes_no_token(net: Net, seed: int) -> None:
    chance = random.Random(seed)
    sampling = (
        {"temperature": 0.8, "seed": seed, "presence_penalty": 0.5, "repetition_penalty": 1.2} if seed % 2 else {}
    )
    req = request("r", prompt(chance.randrange(3, 200)), max_tokens=90, min_tokens=40, ignore_eos=True, **sampling)
    started(net, req, chance.randrange(1, 60))
    first = move(net, "r")
    net.until(lambda: first in net.answers)
    migrated(net.answers[first])
    net.until(lambda: len(net.told["r"].tokens) >= chance.randrange(60, 70))
    back = move(net, "r", "d1", "d0")
    net.run()
    migrated(net.answers[back])
    assert net.told["r"].tokens == single(req)
    assert net.told["r"].finish is FinishReason.LENGTH
    assert net.moves == [("r", "d1"), ("r", "d0")]
    net.check()


def test_neither_a_first_token_nor_the_word_of_a_move_waits_for_a_step(net: Net) -> None:
    def watched(worker: Worker, tick: Callable[[float], None]) -> Callable[[float], None]:
        def checked(now: float) -> None:
            assert not worker.decode.take_frames(), "the gateway could know this before the step"
            tick(now)

        return checked

    for name in ("d0", "d1"):
        worker = net.workers[name]
        worker.tick = watched(worker, worker.tick)  # type: ignore[method-assign]
    started(net, request("r", prompt(40), max_tokens=20))
    moving = move(net, "r")
    net.run()
    migrated(net.answers[moving])
    assert net.moves == [("r", "d1")]


def test_both_ends_let_a_step_wait_for_the_tail_of_a_move_and_for_no_other_bytes(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: dict[str, list[tuple[str, Stage]]] = {"d0": [], "d1": []}

    def watched(name: str, look: Callable[[str, float], bool]) -> Callable[[str, float], bool]:
        def noted(scheme: str, until_s: float) -> bool:
            (stage,) = (one.migration.stage for one in net.workers["d0"].decode._mover._unanswered.values())
            looked[name].append((scheme, stage))
            return look(scheme, until_s)

        return noted

    for name in looked:
        transfers = net.workers[name].transfers
        monkeypatch.setattr(transfers, "look", watched(name, transfers.look))
    started(net, request("r", prompt(300), max_tokens=60), 4)
    net.workers["d0"].transfers.faults.add(Fault.DELAY, 2, delay_s=0.02)
    moving = move(net, "r")
    net.run()
    migrated(net.answers[moving])
    for name, looks in looked.items():
        assert set(looks) == {("inproc", Stage.COMMITTING)}, name
    net.check()


def test_a_tail_that_never_comes_costs_few_steps_a_wait(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    worker = net.workers["d1"]
    monkeypatch.setattr(worker.decode, "arrives_by", lambda: "inproc")
    monkeypatch.setattr(worker.transfers, "look", lambda scheme, until_s: bool(looks.append(scheme)))
    for _ in range(100):
        worker.prepare(net.now)
    assert len(looks) == 6, "at the steps 1, 3, 7, 15, 31 and 63"


def test_it_goes_on_decoding_while_its_blocks_are_copied(net: Net) -> None:
    req = request("r", prompt(300), max_tokens=60)
    started(net, req, 4)
    net.workers["d0"].transfers.faults.add(Fault.DELAY, delay_s=0.02)
    moving = move(net, "r")
    net.until(stage_is(net, Stage.COPYING))
    before = len(net.told["r"].tokens)
    net.until(lambda: moving in net.answers)
    assert len(net.told["r"].tokens) >= before + 15
    net.run()
    report = migrated(net.answers[moving]).report
    assert report.stages >= 1
    assert report.tail_blocks <= 2
    assert report.kv_blocks > 18
    assert net.told["r"].tokens == single(req)
    net.check()


def test_a_copy_slower_than_decoding_pauses_when_the_room_is_full(net: Net) -> None:
    req = request("r", prompt(300), max_tokens=200)
    started(net, req, 4)
    net.workers["d0"].transfers.faults.add(Fault.DELAY, delay_s=0.15)
    moving = move(net, "r")
    net.until(stage_is(net, Stage.COMMITTING))
    told = len(net.told["r"].tokens)
    net.run()
    assert told < 4 + 6 * 16
    migrated(net.answers[moving])
    assert net.told["r"].tokens == single(req)
    net.check()


def test_what_the_destination_holds_is_not_sent(net: Net) -> None:
    req = request("r", prompt(160), max_tokens=60)
    net.start(request("before", req.token_ids, max_tokens=4), "p0", "d1")
    net.run()
    started(net, req, 4)
    moving = move(net, "r")
    net.run()
    assert migrated(net.answers[moving]).report.kv_blocks <= 2
    assert net.told["r"].tokens == single(req)
    net.check()


def test_four_at_once_and_new_requests_meanwhile(net: Net) -> None:
    reqs = [request(f"r{i}", prompt(50 + 40 * i, i), max_tokens=80) for i in range(4)]
    for req in reqs:
        started(net, req)
    answers = [move(net, req.request_id) for req in reqs]
    late = [request(f"s{i}", prompt(60, 10 + i), max_tokens=20) for i in range(3)]
    for req in late:
        net.start(req, "p0", "d1")
    net.run()
    for ask_id in answers:
        migrated(net.answers[ask_id])
    for req in (*reqs, *late):
        assert net.told[req.request_id].tokens == single(req)
    counted = net.workers["d0"].decode.migrations
    assert (counted.moved, counted.failed) == (4, 0)
    net.check()


# -- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MOVES, ids=lambda kind: kind.__name__)
def test_a_lost_answer_changes_no_token(net: Net, kind: type) -> None:
    req = request("r", prompt(200), max_tokens=120)
    started(net, req, 3)
    net.lost_answers.append(kind)
    moving = move(net, "r")
    net.until(lambda: moving in net.answers)
    assert isinstance(net.answers[moving], Migrated) is (kind is not AskMove)
    net.run(turns=400, dt=0.05)
    assert net.told["r"].tokens == single(req)
    net.check()


@pytest.mark.parametrize("max_tokens", [40, 250])
def test_a_commit_whose_answers_are_all_lost_is_taken_back_and_nobody_hears_the_other(
    net: Net, max_tokens: int
) -> None:
    req = request("r", prompt(100), max_tokens=max_tokens)
    started(net, req, 3)
    net.lost_answers.extend([Commit] * 200)
    moving = move(net, "r")
    net.until(stage_is(net, Stage.COMMITTING))
    told = len(net.told["r"].tokens)
    net.run(turns=400, dt=0.05)
    assert declined(net.answers[moving]).code is Code.UNAVAILABLE
    assert len(net.told["r"].tokens) > told
    assert net.told["r"].tokens == single(req)
    assert net.moves == []
    net.check()


@pytest.mark.parametrize("kind", [Fault.FAIL, Fault.CORRUPT, Fault.DROP], ids=str)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_push_leaves_it_where_it_is(net: Net, kind: Fault, nth: int) -> None:
    req = request("r", prompt(200), max_tokens=150)
    started(net, req, 3)
    net.workers["d1" if kind is Fault.CORRUPT else "d0"].transfers.faults.add(kind, nth)
    moving = move(net, "r")
    net.run(turns=600, dt=0.03)
    declined(net.answers[moving])
    assert net.told["r"].tokens == single(req)
    assert net.workers["d0"].decode.migrations.failed == 1
    net.check()


def test_a_push_that_nobody_acknowledges_costs_its_patience_and_the_request_decodes_on(net: Net) -> None:
    req = request("r", prompt(200), max_tokens=150)
    started(net, req, 3)
    net.workers["d0"].transfers.faults.add(Fault.DROP)
    patience_s, asked_s = net.workers["d0"].decode._mover._limits.push_patience_s, net.now
    moving = move(net, "r")
    while moving not in net.answers:
        net.turn(dt=0.1)
        assert net.now < asked_s + patience_s + 1
    assert "deadline passed" in declined(net.answers[moving]).message
    assert 30 < len(net.told["r"].tokens) < 150
    net.run(turns=200, dt=0.1)
    assert net.told["r"].tokens == single(req)
    net.check()


@pytest.mark.parametrize("stage", [Stage.ASKING, Stage.COPYING, Stage.COMMITTING])
@pytest.mark.parametrize(
    "how", ["abort", "deadline", "kill source", "kill destination", "freeze destination", "cut source"]
)
def test_whatever_ends_a_move_wherever_it_is_no_token_is_wrong_and_no_block_stays(
    net: Net, stage: Stage, how: str
) -> None:
    deadline = 103.0 if how == "deadline" else None
    req = request("r", prompt(300), max_tokens=300, deadline_s=deadline)
    started(net, req, 3)
    net.workers["d0"].transfers.faults.add(Fault.DELAY, nth=2 if stage is Stage.COMMITTING else 1, delay_s=4.0)
    if stage is Stage.ASKING:
        net.frozen.add("d1")
    moving = move(net, "r")
    net.until(stage_is(net, stage))
    match how:
        case "abort":
            net.abort("r")
        case "kill source" | "kill destination":
            net.kill("d0" if how == "kill source" else "d1")
        case "freeze destination":
            net.frozen.add("d1")
        case "cut source":
            net.workers["d0"].transfers.cut(net.workers["d1"].info.ref.peer)
    if how != "freeze destination":
        net.frozen.discard("d1")
    net.run(turns=600, dt=0.05)
    net.frozen.discard("d1")
    net.run(turns=400, dt=0.05)
    told = net.told["r"].tokens
    assert told == single(req)[: len(told)]
    if how in ("kill destination", "freeze destination", "cut source"):
        assert told == single(req)
        declined(net.answers[moving])
    elif how == "deadline":
        assert net.told["r"].finish is FinishReason.DEADLINE
    elif how == "abort":
        assert net.told["r"].finish is FinishReason.ABORT
    net.check()


@pytest.mark.parametrize("turns", [0, 2, 4, 8])
@pytest.mark.parametrize("how", ["abort", "kill destination", "kill source"])
def test_an_end_some_turns_after_the_question(net: Net, how: str, turns: int) -> None:
    req = request("r", prompt(120), max_tokens=60)
    started(net, req, 3)
    moving = move(net, "r")
    for _ in range(turns):
        net.turn()
    if how == "abort":
        net.abort("r")
    else:
        net.kill("d1" if how == "kill destination" else "d0")
    net.run(turns=400, dt=0.05)
    told = net.told["r"].tokens
    assert told == single(req)[: len(told)]
    if how == "kill destination" and not net.moves:
        assert told == single(req)
        declined(net.answers[moving])
    net.check()


def test_a_request_that_ends_during_the_copy_has_ended(net: Net) -> None:
    req = request("r", prompt(200), max_tokens=12)
    started(net, req, 3)
    net.workers["d0"].transfers.faults.add(Fault.DELAY, delay_s=0.5)
    moving = move(net, "r")
    net.run()
    assert declined(net.answers[moving]).code is Code.ABORTED
    assert net.told["r"].tokens == single(req)
    net.check()


def test_a_request_that_ends_over_there_before_anybody_asks_is_told_to_its_end(net: Net) -> None:
    req = request("r", prompt(100), max_tokens=40)
    started(net, req, 36)
    ask_id = move(net, "r")
    net.until(lambda: net.workers["d1"].engine.generated("r") is not None or ask_id in net.answers)
    net.frozen.add("d0")  # Commit's answer is there, and the word to the gateway is not
    for _ in range(30):
        net.turn()
    assert len(net.told["r"].tokens) < 40
    net.frozen.clear()
    net.run()
    assert net.told["r"].tokens == single(req)
    assert net.told["r"].finish is FinishReason.LENGTH
    net.check()


def test_a_preempted_request_stays(net: Net) -> None:
    net.add("d0", "decode", ledger_engine(num_blocks=28))
    first, second = request("a", prompt(120), max_tokens=150), request("b", prompt(120, 1), max_tokens=150)
    started(net, first)
    started(net, second)
    net.until(lambda: net.workers["d0"].engine.load(net.now).live_blocks >= 26)
    net.workers["d0"].transfers.faults.add(Fault.DELAY, delay_s=1.0)
    moving = move(net, "b")
    net.run(turns=3000)
    assert "preempted" in declined(net.answers[moving]).message
    for req in (first, second):
        assert net.told[req.request_id].tokens == single(req)
    net.check()


def test_a_request_that_cannot_be_adopted_is_an_error_and_no_other_text(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    req = request("r", prompt(100), max_tokens=60)
    started(net, req, 3)
    monkeypatch.setattr(net.workers["d1"].engine, "adopt", refuse_to_adopt)
    move(net, "r")
    net.run()
    error = net.told["r"].error
    assert error is not None
    assert (error.code, error.by) == (Code.MISMATCH, "d1")
    assert net.told["r"].tokens == single(req)[: len(net.told["r"].tokens)]
    net.check()


def refuse_to_adopt(request: Request, first: object) -> None:
    raise ValueError(f"{request.request_id} was leased for other tokens")


def test_no_room_over_there(net: Net) -> None:
    net.add("d1", "decode", ledger_engine(num_blocks=8))
    req = request("r", prompt(100), max_tokens=60)
    started(net, req, 3)
    refused = move(net, "r")
    net.until(lambda: refused in net.answers)
    assert declined(net.answers[refused]).code in (Code.NO_ROOM, Code.INVALID)
    net.run()
    assert net.told["r"].tokens == single(req)
    net.check()


# -- questions that make no sense -------------------------------------------------------------------------------------


def test_what_does_not_run_here_does_not_move(net: Net) -> None:
    req = request("r", prompt(200), max_tokens=60)
    net.start(req, "p0", "d0")
    early = move(net, "r")
    unknown = move(net, "nobody")
    net.until(lambda: len(net.told["r"].tokens) > 2)
    to_itself = move(net, "r", to="d0")
    net.ask("d1", SetDraining(True))
    to_a_draining = move(net, "r")
    twice = move(net, "r")
    stranger = net.ask("d1", Follow("r", "g"))
    net.run()
    assert declined(net.answers[early]).code is Code.UNAVAILABLE
    assert declined(net.answers[unknown]).code is Code.UNAVAILABLE
    assert declined(net.answers[to_itself]).code is Code.INVALID
    assert "moving already" in declined(net.answers[twice]).message
    assert "draining" in declined(net.answers[to_a_draining]).message
    assert declined(net.answers[stranger]).code is Code.STALE
    assert net.told["r"].tokens == single(req)
    net.check()


def test_news_that_nobody_asks_for_are_dropped_with_the_request(net: Net) -> None:
    req = request("r", prompt(100), max_tokens=300)
    started(net, req, 3)
    deaf = net.workers["d1"]
    net._note = lambda delta: None  # type: ignore[method-assign]  # the gateway is gone
    moving = move(net, "r")
    net.until(lambda: moving in net.answers)
    migrated(net.answers[moving])
    assert deaf.engine.generated("r") is not None
    net.run(turns=400, dt=0.05)
    assert deaf.engine.generated("r") is None
    net.check()


def test_an_abort_reaches_it_where_it_is(net: Net) -> None:
    req = request("r", prompt(100), max_tokens=300)
    started(net, req, 3)
    moving = move(net, "r")
    net.until(lambda: moving in net.answers)
    net.ask("d1", Abort("r"))
    net.run()
    assert net.told["r"].finish is FinishReason.ABORT
    assert isinstance(net.answers[moving], Migrated)
    assert not any(isinstance(answer, Declined) for answer in net.answers.values())
    net.check()
