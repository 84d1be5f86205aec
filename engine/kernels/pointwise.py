"""What a layer computes between its products, in plain torch: the CPU's, and what Triton's is tested against."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.rope import rotate


class Pointwise(Protocol):
    """Norms, rotation and activation of a layer. An input may be overwritten where it says so."""

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """Adds `delta` (rows, size) to `x`, float32 (rows, size), in place; returns x's RMS norm in `dtype`."""

    def rotate(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`qk` (tokens, heads, head_dim) turned by `Rotary.angles`. May overwrite `qk`."""

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu of the left half of (rows, 2 * size) times the right half: (rows, size). May overwrite its input."""


class TorchPointwise:
    """In torch's own operations."""

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        if delta is not None:
            x += delta
        return F.rms_norm(x, weight.shape, weight, eps).to(dtype)

    def rotate(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotate(qk, cos, sin)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
