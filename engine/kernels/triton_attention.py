# mypy: disable-error-code="no-untyped-call"
"""Paged attention and KV write in Triton, for GPUs. The plain twin is `engine.kernels.torch_attention`.

A step is cut into tiles: up to `tokens` queries of one sequence, together with all query heads that share one KV head,
make the rows of one program. A program walks its sequence's block table page by page with a running softmax (Flash
Attention 2, arXiv 2307.08691), so a decode is a tile of one token and a prompt many of them: one kernel for both.
Strides come from the pool and block offsets are 64-bit: a pool may exceed 2**31 elements.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.batch import AttentionBatch
from engine.kv import KVPool

_ROWS = 16
"""Smallest number of rows that a matrix unit takes."""
_PROMPT_ROWS = 64


class TritonAttention:
    """Attention of one step; same arguments and result as `TorchAttention`."""

    def __init__(self, pool: KVPool, batch: AttentionBatch, scale: float) -> None:
        self._pool, self._batch, self._scale = pool, batch, scale
        spans, device = batch.spans, pool.device
        self._slots = torch.tensor(batch.slots(), dtype=torch.int64, device=device)
        self._tables = torch.tensor(batch.tables(spans), dtype=torch.int64, device=device)
        places = [(span.first, span.query, span.start) for span in spans]
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._tiles: dict[int, torch.Tensor] = {}

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """As `engine.models.Attention`."""
        write_kv(self._pool.tensor, layer, k, v, self._slots)
        return self._attend(layer, q.contiguous(), window)

    def _attend(self, layer: int, q: torch.Tensor, window: int | None) -> torch.Tensor:
        _, heads, head_dim = q.shape
        pool = self._pool.tensor
        kv_heads, block_size = pool.shape[1], pool.shape[4]
        group = heads // kv_heads
        group_rows = triton.next_power_of_2(group)
        longest = max(span.query for span in self._batch.spans)
        tokens = max(1, (_ROWS if longest == 1 else _PROMPT_ROWS) // group_rows)
        rows = max(_ROWS, tokens * group_rows)
        tiles = self._tiles_of(tokens)
        mixed = torch.empty_like(q)
        kernel: Any = _attend  # its type knows neither grid nor compile-time arguments
        kernel[(len(tiles), kv_heads)](
            *(q, pool, mixed, tiles, self._places, self._tables),
            *(layer, self._scale, window or 0),
            *q.stride()[:2],
            *pool.stride()[:5],
            self._tables.stride(0),
            GROUP=group,
            GROUP_ROWS=group_rows,
            TOKENS=tokens,
            ROWS=rows,
            BLOCK=block_size,
            BLOCK_PADDED=triton.next_power_of_2(block_size),
            DIM=head_dim,
            DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        )
        return mixed

    def _tiles_of(self, tokens: int) -> torch.Tensor:
        """(tiles, 2) int64: the sequence, and the first of its tokens, that a program works on."""
        if tokens not in self._tiles:
            spans = enumerate(self._batch.spans)
            tiles = [(index, first) for index, span in spans for first in range(0, span.query, tokens)]
            self._tiles[tokens] = torch.tensor(tiles, dtype=torch.int64, device=self._pool.device)
        return self._tiles[tokens]


def write_kv(pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store `k` and `v` (tokens, kv_heads, head_dim) of a layer into `pool` (see `KVLayout.shape`) at `slots`.

    `slots` (tokens,) int64 is block * block_size + offset. Values are rounded to the pool's dtype.
    """
    tokens, kv_heads, head_dim = k.shape
    kernel: Any = _write
    kernel[(tokens, kv_heads)](
        *(k, v, pool, slots, layer),
        *k.stride()[:2],
        *v.stride()[:2],
        *pool.stride()[:5],
        BLOCK=pool.shape[4],
        DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _write(
    k: Any,
    v: Any,
    pool: Any,
    slots: Any,
    layer: Any,
    k_token: Any,
    k_head: Any,
    v_token: Any,
    v_head: Any,
    pool_block: Any,
    pool_head: Any,
    pool_layer: Any,
    pool_half: Any,
    pool_slot: Any,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    target = pool + slot // BLOCK * pool_block + head * pool_head + layer * pool_layer + slot % BLOCK * pool_slot
    dims = tl.arange(0, DIM_PADDED)
    kept = dims < DIM
    key = tl.load(k + token * k_token + head * k_head + dims, mask=kept)
    value = tl.load(v + token * v_token + head * v_head + dims, mask=kept)
    tl.store(target + dims, key.to(pool.dtype.element_ty), mask=kept)
    tl.store(target + pool_half + dims, value.to(pool.dtype.element_ty), mask=kept)


@triton.jit
def _attend(
    q: Any,
    pool: Any,
    mixed: Any,
    tiles: Any,
    places: Any,
    tables: Any,
    layer: Any,
    scale: Any,
    window: Any,
    q_token: Any,
    q_head: Any,
    pool_block: Any,
    pool_head: Any,
    pool_layer: Any,
    pool_half: Any,
    pool_slot: Any,
    table_stride: Any,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    tile, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sequence = tl.load(tiles + 2 * tile)
    tile_first = tl.load(tiles + 2 * tile + 1)
    first = tl.load(places + 3 * sequence)
    query = tl.load(places + 3 * sequence + 1)
    start = tl.load(places + 3 * sequence + 2)

    rows = tl.arange(0, ROWS)
    token, member = tile_first + rows // GROUP_ROWS, rows % GROUP_ROWS
    used = (rows // GROUP_ROWS < TOKENS) & (token < query) & (member < GROUP)
    position = start + token
    dims = tl.arange(0, DIM_PADDED)
    q_place = (first + token) * q_token + (kv_head * GROUP + member) * q_head
    q_mask = used[:, None] & (dims < DIM)[None, :]
    queries = tl.load(q + q_place[:, None] + dims[None, :], mask=q_mask, other=0.0)

    best = tl.full([ROWS], -1e30, tl.float32)  # finite, so that a page a row sees nothing of leaves no NaN
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM_PADDED], tl.float32)

    last = tl.minimum(tile_first + TOKENS, query) + start  # keys before this one are seen by some row
    lowest = tl.where(window > 0, tl.maximum(start + tile_first - window + 1, 0), 0)
    offsets = tl.arange(0, BLOCK_PADDED)
    base = pool + kv_head * pool_head + layer * pool_layer
    for page in range(lowest // BLOCK, (last + BLOCK - 1) // BLOCK):
        block = tl.load(tables + sequence * table_stride + page)
        key_position = page * BLOCK + offsets
        there = (offsets < BLOCK) & (key_position < last)
        place = base + block * pool_block + offsets * pool_slot
        kv_mask = there[:, None] & (dims < DIM)[None, :]
        keys = tl.load(place[:, None] + dims[None, :], mask=kv_mask, other=0.0).to(queries.dtype)
        values = tl.load(place[:, None] + pool_half + dims[None, :], mask=kv_mask, other=0.0).to(queries.dtype)

        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        seen = there[None, :] & (key_position[None, :] <= position[:, None])
        seen = seen & ((window == 0) | (key_position[None, :] > position[:, None] - window))
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
        fade = tl.exp(best - higher)
        total = total * fade + tl.sum(weights, axis=1)
        sums = sums * fade[:, None] + tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
        best = higher

    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(mixed + q_place[:, None] + dims[None, :], result.to(mixed.dtype.element_ty), mask=q_mask)
