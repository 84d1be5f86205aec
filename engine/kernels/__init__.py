"""Paged attention and KV write, each twice: in plain torch and in Triton. Which one runs is decided by the device.

`attention_for(device)` returns the class to build once a step; an instance is called once per layer. Both compute the
same: query token at position p sees keys 0 … p of its own sequence, with a sliding window w only those above p - w.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kernels.batch import AttentionBatch
from engine.kernels.torch_attention import TorchAttention
from engine.kv import KVPool
from engine.models import Attention

MakeAttention = Callable[[KVPool, AttentionBatch, float], Attention]
"""(pool, batch, scale) → the step's attention."""


def attention_for(device: torch.device) -> MakeAttention:
    """Triton on a GPU, torch elsewhere."""
    if device.type == "cuda":
        from engine.kernels.triton_attention import TritonAttention  # triton is there on Linux only

        return TritonAttention
    return TorchAttention
