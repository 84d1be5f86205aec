# mypy: disable-error-code="no-untyped-call, no-untyped-def"
"""Paged attention of chunks in Triton: bound by arithmetic, so made to keep the matrix units busy.

A chunk is cut into tiles of tokens; a tile's tokens with all query heads that share one KV head are the rows of one
program, which walks the keys with a running softmax (Flash Attention 2, arXiv 2307.08691): first those that every row
sees, without masks, then the diagonal. Keys are found position by position through the block table, so the keys of a
round need not be those of a block. The tiles that see most come first, so that the last to end are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.batch import AttentionBatch, Span
from engine.kernels.tiling import keys_together, padded, rows_together

_LOG2_E = 1.4426950408889634
STAGES = 3
"""Rounds in flight: the block table is read two ahead, keys and values one ahead."""


class ChunkAttention:
    """Attention of one step's chunks, `spans` of `batch`."""

    def __init__(self, pool: torch.Tensor, batch: AttentionBatch, spans: tuple[Span, ...], scale: float) -> None:
        self._pool, self._spans, self._scale = pool, spans, scale
        self._tables = torch.tensor(batch.tables(spans), dtype=torch.int32, device=pool.device)
        self._longest = max(span.context for span in spans)
        self._tiles: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, q: torch.Tensor, mixed: torch.Tensor, window: int | None) -> None:
        """Fill the chunks' rows of `mixed` from those of `q`, both (tokens, heads, head_dim) and of equal strides."""
        _, heads, head_dim = q.shape
        pages = self._pool[:, :, layer]
        kv_heads, _, block_size, _ = pages.shape[1:]
        group = heads // kv_heads
        rows = rows_together(max(span.query for span in self._spans), group, head_dim, q.element_size())
        tiles = self._tiles_of(rows // group)
        kernel: Any = _chunk  # its type knows neither grid nor compile-time arguments
        kernel[(kv_heads, len(tiles))](
            *(q, pages, mixed, tiles, self._tables, self._scale * _LOG2_E),
            *(*q.stride()[:2], *pages.stride()[:4], self._tables.stride(0)),
            GROUP=group,
            ROWS=rows,
            KEYS=keys_together(head_dim, pages.element_size()),
            BLOCK=block_size,
            DIM=head_dim,
            DIM_PADDED=padded(head_dim),
            WINDOW=window if window is not None and window < self._longest else 0,
            num_warps=8 if rows >= 128 else 4,
            num_stages=STAGES,
        )

    def _tiles_of(self, tokens: int) -> torch.Tensor:
        if tokens not in self._tiles:
            rows = tiles_of(self._spans, tokens)
            self._tiles[tokens] = torch.tensor(rows, dtype=torch.int32, device=self._pool.device)
        return self._tiles[tokens]


def tiles_of(spans: Sequence[Span], tokens: int) -> list[tuple[int, int, int, int]]:
    """(row of the block table, first token in the flat batch, tokens, position of the first), longest sight first."""
    tiles = [
        (row, span.first + begin, min(tokens, span.query - begin), span.start + begin)
        for row, span in enumerate(spans)
        for begin in range(0, span.query, tokens)
    ]
    return sorted(tiles, key=lambda tile: -tile[3])


@triton.jit
def _chunk(
    q,
    pages,
    mixed,
    tiles,
    tables,
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
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    kv_head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = tables + tl.load(tiles + 4 * tile).to(tl.int64) * table_stride
    first = tl.load(tiles + 4 * tile + 1).to(tl.int64)
    count = tl.load(tiles + 4 * tile + 2)
    start = tl.load(tiles + 4 * tile + 3)

    rows, dims, offsets = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED), tl.arange(0, KEYS)
    token = rows // GROUP
    position = start + token
    used = (token < count)[:, None] & (dims < DIM)[None, :]
    q_row = (first + token) * q_token + (kv_head * GROUP + rows % GROUP) * q_head
    q_place = q_row[:, None] + dims[None, :]
    queries = tl.load(q + q_place, mask=used, other=0.0)

    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    base = pages + kv_head * page_head
    end = start + count  # keys before this one are seen by some row
    low = start * 0
    common = (start + 1) // KEYS * KEYS  # keys before this one are seen by every row
    if WINDOW > 0:
        low = tl.maximum(start - WINDOW + 1, 0)
        common = low

    for begin in range(low, common, KEYS):
        positions = begin + offsets
        block = tl.load(table + positions // BLOCK).to(tl.int64)
        place = (block * page_block + (positions % BLOCK) * page_slot)[:, None] + dims[None, :]
        if DIM == DIM_PADDED:
            keys = tl.load(base + place)
            values = tl.load(base + page_half + place)
        else:
            keys = tl.load(base + place, mask=(dims < DIM)[None, :], other=0.0)
            values = tl.load(base + page_half + place, mask=(dims < DIM)[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * scale
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(weights, axis=1)
        sums = sums * fade[:, None]
        sums = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), sums, input_precision="ieee")
        best = higher

    for begin in range(common, end, KEYS):
        positions = begin + offsets
        there = positions < end
        block = tl.load(table + positions // BLOCK, mask=there, other=0).to(tl.int64)
        place = (block * page_block + (positions % BLOCK) * page_slot)[:, None] + dims[None, :]
        read = there[:, None] & (dims < DIM)[None, :]
        keys = tl.load(base + place, mask=read, other=0.0)
        values = tl.load(base + page_half + place, mask=read, other=0.0)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * scale
        seen = (positions[None, :] <= position[:, None]) & (token < count)[:, None]
        if WINDOW > 0:
            seen = seen & (positions[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)  # a row may see nothing of this round
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(weights, axis=1)
        sums = sums * fade[:, None]
        sums = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), sums, input_precision="ieee")
        best = higher

    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(mixed + q_place, result.to(mixed.dtype.element_ty), mask=used)
