"""Small worlds for router tests: workers, loads and requests with only what a claim is about spelled out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.config import TandemConfig
from cluster.router import RouterState
from cluster.snapshot import RequestView, WorkerView
from engine.types import EngineLoad, StepTimes
from tandem.messages import KvEvents, LoadReport, WorkerInfo, WorkerRef

TIMES = StepTimes((0.005, 0.001, 0.0), (0.02, 0.001, 0.0), prefill_error=0.0, decode_error=0.0, samples=100)
"""1 ms for a prompt token, 20 ms + 1 ms for each sequence of a decode step."""


def info(name: str, **changes: Any) -> WorkerInfo:
    """A worker whose role is in its name, `prefill-0`."""
    base = WorkerInfo(
        ref=WorkerRef(name, "i1", f"{name}:1"),
        role=name.split("-")[0],
        model="toy",
        model_digest="d1",
        layout="layers=2",
        numerics="fp32",
        max_model_len=8192,
        vocab_size=512,
        block_bytes=1 << 16,
        total_blocks=1000,
        max_num_seqs=64,
        block_size=16,
        kv_heads=2,
        layers=2,
    )
    return replace(base, **changes)


def again(worker: WorkerInfo, incarnation: str) -> WorkerInfo:
    return replace(worker, ref=replace(worker.ref, incarnation=incarnation))


def load(**changes: Any) -> EngineLoad:
    base = EngineLoad(
        total_blocks=1000,
        free_blocks=1000,
        live_blocks=0,
        cached_blocks=0,
        block_size=16,
        running=0,
        waiting=0,
        leased_blocks=0,
        queued_prefill_tokens=0,
        running_context_tokens=0,
        preemptions=0,
        prefix_queries=0,
        prefix_hits=0,
        prompt_tokens=0,
        generated_tokens=0,
        step_times=TIMES,
    )
    return replace(base, **changes)


def worker(name: str, *, blocks: int = 1000, **changes: Any) -> WorkerView:
    """A view; `load_...` arguments go to its load."""
    loads = {key.removeprefix("load_"): changes.pop(key) for key in list(changes) if key.startswith("load_")}
    return WorkerView(info=info(name, total_blocks=blocks), load=load(total_blocks=blocks, **loads), **changes)


def request(request_id: str = "r", *, prompt: int = 160, **changes: Any) -> RequestView:
    return RequestView(request_id=request_id, prompt_tokens=prompt, **changes)


def keys(*names: object) -> tuple[bytes, ...]:
    return tuple(str(name).encode().ljust(16, b".") for name in names)


def report(name: str, number: int, request_ids: tuple[str, ...] = (), **changes: Any) -> LoadReport:
    return LoadReport(name, "i1", number, load(**changes), request_ids)


def stored(name: str, number: int, *prefix: bytes) -> KvEvents:
    return KvEvents(name, "i1", number, stored=prefix)


def cluster(prefill: int = 1, decode: int = 1, config: TandemConfig | None = None) -> RouterState:
    """A router that has heard from all its workers at time 0."""
    router = RouterState(config or TandemConfig())
    for name in [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]:
        assert router.register(info(name), 0.0) is None
        assert router.report(report(name, 1), 0.0)
    return router
