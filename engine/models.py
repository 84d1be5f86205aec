"""One decoder for the whole family: what differs between Llama, Mistral, Qwen2 and Qwen3 is data in `ModelConfig`.

A step arrives as one flat batch of tokens of many sequences. Everything but attention is per token, so prompts and
decodes run through the same products together; attention is handed in as an object that knows the step's sequences.

The residual stream and the norms are float32 whatever the weights' dtype: in bfloat16 their rounding alone would move
SmolLM2's logits by half a unit from one batch shape to another, twice what the products do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.attention import Attention
from engine.kernels.pointwise import Pointwise, TorchPointwise
from engine.linear import dense, product
from engine.model_config import ModelConfig
from engine.rope import Rotary
from engine.weights import Layer, Norm, Weights, tensors


class Decoder:
    """A decoder-only transformer over given weights. Stateless between calls: KV lives in the pool.

    `pointwise` computes what lies between the products; None: torch does.
    """

    def __init__(self, config: ModelConfig, weights: Weights, pointwise: Pointwise | None = None) -> None:
        self.config = config
        self.weights = weights
        self._pointwise = pointwise or TorchPointwise()
        self._rotary = Rotary(config, self.device)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors(self.weights))

    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        """Float32 hidden states (tokens, hidden_size) after the last layer, not yet normed: `logits` does that.

        `token_ids`, `positions` and `lengths` are (tokens,) int64; for `lengths` see `Rotary.angles`.
        """
        cos, sin = self._rotary.angles(positions, lengths)
        x = F.embedding(token_ids, self.weights.embedding).to(torch.float32)  # a fresh tensor: added to in place
        delta = None
        for index, layer in enumerate(self.weights.layers):
            normed = self._add_norm(x, delta, layer.input_norm)
            delta = self._attention(index, layer, normed, cos, sin, attend)
            normed = self._add_norm(x, delta, layer.post_norm)
            delta = product(self._pointwise.gated(product(normed, layer.gate_up)), layer.down)
        return x if delta is None else x.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (rows, vocab_size) of hidden states (rows, hidden_size)."""
        return dense(self._norm(hidden, self.weights.norm), self.weights.lm_head).to(torch.float32)

    def _attention(
        self, index: int, layer: Layer, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = product(normed, layer.qkv).view(-1, heads + 2 * kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(qkv[:, :heads], layer.q_norm), self._norm(qkv[:, heads:-kv_heads], layer.k_norm)
            qk = torch.cat((q, k), dim=1)
        else:
            qk = qkv[:, :-kv_heads]
        q, k = torch.split(self._pointwise.rotate(qk, cos, sin), [heads, kv_heads], dim=1)
        mixed = attend(index, q, k, qkv[:, -kv_heads:], config.windows[index])
        return product(mixed.reshape(-1, heads * config.head_dim), layer.output)

    def _add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        return self._pointwise.add_norm(x, delta, norm.weight, self.config.norm_eps, self.dtype)

    def _norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        wide = x.to(torch.float32)
        return F.rms_norm(wide, norm.weight.shape, norm.weight, self.config.norm_eps).to(self.dtype)
