"""A model that cannot hide a wrong KV block: its cache holds the tokens themselves, and the next token is a hash of
everything the cache holds. A byte missing, stale or foreign changes every token after it."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.info import ModelFacts
from engine.types import Chunk, StepPlan

VOCAB = 512
EOS = 3
BLOCK = 16


class LedgerRunner:
    """The cache is int64 (blocks, 16 positions): token + 1."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = np.zeros((num_blocks, BLOCK), dtype=np.int64)

    def run(self, plan: StepPlan) -> torch.Tensor:
        rows = [row for chunk in plan.chunks for row in self._rows(chunk)]
        return torch.stack(rows) if rows else torch.empty((0, VOCAB))

    def _rows(self, chunk: Chunk) -> list[torch.Tensor]:
        table = np.array(chunk.block_ids)
        end = chunk.start + len(chunk.token_ids)
        positions = np.arange(chunk.start, end)
        self.cache[table[positions // BLOCK], positions % BLOCK] = np.array(chunk.token_ids) + 1
        seen = self.cache[table].reshape(-1)
        first = end - chunk.rows + 1
        return [_logits(seen[:length]) for length in range(first, end + 1)]


def _logits(seen: np.ndarray) -> torch.Tensor:
    token = zlib.crc32(seen.tobytes()) % (VOCAB - 16) + 16  # never EOS by itself
    logits = torch.linspace(0.0, 1.0, VOCAB)
    logits[token] = 9.0
    return logits


def ledger_engine(*, num_blocks: int = 64, max_num_batched_tokens: int = 64, max_num_seqs: int = 8) -> Engine:
    """A real engine around the ledger."""
    runner = LedgerRunner(num_blocks)
    config = EngineConfig(
        model="ledger",
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    facts = ModelFacts(
        model="ledger",
        model_digest="d1",
        layout="ledger",
        kv_heads=1,
        layers=1,
        max_model_len=2048,
        vocab_size=VOCAB,
        block_bytes=BLOCK * 8,
        total_blocks=num_blocks,
        eos_token_ids=(EOS,),
    )
    return Engine(config, runner, facts, memory=memoryview(runner.cache.reshape(-1).view(np.uint8)))
