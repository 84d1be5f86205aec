"""What the SLA file says of an engine is what the workers' engines do, and what their metrics show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config_text import config_from_text
from cluster.local import LocalCluster
from engine.types import Request
from tests.cluster.local_rig import SOON, ids, request, running


def shown(cluster: LocalCluster, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(cluster.metrics.expose().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == f"tandem_{name}"]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


async def answered(
    toy: Path, text: str, alone: Callable[[Request], list[int]], held: Callable[[LocalCluster], bool]
) -> None:
    """Five requests get the texts that they get alone, and at the end `held` comes true."""
    settings = config_from_text("model: {name: toy, dtype: fp32}\n" + text)
    requests = [request(f"r{i}", 60, salt=i, max_tokens=60, ignore_eos=True) for i in range(5)]
    async with running(toy, replace(settings, timeouts=SOON)) as cluster:
        answers = await asyncio.gather(*(cluster.generate(one) for one in requests))
        for one, (tokens, _) in zip(requests, answers, strict=True):
            assert ids(tokens) == alone(one)
        await cluster.until(lambda: held(cluster))


@pytest.mark.parametrize(("preemption", "other"), [("swap", "recompute"), ("recompute", "swap")])
async def test_preemption_goes_the_way_that_the_file_names_and_is_counted_there(
    toy: Path, alone: Callable[[Request], list[int]], preemption: str, other: str
) -> None:
    def held(cluster: LocalCluster) -> bool:
        ways = [shown(cluster, "worker_preemptions_total", worker="decode-0", way=way) for way in (preemption, other)]
        return ways[0] > 0 == ways[1]

    decode = f"{{num_blocks: 14, preemption: {preemption}, swap_memory: 1MiB, max_num_seqs: 8}}"
    await answered(toy, f"routing: {{local_prefill: always}}\npools: {{decode: {decode}}}\n", alone, held)


async def test_static_batches_take_in_whom_prefill_hands_over(toy: Path, alone: Callable[[Request], list[int]]) -> None:
    static = "{num_blocks: 96, batching: static, max_num_seqs: 2}"
    text = f"routing: {{local_prefill: never}}\npools: {{prefill: {{num_blocks: 96}}, decode: {static}}}\n"
    await answered(toy, text, alone, lambda cluster: shown(cluster, "worker_generated_tokens_total") > 250)
