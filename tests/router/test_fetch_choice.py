"""When a prefix is fetched from a peer, from whom, and when computing it is the better deal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.config import RoutingSection, TandemConfig
from cluster.policies import POLICIES
from cluster.router import place
from cluster.snapshot import FETCHED, PREFIX, Placement, RoutingKnobs, Snapshot, WorkerView
from engine.types import TierLoad
from tandem.messages import FetchCounters
from tests.router.worlds import cluster, keys, report, request, stored, worker

PROMPT = request(prompt=1600)
"""1.6 s to compute on a worker of this world; 100 blocks of 64 KiB, 6 ms on the wire."""


def world(
    *views: WorkerView, held: Mapping[str, int], links: Mapping[tuple[str, str], float] | None = None, **knobs: Any
) -> Snapshot:
    return Snapshot(
        prefill=tuple(view for view in views if view.info.role == "prefill"),
        decode=tuple(view for view in views if view.info.role == "decode"),
        overlaps=held,
        held=held,
        links=links or {},
        knobs=RoutingKnobs(**({"local_prefill": "never"} | knobs)),
    )


def placed(snapshot: Snapshot, policy: str = "sla", view: Any = PROMPT) -> Placement:
    decision = place(view, snapshot, 0.0, POLICIES[policy])
    assert isinstance(decision, Placement), decision
    return decision


def source(decision: Placement) -> str:
    return decision.fetch.source.name if decision.fetch else ""


BUSY = {"load_queued_prefill_tokens": 8000, "load_waiting": 4}
HOLDER, LACKS, DECODE = worker("prefill-0"), worker("prefill-1"), worker("decode-0")


def test_an_idle_holder_computes_itself() -> None:
    decision = placed(world(HOLDER, LACKS, DECODE, held={"prefill-0": 1600}))
    assert (decision.prefill, source(decision), decision.reason) == (HOLDER.info.ref, "", PREFIX)


def test_a_busy_holder_lends_to_an_idle_worker() -> None:
    decision = placed(world(worker("prefill-0", **BUSY), LACKS, DECODE, held={"prefill-0": 1600}))
    assert (decision.prefill, source(decision), decision.reason) == (LACKS.info.ref, "prefill-0", FETCHED)
    assert decision.fetch is not None
    assert decision.fetch.tokens == 1584, "full blocks, and one token at least is computed"
    assert decision.fetch.patience_s >= 1.5, "as long as computing would take"
    assert decision.estimates.ttft_s < 0.6, "the step that the holder is in, and what is left"
    assert "fetch=1584 tokens from prefill-0" in decision.explain()


@pytest.mark.parametrize("sizes", [(64, 16), (16, 64)])
def test_whole_blocks_of_both_ends_are_asked_for(sizes: tuple[int, int]) -> None:
    """Of a block that ends beyond the prompt the holder cannot be told the key."""
    holder, lacks = (
        replace(view, info=replace(view.info, block_size=size))
        for view, size in zip((worker("prefill-0", **BUSY), LACKS), sizes, strict=True)
    )
    decision = placed(world(holder, lacks, DECODE, held={"prefill-0": 1600}))
    assert decision.fetch is not None
    assert (decision.fetch.tokens, decision.fetch.block_size) == (1536, sizes[0])


def test_a_prefix_in_a_lower_tier_draws_the_request_and_is_not_lent() -> None:
    router = cluster(prefill=2)
    prompt = request(prompt=1600, prefix_keys=keys(*range(100)))
    router.report(report("prefill-1", 2, tiers=(TierLoad("disk", loaded_bytes=1 << 30, load_seconds=1.0),)), 0.0)
    router.kv_events(replace(stored("prefill-1", 1, *prompt.prefix_keys), tier="disk"))
    seen = router.snapshot(prompt, frozenset(), 0.0)
    assert (seen.overlaps, seen.held) == ({"prefill-1": 1600}, {})
    assert seen.loads["prefill-1"] == pytest.approx(100 * (1 << 16) / (1 << 30))
    decision = placed(seen, view=prompt)
    assert decision.prefill is not None
    assert (decision.prefill.name, source(decision)) == ("prefill-1", "")
    assert seen.loads["prefill-1"] < decision.estimates.prefill_s < 0.1
    slow = placed(replace(seen, loads={"prefill-1": 60.0}), view=prompt)
    assert slow.estimates.prefill_s < 2.0, "it would be computed"
    without = placed(replace(seen, excluded=frozenset({"prefill-1"})), view=prompt)
    assert without.fetch is None


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_whoever_is_excluded_may_still_lend(policy: str) -> None:
    excluded = replace(world(HOLDER, LACKS, DECODE, held={"prefill-0": 1600}), excluded=frozenset({"prefill-0"}))
    decision = placed(excluded, policy)
    assert (decision.prefill, source(decision)) == (LACKS.info.ref, "prefill-0")


def test_the_next_turn_of_a_chat_comes_from_the_decode_worker() -> None:
    decision = placed(world(LACKS, DECODE, held={"decode-0": 1200, "prefill-1": 400}))
    assert (source(decision), decision.prefill_overlap_tokens) == ("decode-0", 400)
    assert decision.fetch is not None
    assert decision.fetch.tokens == decision.ready_tokens == 1200


def test_local_prefill_fetches_too() -> None:
    decision = placed(
        world(DECODE, worker("decode-1", load_waiting=2000), held={"decode-1": 1600}, local_prefill="always")
    )
    assert (decision.prefill, decision.decode, source(decision)) == (None, DECODE.info.ref, "decode-1")


@pytest.mark.parametrize(
    "why_not",
    [
        {"links": {("prefill-0", "prefill-1"): 2.0**20}},
        {"fetch": "never"},
        {"fetch_gain": 100.0},
        {"handover_s": 2.0},
    ],
    ids=["slow link", "never", "a hundredfold gain wanted", "slow control"],
)
def test_it_computes_where_fetching_is_no_gain(why_not: dict[str, Any]) -> None:
    busy = worker("prefill-0", **BUSY)
    decision = placed(world(busy, LACKS, DECODE, held={"prefill-0": 1600}, **why_not))
    assert (decision.prefill, source(decision)) == (LACKS.info.ref, "")


@pytest.mark.parametrize(
    "state",
    [{"transfers_in_flight": 17}, {"healthy": False}, {"transfers_in_flight": 15, "links": 2.0**25}],
    ids=["moves too much", "silent", "shares a slow link"],
)
def test_an_overloaded_or_silent_source_is_not_asked(state: dict[str, Any]) -> None:
    rate = state.pop("links", 2.0**30)
    busy = worker("prefill-0", **BUSY, **state)
    links = {("prefill-0", "prefill-1"): rate}
    decision = placed(world(busy, LACKS, DECODE, held={"prefill-0": 1600}, links=links))
    assert (decision.prefill, source(decision)) == (LACKS.info.ref, "")


def test_of_two_holders_the_idler_one_is_asked() -> None:
    views = (worker("prefill-0", **BUSY), LACKS, worker("prefill-2", transfers_in_flight=2, **BUSY), DECODE)
    held = {"prefill-0": 1600, "prefill-2": 1600}
    assert source(placed(world(*views, held=held))) == "prefill-0"


def test_a_nearer_shorter_prefix_may_beat_a_longer_one_behind_a_slow_link() -> None:
    views = (worker("prefill-0", **BUSY), LACKS, worker("prefill-2", **BUSY), DECODE)
    links = {("prefill-0", "prefill-1"): 4e6}
    decision = placed(world(*views, held={"prefill-0": 1600, "prefill-2": 1200}, links=links))
    assert (source(decision), decision.ready_tokens) == ("prefill-2", 1200)


def test_a_few_tokens_more_are_not_worth_a_fetch() -> None:
    decision = placed(world(LACKS, DECODE, held={"decode-0": 415, "prefill-1": 400}))
    assert decision.fetch is None
    decision = placed(world(LACKS, DECODE, held={"prefill-1": 1600}))
    assert decision.fetch is None, "nobody fetches from itself"


REMOTE = TandemConfig(routing=RoutingSection(local_prefill="never"))


def test_the_router_learns_what_a_pair_achieves_and_forgets_it() -> None:
    router = cluster(prefill=2, decode=1, config=REMOTE)
    prompt = keys(*range(100))
    router.kv_events(stored("prefill-0", 1, *prompt))
    view = request(prompt=1600, prefix_keys=prompt)
    exclude = frozenset({"prefill-0"})
    assert source(router.place(view, exclude, 0.1)) == "prefill-0"  # type: ignore[arg-type]
    router.finished("r")
    slow = FetchCounters("prefill-0", fetches=1, blocks=100, kv_bytes=100 << 16, seconds=10.0)
    assert router.report(replace(report("prefill-1", 2), fetches=(slow,)), 0.2)
    assert source(router.place(view, exclude, 0.3)) == ""  # type: ignore[arg-type]
    router.finished("r")
    assert router.report(replace(report("prefill-1", 3), fetches=(slow,)), 80.0)
    assert router.report(report("decode-0", 3), 80.0)
    assert router.report(report("prefill-0", 3), 80.0)
    assert source(router.place(view, exclude, 80.1)) == "prefill-0"  # type: ignore[arg-type]
    router.check()


def test_what_is_fetched_does_not_count_as_queued_work() -> None:
    router = cluster(prefill=2, decode=1, config=REMOTE)
    prompt = keys(*range(100))
    router.kv_events(stored("prefill-0", 1, *prompt))
    router.place(request(prompt=1600, prefix_keys=prompt), frozenset({"prefill-0"}), 0.1)
    assert router.ledger.unseen("prefill-1").prefill_tokens == 16
    router.check()
