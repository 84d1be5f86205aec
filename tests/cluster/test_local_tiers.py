"""Lower tiers in a whole cluster: told by the config, used by prefill, shown in the metrics, kept over a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import TandemConfig
from cluster.config_text import ConfigFileError, config_from_text
from cluster.config_words import describe
from cluster.ipc import from_json, to_json
from cluster.local import LocalCluster
from cluster.tiers import too_small
from cluster.wiring import rank_settings
from engine.types import Request
from kvtransfer.tiers.block_file import HEADER_BYTES
from kvtransfer.tiers.types import TierSettings
from tests.cluster.local_rig import config, ids, request, running
from tests.cluster.test_local_metrics import shown


def tiered(folder: Path) -> TandemConfig:
    """A prefill worker whose pool holds two of the prompts below, its host memory four more."""
    settings = config(prefill_blocks=24)
    tiers = TierSettings(host_bytes=1 << 19, disk_path=str(folder), io_timeout_s=5.0)
    return replace(
        settings,
        pools=replace(settings.pools, prefill=replace(settings.pools.prefill, tiers=tiers)),
        routing=replace(settings.routing, fetch="never"),  # or what decode still holds comes from there
    )


def always_load(cluster: LocalCluster) -> None:
    """On a model as small as this computing would be chosen."""
    tiers = cluster.slots["prefill-0"].worker.engine._tiers
    assert tiers is not None
    tiers.mode = "always"


def folder_is_read(cluster: LocalCluster) -> bool:
    """Until then an idle machine would compute all prompts: nothing is believed before it is verified."""
    store = cluster.slots["prefill-0"].store
    assert store is not None
    store.poll(cluster.now())
    return not store.busy()


async def test_prompts_beyond_the_pool_are_loaded_again_with_the_same_text_and_counted(
    toy: Path, alone: Callable[[Request], list[int]], tmp_path: Path
) -> None:
    async with running(toy, tiered(tmp_path)) as cluster:
        always_load(cluster)
        for turn in range(24):
            req = request(f"r{turn}", 170, salt=turn % 8)
            tokens, _ = await cluster.generate(req)
            assert ids(tokens) == alone(req)
        await cluster.until(lambda: shown(cluster)("worker_tier_loads_total", worker="prefill-0") > 5)
        hits = shown(cluster)
        assert hits("tier_hits_total", worker="prefill-0", tier="host") > 0
        assert hits("tier_stored_total", worker="prefill-0") > 0
        assert hits("tier_used_bytes", worker="prefill-0", tier="host") <= 1 << 19
        assert len(list((tmp_path / "prefill-0").rglob("*.kv"))) > 0
        cluster.restart("prefill-0")
        always_load(cluster)
        await cluster.until(lambda: folder_is_read(cluster))
        for turn in range(8):
            req = request(f"again{turn}", 170, salt=turn)
            assert ids((await cluster.generate(req))[0]) == alone(req)
        await cluster.until(lambda: shown(cluster)("tier_hits_total", worker="prefill-0", tier="disk") > 0)


SLA = """
pools:
  prefill:
    count: 2
    tiers: {host_memory: 2GiB, disk_path: /scratch/kv, disk_space: 8GiB, io_timeout: 250ms, fsync: true}
  decode:
    tiers: {host_memory: 1GiB}
"""


def test_the_file_names_each_pools_tiers_and_every_worker_has_a_folder_of_its_own() -> None:
    settings = config_from_text(SLA)
    second = rank_settings(settings, "prefill-1", Path("/m"))
    assert second.tiers == TierSettings(
        host_bytes=2 << 30, disk_path="/scratch/kv/prefill-1", disk_bytes=8 << 30, io_timeout_s=0.25, fsync=True
    )
    assert from_json(to_json(second)) == second
    assert rank_settings(settings, "decode-0", Path("/m")).tiers == TierSettings(host_bytes=1 << 30)
    assert rank_settings(TandemConfig(), "decode-0", Path("/m")).tiers is None
    told = describe(settings)
    assert "KV that leaves the cache goes to 2 GiB of host memory, then 8 GiB under /scratch/kv." in told
    assert "KV that leaves the cache goes to 1 GiB of host memory." in told


def test_tiers_without_host_memory_are_refused_by_name() -> None:
    with pytest.raises(ConfigFileError, match="needs 'host_memory' too"):
        config_from_text("pools: {decode: {tiers: {disk_path: /x}}}")


def test_a_tier_holds_one_block_or_is_refused_with_the_bytes_of_one() -> None:
    def refused(host_bytes: int, disk_bytes: int = 0, disk_path: str | None = "/kv") -> str:
        settings = TierSettings(host_bytes=host_bytes, disk_path=disk_path, disk_bytes=disk_bytes)
        return str(too_small(settings, 4096) or "")

    file_bytes = HEADER_BYTES + 4096
    assert refused(4096, file_bytes) == refused(4096, disk_path=None) == ""
    assert refused(4095, file_bytes) == "host_bytes is 4095; it must be at least 4096, the bytes of one KV block"
    assert f"disk_bytes is {file_bytes - 1}; it must be at least {file_bytes}, " in refused(4096, file_bytes - 1)
