"""What an engine is, in values that may be shown and compared; no torch needed to read them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the engine must know of the model and pool that its runner works on."""

    model: str
    model_digest: str
    layout: str
    """Readable layout of one token's KV, for example `layers=30 kv_heads=3 head_dim=64 dtype=float32`."""
    kv_heads: int
    layers: int
    max_model_len: int
    vocab_size: int
    block_bytes: int
    total_blocks: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """`model_digest`, `layout` and `numerics` must be equal for two engines to exchange KV, and the larger `block_size`
    a multiple of the smaller."""

    model: str
    model_digest: str
    layout: str
    kv_heads: int
    layers: int
    numerics: str
    max_model_len: int
    vocab_size: int
    block_bytes: int
    total_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    hash_root: bytes
