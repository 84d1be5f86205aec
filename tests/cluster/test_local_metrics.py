"""What `/metrics` shows of a whole cluster: every series moves, the sums agree, and at rest nothing is held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config import SlaClass, TandemConfig
from cluster.http_server import HttpSettings, build_app
from cluster.local import LocalCluster
from cluster.metrics import CONTENT_TYPE
from cluster.validate import Ask, RequestFailed
from engine.types import Request, SamplingParams
from tandem.messages import Code, FaultInjected, FaultKind, InjectFault
from tests.cluster.local_rig import config, ids, request, running


class Scrape:
    """One reading of `/metrics`."""

    def __init__(self, text: str, *, strict: bool = True) -> None:
        self._strict = strict
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over the series `tandem_<name>` with these labels; when strict there must be some."""
        found = [s for s in self._samples if s.name == f"tandem_{name}" and labels.items() <= s.labels.items()]
        assert found or not self._strict, f"no series tandem_{name} {labels}"
        return sum(sample.value for sample in found)

    def labels(self, name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in self._samples if sample.name == f"tandem_{name}"}


async def scraped(cluster: LocalCluster) -> Scrape:
    """Over HTTP, as Prometheus does."""
    app = build_app(cluster.gateway, HttpSettings(metrics=lambda: (cluster.metrics.expose(), CONTENT_TYPE)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tandem") as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    return Scrape(answer.text)


def shown(cluster: LocalCluster) -> Scrape:
    """As it is now, for conditions to wait for."""
    return Scrape(cluster.metrics.expose().decode(), strict=False)


async def reported(cluster: LocalCluster) -> None:
    """Wait until nobody does anything, and every worker's last report says how it is."""
    await cluster.settled()
    await cluster.until(lambda: not any(slot.worker._reports._changed() for slot in cluster.slots.values()))


def promising(settings: TandemConfig) -> TandemConfig:
    return replace(settings, classes={"default": SlaClass(ttft_s=5.0, itl_s=1.0, timeout_s=30.0)})


async def test_every_series_of_a_served_request_moves(toy: Path) -> None:
    long = request("b", 400, max_tokens=300, ignore_eos=True)
    async with running(toy, promising(config())) as cluster:
        await cluster.generate(request("a", 160))
        busy = asyncio.create_task(cluster.generate(long))
        await cluster.until(lambda: shown(cluster)("worker_blocks", worker="decode-0", state="live") > 25)
        during = await scraped(cluster)
        assert during("requests_in_progress") == during("worker_running", worker="decode-0") == 1
        await busy
        await cluster.generate(request("c", 160))
        await reported(cluster)
        assert shown(cluster)("worker_blocks", state="live") == 0
        after = await scraped(cluster)
        for name in ("ttft", "e2e", "placement", "prefill_queue"):
            assert after(f"{name}_seconds_count") == 3, name
        assert after("handover_exposed_seconds_count") == 2, "decode held all of the last prompt"
        assert after("itl_seconds_count") == 7 + 299 + 7
        assert after("requests_received_total") == after("requests_ended_total", outcome="success") == 3
        assert after("promises_total", kept="yes", promise="ttft") == 3
        assert after("tokens_total", kind="completion") == 316
        assert after("placements_total", reason="prefix held") >= 1
        assert after("placements_total") == 3
        assert after("worker_prefix_query_tokens_total", worker="prefill-0") == 160 + 400 + 160
        assert after("worker_prefix_hit_tokens_total", worker="prefill-0") >= 144
        assert after("worker_blocks", worker="prefill-0", state="cached") > 0
        assert after("worker_prompt_tokens_total", worker="prefill-0") > 0
        assert after("worker_generated_tokens_total", worker="decode-0") > 0


async def test_transfers_are_counted_on_both_sides_by_transport(toy: Path) -> None:
    async with running(toy, config()) as cluster:
        outcomes = [(await cluster.generate(request(f"r{i}", 100, salt=i)))[1] for i in range(3)]
        await reported(cluster)
        moved = sum(outcome.report.kv_bytes for outcome in outcomes)
        after = await scraped(cluster)
        assert after.labels("handovers_total", "transport") == {"inproc"}
        assert after("handovers_total", transport="inproc") == 3
        assert after("handover_kv_bytes_total", transport="inproc") == moved > 0
        sent = after("transfer_pushes_total", worker="prefill-0", scheme="inproc")
        assert sent == after("transfer_receives_total", worker="decode-0", scheme="inproc") > 0
        assert after("transfer_push_bytes_total", worker="prefill-0") == moved
        assert after("transfer_receive_bytes_total", worker="decode-0") == moved
        assert after("transfer_push_seconds_total", worker="prefill-0") > 0
        assert after("transfer_push_bytes_total", worker="decode-0") == 0
        assert after("transfer_in_flight") == after("transfer_failed_total") == 0


async def test_a_failed_transfer_is_counted(toy: Path) -> None:
    async with running(toy, config(2, 2)) as cluster:
        for name in cluster.slots:
            assert await cluster.ask(cluster.info(name).ref, InjectFault(FaultKind.FAIL)) == FaultInjected()
        await cluster.generate(request("r", 150))
        await reported(cluster)
        after = await scraped(cluster)
        assert after("transfer_failed_total") > 0
        assert after("transfer_in_flight") == after("worker_transfers_in_flight") == 0
        assert after("placement_retries_total") > 0


async def test_preemptions_and_queues_are_shown(toy: Path, alone: Callable[[Request], list[int]]) -> None:
    reqs = [request(f"r{i}", 60, salt=i, max_tokens=100, ignore_eos=True) for i in range(5)]
    async with running(toy, config(prefill=0, local="always", decode_blocks=20)) as cluster:
        tasks = [asyncio.create_task(cluster.generate(req)) for req in reqs]
        await cluster.until(lambda: shown(cluster)("worker_waiting", worker="decode-0") > 0)
        for req, (tokens, _) in zip(reqs, await asyncio.gather(*tasks), strict=True):
            assert ids(tokens) == alone(req)
        await cluster.until(lambda: shown(cluster)("worker_preemptions_total", worker="decode-0") > 0)
        assert (await scraped(cluster))("placements_total", reason="local prefill by config") == 5


async def test_a_dead_worker_leaves_no_series(toy: Path) -> None:
    async with running(toy, config(1, 2)) as cluster:
        await cluster.generate(request("r"))
        await cluster.until(lambda: "decode-1" in shown(cluster).labels("worker_blocks", "worker"))
        cluster.kill("decode-1")
        assert "decode-1" not in shown(cluster).labels("worker_blocks", "worker")


async def test_requests_that_end_in_every_way_add_up_and_leave_nothing(toy: Path) -> None:
    """Twenty complete; ten each are invalid, time out in the queue, leave in prefill, leave in decode."""
    async with running(toy, config()) as cluster:
        good = [request(f"good{i}", 40, salt=i) for i in range(20)]
        done = await asyncio.gather(*(cluster.generate(req) for req in good))
        assert {outcome.code for _, outcome in done} == {None}

        for _ in range(10):
            with pytest.raises(RequestFailed):
                await cluster.gateway.prepare(
                    Ask(prompts=((1, 2, 3),), sampling=SamplingParams(temperature=-1.0), max_tokens=4)
                )

        cluster.freeze("prefill-0")
        late = [replace(request(f"late{i}"), deadline_s=time.monotonic() + 0.3) for i in range(10)]
        timed_out = await asyncio.gather(*(cluster.generate(req) for req in late))
        assert {outcome.code for _, outcome in timed_out} == {Code.DEADLINE}
        cluster.thaw("prefill-0")
        await cluster.settled()

        prefill, decode = (cluster.slots[name].worker for name in ("prefill-0", "decode-0"))
        await _leave(cluster, "p", 600, lambda: bool(prefill.engine.load(0.0).queued_prefill_tokens))
        await _leave(
            cluster,
            "d",
            50,
            lambda: decode.engine.load(0.0).running_context_tokens >= 50 + 8,
            max_tokens=400,
            ignore_eos=True,
        )
        await reported(cluster)
        assert shown(cluster)("worker_blocks", state="live") == 0

        after = await scraped(cluster)
        assert after("requests_received_total") == 60
        ended = {name: after("requests_ended_total", outcome=name) for name in ("success", "invalid", "deadline")}
        assert ended == {"success": 20, "invalid": 10, "deadline": 10}
        assert after("requests_ended_total", outcome="aborted") == 20
        assert after("requests_ended_total") == 60
        for gauge in ("requests_in_progress", "worker_running", "worker_waiting", "worker_transfers_in_flight"):
            assert after(gauge) == 0, gauge
        assert after("transfer_in_flight") == after("worker_queued_prefill_tokens") == 0
        assert after("worker_blocks", state="leased") == 0
        assert after("worker_blocks", state="cached") > 0
        assert after("e2e_seconds_count") == 50
        assert after("ttft_seconds_count") == 20 + 10
        await cluster.generate(request("after", 900, salt=99, max_tokens=1))


async def _leave(cluster: LocalCluster, name: str, length: int, when: Callable[[], bool], **sampling: object) -> None:
    """Ten requests whose clients leave at the moment `when`; those in decode have all had a token by then."""
    for i in range(10):
        task = asyncio.create_task(cluster.generate(request(f"{name}{i}", length, salt=30 + i, **sampling)))
        await cluster.until(when)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await cluster.settled()
