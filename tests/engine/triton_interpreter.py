"""Runs the Triton kernels in Triton's interpreter and prints how far each case is from the torch twin.

A process of its own: the interpreter must be chosen before triton is first imported.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from engine.kernels.batch import batch_of
from engine.kernels.torch_attention import TorchAttention
from engine.kernels.triton_attention import TritonAttention
from engine.kv import KVLayout, KVPool

DECODE = [(0, 1), (15, 1), (16, 1), (40, 1)]
MIXED = [(0, 35), (20, 1), (17, 20), (33, 16)]
# name: (pieces, heads, kv_heads, head_dim, block_size, window, dtype)
CASES = {
    "decode": (DECODE, 4, 2, 16, 16, None, "float32"),
    "decode three query heads to one": (DECODE, 9, 3, 64, 16, None, "float32"),
    "decode window": (DECODE, 4, 4, 32, 16, 8, "float32"),
    "mixed": (MIXED, 4, 2, 16, 16, None, "float32"),
    "mixed window": (MIXED, 6, 2, 16, 16, 19, "float32"),
    "mixed odd head size": (MIXED, 4, 1, 24, 16, None, "float32"),
    "mixed wide block": (MIXED, 3, 3, 16, 48, None, "float32"),
    "mixed float16 pool": (MIXED, 4, 2, 16, 16, None, "float16"),
    "mixed bfloat16 pool": (MIXED, 4, 2, 16, 16, None, "bfloat16"),
}


def main() -> None:
    print(json.dumps({name: errors(*case) for name, case in CASES.items()}))


def errors(pieces, heads, kv_heads, head_dim, block_size, window, kv_dtype) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    layout = KVLayout(32, 2, kv_heads, head_dim, block_size, kv_dtype)
    pools = [KVPool(layout), KVPool(layout)]
    history = torch.randn(layout.shape, generator=generator)
    free = iter(torch.randperm(layout.num_blocks, generator=generator).tolist())
    batch = batch_of(
        [(start, n, [next(free) for _ in range(-(-(start + n) // block_size))]) for start, n in pieces], block_size
    )
    q = torch.randn(batch.num_tokens, heads, head_dim, generator=generator)
    k = torch.randn(batch.num_tokens, kv_heads, head_dim, generator=generator)
    v = torch.randn(batch.num_tokens, kv_heads, head_dim, generator=generator)
    results = []
    for pool, kind in zip(pools, (TorchAttention, TritonAttention), strict=True):
        pool.tensor.copy_(history)
        results.append(kind(pool, batch, head_dim**-0.5)(1, q, k, v, window))
    written = torch.tensor(batch.slots())
    kept = [pool.tensor[written // block_size, :, 1, :, written % block_size].float() for pool in pools]
    return {
        "attention": (results[0] - results[1]).abs().max().item(),
        "written": (kept[0] - kept[1]).abs().max().item(),
    }


if __name__ == "__main__":
    main()
