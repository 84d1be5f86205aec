# mypy: disable-error-code="no-untyped-call, no-untyped-def"
"""Paged attention and KV write in Triton, for GPUs. The plain twin is `engine.kernels.torch_attention`.

A step's single tokens go to `triton_decode`, which is bound by memory, its chunks to `triton_prefill`, which is bound
by arithmetic. Strides come from the pool and block offsets are 64-bit: a pool may exceed 2**31 elements.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.batch import AttentionBatch
from engine.kernels.decode_batch import DecodeBatch, decode_batch_of
from engine.kernels.tiling import power_of_two, split_count
from engine.kernels.triton_decode import DecodeAttention
from engine.kernels.triton_prefill import ChunkAttention
from engine.kv import KVPool

_INTERPRETED_PROCESSORS = 4


class TritonAttention:
    """Attention of one step; same arguments and result as `TorchAttention`."""

    def __init__(self, pool: KVPool, batch: AttentionBatch, scale: float) -> None:
        self._pool = pool.tensor
        self._slots = torch.tensor(batch.slots(), dtype=torch.int64, device=pool.device)
        singles = tuple(span for span in batch.spans if span.query == 1)
        chunks = tuple(span for span in batch.spans if span.query > 1)
        self._kinds: list[DecodeAttention | ChunkAttention] = []
        if singles:
            decodes = decode_batch_of(batch, singles, pool.device)
            longest = max(span.context for span in singles)
            splits = split_count(len(singles), pool.layout.kv_heads, longest, processors(pool.device))
            self._kinds.append(DecodeAttention(pool.tensor, decodes, scale, splits))
        if chunks:
            self._kinds.append(ChunkAttention(pool.tensor, batch, chunks, scale))

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """As `engine.kernels.attention.Attention`."""
        write_kv(self._pool, layer, k, v, self._slots)
        q = q.contiguous()
        mixed = torch.empty_like(q)
        for kind in self._kinds:
            kind.attend(layer, q, mixed, window)
        return mixed


class TritonDecode:
    """Attention of a step of single tokens whose sequences are known to the device only, as in a captured graph.

    `longest_context` bounds every length that will come.
    """

    def __init__(self, pool: KVPool, batch: DecodeBatch, scale: float, longest_context: int) -> None:
        self._pool, self._batch = pool.tensor, batch
        splits = split_count(len(batch.rows), pool.layout.kv_heads, longest_context, processors(pool.device))
        self._decode = DecodeAttention(pool.tensor, batch, scale, splits)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """As `engine.kernels.attention.Attention`."""
        write_kv(self._pool, layer, k, v, self._batch.slots)
        q = q.contiguous()
        mixed = torch.empty_like(q)
        self._decode.attend(layer, q, mixed, window)
        return mixed


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; elsewhere the kernels are interpreted, one program after the other."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def write_kv(pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store `k` and `v` (tokens, kv_heads, head_dim) of a layer into `pool` (see `KVLayout.shape`) at `slots`.

    `slots` (tokens,) int64 is block * block_size + offset; a token with slot -1 is dropped. Values are rounded to the
    pool's dtype.
    """
    tokens, kv_heads, head_dim = k.shape
    pages = pool[:, :, layer]
    kernel: Any = _write
    kernel[(tokens,)](
        *(k, v, pages, slots),
        *k.stride()[:2],
        *v.stride()[:2],
        *pages.stride()[:4],
        HEADS=kv_heads,
        HEADS_PADDED=power_of_two(kv_heads),
        BLOCK=pool.shape[4],
        DIM=head_dim,
        DIM_PADDED=power_of_two(head_dim),
        num_warps=4,
    )


@triton.jit
def _write(
    k,
    v,
    pages,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    page_block,
    page_head,
    page_half,
    page_slot,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head, dims = tl.arange(0, HEADS_PADDED)[:, None].to(tl.int64), tl.arange(0, DIM_PADDED)[None, :]
    kept = (head < tl.where(slot >= 0, HEADS, 0)) & (dims < DIM)
    key = tl.load(k + token * k_token + head * k_head + dims, mask=kept)
    value = tl.load(v + token * v_token + head * v_head + dims, mask=kept)
    target = pages + slot // BLOCK * page_block + slot % BLOCK * page_slot + head * page_head + dims
    tl.store(target, key.to(pages.dtype.element_ty), mask=kept)
    tl.store(target + page_half, value.to(pages.dtype.element_ty), mask=kept)
