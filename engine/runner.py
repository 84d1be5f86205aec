"""Carries out a step: flattens the plan's chunks into one batch, runs the model, returns the rows of logits wanted.

There are no prefill and decode modes: a chunk is some tokens at some positions with a block table. Everything that
depends only on the plan is worked out once a step. The runner decides nothing and keeps nothing but the pool, and on a
GPU the captured graphs that repeat steps of single tokens (`engine.cuda_graphs`).
"""

from __future__ import annotations

import torch

from engine.cuda_graphs import DecodeGraphs
from engine.kernels import attention_for
from engine.kernels.batch import batch_of
from engine.kv import KVPool
from engine.models import Decoder
from engine.types import Chunk, StepPlan


class ModelRunner:
    """Runs `model` over the KV of `pool`; both on the same device, in dtypes of their own."""

    def __init__(self, model: Decoder, pool: KVPool, graphs: DecodeGraphs | None = None) -> None:
        self.model = model
        self.pool = pool
        self._graphs = graphs
        self._make_attention = attention_for(pool.device)
        self._scale = model.config.head_dim**-0.5

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Compute the plan's chunks and write their KV.

        Returns float32 logits (rows, vocab_size): `chunk.rows` rows per chunk, in the plan's order, on the model's
        device. Raises ValueError for a chunk whose block table is too short, before anything is written.
        """
        size = self._graphs.size_of(plan) if self._graphs else None
        with torch.inference_mode():
            return self._run(plan) if size is None or self._graphs is None else self._graphs.run(plan, size)

    def _run(self, plan: StepPlan) -> torch.Tensor:
        chunks = plan.chunks
        pieces = [(chunk.start, len(chunk.token_ids), chunk.block_ids) for chunk in chunks]
        batch = batch_of(pieces, self.pool.layout.block_size)
        attend = self._make_attention(self.pool, batch, self._scale)
        hidden = self.model.hidden_states(
            self._indices([token for chunk in chunks for token in chunk.token_ids]),
            self._indices([position for chunk in chunks for position in _positions(chunk)]),
            self._indices([_end(chunk) for chunk in chunks for _ in chunk.token_ids]),
            attend,
        )
        rows = wanted_rows(chunks)
        if len(rows) != hidden.shape[0]:
            hidden = hidden.index_select(0, self._indices(rows))
        return self.model.logits(hidden)

    def _indices(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)


def wanted_rows(chunks: tuple[Chunk, ...]) -> list[int]:
    """Which rows of the flat batch need logits."""
    rows: list[int] = []
    first = 0
    for chunk in chunks:
        end = first + len(chunk.token_ids)
        rows += range(end - chunk.rows, end)
        first = end
    return rows


def _positions(chunk: Chunk) -> range:
    return range(chunk.start, _end(chunk))


def _end(chunk: Chunk) -> int:
    return chunk.start + len(chunk.token_ids)
