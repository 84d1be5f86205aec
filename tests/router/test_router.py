"""The router as a whole: registration, reports, placements and what they leave behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.config import RoutingSection, SlaClass, TandemConfig
from cluster.membership import Fence, GiveUp, Kill, Restart
from cluster.router import MUST_MATCH, RouterState
from cluster.snapshot import LOCAL_FASTER, PREFIX, Placement, Refusal, Tally
from engine.types import StepTimes
from tandem.messages import Code, HandoffReport, KvEvents, LinkRate, WorkerRef
from tests.router.worlds import TIMES, again, cluster, info, keys, load, report, request, stored

NOBODY: frozenset[str] = frozenset()
REMOTE = TandemConfig(routing=RoutingSection(local_prefill="never"))
PREFIX_KEYS = keys(*range(10))


@pytest.fixture
def router() -> Iterator[RouterState]:
    state = cluster(prefill=2, decode=2, config=REMOTE)
    yield state
    state.check()


def placed(router: RouterState, request_id: str, now: float = 1.0, **view: object) -> Placement:
    decision = router.place(request(request_id, **view), NOBODY, now)  # type: ignore[arg-type]
    assert isinstance(decision, Placement), decision
    router.check()
    return decision


def keep_alive(router: RouterState, names: list[str], number: int, now: float) -> None:
    for name in names:
        assert router.report(report(name, number), now)


# -- registration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", MUST_MATCH)
def test_a_worker_that_differs_is_refused_with_both_values(router: RouterState, field: str) -> None:
    mine = 4096 if field == "max_model_len" else "another"
    refusal = router.register(info("decode-9", **{field: mine}), 1.0)
    assert refusal is not None
    assert refusal.code is Code.MISMATCH
    assert field in refusal.message
    assert repr(mine) in refusal.message
    assert repr(getattr(info("prefill-0"), field)) in refusal.message
    assert "decode-9" not in [worker.ref.name for worker in router.workers()]


def test_block_sizes_may_differ_if_one_is_a_multiple_of_the_other(router: RouterState) -> None:
    assert router.register(info("decode-8", block_size=64), 1.0) is None
    refusal = router.register(info("decode-9", block_size=48), 1.0)
    assert refusal is not None
    assert (refusal.code, refusal.by) == (Code.MISMATCH, "decode-9")
    assert "block_size of decode-9 is 48" in refusal.message
    assert "multiple" in refusal.message


def test_a_worker_that_is_alone_may_come_back_with_another_model() -> None:
    router = RouterState(REMOTE)
    assert router.register(info("decode-0"), 0.0) is None
    changed = again(info("decode-0", model_digest="d2"), "i2")
    assert router.register(changed, 1.0) is None
    assert router.workers() == (changed,)


def test_registering_again_changes_nothing(router: RouterState) -> None:
    placed(router, "r")
    promised = router.ledger.promised("decode-0")
    assert router.register(info("decode-0"), 2.0) is None
    assert router.ledger.promised("decode-0") == promised


def test_reports_of_strangers_old_incarnations_and_the_past_are_refused(router: RouterState) -> None:
    assert not router.report(report("decode-7", 1), 1.0)
    assert not router.report(report("decode-0", 1), 1.0)
    assert router.report(report("decode-0", 2), 1.0)
    assert router.register(again(info("decode-0"), "i2"), 2.0) is None
    assert not router.report(report("decode-0", 3), 2.1)
    assert not router.kv_events(stored("decode-0", 1, *PREFIX_KEYS))


# -- placements ---------------------------------------------------------------------------------------------------


def test_a_burst_between_two_reports_does_not_herd(router: RouterState) -> None:
    pairs = [placed(router, f"r{i}") for i in range(20)]
    assert Counter(pair.prefill.name for pair in pairs if pair.prefill) == {"prefill-0": 10, "prefill-1": 10}
    assert Counter(pair.decode.name for pair in pairs) == {"decode-0": 10, "decode-1": 10}


def test_what_was_promised_is_free_again_when_the_request_is_over(router: RouterState) -> None:
    decision = placed(router, "r", prefix_keys=PREFIX_KEYS)
    assert router.ledger.promised(decision.decode.name).requests == 1
    router.finished("r")
    router.finished("r")
    assert router.ledger.promised(decision.decode.name) == Tally()
    assert len(router.ledger) == 0


def test_a_prefix_that_is_being_computed_counts_as_held(router: RouterState) -> None:
    first = placed(router, "r1", prompt=1600, prefix_keys=keys(*range(100)))
    second = placed(router, "r2", prompt=1616, prefix_keys=keys(*range(101)))
    assert second.prefill == first.prefill
    assert second.reason == PREFIX
    assert second.prefill_overlap_tokens == 1600


def test_stored_prefixes_attract_and_removed_ones_do_not(router: RouterState) -> None:
    router.kv_events(stored("prefill-1", 1, *PREFIX_KEYS))
    assert placed(router, "r1", prefix_keys=PREFIX_KEYS).prefill_overlap_tokens == 160
    router.finished("r1")
    router.kv_events(KvEvents("prefill-1", "i1", 2, removed=PREFIX_KEYS))
    assert placed(router, "r2", prefix_keys=PREFIX_KEYS).prefill_overlap_tokens == 0


def test_a_lost_event_means_no_match_and_a_request_to_tell_again(router: RouterState) -> None:
    router.kv_events(stored("prefill-1", 1, *PREFIX_KEYS))
    router.kv_events(stored("prefill-1", 3))
    assert placed(router, "r", prefix_keys=PREFIX_KEYS).prefill_overlap_tokens == 0
    assert router.stale_indexes() == (info("prefill-1").ref,)


def test_a_worker_is_asked_to_tell_again_until_it_has_and_less_and_less_often(router: RouterState) -> None:
    ref = info("prefill-1").ref
    router.report(replace(report("prefill-1", 2), kv_events=7), 10.0)
    asked = [now for now in (10.0 + 0.25 * i for i in range(40)) if router.replays_due(now) == (ref,)]
    assert asked == [10.0, 10.5, 11.5, 13.5, 17.5]
    router.kv_events(KvEvents("prefill-1", "i1", 8, stored=PREFIX_KEYS, cleared=True))
    assert router.replays_due(60.0) == ()
    assert placed(router, "r", prefix_keys=PREFIX_KEYS).prefill_overlap_tokens == 160
    router.report(replace(report("prefill-1", 3), kv_events=10), 61.0)
    assert router.replays_due(61.0) == (ref,)


def test_a_worker_that_has_measured_nothing_yet_is_taken_to_be_like_its_pool(router: RouterState) -> None:
    router.report(report("prefill-0", 2, step_times=replace(TIMES, prefill=(0.0, 1e-5, 0.0))), 1.0)
    router.report(report("prefill-1", 2, step_times=StepTimes()), 1.0)
    pairs = [placed(router, f"r{i}") for i in range(10)]
    assert Counter(pair.prefill.name for pair in pairs if pair.prefill) == {"prefill-0": 5, "prefill-1": 5}
    router.report(report("prefill-1", 3, step_times=replace(TIMES, prefill=(1.0, 1.0, 0.0))), 1.0)
    assert {placed(router, f"s{i}").prefill for i in range(10)} == {info("prefill-0").ref}


def test_affinity_can_be_switched_off() -> None:
    config = TandemConfig(routing=RoutingSection(prefix_affinity=False))
    router = cluster(config=config)
    router.kv_events(stored("prefill-0", 1, *PREFIX_KEYS))
    assert placed(router, "r", prefix_keys=PREFIX_KEYS).prefill_overlap_tokens == 0


def test_different_salts_have_different_keys_and_never_match(router: RouterState) -> None:
    router.kv_events(stored("prefill-1", 1, *keys(*(f"a{i}" for i in range(10)))))
    same = placed(router, "r1", prefix_keys=keys(*(f"a{i}" for i in range(10))))
    other = placed(router, "r2", prefix_keys=keys(*(f"b{i}" for i in range(10))))
    assert (same.prefill_overlap_tokens, other.prefill_overlap_tokens) == (160, 0)


def test_the_second_turn_goes_to_the_decode_worker_that_wrote_the_first() -> None:
    router = cluster(prefill=2, decode=2)
    history = keys(*range(60))
    router.kv_events(stored("decode-1", 1, *history))
    decision = placed(router, "turn2", prompt=1000, prefix_keys=(*history, *keys("a", "b")))
    assert (decision.prefill, decision.decode.name, decision.reason) == (None, "decode-1", LOCAL_FASTER)


def test_a_measured_link_replaces_the_assumed_one(router: RouterState) -> None:
    decision = placed(router, "r1", prompt=1600)
    assert decision.prefill is not None
    router.finished("r1", HandoffReport(kv_bytes=100 << 20, transfer_s=1.0))
    snapshot = router.snapshot(request(), NOBODY, 1.0)
    assert snapshot.links == {(decision.prefill.name, decision.decode.name): float(100 << 20)}


@pytest.mark.parametrize(("best", "due"), [(1e9, False), (1e7, True)])
def test_a_pair_that_a_busy_moment_made_look_slow_is_measured_again(
    router: RouterState, best: float, due: bool
) -> None:
    rates = tuple(LinkRate(f"decode-{i}", "shm", best, best, 8e9) for i in range(2))
    for name in ("prefill-0", "prefill-1"):
        assert router.report(replace(report(name, 2), links=rates), 1.0)
    for name in ("decode-0", "decode-1"):
        assert router.report(report(name, 2), 1.0)
    turns = [router.probes_due(1.0) for _ in range(8)]
    pairs = {(pair.source.name, pair.destination.name) for turn in turns for pair in turn}
    assert bool(pairs & {(f"prefill-{i}", f"decode-{j}") for i in range(2) for j in range(2)}) is due


def test_a_pair_whose_source_has_lost_the_other_is_measured_again(router: RouterState) -> None:
    rates = tuple(LinkRate(f"decode-{i}", "shm", 1e9, 1e9, 8e9) for i in range(2))
    assert router.report(replace(report("prefill-0", 2), links=rates), 1.0)
    assert router.snapshot(request(), NOBODY, 1.0).links == {("prefill-0", f"decode-{i}"): 1e9 for i in range(2)}
    assert router.report(replace(report("prefill-0", 3), links=rates[:1]), 1.0)
    assert router.snapshot(request(), NOBODY, 1.0).links == {("prefill-0", "decode-0"): 1e9}
    for name in ("prefill-1", "decode-0", "decode-1"):
        assert router.report(report(name, 2), 1.0)
    due = {pair for _ in range(8) for pair in router.probes_due(1.0)}
    of_prefill_0 = {pair.destination.name for pair in due if pair.source.name == "prefill-0"}
    assert "decode-1" in of_prefill_0
    assert "decode-0" not in of_prefill_0


def test_a_burst_of_tiny_transfers_teaches_nothing(router: RouterState) -> None:
    placed(router, "r1")
    router.finished("r1", HandoffReport(kv_bytes=1000, transfer_s=0.01))
    assert router.snapshot(request(), NOBODY, 1.0).links == {}


def test_every_decision_is_counted_and_can_be_read(router: RouterState) -> None:
    placed(router, "r1")
    refusal = router.place(request("big", prompt=100_000), NOBODY, 1.0)
    assert isinstance(refusal, Refusal)
    assert router.placements == {"estimated fastest": 1, "invalid": 1}
    assert router.recent[0].startswith("r1: prefill=")
    assert "refused (invalid)" in router.recent[1]


def test_a_restarted_router_counts_what_is_running_after_one_report_of_each_worker() -> None:
    config = TandemConfig(classes={"default": SlaClass(), "fast": SlaClass(name="fast", itl_s=0.1)})
    router = RouterState(config)
    router.register(info("decode-0"), 0.0)
    router.report(replace(report("decode-0", 900, ("a", "b", "c")), load=load(running=3)), 0.5)
    assert router.ledger.promised("decode-0") == Tally(3, itl_s=0.1)
    router.report(report("decode-0", 901, ("c",)), 1.0)
    assert router.ledger.promised("decode-0").requests == 1
    router.check()


# -- dead, silent and draining workers ----------------------------------------------------------------------------


def test_after_the_first_failed_connection_nothing_is_sent_there(router: RouterState) -> None:
    router.suspect(info("decode-0").ref, "connection refused", 1.0)
    assert {placed(router, f"r{i}").decode.name for i in range(10)} == {"decode-1"}


def test_a_killed_worker_gets_no_request_and_its_promises_are_gone(router: RouterState) -> None:
    for i in range(4):
        placed(router, f"r{i}")
    router.lost(info("decode-0").ref, "killed by signal 9", 2.0)
    assert router.ledger.promised("decode-0") == Tally()
    assert placed(router, "next", 2.0).decode.name == "decode-1"
    assert any(isinstance(decision, Kill) for decision in router.tick(2.0))


def test_a_silent_worker_is_avoided_then_fenced_and_its_old_incarnation_refused(router: RouterState) -> None:
    others = ["prefill-0", "prefill-1", "decode-1"]
    keep_alive(router, others, 2, 3.0)
    assert router.tick(3.0) == ()
    assert {placed(router, f"r{i}", 3.0).decode.name for i in range(4)} == {"decode-1"}
    keep_alive(router, others, 3, 6.5)
    decisions = router.tick(6.5)
    assert Fence("decode-0", "i1", "silent for 6.5 s") in decisions
    assert Kill("decode-0", "i1") in decisions
    assert [worker.ref.name for worker in router.workers()] == others
    assert not router.report(report("decode-0", 2), 6.6)
    refusal = router.register(info("decode-0"), 6.7)
    assert refusal is not None
    assert refusal.code is Code.STALE


def test_traffic_returns_to_a_restarted_worker(router: RouterState) -> None:
    router.lost(info("decode-0").ref, "killed", 1.0)
    router.tick(1.0)
    assert Restart("decode-0", 2) in router.tick(2.0)
    assert router.register(again(info("decode-0"), "i2"), 2.5) is None
    assert "decode-0" in {placed(router, f"r{i}", 2.6).decode.name for i in range(4)}


def test_service_goes_on_when_every_worker_is_only_late(router: RouterState) -> None:
    router.tick(3.0)
    assert placed(router, "r", 3.0)


def test_service_goes_on_before_the_first_report() -> None:
    router = RouterState(REMOTE)
    router.register(info("prefill-0"), 0.0)
    router.register(info("decode-0"), 0.0)
    assert placed(router, "r", 0.1).decode.name == "decode-0"


def test_zero_workers_answer_at_once_with_unavailable() -> None:
    refusal = RouterState(REMOTE).place(request(), NOBODY, 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.UNAVAILABLE


def test_a_draining_worker_gets_nothing_new(router: RouterState) -> None:
    assert router.report(replace(report("decode-0", 2), draining=True), 1.0)
    assert {placed(router, f"r{i}").decode.name for i in range(4)} == {"decode-1"}


def test_a_worker_that_keeps_failing_to_start_is_given_up(router: RouterState) -> None:
    router.expect("decode-2", 0.0)
    decisions = []
    for now in (1.0, 10.0, 20.0):
        router.membership.exited("decode-2", "", "exit code 1", now)
        keep_alive(router, ["prefill-0", "prefill-1", "decode-0", "decode-1"], int(now) + 2, now)
        decisions += router.tick(now)
        keep_alive(router, ["prefill-0", "prefill-1", "decode-0", "decode-1"], int(now) + 3, now + 5)
        decisions += router.tick(now + 5)
    assert [decision for decision in decisions if isinstance(decision, GiveUp)] == [
        GiveUp("decode-2", "3 failed starts in a row, last: exit code 1")
    ]


def test_readiness_says_what_is_missing() -> None:
    router = RouterState(REMOTE)
    assert router.readiness() == (False, "no decode worker is ready (none has registered)")
    router.expect("decode-0", 0.0)
    assert "decode-0 is starting" in router.readiness()[1]
    router.register(info("decode-0"), 0.0)
    assert "no prefill worker" in router.readiness()[1]
    router.register(info("prefill-0"), 0.0)
    assert router.readiness() == (True, "ready")
    router.hold_back("decode-0")
    assert router.readiness() == (False, "no decode worker is ready (decode-0 is draining)")
    router.suspect(WorkerRef("decode-0", "i1", ""), "no answer", 1.0)
    ready, why = router.readiness()
    assert not ready
    assert "decode-0 is suspect: accused: no answer" in why


def test_a_removed_worker_is_forgotten(router: RouterState) -> None:
    router.kv_events(stored("decode-0", 1, *PREFIX_KEYS))
    router.remove("decode-0")
    assert "decode-0" not in [worker.ref.name for worker in router.workers()]
    assert router.index.match(PREFIX_KEYS) == {}


# -- cost ---------------------------------------------------------------------------------------------------------


def test_a_placement_among_64_workers_with_512_keys_takes_a_few_milliseconds() -> None:
    router = cluster(prefill=32, decode=32)
    prompt = keys(*range(512))
    for i in range(32):
        router.kv_events(stored(f"prefill-{i}", 1, *prompt[: 16 * i]))
        router.kv_events(stored(f"decode-{i}", 1, *prompt[: 8 * i]))
    spent = []
    for i in range(30):
        view = request(f"r{i}", prompt=8000, prefix_keys=prompt, max_tokens=100, itl_s=0.1)
        started = time.perf_counter()
        router.place(view, NOBODY, 1.0)
        spent.append(time.perf_counter() - started)
    assert sorted(spent)[len(spent) // 2] < 0.010, f"{sorted(spent)}"
