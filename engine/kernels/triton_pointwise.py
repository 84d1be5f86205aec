# mypy: disable-error-code="no-untyped-call, no-untyped-def"
"""What a layer computes between its products, one Triton kernel each. The plain twin is `engine.kernels.pointwise`.

At few rows a step waits for weights, and each kernel between two products is a pause in reading them: three instead of
some fifteen per layer. Arithmetic is float32; only results are rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.tiling import power_of_two

_COLUMNS = 1024


class TritonPointwise:
    """As `engine.kernels.pointwise.Pointwise`."""

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        rows, size = x.shape
        normed = torch.empty(rows, size, dtype=dtype, device=x.device)
        kernel: Any = _add_norm  # its type knows neither grid nor compile-time arguments
        kernel[(rows,)](
            *(x, x if delta is None else delta.contiguous(), weight, normed, eps),
            ADD=delta is not None,
            SIZE=size,
            PADDED=power_of_two(size),
            num_warps=8 if size >= 2048 else 4,
        )
        return normed

    def rotate(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tokens, heads, head_dim = qk.shape
        kernel: Any = _rotate
        kernel[(tokens,)](
            *(qk, cos, sin, *qk.stride()[:2], cos.stride(0)),
            HEADS=heads,
            HEADS_PADDED=power_of_two(heads),
            HALF=head_dim // 2,
            HALF_PADDED=power_of_two(head_dim // 2),
            num_warps=4,
        )
        return qk

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
        kernel: Any = _gated
        kernel[(rows, triton.cdiv(size, _COLUMNS))](gate_up, out, SIZE=size, COLUMNS=_COLUMNS, num_warps=4)
        return out


@triton.jit
def _add_norm(x, delta, weight, normed, eps, ADD: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    there = columns < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + columns
    values = tl.load(x + place, mask=there, other=0.0)
    if ADD:
        values += tl.load(delta + place, mask=there, other=0.0).to(tl.float32)
        tl.store(x + place, values, mask=there)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    result = values * inverse * tl.load(weight + columns, mask=there, other=0.0)
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=there)


@triton.jit
def _rotate(
    qk,
    cos,
    sin,
    token_stride,
    head_stride,
    angle_stride,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, dims = tl.arange(0, HEADS_PADDED)[:, None], tl.arange(0, HALF_PADDED)[None, :]
    there = (head < HEADS) & (dims < HALF)
    place = qk + token * token_stride + head * head_stride + dims
    angle = token * angle_stride + dims
    left = tl.load(place, mask=there, other=0.0).to(tl.float32)
    right = tl.load(place + HALF, mask=there, other=0.0).to(tl.float32)
    turn = tl.load(cos + angle, mask=dims < HALF, other=0.0)
    rise = tl.load(sin + angle + HALF, mask=dims < HALF, other=0.0)  # the left half has it with its sign turned
    tl.store(place, (left * turn - right * rise).to(qk.dtype.element_ty), mask=there)
    tl.store(place + HALF, (right * turn + left * rise).to(qk.dtype.element_ty), mask=there)


@triton.jit
def _gated(gate_up, out, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=there, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=there)
