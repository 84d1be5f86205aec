"""Runs loaded models the way the engine does, so that tests can compare whole, chunked and batched runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.kv import KVLayout, KVPool
from engine.loaders import load_model
from engine.runner import ModelRunner
from engine.types import Chunk, StepPlan

BLOCK = 16


def make_runner(path: Path, *, dtype: str = "float32", kv_dtype: str | None = None, blocks: int = 64) -> ModelRunner:
    """A runner over a pool full of not-a-numbers: whoever reads what was not written is found out."""
    loaded = load_model(path, dtype=dtype)
    config = loaded.config
    layout = KVLayout(blocks, config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, kv_dtype or dtype)
    pool = KVPool(layout)
    pool.tensor.fill_(torch.nan)
    return ModelRunner(loaded.model, pool)


def all_logits(runner: ModelRunner, tokens: Sequence[int], *, budget: int = 4096, first_block: int = 3) -> torch.Tensor:
    """Float32 logits (tokens, vocabulary), computed in chunks of `budget` tokens."""
    rows, table = [], block_table(len(tokens), first_block)
    for start in range(0, len(tokens), budget):
        part = tuple(tokens[start : start + budget])
        rows.append(runner.run(StepPlan((Chunk("r", part, start, table, "all"),))))
    return torch.cat(rows)


def block_table(tokens: int, first_block: int) -> tuple[int, ...]:
    """Descending, so that neighbours in the sequence are not neighbours in the pool."""
    count = -(-tokens // BLOCK)
    return tuple(range(first_block + count, first_block, -1))


def greedy(runner: ModelRunner, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens after the prompt, one step each."""
    table = block_table(len(prompt) + count, 0)
    tokens, start = list(prompt), 0
    for _ in range(count):
        logits = runner.run(StepPlan((Chunk("r", tuple(tokens[start:]), start, table),)))
        start = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


def random_tokens(count: int, vocab: int = 256, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())
