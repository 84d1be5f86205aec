"""Puts an engine's doing half together: checkpoint, KV pool, runner; and says what they are."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.info import ModelFacts
from engine.kv import KVLayout, KVPool
from engine.loaders import load_model
from engine.runner import ModelRunner


def assemble(config: EngineConfig) -> tuple[ModelRunner, ModelFacts, memoryview | None]:
    """Runner, facts and the pool's bytes (None when it is in a device's memory).

    Raises ModelError for the checkpoint, ConfigError when no block fits.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    shape = loaded.config
    one = KVLayout(
        1, shape.num_layers, shape.num_kv_heads, shape.head_dim, config.block_size, config.kv_dtype or config.dtype
    )
    num_blocks = config.num_blocks or config.kv_memory_bytes // one.block_bytes
    if not num_blocks:
        remedy = f"at least {one.block_bytes}, the bytes of one KV block"
        raise ConfigError("kv_memory_bytes", config.kv_memory_bytes, remedy)
    layout = KVLayout(num_blocks, one.layers, one.kv_heads, one.head_dim, one.block_size, one.dtype)
    pool = KVPool(layout, config.device)
    facts = ModelFacts(
        model=config.model,
        model_digest=loaded.digest,
        layout=layout.describe(),
        max_model_len=shape.context_length,
        vocab_size=shape.vocab_size,
        block_bytes=layout.block_bytes,
        total_blocks=num_blocks,
        eos_token_ids=shape.eos_token_ids,
    )
    on_host = pool.device.type == "cpu"
    return ModelRunner(loaded.model, pool), facts, pool.bytes() if on_host else None
