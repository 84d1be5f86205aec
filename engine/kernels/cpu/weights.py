"""A decoder's weights in packed tiles, wired up for C++."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch

from engine.kernels.cpu import abi
from engine.kernels.cpu.pack import packed
from engine.model_config import ModelConfig
from engine.quantised import Quantised

Reader = Callable[[str], torch.Tensor | Quantised]
"""A checkpoint tensor by its Hugging Face name; norms and biases come dense."""


class PackedWeights:
    """Packs every weight and keeps it alive for as long as C++ points to it. `model` is the root of the structures."""

    def __init__(self, config: ModelConfig, read: Reader) -> None:
        self._read = read
        self._kept: list[object] = []
        self._bytes_of: dict[str, int] = {}
        layers = (abi.Layer * config.num_layers)(*(self._layer(config, i) for i in range(config.num_layers)))
        self._kept.append(layers)
        embedding = self._matrix("model.embed_tokens")
        head = embedding if config.tied_embeddings else self._matrix("lm_head")
        self.model = abi.Model(
            ctypes.addressof(layers),
            embedding,
            head,
            self._vector("model.norm.weight"),
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.norm_eps,
            1.0 / math.sqrt(config.head_dim),
        )

    def step_bytes(self, config: ModelConfig) -> int:
        """Bytes of matrices that a step reads, however few its tokens: all but an untied embedding."""
        skipped = 0 if config.tied_embeddings else self._bytes_of["model.embed_tokens"]
        return sum(self._bytes_of.values()) - skipped

    def _layer(self, config: ModelConfig, index: int) -> abi.Layer:
        at = f"model.layers.{index}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        biased = {"q_proj": config.qkv_bias, "k_proj": config.qkv_bias, "v_proj": config.qkv_bias}
        biased |= {"o_proj": config.output_bias}
        rooms = {name: attention if name[0] in "qkvo" else mlp for name in abi.PROJECTIONS}
        matrices = [
            self._matrix(f"{room}.{name}", bias=biased.get(name, config.mlp_bias)) for name, room in rooms.items()
        ]
        norms = [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
        heads = [f"{attention}.q_norm", f"{attention}.k_norm"]
        pointers = [self._vector(f"{name}.weight") for name in norms]
        pointers += [self._vector(f"{name}.weight") if config.qk_norm else 0 for name in heads]
        return abi.Layer(*matrices, *pointers, config.windows[index] or 0)

    def _matrix(self, name: str, *, bias: bool = False) -> abi.Weight:
        made = packed(self._read(f"{name}.weight"))
        self._kept.append(made)
        self._bytes_of[name] = made.data.numel()
        pointer = self._vector(f"{name}.bias") if bias else 0
        return abi.Weight(made.data.data_ptr(), pointer, made.format, made.outputs, made.inputs, 0)

    def _vector(self, name: str) -> int:
        read = self._read(name)
        values = (read.dequantised() if isinstance(read, Quantised) else read).to(torch.float32).contiguous()
        self._kept.append(values)
        return values.data_ptr()
