"""Paged attention, KV write and what lies between products, each twice: in plain torch and in Triton.

Which one runs is decided by the device. `attention_for(device)` returns the class to build once a step,
`decode_attention_for(device)` the class to build once for every step of single tokens of one batch size; an instance
is called once per layer. All compute the same: query token at position p sees keys 0 … p of its own sequence, with a
sliding window w only those above p - w. `pointwise_for(device)` returns norms, rotation and activation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kernels.attention import Attention
from engine.kernels.batch import AttentionBatch
from engine.kernels.decode_batch import DecodeBatch
from engine.kernels.pointwise import Pointwise, TorchPointwise
from engine.kernels.torch_attention import TorchAttention
from engine.kernels.torch_decode import TorchDecode
from engine.kv import KVPool

MakeAttention = Callable[[KVPool, AttentionBatch, float], Attention]
"""(pool, batch, scale) → the step's attention."""
MakeDecodeAttention = Callable[[KVPool, DecodeBatch, float, int], Attention]
"""(pool, batch, scale, longest context there can be) → attention of every step that `batch` is filled for."""


def attention_for(device: torch.device) -> MakeAttention:
    """Triton on a GPU, torch elsewhere."""
    if device.type == "cuda":
        from engine.kernels.triton_attention import TritonAttention  # triton is there on Linux only

        return TritonAttention
    return TorchAttention


def decode_attention_for(device: torch.device) -> MakeDecodeAttention:
    """Triton on a GPU, torch elsewhere."""
    if device.type == "cuda":
        from engine.kernels.triton_attention import TritonDecode

        return TritonDecode
    return TorchDecode


def pointwise_for(device: torch.device) -> Pointwise:
    """Triton on a GPU, torch elsewhere."""
    if device.type == "cuda":
        from engine.kernels.triton_pointwise import TritonPointwise

        return TritonPointwise()
    return TorchPointwise()
