# mypy: disable-error-code="no-untyped-call, no-untyped-def"
"""Paged attention of single tokens in Triton: bound by the bytes of keys and values, so made to keep many in flight.

The longest context is cut into parts of equal length (flash-decoding: Dao and others 2023, over Flash Attention 2,
arXiv 2307.08691); shorter sequences have fewer of them. One program reads one part for one KV head, once for all query
heads that share it, and leaves a partial result with the logarithm of its softmax's denominator; a second kernel mixes
the parts. With one part there is no second kernel. How many programs start is fixed when a graph is captured; how long
the parts are is read from the device in every step. The plain twin is `engine.kernels.torch_decode`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.decode_batch import DecodeBatch
from engine.kernels.tiling import keys_together, padded

_LOG2_E = 1.4426950408889634
_PARTS_TOGETHER = 16
STAGES = 3
"""Rounds in flight: the block table is read two ahead, keys and values one ahead."""


class DecodeAttention:
    """Attention of one step's single tokens, with every context in at most `splits` parts."""

    def __init__(self, pool: torch.Tensor, batch: DecodeBatch, scale: float, splits: int) -> None:
        self._pool, self._batch, self._scale, self._splits = pool, batch, scale, splits
        self._parts: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(self, layer: int, q: torch.Tensor, mixed: torch.Tensor, window: int | None) -> None:
        """Fill the batch's rows of `mixed` from those of `q`, both (tokens, heads, head_dim) and of equal strides."""
        _, heads, head_dim = q.shape
        batch, splits, pages = self._batch, self._splits, self._pool[:, :, layer]
        kv_heads, _, block_size, _ = pages.shape[1:]
        sums, logs = self._parts = self._parts or self._scratch(heads, head_dim, q.device)
        keys = keys_together(head_dim, pages.element_size())
        partial: Any = _partial  # its type knows neither grid nor compile-time arguments
        partial[(splits, kv_heads, len(batch.rows))](
            *(q, pages, mixed, sums, logs, batch.rows, batch.lengths, batch.tables, batch.longest),
            *(self._scale * _LOG2_E, *q.stride()[:2], *pages.stride()[:4], batch.tables.stride(0)),
            GROUP=heads // kv_heads,
            ROWS=padded(heads // kv_heads),
            SPLITS=splits,
            KEYS=keys,
            BLOCK=block_size,
            DIM=head_dim,
            DIM_PADDED=padded(head_dim),
            WINDOW=window or 0,
            num_warps=4,
            num_stages=STAGES,
        )
        if splits == 1:
            return
        reduce: Any = _reduce
        reduce[(heads, len(batch.rows))](
            *(mixed, sums, logs, batch.rows, batch.lengths, batch.longest, *q.stride()[:2]),
            SPLITS=splits,
            KEYS=keys,
            PARTS=_PARTS_TOGETHER,
            DIM=head_dim,
            DIM_PADDED=padded(head_dim),
            WINDOW=window or 0,
            num_warps=4,
        )

    def _scratch(self, heads: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 (rows, heads, splits, head_dim) partial results and (rows, heads, splits) logarithms to base 2."""
        shape = (len(self._batch.rows), heads, self._splits)
        if self._splits == 1:
            shape = (1, 1, 1)
        return torch.empty(*shape, head_dim, device=device), torch.empty(shape, device=device)


@triton.jit
def _part_length(longest, SPLITS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    visible = tl.load(longest).to(tl.int32)
    if WINDOW > 0:
        visible = tl.minimum(visible, WINDOW)
    return (visible + SPLITS * KEYS - 1) // (SPLITS * KEYS) * KEYS


@triton.jit
def _lowest(length, WINDOW: tl.constexpr):
    low = length * 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0)
    return low


@triton.jit
def _partial(
    q,
    pages,
    mixed,
    sums_out,
    logs_out,
    rows,
    lengths,
    tables,
    longest,
    scale,
    q_token,
    q_head,
    page_block,
    page_head,
    page_half,
    page_slot,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + sequence).to(tl.int32)
    begin = _lowest(length, WINDOW) + split * _part_length(longest, SPLITS, KEYS, WINDOW)
    end = tl.minimum(begin + _part_length(longest, SPLITS, KEYS, WINDOW), length)

    member, dims, offsets = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED), tl.arange(0, KEYS)
    head = kv_head * GROUP + member
    used = (member < GROUP)[:, None] & (dims < DIM)[None, :]
    q_place = tl.load(rows + sequence) * q_token + head[:, None] * q_head + dims[None, :]
    queries = tl.load(q + q_place, mask=used, other=0.0)

    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    base = pages + kv_head * page_head
    table = tables + sequence * table_stride
    for first in range(begin, end, KEYS):
        positions = first + offsets
        there = positions < end
        block = tl.load(table + positions // BLOCK, mask=there, other=0).to(tl.int64)
        place = (block * page_block + (positions % BLOCK) * page_slot)[:, None] + dims[None, :]
        read = there[:, None] & (dims < DIM)[None, :]
        keys = tl.load(base + place, mask=read, other=0.0).to(queries.dtype)
        values = tl.load(base + page_half + place, mask=read, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, -1e30)  # each round has a key that is there
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(weights, axis=1)
        sums = sums * fade[:, None] + tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
        best = higher

    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(mixed + q_place, result.to(mixed.dtype.element_ty), mask=used)
    else:
        heads = tl.num_programs(1).to(tl.int64) * GROUP
        part = (sequence * heads + head) * SPLITS + split
        left = member < tl.where(begin < end, GROUP, 0)
        tl.store(sums_out + part[:, None] * DIM + dims[None, :], result, mask=left[:, None] & (dims < DIM)[None, :])
        tl.store(logs_out + part, best + tl.log2(tl.where(total > 0, total, 1.0)), mask=left)


@triton.jit
def _reduce(
    mixed,
    sums_in,
    logs_in,
    rows,
    lengths,
    longest,
    q_token,
    q_head,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    head, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence).to(tl.int32)
    span = tl.maximum(_part_length(longest, SPLITS, KEYS, WINDOW), 1)
    parts = (length - _lowest(length, WINDOW) + span - 1) // span
    offsets, dims = tl.arange(0, PARTS), tl.arange(0, DIM_PADDED)
    base = (sequence * tl.num_programs(0) + head) * SPLITS
    best = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([DIM_PADDED], tl.float32)
    for first in range(0, parts, PARTS):
        there = first + offsets < parts
        logs = tl.load(logs_in + base + first + offsets, mask=there, other=-1e30)
        place = (base + first + offsets)[:, None] * DIM + dims[None, :]
        results = tl.load(sums_in + place, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
        higher = tl.maximum(best, tl.max(logs, axis=0))
        weights = tl.exp2(logs - higher)
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(weights, axis=0)
        sums = sums * fade + tl.sum(weights[:, None] * results, axis=0)
        best = higher
    result = sums / tl.where(total > 0, total, 1.0)
    place = tl.load(rows + sequence) * q_token + head * q_head + dims
    tl.store(mixed + place, result.to(mixed.dtype.element_ty), mask=dims < DIM)
