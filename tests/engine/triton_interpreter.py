"""Runs the Triton kernels in Triton's interpreter and prints how far each case is from the torch twin.

A process of its own: the interpreter must be chosen before triton is first imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

os.environ["TRITON_INTERPRET"] = "1"

import torch

from engine.kernels.batch import batch_of
from engine.kernels.decode_batch import DecodeBatch
from engine.kernels.pointwise import TorchPointwise
from engine.kernels.torch_attention import TorchAttention
from engine.kernels.torch_decode import TorchDecode
from engine.kernels.triton_attention import TritonAttention, TritonDecode
from engine.kernels.triton_pointwise import TritonPointwise
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
    "decode in many parts": ([(700, 1), (3, 1), (299, 1)], 4, 2, 16, 16, None, "float32"),
    "decode in many parts, window": ([(700, 1), (3, 1), (299, 1)], 4, 2, 16, 16, 270, "float32"),
    "chunk far into a prompt": ([(130, 70)], 4, 2, 16, 16, None, "float32"),
    "mixed float16 pool": (MIXED, 4, 2, 16, 16, None, "float16"),
    "mixed bfloat16 pool": (MIXED, 4, 2, 16, 16, None, "bfloat16"),
}


def main() -> None:
    found = {name: errors(*case) for name, case in CASES.items()}
    for window in (None, 40):
        found[f"padded batch at fixed addresses, window {window}"] = padded_errors(window)
    for dtype in (torch.float32, torch.float16):
        found |= {f"{name} {dtype}": {"attention": error, "written": 0.0} for name, error in pointwise_errors(dtype)}
    print(json.dumps(found))


def errors(pieces, heads, kv_heads, head_dim, block_size, window, kv_dtype) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    layout = KVLayout(80, 2, kv_heads, head_dim, block_size, kv_dtype)
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


def padded_errors(window: int | None) -> dict[str, float]:
    """Rows of 0, 1, 17 and 530 keys, and two of padding, in a batch that may grow to 1,024 keys."""
    torch.manual_seed(2)
    layout = KVLayout(64, 2, 2, 16, 16, "float32")
    lengths = torch.tensor([1, 0, 17, 530, 0])
    tables = torch.randperm(5 * 64).remainder(64).view(5, 64).to(torch.int32)
    tables[3, :34], tables[2, :2], tables[0, 0] = torch.arange(34), torch.tensor([40, 41]), 50
    last = (lengths - 1).clamp(min=0)
    slots = tables[torch.arange(5), last // 16].to(torch.int64) * 16 + last % 16
    batch = DecodeBatch(torch.arange(5), lengths, slots.where(lengths > 0, -1), tables, lengths.max().view(1))
    q, k, v, history = torch.randn(5, 6, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16), torch.randn(layout.shape)
    results, pools = [], [KVPool(layout), KVPool(layout)]
    for pool, kind in zip(pools, (TorchDecode, TritonDecode), strict=True):
        pool.tensor.copy_(history)
        results.append(kind(pool, batch, 0.25, 1024)(1, q, k, v, window))
    return {
        "attention": (results[0] - results[1]).abs().max().item(),
        "written": (pools[0].tensor - pools[1].tensor).abs().max().item(),
    }


def pointwise_errors(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Of each operation, in units of a rounding of `dtype` over one of float32."""
    torch.manual_seed(3)
    unit = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    twins = (TorchPointwise(), TritonPointwise())

    def error(results: Sequence[torch.Tensor]) -> float:
        return (results[0].float() - results[1].float()).abs().max().item() / unit

    x, delta, weight = torch.randn(3, 48), torch.randn(3, 48).to(dtype), torch.randn(48)
    for given in (None, delta):
        sums = [x.clone(), x.clone()]
        normed = [twin.add_norm(sums[i], given, weight, 1e-5, dtype) for i, twin in enumerate(twins)]
        yield f"norm after {'nothing' if given is None else 'a sum'}", max(error(sums), error(normed))
    qkv, angles = torch.randn(3, 9, 24).to(dtype), torch.randn(3, 12)
    cos = torch.cat((angles.cos(), angles.cos()), dim=1).unsqueeze(1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=1).unsqueeze(1)
    yield "rotation", error([twin.rotate(qkv.clone()[:, :7], cos, sin) for twin in twins])
    gate_up = torch.randn(3, 2 * 1100).to(dtype)
    yield "activation", error([twin.gated(gate_up.clone()) for twin in twins])


if __name__ == "__main__":
    main()
