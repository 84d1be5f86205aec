"""Affinity must not overload one worker: a small simulation of queues, in simulated time.

Prefill workers serve their queues one request at a time; requests keep coming at a fixed concurrency and share a system
prompt. Reports and KV events arrive after each completed request, as from real workers.
"""

from __future__ import annotations

import heapq
from collections import Counter

import pytest

from cluster.config import RoutingSection, TandemConfig
from cluster.router import RouterState
from cluster.snapshot import Placement
from tests.router.worlds import TIMES, cluster, keys, report, request, stored

SYSTEM = keys(*(f"system{i}" for i in range(10)))
WORKERS = [f"prefill-{i}" for i in range(3)]


class World:
    """Three prefill workers with queues, one roomy decode worker, and a clock."""

    def __init__(self, policy: str) -> None:
        routing = RoutingSection(policy=policy, local_prefill="never")
        self.router: RouterState = cluster(prefill=3, decode=1, config=TandemConfig(routing=routing))
        self.now = 1.0
        self.free_at = dict.fromkeys(WORKERS, self.now)
        self.held: dict[str, set[bytes]] = {name: set() for name in WORKERS}
        self.events = dict.fromkeys(WORKERS, 0)
        self.numbers = dict.fromkeys([*WORKERS, "decode-0"], 1)
        self.queues: dict[str, dict[str, int]] = {name: {} for name in [*WORKERS, "decode-0"]}
        self.served = Counter[str]()
        self.ttft_s: list[float] = []
        self.hits = 0

    def send(self, number: int, prompt: int) -> tuple[float, str, str, tuple[bytes, ...]]:
        """Place one request; the answer says when it will be through."""
        own = keys(*(f"{number}.{i}" for i in range(prompt // 16 - len(SYSTEM))))
        view = request(f"r{number}", prompt=prompt, prefix_keys=SYSTEM + own)
        decision = self.router.place(view, frozenset(), self.now)
        assert isinstance(decision, Placement)
        assert decision.prefill is not None
        name = decision.prefill.name
        held = next((i for i, key in enumerate(view.prefix_keys) if key not in self.held[name]), len(view.prefix_keys))
        self.hits += held > 0
        self.held[name].update(view.prefix_keys)
        begin = max(self.now, self.free_at[name])
        tokens = max(1, prompt - 16 * held)
        self.free_at[name] = begin + TIMES.prefill_s(tokens, 0)
        self.queues[name][view.request_id] = tokens
        self.served[name] += 1
        self.ttft_s.append(self.free_at[name] - self.now)
        return self.free_at[name], view.request_id, name, view.prefix_keys

    def complete(self, request_id: str, name: str, prefix: tuple[bytes, ...]) -> None:
        del self.queues[name][request_id]
        self.router.finished(request_id)
        self.events[name] += 1
        self.router.kv_events(stored(name, self.events[name], *prefix))
        for worker, queue in self.queues.items():
            self.numbers[worker] += 1
            load = {"queued_prefill_tokens": sum(queue.values()), "waiting": len(queue)}
            self.router.report(report(worker, self.numbers[worker], tuple(queue), **load), self.now)

    def run(self, prompts: list[int], concurrency: int) -> None:
        waiting = list(enumerate(prompts))
        running: list[tuple[float, str, str, tuple[bytes, ...]]] = []
        while waiting or running:
            while waiting and len(running) < concurrency:
                heapq.heappush(running, self.send(*waiting.pop(0)))
            self.now, *done = heapq.heappop(running)
            self.complete(*done)
        self.router.check()


def run(policy: str, prompts: list[int], concurrency: int = 12) -> World:
    world = World(policy)
    world.run(prompts, concurrency)
    return world


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


SHARED = [192] * 60
MIXED_LATER = [192] * 6 + [3200] + [192] * 53
MIXED = [3200, 3200, 3200] + [192] * 60


@pytest.mark.parametrize("prompts", [SHARED, MIXED], ids=["shared", "three-long-many-short"])
def test_no_worker_gets_most_of_the_requests_and_the_prefix_is_still_used(prompts: list[int]) -> None:
    world = run("sla", prompts)
    assert max(world.served.values()) <= 0.6 * len(prompts), world.served
    assert world.hits > 0.5 * len(prompts)


@pytest.mark.parametrize("prompts", [SHARED, MIXED], ids=["shared", "three-long-many-short"])
def test_affinity_is_no_slower_than_taking_turns(prompts: list[int]) -> None:
    assert p95(run("sla", prompts).ttft_s) <= p95(run("round_robin", prompts).ttft_s)


def test_short_requests_do_not_queue_behind_long_ones() -> None:
    assert p95(run("sla", MIXED_LATER).ttft_s) < 0.8 * p95(run("round_robin", MIXED_LATER).ttft_s)
