"""What a layer asks of attention."""

from __future__ import annotations

from typing import Protocol

import torch


class Attention(Protocol):
    """Attention over the sequences of one step: writes a layer's new keys and values, then attends."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """`q` (tokens, heads, head_dim), `k` and `v` (tokens, kv_heads, head_dim) → (tokens, heads, head_dim)."""
