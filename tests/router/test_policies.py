"""What each policy chooses, and what it says of it. Pure: a snapshot in, a decision out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.policies import POLICIES, estimates
from cluster.router import place
from cluster.snapshot import (
    AT_RISK,
    FASTEST,
    FULL,
    LOCAL_ALWAYS,
    LOCAL_FASTER,
    LOCAL_ONLY,
    PREFIX,
    REASONS,
    Placement,
    Refusal,
    RequestView,
    RoutingKnobs,
    Snapshot,
    Tally,
    WorkerView,
)
from tandem.messages import Code
from tests.router.worlds import request, worker

EVERY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))


def world(*views: WorkerView, overlaps: Mapping[str, int] | None = None, **knobs: Any) -> Snapshot:
    return Snapshot(
        prefill=tuple(view for view in views if view.info.role == "prefill"),
        decode=tuple(view for view in views if view.info.role == "decode"),
        overlaps=overlaps or {},
        knobs=RoutingKnobs(**knobs),
    )


def decide(view: RequestView, snapshot: Snapshot, policy: str = "sla") -> Placement | Refusal:
    return place(view, snapshot, 0.0, POLICIES[policy])


def placed(view: RequestView, snapshot: Snapshot, policy: str = "sla") -> Placement:
    decision = decide(view, snapshot, policy)
    assert isinstance(decision, Placement), decision
    assert decision.reason in REASONS
    return decision


def refused(view: RequestView, snapshot: Snapshot, policy: str = "sla") -> Refusal:
    decision = decide(view, snapshot, policy)
    assert isinstance(decision, Refusal), decision
    return decision


def names(decision: Placement) -> tuple[str, str]:
    return (decision.prefill.name if decision.prefill else "", decision.decode.name)


# -- all policies -------------------------------------------------------------------------------------------------


@EVERY_POLICY
def test_the_same_snapshot_gives_the_same_answer(policy: str) -> None:
    snapshot = world(*(worker(f"{role}-{i}") for role in ("prefill", "decode") for i in range(3)))
    assert len({decide(request(), snapshot, policy).explain() for _ in range(5)}) == 1


@EVERY_POLICY
def test_without_a_decode_worker_the_request_is_unavailable(policy: str) -> None:
    assert refused(request(), world(worker("prefill-0")), policy).code is Code.UNAVAILABLE
    assert refused(request(), world(), policy).code is Code.UNAVAILABLE


@EVERY_POLICY
def test_without_a_prefill_worker_decode_computes_the_prompt_if_it_may(policy: str) -> None:
    assert placed(request(), world(worker("decode-0")), policy).reason == LOCAL_ONLY
    assert refused(request(), world(worker("decode-0"), local_prefill="never"), policy).code is Code.UNAVAILABLE


@EVERY_POLICY
def test_a_request_that_no_pool_can_ever_hold_is_invalid_and_says_the_sizes(policy: str) -> None:
    snapshot = world(worker("prefill-0"), worker("decode-0", blocks=10), worker("decode-1", blocks=20))
    refusal = refused(request(prompt=300, max_tokens=50), snapshot, policy)
    assert refusal.code is Code.INVALID
    assert "350" in refusal.reason
    assert "320" in refusal.reason


@EVERY_POLICY
def test_a_request_goes_only_where_it_fits(policy: str) -> None:
    snapshot = world(worker("prefill-0"), worker("decode-0", blocks=10), worker("decode-1", blocks=30))
    assert placed(request(prompt=300, max_tokens=50), snapshot, policy).decode.name == "decode-1"


@EVERY_POLICY
def test_excluded_workers_are_not_chosen_and_when_all_are_nobody_is_there(policy: str) -> None:
    views = [worker(f"{role}-{i}") for role in ("prefill", "decode") for i in range(2)]
    some = replace(world(*views), excluded=frozenset({"prefill-0", "decode-1"}))
    assert names(placed(request(), replace(some, knobs=RoutingKnobs(local_prefill="never")), policy)) == (
        "prefill-1",
        "decode-0",
    )
    none = replace(some, excluded=frozenset({"decode-0", "decode-1"}))
    assert refused(request(), none, policy).code is Code.UNAVAILABLE


@EVERY_POLICY
def test_a_queue_at_its_bound_refuses(policy: str) -> None:
    full = world(worker("prefill-0", load_waiting=3), worker("decode-0"), max_waiting=3, local_prefill="never")
    refusal = refused(request(), full, policy)
    assert refusal.code is Code.NO_ROOM
    assert "bound is 3" in refusal.reason


@EVERY_POLICY
def test_a_late_worker_is_chosen_only_when_no_other_is_left(policy: str) -> None:
    late = worker("decode-0", healthy=False)
    assert placed(request(), world(worker("prefill-0"), late, worker("decode-1")), policy).decode.name == "decode-1"
    assert placed(request(), world(worker("prefill-0"), late), policy).decode.name == "decode-0"


@EVERY_POLICY
def test_local_prefill_by_config_uses_no_prefill_worker(policy: str) -> None:
    decision = placed(request(), world(worker("prefill-0"), worker("decode-0"), local_prefill="always"), policy)
    assert decision.prefill is None
    assert decision.reason == LOCAL_ALWAYS


@EVERY_POLICY
@pytest.mark.parametrize("prompt", [1, 16, 17])
def test_a_prompt_without_keys_is_placed_by_load_alone(policy: str, prompt: int) -> None:
    assert placed(request(prompt=prompt), world(worker("prefill-0"), worker("decode-0")), policy)


# -- the baselines ------------------------------------------------------------------------------------------------


def test_round_robin_takes_the_worker_chosen_longest_ago() -> None:
    snapshot = world(
        worker("prefill-0", last_placed=4),
        worker("prefill-1", last_placed=3, load_queued_prefill_tokens=9999),
        worker("decode-0", last_placed=2),
        worker("decode-1", last_placed=4),
    )
    assert names(placed(request(), snapshot, "round_robin")) == ("prefill-1", "decode-0")


def test_least_loaded_counts_reservations_that_no_report_shows_yet() -> None:
    snapshot = world(
        worker("prefill-0", unseen=Tally(1, 500)),
        worker("prefill-1", load_queued_prefill_tokens=400),
        worker("decode-0", load_running=3),
        worker("decode-1", promised=Tally(4)),
    )
    assert names(placed(request(), snapshot, "least_loaded")) == ("prefill-1", "decode-0")


# -- the policy by promises ---------------------------------------------------------------------------------------


def test_an_idle_cluster_uses_a_pair_and_keeps_decode_for_decoding() -> None:
    decision = placed(request(prompt=400), world(worker("prefill-0"), worker("decode-0")))
    assert names(decision) == ("prefill-0", "decode-0")
    assert decision.reason == FASTEST


def test_the_estimates_are_queue_prefill_transfer_and_joined_batch() -> None:
    busy = worker("prefill-0", load_queued_prefill_tokens=100, unseen=Tally(1, 100))
    decode = worker("decode-0", load_running=4)
    told = placed(request(prompt=160), world(busy, decode, local_prefill="never", handover_s=0.0)).estimates
    assert told.queue_s == pytest.approx(0.205)
    assert told.prefill_s == pytest.approx(0.165)
    assert told.transfer_s == pytest.approx(10 * (1 << 16) / (1 << 30))
    assert told.ttft_s == pytest.approx(told.queue_s + told.prefill_s + told.transfer_s)
    assert told.itl_s == pytest.approx(0.025)


def test_only_what_compute_cannot_hide_of_a_long_transfer_counts() -> None:
    snapshot = world(worker("prefill-0"), worker("decode-0"), local_prefill="never", handover_s=0.0)
    told = placed(request(prompt=1600), replace(snapshot, links={("prefill-0", "decode-0"): 1e7})).estimates
    assert told.transfer_s == pytest.approx(0.65536)
    assert told.ttft_s == pytest.approx(told.prefill_s + told.transfer_s / 4)


def test_a_prefix_held_by_prefill_wins_among_equals() -> None:
    views = [worker(f"prefill-{i}", last_placed=3 - i) for i in range(3)] + [worker("decode-0")]
    decision = placed(request(prompt=320), world(*views, overlaps={"prefill-0": 160}))
    assert names(decision) == ("prefill-0", "decode-0")
    assert decision.reason == PREFIX
    assert decision.prefill_overlap_tokens == 160


def test_a_prefix_does_not_win_against_a_longer_queue() -> None:
    hot = worker("prefill-0", load_queued_prefill_tokens=500)
    snapshot = world(hot, worker("prefill-1"), worker("decode-0"), overlaps={"prefill-0": 160})
    assert placed(request(prompt=320), snapshot).prefill == worker("prefill-1").info.ref


def test_the_second_turn_of_a_chat_is_computed_where_its_history_is() -> None:
    snapshot = world(
        worker("prefill-0"), worker("decode-0"), worker("decode-1", load_running=0), overlaps={"decode-1": 992}
    )
    decision = placed(request(prompt=1024), snapshot)
    assert names(decision) == ("", "decode-1")
    assert decision.reason == LOCAL_FASTER
    assert decision.decode_overlap_tokens == 992


def test_local_prefill_yields_to_running_neighbours_with_a_tight_promise() -> None:
    tight = worker("decode-0", load_running=10, promised=Tally(10, itl_s=0.031))
    decision = placed(request(prompt=1024), world(worker("prefill-0"), tight, overlaps={"decode-0": 992}))
    assert decision.prefill is not None


def test_local_prefill_pays_for_what_running_neighbours_lose() -> None:
    def where(running: int) -> str:
        busy = worker("prefill-0", load_queued_prefill_tokens=600)
        decode = worker("decode-0", load_running=running, load_running_context_tokens=100 * running)
        return names(placed(request(prompt=320), world(busy, decode)))[0]

    assert where(0) == ""
    assert where(8) == "prefill-0"


def test_local_prefill_is_slower_the_tighter_the_neighbours_promise() -> None:
    def local_ttft(promise_s: float) -> float:
        decode = worker("decode-0", load_running=4, promised=Tally(4, itl_s=promise_s))
        return placed(request(prompt=320), world(decode)).estimates.ttft_s

    assert local_ttft(0.5) < local_ttft(0.1) < local_ttft(0.05)


def test_decode_avoids_the_worker_where_a_promise_would_break() -> None:
    tight = worker("decode-0", load_running=9, promised=Tally(9, itl_s=0.0295))
    loose = worker("decode-1", load_running=12)
    decision = placed(request(), world(worker("prefill-0"), tight, loose, local_prefill="never"))
    assert decision.decode.name == "decode-1"


def test_decode_prefers_the_worker_that_keeps_the_requests_own_promise() -> None:
    views = [worker("prefill-0"), worker("decode-0", load_running=30), worker("decode-1", load_running=40)]
    kept = placed(request(itl_s=0.055), world(*views, local_prefill="never"))
    assert kept.decode.name == "decode-0"
    broken = placed(request(itl_s=0.01), world(*views, local_prefill="never"))
    assert broken.reason == AT_RISK
    assert "ITL" in broken.detail


def test_room_comes_first_and_reservations_count_in_it() -> None:
    promised = worker("decode-0", blocks=100, promised=Tally(2, blocks=95))
    filled = worker("decode-1", blocks=100, load_running=20, load_live_blocks=40)
    decision = placed(request(prompt=160), world(worker("prefill-0"), promised, filled, local_prefill="never"))
    assert decision.decode.name == "decode-1"


def test_cached_blocks_are_room() -> None:
    full_of_cache = worker("decode-0", blocks=100, load_cached_blocks=100, load_free_blocks=0)
    decision = placed(request(), world(worker("prefill-0"), full_of_cache))
    assert decision.reason == FASTEST


def test_when_every_decode_worker_is_full_the_request_waits_and_says_so() -> None:
    full = worker("decode-0", blocks=100, load_live_blocks=99)
    decision = placed(request(), world(worker("prefill-0"), full, local_prefill="never"))
    assert decision.reason == FULL
    assert "waits for KV room" in decision.explain()


def test_equal_workers_are_used_in_turn() -> None:
    views = [
        worker("prefill-0", last_placed=2),
        worker("prefill-1", last_placed=1),
        worker("decode-0", last_placed=1),
        worker("decode-1", last_placed=2),
    ]
    assert names(placed(request(), world(*views))) == ("prefill-1", "decode-0")


def test_a_decision_can_be_read_in_one_line() -> None:
    line = placed(request("req-7", prompt=320), world(worker("prefill-0"), worker("decode-0"))).explain()
    assert line.startswith("req-7: prefill=prefill-0 decode=decode-0 ttft=")
    assert "estimated fastest" in line
    assert "local prefill would cost" in line
    assert "\n" not in line


def test_a_placement_never_prints_prefix_keys() -> None:
    assert "secret" not in repr(request(prefix_keys=(b"secret",)))


def test_a_burst_on_stale_reports_spreads_over_all_workers() -> None:
    """Nothing but the tallies changes between the placements, as when no report comes in between."""
    counts = {f"{role}-{i}": Counter[str]() for role in ("prefill", "decode") for i in range(4)}
    turns = dict.fromkeys(counts, 0)
    for turn in range(1, 41):
        views = [
            worker(
                name,
                last_placed=turns[name],
                unseen=Tally(seen["requests"], seen["tokens"], seen["blocks"], seen["context"]),
            )
            for name, seen in counts.items()
        ]
        decision = placed(request(prompt=160), world(*views, local_prefill="never"))
        assert decision.prefill is not None
        turns[decision.prefill.name] = turns[decision.decode.name] = turn
        counts[decision.prefill.name].update(requests=1, tokens=160)
        counts[decision.decode.name].update(requests=1, blocks=11, context=160)
    assert {seen["requests"] for seen in counts.values()} == {10}


def test_a_request_of_several_sequences_weighs_as_much_as_they_do() -> None:
    """Forty free blocks hold the prompt and one answer of 256 tokens, but not four of them."""
    full = worker("decode-0", load_live_blocks=960)
    snapshot = world(worker("prefill-0"), full, worker("decode-1", promised=Tally(30, 0, 900, 4800)))
    one, four = request(max_tokens=500), request(max_tokens=500, sequences=4)
    assert (one.expected_tokens, four.expected_tokens) == (160 + 256, 160 + 4 * 256)
    assert estimates.lacks_room(four, full, snapshot)
    assert not estimates.lacks_room(one, full, snapshot)
    times = full.load.step_times
    assert estimates.joined_itl_s(four, full) == times.decode_s(full.batch + 4, full.context_tokens + 4 * 160)
    assert placed(four, snapshot).decode.name == "decode-1"
