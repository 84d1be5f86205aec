"""The cluster's settings: frozen sections, built once at the entrance, each room handed its own.

The SLA file (YAML) is read by `load_config`; whatever it leaves out has the default written here. Durations are
seconds and sizes bytes, whatever the file wrote them in. `cluster.config_text` knows the file's keys and refuses what
it does not know; `cluster.config_words` says a config in words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.config import EngineConfig
from engine.profiles import profile_settings
from kvtransfer.tiers.types import TierSettings

DEFAULT_MODEL = "smollm2-135m"
ROLES = ("prefill", "decode")
POLICY_NAMES = ("sla", "round_robin", "least_loaded")
LOCAL_PREFILL = ("auto", "never", "always")
FETCH = ("auto", "never")
STAGING = ("auto", "always", "never")
TRANSPORTS = ("shm", "ucx", "tcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The one model of the cluster, and what must be the same on every worker for KV to be exchanged."""

    name: str = DEFAULT_MODEL
    """What clients ask for. Without a `path` it is also where to find it: a built-in model's name."""
    path: str | None = None
    """A Hugging Face directory or a .gguf file."""
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    device: str = "cpu"
    weights: str = "auto"
    """`packed`: quantised weights are multiplied as the file has them; `dense`: in `dtype`; see `engine.config`."""
    kernels: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    prefix_caching: bool = True
    prefix_hash: str = "builtin"
    hash_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSection:
    """One pool: `count` workers alike. `num_blocks` None: the KV pool is sized from `kv_memory_bytes`.

    What a `profile` sets stands here as if the file had said so, except what the file does say; see `profiled_pool`.
    """

    count: int = 1
    threads: int = 1
    profile: str = "balanced"
    num_blocks: int | None = None
    kv_memory_bytes: int = 1 << 30
    block_size: int | None = None
    """Tokens in a KV block. None: the model section's. Where the pools' differ, the larger is a multiple of the
    smaller, and KV moves between them in many small pieces."""
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    batching: str = "continuous"
    chunked_prefill: bool = True
    preemption: str = "auto"
    swap_bytes: int = 256 << 20
    """Host memory for KV of preempted sequences. 0: they are always computed again."""
    tiers: TierSettings | None = None
    """Lower tiers of each worker's KV. None: what leaves the KV pool is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsSection:
    profile: str = "balanced"
    """Of the pools that name none."""
    prefill: PoolSection = PoolSection()
    decode: PoolSection = PoolSection()

    def of(self, role: str) -> PoolSection:
        return {"prefill": self.prefill, "decode": self.decode}[role]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSection:
    policy: str = "sla"
    local_prefill: str = "auto"
    local_prefill_gain: float = 1.25
    fetch: str = "auto"
    """Whether a worker that lacks a prefix may get it from one that holds it."""
    fetch_gain: float = 1.25
    """It does when computing is estimated to take at least this many times as long."""
    prefix_affinity: bool = True
    max_waiting: int = 1024
    assumed_bytes_per_s: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaClass:
    """What a class of requests is promised. None: nothing. `timeout_s` bounds a request from arrival to its end."""

    name: str = "default"
    ttft_s: float | None = None
    itl_s: float | None = None
    priority: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSection:
    """Paths of PEM files on the gateway's machine. `client_ca`: clients must show a certificate signed by it."""

    cert: str
    key: str
    client_ca: str | None = None
    ca: str | None = None
    """The authority by which `tandem status`, `chat` and the others there know the gateway. None: `cert` itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySection:
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50051
    api_key_env: str | None = None
    """The environment variable that holds the key; a key never stands in the file."""
    max_message_bytes: int = 64 << 20
    max_streams: int = 1024
    tls: TlsSection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSection:
    transports: tuple[str, ...] = ("shm", "ucx", "tcp")
    """Best first; a pair uses the first that both ends have and that can join them: shm joins workers of one host."""
    checksums: bool = False
    staging: str = "auto"
    """`auto`: KV in a device's memory moves by way of `staging_bytes` of host memory; `always`: any KV does; `never`:
    UCX alone moves it, by its own roads (CUDA IPC, GPUDirect), without checksums."""
    staging_bytes: int = 4 << 30
    net_device: str | None = None
    """The device of each worker's host that KV goes by (`eth0`), or UCX's devices (`mlx5_0:1,eth0`). None: sockets bind
    the address that the worker has in the cluster, and UCX is told `lo` on one machine, else what its environment
    says."""
    link_probes: bool = True
    """Whether idle pairs are measured, with 16 MiB each, before anybody needs to know how fast they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutsSection:
    """Seconds. A worker is heard at least every `heartbeat_s`; silent for `suspect_s` it gets no new request while
    others are there, for `fence_s` it is fenced, killed and restarted."""

    heartbeat_s: float = 0.5
    suspect_s: float = 2.0
    fence_s: float = 6.0
    lease_s: float = 10.0
    quiet_s: float = 5.0
    """What a transfer that was told to end may take to do so; then its pair's links are cut."""
    connect_s: float = 2.0
    request_s: float = 600.0
    """For classes that name no timeout; `load_config` writes it into them."""
    resume_s: float = 30.0
    """What an answer that lost its decode worker waits for another, or for that one to be started again."""
    start_s: float = 180.0
    drain_s: float = 30.0
    restart_backoff_s: float = 1.0
    restart_backoff_max_s: float = 30.0
    max_start_failures: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """`ray_address` None: a local Ray of our own is started, with `num_cpus` (None: what the machine has)."""

    namespace: str = "tandem"
    ray_address: str | None = None
    num_cpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TandemConfig:
    version: int = 1
    model: ModelSection = ModelSection()
    pools: PoolsSection = PoolsSection()
    routing: RoutingSection = RoutingSection()
    classes: Mapping[str, SlaClass] = field(default_factory=lambda: {"default": SlaClass()})
    """By name; "default" is always there."""
    gateway: GatewaySection = GatewaySection()
    transfer: TransferSection = TransferSection()
    timeouts: TimeoutsSection = TimeoutsSection()
    cluster: ClusterSection = ClusterSection()
    warnings: tuple[str, ...] = ()
    """What is allowed but looks like a mistake, for the start to show."""
    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """`FILE:LINE` of the file's keys, by path (`pools.decode.kv_memory`): for what only a start can refuse."""


def default_config() -> TandemConfig:
    """One prefill and one decode worker on the default model, no promises."""
    return TandemConfig()


def load_config(path: str | Path) -> TandemConfig:
    """Reads an SLA file. Raises `cluster.config_text.ConfigFileError` naming file, line, key and remedy."""
    from cluster.config_text import read_config  # it needs the sections above

    return read_config(Path(path))


def profiled_pool(pool: PoolSection, role: str, stated: Collection[str]) -> PoolSection:
    """The pool with its profile's settings in all fields but those `stated`. Raises ConfigError for the profile."""
    preset = profile_settings(pool.profile, role)
    return replace(pool, **{name: value for name, value in preset.items() if name not in stated})


def engine_config(config: TandemConfig, role: str, model_path: str | Path) -> EngineConfig:
    """The engine settings of a worker of this role; `model_path` is where the checkpoint lies on its machine."""
    model, pool = config.model, config.pools.of(role)
    return EngineConfig(
        model=str(model_path),
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        device=model.device,
        weights=model.weights,
        kernels=model.kernels,
        block_size=pool.block_size or model.block_size,
        num_blocks=pool.num_blocks,
        kv_memory_bytes=pool.kv_memory_bytes,
        kv_shared="shm" in config.transfer.transports and config.transfer.staging != "always",
        max_model_len=model.max_model_len,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_num_seqs=pool.max_num_seqs,
        batching=pool.batching,
        chunked_prefill=pool.chunked_prefill,
        preemption=pool.preemption,
        swap_bytes=pool.swap_bytes,
        prefix_caching=model.prefix_caching,
        prefix_hash=model.prefix_hash,
        hash_seed=model.hash_seed,
        threads=pool.threads,
    )


def worker_names(config: TandemConfig, role: str) -> tuple[str, ...]:
    """`prefill-0`, `prefill-1`, …: the names of a pool's workers, stable over restarts."""
    return tuple(f"{role}-{index}" for index in range(config.pools.of(role).count))
