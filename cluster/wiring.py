"""From the one config to the settings of each room. Pure: whoever starts a cluster, by Ray or in a test, asks here."""

from __future__ import annotations

from pathlib import Path

from cluster import tiers
from cluster.config import TandemConfig, engine_config
from cluster.config_text import engine_keys
from cluster.control import ControlSettings
from cluster.dispatch import Limits
from cluster.fetching import FetchLimits
from cluster.gateway import GatewaySettings
from cluster.ipc import RankSettings
from cluster.worker import WorkerSettings
from decode_node.service import DecodeLimits
from engine.hashing import PrefixHasher, hash_root
from prefill_node.service import PrefillLimits
from tandem.messages import WorkerInfo

LOOPBACK = "127.0.0.1"


def model_source(config: TandemConfig) -> str:
    """What `cluster.models.resolve` is asked for."""
    return config.model.path or config.model.name


def role_of(name: str) -> str:
    """`decode-3` is a decode worker."""
    return name.rpartition("-")[0]


def rank_settings(
    config: TandemConfig, name: str, model: Path, *, host: str = LOOPBACK, allow_faults: bool = False
) -> RankSettings:
    """Of the worker `name`, whose checkpoint lies at `model`. Control adds its incarnation, address and endpoint."""
    role = role_of(name)
    pool, quiet_s = config.pools.of(role), config.timeouts.quiet_s
    worker = WorkerSettings(
        name=name,
        incarnation="",
        role=role,
        address="",
        model=config.model.name,
        max_num_seqs=pool.max_num_seqs,
        prefill=PrefillLimits(tokens_per_step=pool.max_num_batched_tokens, quiet_patience_s=quiet_s),
        decode=DecodeLimits(lease_s=config.timeouts.lease_s, quiet_patience_s=quiet_s),
        fetch=FetchLimits(quiet_patience_s=quiet_s),
        allow_faults=allow_faults,
        heartbeat_s=config.timeouts.heartbeat_s,
    )
    return RankSettings(
        worker=worker,
        engine=engine_config(config, role, model),
        transports=config.transfer.transports,
        checksums=config.transfer.checksums,
        staging=config.transfer.staging,
        staging_bytes=config.transfer.staging_bytes,
        net_device=config.transfer.net_device,
        tiers=tiers.settings_of(pool.tiers, name),
        host=host,
        keys=engine_keys(config, role),
    )


def control_settings(config: TandemConfig, secret: str, *, host: str = LOOPBACK) -> ControlSettings:
    return ControlSettings(secret=secret, host=host, start_s=config.timeouts.start_s, silence_s=config.timeouts.fence_s)


def dispatch_limits(config: TandemConfig) -> Limits:
    return Limits(control_timeout_s=config.timeouts.connect_s, resume_s=config.timeouts.resume_s)


def gateway_settings(config: TandemConfig) -> GatewaySettings:
    return GatewaySettings(
        model=config.model.name,
        classes=config.classes,
        max_streams=config.gateway.max_streams,
    )


def hasher_for(config: TandemConfig, info: WorkerInfo) -> PrefixHasher:
    """The gateway's own view of prefixes, the same as the engines'."""
    root = hash_root(
        name=config.model.prefix_hash,
        seed=config.model.hash_seed,
        model_digest=info.model_digest,
        kv_dtype=config.model.kv_dtype or config.model.dtype,
        numerics=info.numerics,
    )
    return PrefixHasher(config.model.prefix_hash, root)
