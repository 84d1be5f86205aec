"""Weights in the tiles that the C++ products read; the layouts are told in `gemm.h`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.quantised import GROUP, Quantised

TILE = 16
INT4, INT8, BF16 = range(3)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix (outputs, inputs) as uint8 tiles in one of the three formats."""

    data: torch.Tensor
    format: int
    outputs: int
    inputs: int


def packed(weight: torch.Tensor | Quantised) -> Packed:
    """Tiles of a dense weight (out, in), as bf16, or of a quantised one. ValueError unless `in` is a multiple of 32."""
    return _packed_groups(weight) if isinstance(weight, Quantised) else _packed_bf16(weight)


def _packed_bf16(weight: torch.Tensor) -> Packed:
    outputs, inputs = _shape(weight)
    tiles = _whole_tiles(weight.to(torch.bfloat16)).view(-1, TILE, inputs // 2, 2).transpose(1, 2).contiguous()
    return Packed(_bytes(tiles), BF16, outputs, inputs)


def _packed_groups(weight: Quantised) -> Packed:
    outputs, inputs = _shape(weight.codes)
    groups = inputs // GROUP
    codes = _whole_tiles(weight.codes).view(-1, TILE, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if weight.bits == 4:
        codes = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
    tail = [_bytes(_whole_tiles(part).view(-1, TILE, groups).transpose(1, 2).contiguous()) for part in
            (weight.scales, weight.offsets)]  # fmt: skip
    shape = (codes.shape[0], groups, -1)
    data = torch.cat([codes.reshape(shape), *(part.view(shape) for part in tail)], dim=-1)
    return Packed(data.contiguous().view(-1), INT4 if weight.bits == 4 else INT8, outputs, inputs)


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise ValueError(f"{inputs} inputs are not whole groups of {GROUP}")
    return outputs, inputs


def _whole_tiles(rows: torch.Tensor) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, -rows.shape[0] % TILE)).contiguous()


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8).view(-1)
