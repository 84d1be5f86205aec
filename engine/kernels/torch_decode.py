"""Attention of a `DecodeBatch` in plain torch: what the Triton decode is compared with, and what runs without a GPU.

Shapes depend on the batch's shapes alone, never on its values: it walks the whole width of the block tables.
"""

from __future__ import annotations

import torch

from engine.kernels.decode_batch import DecodeBatch
from engine.kv import KVPool


class TorchDecode:
    """Same arguments and result as `TritonDecode`."""

    def __init__(self, pool: KVPool, batch: DecodeBatch, scale: float, longest_context: int) -> None:
        self._pool, self._batch, self._scale = pool.tensor, batch, scale
        self._block_size, self._longest = pool.layout.block_size, longest_context

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """As `engine.kernels.attention.Attention`."""
        self._write(layer, k, v)
        batch, (_, heads, head_dim) = self._batch, q.shape
        pages = self._pool[batch.tables.to(torch.int64), :, layer]  # (n, width, kv_heads, 2, block_size, head_dim)
        keys, values = pages.permute(3, 0, 2, 1, 4, 5).flatten(3, 4).to(q.dtype)  # (n, kv_heads, slots, head_dim)
        slots = torch.arange(keys.shape[2], device=q.device)
        lengths = batch.lengths.unsqueeze(1)
        seen = (slots < lengths) & (slots >= lengths - (window or self._longest))
        values = values.where(seen[:, None, :, None], 0)  # a slot that nobody wrote may hold what is not a number
        queries = q[batch.rows].view(len(lengths), keys.shape[1], -1, head_dim)
        scores = (queries @ keys.transpose(-1, -2) * self._scale).masked_fill(~seen[:, None, None], -torch.inf)
        weights = scores.softmax(dim=-1).nan_to_num(0)  # a row without a sequence sees nothing
        mixed = torch.empty_like(q)
        mixed[batch.rows] = (weights @ values).view(-1, heads, head_dim)
        return mixed

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        kept = self._batch.slots >= 0
        slots = self._batch.slots[kept]
        blocks, offsets = slots // self._block_size, slots % self._block_size
        for half, values in enumerate((k, v)):
            self._pool[blocks, :, layer, half, offsets] = values[kept].to(self._pool.dtype)
