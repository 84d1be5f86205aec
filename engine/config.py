"""The engine's settings: built once at the entrance, frozen, handed down. Bad values are refused here by name."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
HASHES = ("builtin", "sha256")
WEIGHTS = ("auto", "dense", "packed")
KERNELS = ("auto", "torch")
PREEMPTIONS = ("auto", "recompute", "swap")
BATCHINGS = ("continuous", "static")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. `num_blocks=None` sizes the pool from `kv_memory_bytes`."""

    model: str
    """A Hugging Face directory or a .gguf file."""
    dtype: str = "float32"
    kv_dtype: str | None = None
    """None: as `dtype`."""
    device: str = "cpu"
    weights: str = "auto"
    """`packed`: quantised tensors are multiplied as the file has them. `dense`: all weights in `dtype`. `auto`: packed
    where that is a matter of speed only, which is bfloat16 on a CPU."""
    kernels: str = "auto"
    """`auto`: on a CPU the compiled step where it can be had, for bfloat16 or packed weights. `torch`: never."""
    cuda_graphs: bool = True
    """Replay steps of single tokens as captured graphs. Of no effect on a CPU."""
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int = 1 << 30
    kv_shared: bool = True
    """Whether other processes of this host may read the pool of a CPU, as the transport shm does. Without it the memory
    is private, and copied faster by the kernel: it comes in huge pages."""
    max_model_len: int | None = None
    """None: the model's own context length. Never reserves memory."""
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    chunked_prefill: bool = True
    batching: str = "continuous"
    """`static`: the baseline to measure against. Nobody joins a batch until all of it has ended; finished rows stay."""
    preemption: str = "auto"
    """`auto`: whichever is estimated cheaper, computing KV again or copying it out and in. Others: always that one."""
    swap_bytes: int = 256 << 20
    """Host memory for KV of preempted sequences, taken as it is used; when it is full they are computed again."""
    prefix_caching: bool = True
    prefix_hash: str = "builtin"
    hash_seed: int = 0
    """Shared by the whole cluster, so that a hash means the same on every worker."""
    threads: int | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        if self.kv_dtype is not None:
            _one_of("kv_dtype", self.kv_dtype, DTYPES)
        _one_of("prefix_hash", self.prefix_hash, HASHES)
        _one_of("batching", self.batching, BATCHINGS)
        _one_of("preemption", self.preemption, PREEMPTIONS)
        _one_of("weights", self.weights, WEIGHTS)
        _one_of("kernels", self.kernels, KERNELS)
        if self.weights == "packed" and self.device != "cpu":
            raise ConfigError("weights", self.weights, f"dense or auto on {self.device}")
        if self.block_size <= 0 or self.block_size % 16:
            raise ConfigError("block_size", self.block_size, "a positive multiple of 16")
        for name in ("max_num_batched_tokens", "max_num_seqs", "kv_memory_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(name, getattr(self, name), "a positive number")
        if self.swap_bytes < 0:
            raise ConfigError("swap_bytes", self.swap_bytes, "0 (no swapping) or a positive number")
        if self.preemption == "swap" and not self.swap_bytes:
            raise ConfigError("swap_bytes", 0, "positive when preemption is swap")
        for name in ("num_blocks", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(name, value, "a positive number or nothing")

    @property
    def packed(self) -> bool:
        """Whether quantised weights stay quantised."""
        if self.weights == "auto":
            return self.device == "cpu" and self.dtype == "bfloat16"
        return self.weights == "packed"

    @property
    def numerics(self) -> str:
        """Names how numbers come about: KV of different numerics is not exchanged and not found by its prefix."""
        return f"{self.dtype}-packed" if self.packed else self.dtype


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(name, value, "one of " + ", ".join(allowed))
