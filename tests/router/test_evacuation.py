"""Who leaves a draining worker and for where; the ledger follows a request that moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.config import RoutingSection, TandemConfig
from cluster.evacuation import AT_ONCE, REST_S, Evacuation, Move, Resident, evacuate
from cluster.ledger import Claim
from cluster.router import RouterState
from cluster.snapshot import Placement, WorkerView
from tandem.messages import Code, Declined, Migrated, MigrationReport
from tests.router.worlds import cluster, info, load, report, request

SOURCE = info("decode-9").ref


def resident(name: str, blocks: int = 4, siblings: int = 0) -> Resident:
    return Resident(name, SOURCE, Claim(worker="decode-9", decode=True, blocks=blocks, siblings=siblings))


def view(name: str, *, running: int = 0, live: int = 0, healthy: bool = True) -> WorkerView:
    return WorkerView(info=info(name), load=load(running=running, live_blocks=live), healthy=healthy)


def destinations(moves: tuple[Move, ...]) -> list[tuple[str, str]]:
    return [(move.request_id, move.to.name) for move in moves]


def test_each_goes_to_the_smallest_batch_that_has_room_a_few_at_a_time() -> None:
    views = (view("decode-0", running=1), view("decode-1"))
    residents = [resident(f"r{i}") for i in range(AT_ONCE + 2)]
    moves = evacuate(residents, views, Counter())
    assert destinations(moves) == [("r0", "decode-1"), ("r1", "decode-0")]
    assert "r0: moves from decode-9 to decode-1" in moves[0].explain()
    assert evacuate(residents, views, Counter({"decode-9": AT_ONCE})) == ()


def test_what_fits_nowhere_stays_and_what_follows_it_may_go() -> None:
    total = load().total_blocks
    views = (view("decode-0", live=total - 6),)
    moves = evacuate(
        [resident("big", blocks=7), resident("small", blocks=4), resident("late", blocks=4)], views, Counter()
    )
    assert destinations(moves) == [("small", "decode-0")]
    assert evacuate([resident("r")], (), Counter()) == ()
    assert evacuate([resident("r")], (view("decode-9"),), Counter()) == ()


def test_several_sequences_stay_and_a_late_worker_is_the_last_choice() -> None:
    views = (view("decode-0", healthy=False), view("decode-1", running=5))
    assert destinations(evacuate([resident("n", siblings=1), resident("r")], views, Counter())) == [("r", "decode-1")]


def test_no_seat_no_move() -> None:
    full = view("decode-0", running=info("decode-0").max_num_seqs)
    assert evacuate([resident("r")], (full,), Counter()) == ()


def test_a_move_is_asked_for_once_and_after_a_refusal_again_but_not_for_ever() -> None:
    evacuation, views = Evacuation(), (view("decode-0"),)
    residents = [resident("r")]
    [move] = evacuation.due(residents, views, 1.0)
    assert evacuation.due(residents, views, 1.1) == ()
    assert not evacuation.over(move, Declined(Code.NO_ROOM, "full"), 2.0)
    assert evacuation.due(residents, views, 2.0 + REST_S / 2) == ()
    [move] = evacuation.due(residents, views, 2.0 + REST_S)
    assert not evacuation.over(move, Declined(Code.INVALID, "never"), 4.0)
    assert evacuation.due(residents, views, 1e9) == ()
    assert evacuation.due([], views, 1e9) == ()
    assert len(evacuation.due(residents, views, 1e9)) == 1, "another request of that name"
    assert evacuation.over(move, Migrated("r", MigrationReport()), 5.0)


@pytest.fixture
def router() -> Iterator[RouterState]:
    state = cluster(decode=2, config=TandemConfig(routing=RoutingSection(local_prefill="never")))
    yield state
    state.check()


def running_at(router: RouterState, name: str) -> str:
    """A request that decodes on that worker, which then drains."""
    placement = router.place(request("r"), frozenset({"decode-0", "decode-1"} - {name}), 0.1)
    assert isinstance(placement, Placement)
    assert placement.decode.name == name
    assert router.report(replace(report(name, 2), request_ids=("r",), draining=True), 0.2)
    return name


def test_a_moving_request_has_a_place_on_both_sides_until_reports_say_where_it_is(router: RouterState) -> None:
    running_at(router, "decode-0")
    [move] = router.evacuations(0.3)
    assert (move.request_id, move.source.name, move.to.name) == ("r", "decode-0", "decode-1")
    assert router.evacuations(0.4) == ()
    here, there = router.ledger.promised("decode-0"), router.ledger.promised("decode-1")
    assert (there.blocks, there.prefill_tokens) == (here.blocks, 0)
    router.moved(move, Migrated("r", MigrationReport()), 0.5)
    assert router.report(replace(report("decode-1", 2), request_ids=("r",)), 0.6)
    assert router.report(replace(report("decode-0", 3), draining=True), 0.7)
    assert router.ledger.promised("decode-0").requests == 0
    assert router.ledger.promised("decode-1").requests == 1
    assert router.report(report("decode-1", 3), 0.8)
    assert router.ledger.promised("decode-1").requests == 0
    router.finished("r")


@pytest.mark.parametrize("seen", [True, False])
def test_a_request_that_stays_gives_its_other_place_back(router: RouterState, seen: bool) -> None:
    running_at(router, "decode-0")
    [move] = router.evacuations(0.3)
    if seen:
        assert router.report(replace(report("decode-1", 2), request_ids=("r",)), 0.4)
    router.moved(move, Declined(Code.UNAVAILABLE, "the copy failed"), 0.5)
    assert router.ledger.promised("decode-0").requests == 1
    assert router.ledger.promised("decode-1").requests == 0
    router.finished("r")
    assert router.ledger.promised("decode-0").requests == 0


def test_a_lost_destination_leaves_the_request_where_it_is(router: RouterState) -> None:
    running_at(router, "decode-0")
    router.evacuations(0.3)
    router.lost(info("decode-1").ref, "killed", 0.4)
    assert router.ledger.promised("decode-0").requests == 1
    router.lost(info("decode-0").ref, "killed", 0.5)
    assert len(router.ledger) == 0


def test_nothing_leaves_a_worker_that_does_not_drain(router: RouterState) -> None:
    router.place(request("r"), frozenset({"decode-1"}), 0.1)
    assert router.report(replace(report("decode-0", 2), request_ids=("r",)), 0.2)
    assert router.evacuations(0.3) == ()
