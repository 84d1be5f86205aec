"""A promise counts from the moment it is made until it is over, once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.index import Slots
from cluster.ledger import Claim, Ledger
from cluster.snapshot import Tally
from tests.router.worlds import keys


def decode_claim(worker: str = "d", **more: object) -> Claim:
    return Claim(worker=worker, decode=True, blocks=10, context_tokens=100, **more)  # type: ignore[arg-type]


def prefill_claim(worker: str = "p", **more: object) -> Claim:
    return Claim(worker=worker, decode=False, prefill_tokens=100, blocks=7, **more)  # type: ignore[arg-type]


def ledger_with(*request_ids: str) -> Ledger:
    ledger = Ledger(Slots())
    for request_id in request_ids:
        ledger.place(request_id, [decode_claim(), prefill_claim(keys=keys(1, 2))], 0.0)
    return ledger


def test_a_placement_counts_at_once_on_both_workers() -> None:
    ledger = ledger_with("r1", "r2")
    assert ledger.unseen("p") == Tally(2, 200, 14, 0)
    assert ledger.unseen("d") == ledger.promised("d") == Tally(2, 0, 20, 200)
    ledger.check()


def test_each_sequence_of_a_request_counts_until_it_is_over() -> None:
    ledger = ledger_with("r1")
    ledger.place("r2", [decode_claim(siblings=3), prefill_claim()], 0.0)
    assert (ledger.promised("d").requests, ledger.promised("d").sequences) == (2, 5)
    ledger.check()
    ledger.finished("r2")
    assert ledger.promised("d").sequences == 1
    ledger.check()


def test_a_report_that_lists_the_request_takes_it_out_of_the_unseen_but_not_of_the_promised() -> None:
    ledger = ledger_with("r1", "r2")
    ledger.reported("d", ["r1"], decode=True, now=1.0)
    assert ledger.unseen("d").requests == 1
    assert ledger.promised("d").requests == 2
    ledger.check()


def test_a_report_from_before_the_request_arrived_changes_nothing() -> None:
    ledger = ledger_with("r1")
    ledger.reported("p", [], decode=False, now=1.0)
    assert ledger.unseen("p").requests == 1
    ledger.check()


def test_prefill_being_through_leaves_the_decode_side() -> None:
    ledger = ledger_with("r1")
    ledger.reported("p", ["r1"], decode=False, now=1.0)
    ledger.reported("d", ["r1"], decode=True, now=1.0)
    ledger.reported("p", [], decode=False, now=2.0)
    assert ledger.promised("p") == Tally()
    assert ledger.promised("d").requests == 1
    assert len(ledger.underway) == 0
    ledger.check()


def test_decode_being_through_ends_the_request_everywhere() -> None:
    ledger = ledger_with("r1")
    ledger.reported("d", ["r1"], decode=True, now=1.0)
    ledger.reported("d", [], decode=True, now=2.0)
    assert len(ledger) == 0
    assert ledger.promised("p") == Tally()
    ledger.check()


def test_finished_is_idempotent() -> None:
    ledger = ledger_with("r1")
    assert ledger.finished("r1")
    assert not ledger.finished("r1")
    assert ledger.unseen("d") == Tally()
    ledger.check()


def test_a_lost_decode_worker_ends_its_requests_and_a_lost_prefill_worker_only_its_side() -> None:
    ledger = ledger_with("r1")
    ledger.lost("p")
    assert ledger.promised("d").requests == 1
    ledger.lost("d")
    assert len(ledger) == 0
    ledger.check()


def test_the_tightest_promise_among_those_placed_is_known() -> None:
    ledger = Ledger(Slots())
    ledger.place("slow", [decode_claim(itl_s=0.5)], 0.0)
    ledger.place("fast", [decode_claim(itl_s=0.05)], 0.0)
    assert ledger.promised("d").itl_s == 0.05
    ledger.finished("fast")
    assert ledger.promised("d").itl_s == 0.5


def test_a_restarted_router_learns_what_is_running_from_one_report() -> None:
    ledger = Ledger(Slots(), adopted_itl_s=0.1)
    ledger.reported("d", ["old1", "old2"], decode=True, now=0.0)
    assert ledger.promised("d") == Tally(2, 0, 0, 0, 0.1)
    assert ledger.unseen("d") == Tally()
    ledger.reported("d", ["old2"], decode=True, now=1.0)
    assert "old1" not in ledger
    ledger.check()


def test_a_placement_that_no_worker_ever_shows_ends_by_itself() -> None:
    ledger = ledger_with("r1", "r2")
    ledger.reported("d", ["r2"], decode=True, now=1.0)
    assert ledger.sweep(29.0) == ()
    assert ledger.sweep(31.0) == ("r1",)
    assert "r2" in ledger
    ledger.check()


REQUESTS = [f"r{i}" for i in range(5)]
WORKERS = {"p0": False, "p1": False, "d0": True, "d1": True}


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Whatever the order of placements, reports, ends and losses, the sums are those of the entries."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Slots(), adopted_itl_s=0.1)
        self.now = 0.0

    @rule(request=st.sampled_from(REQUESTS), decode=st.sampled_from(["d0", "d1"]), prefill=st.sampled_from(["p0", ""]))
    def place(self, request: str, decode: str, prefill: str) -> None:
        claims = [decode_claim(decode, itl_s=0.2, keys=() if prefill else keys(1, 2))]
        self.ledger.place(request, claims + ([prefill_claim(prefill, keys=keys(1, 2, 3))] if prefill else []), self.now)

    @rule(worker=st.sampled_from(sorted(WORKERS)), listed=st.lists(st.sampled_from(REQUESTS), unique=True))
    def report(self, worker: str, listed: list[str]) -> None:
        self.ledger.reported(worker, listed, decode=WORKERS[worker], now=self.now)

    @rule(request=st.sampled_from(REQUESTS))
    def finish(self, request: str) -> None:
        self.ledger.finished(request)

    @rule(worker=st.sampled_from(sorted(WORKERS)))
    def lose(self, worker: str) -> None:
        self.ledger.lost(worker)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.sweep(self.now)

    @invariant()
    def sums_agree(self) -> None:
        self.ledger.check()

    def teardown(self) -> None:
        for request in REQUESTS:
            self.ledger.finished(request)
        assert len(self.ledger.underway) == 0
        assert all(self.ledger.promised(worker) == Tally() for worker in WORKERS)


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
