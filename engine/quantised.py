"""Quantised weights as numbers: small codes with a scale and an offset for every group of 32 inputs.

    weight = code * scale + offset

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K of GGUF are this already, so nothing is rounded anew (but the K kinds'
scales, to half precision). Q6_K has groups of 16; its weights are quantised again to 8 bits, which adds a quarter of
the error that it came with. Everything else, and what has rows that are not made of whole groups, stays dense.
Block layouts: ggml's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

GROUP = 32


@dataclass(frozen=True, slots=True)
class Quantised:
    """`codes` uint8 (out, in), all below 2**`bits`; `scales` and `offsets` float16 (out, in / 32). `bits` is 4 or 8."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    bits: int

    def dequantised(self) -> torch.Tensor:
        """Float32 (out, in)."""
        groups = self.codes.view(*self.scales.shape, GROUP).to(torch.float32)
        wide = groups * self.scales.float().unsqueeze(-1) + self.offsets.float().unsqueeze(-1)
        return wide.view(self.codes.shape)

    def rows(self, order: torch.Tensor) -> Quantised:
        """The rows in another order."""
        return Quantised(self.codes[order], self.scales[order], self.offsets[order], self.bits)


def quantise(weight: torch.Tensor) -> Quantised:
    """8-bit codes that meet the least and the greatest weight (out, in) of each group. `in` is a multiple of 32."""
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    # Half precision decides what a code means, so codes are chosen after rounding.
    scales, offsets = ((high - low) / 255).half(), low.half()
    steps = torch.where(scales == 0, 1, scales.float())
    codes = ((groups - offsets.float().unsqueeze(-1)) / steps.unsqueeze(-1)).round().clamp_(0, 255)
    return Quantised(codes.to(torch.uint8).view(weight.shape), scales, offsets, 8)


def from_blocks(kind: str, blocks: torch.Tensor, inputs: int) -> Quantised | None:
    """Raw GGUF `blocks` uint8 (out, bytes of a row) of a kind named `kind`; None for one that is not of groups."""
    if kind not in _KINDS or inputs % GROUP:
        return None
    block_bytes, read = _KINDS[kind]
    codes, scales, offsets, bits = read(blocks.reshape(-1, block_bytes))
    outputs = blocks.shape[0]
    return Quantised(codes.view(outputs, inputs), scales.view(outputs, -1), offsets.view(outputs, -1), bits)


_Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
"""Codes, scales and offsets in the order of the file, whatever their shape; bits."""


def _halves(blocks: torch.Tensor, first: int, count: int = 1) -> torch.Tensor:
    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """All low halves, then all high halves, over the last axis."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(blocks: torch.Tensor) -> _Read:
    scale = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, scale * -8, 4


def _q4_1(blocks: torch.Tensor) -> _Read:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2), 4


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bit i of a little-endian word of 32 bits, as 16 or 0."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts & 1) << 4).flatten(1)


def _q5_0(blocks: torch.Tensor) -> _Read:
    scale = _halves(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, scale * -16, 8


def _q5_1(blocks: torch.Tensor) -> _Read:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _halves(blocks, 0), _halves(blocks, 2), 8


def _q8_0(blocks: torch.Tensor) -> _Read:
    scale = _halves(blocks, 0)
    return blocks[:, 2:] ^ 128, scale, scale * -128, 8


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of the eight groups of a 256-block: 6-bit numbers times the block's two halves."""
    packed = blocks[:, 4:16]
    low, high, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((low & 63, (mixed & 15) | (low >> 6 << 4)), dim=1)
    least = torch.cat((high & 63, (mixed >> 4) | (high >> 6 << 4)), dim=1)
    scales = _halves(blocks, 0).float() * scale
    offsets = _halves(blocks, 2).float() * least
    return scales.half(), -offsets.half()


def _q4_k(blocks: torch.Tensor) -> _Read:
    scales, offsets = _k_scales(blocks)
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), scales, offsets, 4


def _q5_k(blocks: torch.Tensor) -> _Read:
    scales, offsets = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    return low | (blocks[:, None, 16:48] >> shifts & 1) << 4, scales, offsets, 8


def _q6_k(blocks: torch.Tensor) -> _Read:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    quarters = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1) & 3).flatten(2)
    codes = (_nibbles(low) | quarters << 4).view(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _halves(blocks, 208).float()
    again = quantise((codes * scales.unsqueeze(-1)).view(-1, 256))
    return again.codes, again.scales, again.offsets, 8


_KINDS: dict[str, tuple[int, Callable[[torch.Tensor], _Read]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""By GGUF's name: bytes of a block, and its reader."""
