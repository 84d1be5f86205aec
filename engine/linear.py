"""A layer's matrix product in torch: on dense weights, and for few rows on 4-bit codes.

A decode step is bound by the bytes of weights that it reads, a prompt by arithmetic; so where the file has 4-bit codes
both forms are kept and the number of rows decides. Measured on two threads over all linear layers of SmolLM2-135M, on
codes and in bf16: 4.5 and 20.6 ms at one row, 14 and 29.6 ms at 8, 53 and 44.7 ms at 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.quantised import GROUP, Quantised

FEW_ROWS = 16
FEW_COLUMNS = 4
"""In float32 on a CPU so many rows are faster as columns: measured as above, with the last layer, 20 and 28 ms at one
row and 4; as rows 44 and 64 ms, and faster from 8 on."""


@dataclass(frozen=True, slots=True)
class FourBit:
    """Codes in the layout of torch's kernel, and (in / 32, out, 2) scales and the values of code 8, in `dtype`."""

    codes: torch.Tensor
    scales_and_middles: torch.Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """Weight (out, in), bias (out,) or None, and the weight once more as 4-bit codes or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    four_bit: FourBit | None = None


def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """(rows, in) → (rows, out)."""
    few = linear.four_bit
    if few is None or x.shape[0] > FEW_ROWS:
        return dense(x, linear.weight, linear.bias)
    out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, few.codes, GROUP, few.scales_and_middles)
    return out if linear.bias is None else out + linear.bias


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(rows, in), (out, in), (out,) → (rows, out)."""
    rows = x.shape[0]
    if x.dtype is not torch.float32 or not x.is_cpu or not 0 < rows <= FEW_COLUMNS:
        return F.linear(x, weight, bias)
    # A single row goes twice: the product with a vector reads the weights at half the rate.
    columns = x if rows > 1 else x.repeat(2, 1)
    out = (weight @ columns.T).T[:rows].contiguous()
    return out if bias is None else out + bias


def four_bit(parts: Sequence[torch.Tensor | Quantised], dtype: torch.dtype) -> FourBit | None:
    """The rows of all `parts` below one another; None unless each has 4-bit codes and the kernel takes the shape."""
    known = [part for part in parts if isinstance(part, Quantised) and part.bits == 4]
    if len(known) != len(parts) or sum(part.codes.shape[0] for part in known) % GROUP:
        return None
    codes = torch.cat([part.codes for part in known]).to(torch.int32)
    scales, offsets = (
        torch.cat(group).float().T for group in zip(*((p.scales, p.offsets) for p in known), strict=True)
    )
    middles = torch.stack((scales, offsets + 8 * scales), dim=-1).to(dtype).contiguous()
    return FourBit(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), middles)
