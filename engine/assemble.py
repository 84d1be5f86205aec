"""Puts an engine's doing half together: checkpoint, KV pool, runner; and says what they are."""

from __future__ import annotations

import logging

import torch

from engine.config import EngineConfig
from engine.cpu_runner import CpuRunner
from engine.cuda_graphs import DecodeGraphs, decode_graphs_for
from engine.errors import ConfigError, too_much
from engine.info import ModelFacts
from engine.kernels.cpu.build import Unavailable
from engine.kv import KVLayout, KVPool
from engine.loaders import Checkpoint, decoder_of, open_checkpoint
from engine.model_config import ModelConfig
from engine.models import Decoder
from engine.runner import ModelRunner

_log = logging.getLogger(__name__)


def assemble(config: EngineConfig) -> tuple[ModelRunner | CpuRunner, ModelFacts, memoryview | None]:
    """Runner, facts and the pool's bytes (None when it is in a device's memory).

    Raises ModelError for the checkpoint, ConfigError when no block fits into the pool or into a swap space that must be
    used.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = open_checkpoint(config.model)
    shape = checkpoint.config
    layout = _layout(config, shape)
    _check_swap(config, layout)
    pool = _pool(layout, config.device, shared=config.kv_shared)
    facts = ModelFacts(
        model=config.model,
        model_digest=checkpoint.digest,
        layout=layout.describe(),
        kv_heads=layout.kv_heads,
        layers=layout.layers,
        max_model_len=shape.context_length,
        vocab_size=shape.vocab_size,
        block_bytes=layout.block_bytes,
        total_blocks=layout.num_blocks,
        eos_token_ids=shape.eos_token_ids,
    )
    on_host = pool.device.type == "cpu"
    return _runner(config, checkpoint, pool), facts, pool.bytes() if on_host else None


def _layout(config: EngineConfig, shape: ModelConfig) -> KVLayout:
    one = KVLayout(
        1, shape.num_layers, shape.num_kv_heads, shape.head_dim, config.block_size, config.kv_dtype or config.dtype
    )
    num_blocks = config.num_blocks or config.kv_memory_bytes // one.block_bytes
    if not num_blocks:
        remedy = f"at least {one.block_bytes}, the bytes of one KV block"
        raise ConfigError("kv_memory_bytes", config.kv_memory_bytes, remedy)
    return KVLayout(num_blocks, one.layers, one.kv_heads, one.head_dim, one.block_size, one.dtype)


def _check_swap(config: EngineConfig, layout: KVLayout) -> None:
    if config.preemption == "recompute" or not 0 < config.swap_bytes < layout.block_bytes:
        return
    if config.preemption == "swap":
        remedy = f"at least {layout.block_bytes}, the bytes of one KV block, or preemption recompute"
        raise ConfigError("swap_bytes", config.swap_bytes, remedy)
    _log.warning(
        "a swap space of %d bytes holds no KV block of %d: none is used", config.swap_bytes, layout.block_bytes
    )


def _pool(layout: KVLayout, device: str, *, shared: bool) -> KVPool:
    try:
        return KVPool(layout, device, shared=shared)
    except (OSError, OverflowError, MemoryError, torch.OutOfMemoryError) as error:
        raise too_much("kv_memory_bytes", layout.pool_bytes, error, device) from error


def _runner(config: EngineConfig, checkpoint: Checkpoint, pool: KVPool) -> ModelRunner | CpuRunner:
    """The compiled step where it computes what was asked for and can be had; else torch."""
    covered = pool.device.type == "cpu" and (config.packed or config.dtype == "bfloat16")
    if covered and config.kernels == "auto":
        read = checkpoint.read_kept if config.packed else checkpoint.read
        try:
            runner = CpuRunner(checkpoint.config, read, pool, threads=torch.get_num_threads())
        except Unavailable as error:
            _log.warning("the compiled step is not available, torch runs instead: %s", error)
        else:
            # Only sampling is left to torch. Its threads spin for a while after each call, on the cores that the step's
            # own threads need next: with two of each, one token took 11 ms instead of 4.
            torch.set_num_threads(1)
            return runner
    decoder = decoder_of(checkpoint, dtype=config.dtype, device=config.device, packed=config.packed)
    return ModelRunner(decoder, pool, _graphs(config, decoder, pool))


def _graphs(config: EngineConfig, decoder: Decoder, pool: KVPool) -> DecodeGraphs | None:
    if not config.cuda_graphs:
        return None
    length = decoder.config.context_length
    fitting = pool.layout.num_blocks * pool.layout.block_size
    longest = min(config.max_model_len or length, length, fitting)
    return decode_graphs_for(decoder, pool, max_batch=config.max_num_seqs, max_context=longest)
