"""The parameters of a decoder, and which checkpoint tensor fills which rows of them.

q, k and v live fused in one matrix, gate and up in another, so that a step runs one product for each. `allocate`
returns the empty parameters together with the list of parts to fill; a loader fills every part or refuses the
checkpoint, so no parameter is ever served with what happened to be in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.linear import FourBit, Linear
from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight (size,) of an RMSNorm, always float32."""

    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `qkv` rows: query heads, key heads, value heads; `gate_up` rows: gate, up."""

    input_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear
    post_norm: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters of a decoder; with tied embeddings `lm_head` is `embedding`, the same tensor."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    lm_head: torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor, by its Hugging Face name, and the parameter rows (a view) that it fills."""

    name: str
    rows: torch.Tensor


def allocate(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> tuple[Weights, tuple[Part, ...]]:
    """Empty parameters of `config` and the parts that fill every row of them."""
    maker = _Maker(config, dtype, device)
    weights = maker.weights()
    return weights, tuple(maker.parts)


class _Maker:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.parts: list[Part] = []
        self._dtype, self._device = dtype, device

    def weights(self) -> Weights:
        config = self.config
        embedding = self._matrix({"model.embed_tokens.weight": config.vocab_size}, config.hidden_size)
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        norm = self._norm("model.norm", config.hidden_size)
        head = embedding
        if not config.tied_embeddings:
            head = self._matrix({"lm_head.weight": config.vocab_size}, config.hidden_size)
        return Weights(embedding=embedding, layers=layers, norm=norm, lm_head=head)

    def _layer(self, index: int) -> Layer:
        config, at = self.config, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {f"{at}.self_attn.q_proj": q_rows, f"{at}.self_attn.k_proj": kv_rows, f"{at}.self_attn.v_proj": kv_rows}
        return Layer(
            input_norm=self._norm(f"{at}.input_layernorm", hidden),
            qkv=self._linear(qkv, hidden, config.qkv_bias),
            q_norm=self._norm(f"{at}.self_attn.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self._norm(f"{at}.self_attn.k_norm", config.head_dim) if config.qk_norm else None,
            output=self._linear({f"{at}.self_attn.o_proj": hidden}, q_rows, config.output_bias),
            post_norm=self._norm(f"{at}.post_attention_layernorm", hidden),
            gate_up=self._linear({f"{at}.mlp.gate_proj": inner, f"{at}.mlp.up_proj": inner}, hidden, config.mlp_bias),
            down=self._linear({f"{at}.mlp.down_proj": hidden}, inner, config.mlp_bias),
        )

    def _linear(self, rows: dict[str, int], columns: int, bias: bool) -> Linear:
        weight = self._matrix({f"{name}.weight": count for name, count in rows.items()}, columns)
        return Linear(weight, self._vector({f"{name}.bias": count for name, count in rows.items()}) if bias else None)

    def _norm(self, name: str, size: int) -> Norm:
        return Norm(self._split({f"{name}.weight": size}, torch.empty(size, dtype=torch.float32, device=self._device)))

    def _matrix(self, rows: dict[str, int], columns: int) -> torch.Tensor:
        return self._split(rows, self._empty(sum(rows.values()), columns))

    def _vector(self, rows: dict[str, int]) -> torch.Tensor:
        return self._split(rows, self._empty(sum(rows.values())))

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _split(self, rows: dict[str, int], parameter: torch.Tensor) -> torch.Tensor:
        pieces = torch.split(parameter, list(rows.values()))
        self.parts += [Part(name, piece) for name, piece in zip(rows, pieces, strict=True)]
        return parameter


LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""A layer's products, and the checkpoint's tensors in the rows of each."""


def with_four_bit(weights: Weights, make: Callable[[tuple[str, ...]], FourBit | None]) -> Weights:
    """The same weights with 4-bit codes beside them, where `make` has some for the checkpoint tensors named."""

    def layer(index: int, given: Layer) -> Layer:
        made = {
            kind: dataclasses.replace(
                getattr(given, kind), four_bit=make(tuple(f"model.layers.{index}.{name}.weight" for name in names))
            )
            for kind, names in LINEARS.items()
        }
        return dataclasses.replace(given, **made)

    return dataclasses.replace(weights, layers=tuple(layer(i, given) for i, given in enumerate(weights.layers)))


def tensors(weights: Weights) -> Iterator[torch.Tensor]:
    """Every parameter once."""
    yield weights.embedding
    for layer in weights.layers:
        yield from _layer_tensors(layer)
    yield weights.norm.weight
    if weights.lm_head is not weights.embedding:
        yield weights.lm_head


def _layer_tensors(layer: Layer) -> Iterator[torch.Tensor]:
    for norm in (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm):
        if norm is not None:
            yield norm.weight
    for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
        yield linear.weight
        if linear.bias is not None:
            yield linear.bias
        if linear.four_bit is not None:
            yield from (linear.four_bit.codes, linear.four_bit.scales_and_middles)
