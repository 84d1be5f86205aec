"""One config, handed to each room: what must be equal on both sides of a cluster is taken from the same place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster import wiring
from cluster.config import ROLES, ModelSection, PoolSection, PoolsSection, TimeoutsSection, default_config, worker_names
from cluster.ipc import from_json, to_json

CONFIG = replace(
    default_config(),
    model=ModelSection(name="m", dtype="float32", prefix_hash="sha256", hash_seed=7),
    pools=PoolsSection(
        prefill=PoolSection(count=2, threads=3, max_num_batched_tokens=128, batching="static", chunked_prefill=False),
        decode=PoolSection(max_num_seqs=5, preemption="swap", swap_bytes=1 << 20),
    ),
    timeouts=TimeoutsSection(heartbeat_s=0.1, fence_s=1.5, lease_s=4.0, quiet_s=1.2, connect_s=0.7),
)


@pytest.mark.parametrize("role", ROLES)
def test_a_worker_is_told_its_own_pool(role: str) -> None:
    name = worker_names(CONFIG, role)[-1]
    rank = wiring.rank_settings(CONFIG, name, Path("/models/m"))
    pool = CONFIG.pools.of(role)
    assert (rank.worker.name, rank.worker.role, rank.worker.model) == (name, role, "m")
    assert rank.engine.threads == pool.threads
    assert rank.engine.max_num_batched_tokens == rank.worker.prefill.tokens_per_step == pool.max_num_batched_tokens
    assert rank.worker.max_num_seqs == rank.engine.max_num_seqs == pool.max_num_seqs
    for setting in ("batching", "chunked_prefill", "preemption", "swap_bytes"):
        assert getattr(rank.engine, setting) == getattr(pool, setting)
    assert from_json(to_json(rank)).engine == rank.engine, "as the rank process reads it"
    assert rank.worker.heartbeat_s == 0.1
    assert rank.worker.decode.lease_s == 4.0
    limits = (rank.worker.prefill, rank.worker.decode, rank.worker.fetch)
    assert {limit.quiet_patience_s for limit in limits} == {1.2}
    assert not rank.worker.allow_faults
    assert rank.host == "127.0.0.1"


def test_what_makes_prefixes_equal_is_the_same_for_every_role() -> None:
    prefill, decode = (wiring.rank_settings(CONFIG, f"{role}-0", Path("/m")).engine for role in ROLES)
    for name in ("dtype", "kv_dtype", "block_size", "prefix_hash", "hash_seed", "prefix_caching"):
        assert getattr(prefill, name) == getattr(decode, name)


def test_times_reach_control_dispatch_and_gateway() -> None:
    assert wiring.control_settings(CONFIG, "s").silence_s == 1.5
    assert wiring.dispatch_limits(CONFIG).control_timeout_s == 0.7
    assert wiring.gateway_settings(CONFIG).max_streams == CONFIG.gateway.max_streams


def test_a_path_is_where_the_model_is_and_a_name_without_one_is_a_known_model() -> None:
    assert wiring.model_source(CONFIG) == "m"
    assert wiring.model_source(replace(CONFIG, model=ModelSection(name="m", path="/x"))) == "/x"
