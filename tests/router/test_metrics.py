"""Metrics add up, stay bounded, and forget who is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config import SlaClass, TandemConfig
from cluster.membership import Health
from cluster.metrics import UNKNOWN, Metrics
from cluster.outcome import Outcome
from cluster.snapshot import FASTEST, REASONS
from engine.types import FinishReason, StepTimes, TierLoad
from tandem.messages import Code, FetchCounters, HandoffReport, LinkRate, TransferCounters
from tests.router.worlds import report

DOC = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
CONFIG = TandemConfig(
    classes={"default": SlaClass(), "chat": SlaClass(name="chat", ttft_s=1.0, itl_s=0.1)},
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CONFIG)


def samples(metrics: Metrics) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(metrics.expose().decode()):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def total(metrics: Metrics, name: str, **labels: str) -> float:
    return sum(value for found, has, value in samples(metrics) if found == name and labels.items() <= has.items())


def served(request_id: str = "r", sla_class: str = "chat", **more: object) -> Outcome:
    given: dict[str, object] = {
        "finish": FinishReason.LENGTH,
        "prompt_tokens": 32,
        "completion_tokens": 3,
        "prefill": "prefill-0",
        "decode": "decode-0",
        "placement_reason": FASTEST,
        "attempts": 1,
        "placed_s": 0.002,
        "ttft_s": 0.5,
        "itl_s": (0.02, 0.03),
        "e2e_s": 0.6,
        "report": HandoffReport(computed_tokens=32, kv_bytes=1000, transport="ucx", queue_s=0.1, transfer_s=0.2),
    }
    return Outcome(request_id=request_id, sla_class=sla_class, **{**given, **more})  # type: ignore[arg-type]


def failed(code: Code, **more: object) -> Outcome:
    return Outcome(request_id="r", sla_class="chat", code=code, e2e_s=1.0, **more)  # type: ignore[arg-type]


def test_received_is_success_plus_each_error_plus_aborted(metrics: Metrics) -> None:
    ends = (
        [lambda: metrics.observe_outcome(served())] * 20
        + [lambda: metrics.refused(Code.INVALID, "chat")] * 10
        + [lambda: metrics.observe_outcome(failed(Code.DEADLINE))] * 10
        + [lambda: metrics.observe_outcome(failed(Code.ABORTED, ttft_s=0.3))] * 20
    )
    for _ in ends:
        metrics.received("smollm2-135m", "chat")
    assert total(metrics, "tandem_requests_in_progress") == 60
    for end in ends:
        end()
    ended = {name: total(metrics, "tandem_requests_ended_total", outcome=name) for name in _OUTCOMES}
    assert ended == {"success": 20, "invalid": 10, "deadline": 10, "aborted": 20}
    assert total(metrics, "tandem_requests_received_total") == sum(ended.values())
    assert total(metrics, "tandem_requests_in_progress") == 0


_OUTCOMES = ("success", "invalid", "deadline", "aborted")


def test_each_histogram_counts_the_requests_that_reached_its_stage(metrics: Metrics) -> None:
    for outcome in (served(), served(), failed(Code.DEADLINE, placed_s=0.01), failed(Code.ABORTED, ttft_s=0.2)):
        metrics.received("smollm2-135m", "chat")
        metrics.observe_outcome(outcome)
    counts = {
        name: total(metrics, f"tandem_{name}_seconds_count")
        for name in ("e2e", "ttft", "itl", "placement", "prefill_queue", "handover_exposed")
    }
    assert counts == {"e2e": 4, "ttft": 3, "itl": 4, "placement": 3, "prefill_queue": 2, "handover_exposed": 2}


def test_promises_kept_and_broken_are_told_apart(metrics: Metrics) -> None:
    outcomes = (
        served(),
        served(ttft_s=1.5),
        served(itl_s=(0.02, 0.5)),
        failed(Code.DEADLINE),
        failed(Code.ABORTED),
        served(sla_class="default"),
    )
    for outcome in outcomes:
        metrics.observe_outcome(outcome)

    def counted(promise: str, kept: str) -> float:
        return total(metrics, "tandem_promises_total", promise=promise, kept=kept)

    assert (counted("ttft", "yes"), counted("ttft", "no")) == (2, 2)
    assert (counted("itl", "yes"), counted("itl", "no")) == (2, 1)


def test_transfers_and_placements_are_counted_by_their_kind(metrics: Metrics) -> None:
    metrics.observe_outcome(served(attempts=3))
    metrics.observe_outcome(served(report=HandoffReport(), prefill=""))
    assert total(metrics, "tandem_handovers_total", transport="ucx") == 1
    assert total(metrics, "tandem_handover_kv_bytes_total", transport="ucx") == 1000
    assert total(metrics, "tandem_placements_total", reason=FASTEST) == 2
    assert total(metrics, "tandem_placement_retries_total") == 2


def test_nothing_that_a_client_invents_becomes_a_label(metrics: Metrics) -> None:
    def meet(i: int) -> None:
        name = f"invented-{i}" * 1000
        metrics.received(name, name)
        metrics.observe_outcome(served(request_id=name, sla_class=name, placement_reason=name))
        metrics.received(name, name)
        metrics.refused(Code.NOT_FOUND, name)

    meet(0)
    before = len(list(samples(metrics)))
    for i in range(1, 200):
        meet(i)
    assert len(list(samples(metrics))) == before
    assert b"invented" not in metrics.expose()
    assert total(metrics, "tandem_requests_received_total", model=UNKNOWN, sla_class=UNKNOWN) == 400
    assert UNKNOWN not in REASONS


def test_workers_show_live_and_cached_blocks_apart(metrics: Metrics) -> None:
    metrics.observe_report("decode", report("decode-0", 1, live_blocks=3, cached_blocks=90, free_blocks=7, running=2))
    assert total(metrics, "tandem_worker_blocks", worker="decode-0", state="live") == 3
    assert total(metrics, "tandem_worker_blocks", worker="decode-0", state="cached") == 90
    assert total(metrics, "tandem_worker_running", worker="decode-0", role="decode") == 2


def test_preemptions_are_told_apart_and_swap_space_has_its_own_blocks(metrics: Metrics) -> None:
    times = StepTimes(prefill_error=0.03, decode_error=0.01)
    swaps = {"preemptions": 7, "swap_preemptions": 5, "swapped": 2, "swap_total_blocks": 64, "swap_used_blocks": 24}
    metrics.observe_report("decode", report("decode-0", 1, step_times=times, **swaps))
    assert total(metrics, "tandem_worker_preemptions_total", worker="decode-0", way="swap") == 5
    assert total(metrics, "tandem_worker_preemptions_total", worker="decode-0", way="recompute") == 2
    assert total(metrics, "tandem_worker_preemptions_total", worker="decode-0") == 7
    assert total(metrics, "tandem_worker_swapped", worker="decode-0") == 2
    assert total(metrics, "tandem_worker_swap_blocks", worker="decode-0", state="used") == 24
    assert total(metrics, "tandem_worker_swap_blocks", worker="decode-0") == 64
    assert total(metrics, "tandem_worker_step_time_error", worker="decode-0", kind="prefill") == 0.03


def test_prefix_cache_and_transfers_of_a_worker_are_shown(metrics: Metrics) -> None:
    told = report("prefill-0", 1, prefix_queries=100, prefix_hits=40)
    metrics.observe_report("prefill", replace(told, transfers=(TransferCounters("ucx", 5, 500, 0.5, 0, 0, 1, 2),)))
    assert total(metrics, "tandem_worker_prefix_query_tokens_total", worker="prefill-0") == 100
    assert total(metrics, "tandem_worker_prefix_hit_tokens_total", worker="prefill-0") == 40
    assert total(metrics, "tandem_transfer_pushes_total", worker="prefill-0", scheme="ucx") == 5
    assert total(metrics, "tandem_transfer_push_bytes_total", worker="prefill-0") == 500
    assert total(metrics, "tandem_transfer_in_flight", worker="prefill-0") == 1
    assert total(metrics, "tandem_transfer_failed_total", worker="prefill-0") == 2


def test_a_worker_that_is_gone_leaves_no_series(metrics: Metrics) -> None:
    told = report("decode-0", 1, running=1)
    metrics.observe_report("decode", replace(told, transfers=(TransferCounters("tcp"),)))
    metrics.observe_health("decode-0", "decode", Health.ALIVE)
    assert b"decode-0" in metrics.expose()
    metrics.forget("decode-0")
    assert b"decode-0" not in metrics.expose()


def test_health_has_one_series_for_a_worker(metrics: Metrics) -> None:
    metrics.observe_health("decode-0", "decode", Health.ALIVE)
    metrics.observe_health("decode-0", "decode", Health.SUSPECT)
    found = [labels["state"] for name, labels, _ in samples(metrics) if name == "tandem_worker_health"]
    assert found == ["suspect"]


def test_every_name_is_ours_and_two_registries_do_not_meet(metrics: Metrics) -> None:
    other = Metrics(CONFIG)
    metrics.received("smollm2-135m", "chat")
    assert total(other, "tandem_requests_received_total") == 0
    assert all(name.startswith("tandem_") for name, _, _ in samples(metrics))


def test_the_docs_list_every_name_with_its_type_labels_and_meaning(metrics: Metrics) -> None:
    metrics.observe_health("decode-0", "decode", Health.ALIVE)
    told = report("decode-0", 1, tiers=(TierLoad("host"),))
    links, fetches = (LinkRate("prefill-0", "shm", 1.0, 2.0, 3.0),), (FetchCounters("prefill-0"),)
    metrics.observe_report("decode", replace(told, transfers=(TransferCounters("shm"),), links=links, fetches=fetches))
    metrics.received("smollm2-135m", "chat")
    metrics.observe_outcome(served(attempts=2, fetch="chosen"))
    exported = {}
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {key for sample in family.samples for key in sample.labels} - {"le"}
        exported[name] = (family.type, labels, family.documentation)
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.+) \|$", DOC.read_text(), re.MULTILINE)
    assert {name: (kind, set(re.findall(r"`(\w+)`", labels)), what) for name, kind, labels, what in rows} == exported
