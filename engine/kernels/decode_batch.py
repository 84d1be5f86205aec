"""What attention must know about a step of single tokens, as tensors that stay where they are.

A captured graph reads its inputs from fixed addresses, and a step that runs as it comes reads the same form. A row
without a sequence (padding) has length 0 and slot -1: it writes nothing, sees nothing, and its result is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.batch import AttentionBatch, Span


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Single-token queries of one step, all on the pool's device.

    `rows` (n,) int64: where in the flat batch each stands. `lengths` (n,) int64: keys it sees, its own included.
    `slots` (n,) int64: block * block_size + offset of its own KV. `tables` (n, width) int32: block tables; entries
    behind a length are never read as KV. `longest` (1,) int64: the greatest of `lengths`, or more.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    longest: torch.Tensor


def decode_batch_of(batch: AttentionBatch, spans: tuple[Span, ...], device: torch.device) -> DecodeBatch:
    """Of those spans of `batch`, at least one, that are single tokens."""

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    size = batch.block_size
    return DecodeBatch(
        rows=tensor([span.first for span in spans]),
        lengths=tensor([span.context for span in spans]),
        slots=tensor([span.blocks[span.start // size] * size + span.start % size for span in spans]),
        tables=torch.tensor(batch.tables(spans), dtype=torch.int32, device=device),
        longest=tensor([max(span.context for span in spans)]),
    )
