"""A tiny random checkpoint, so that a whole cluster can be tried in seconds.

`make_toy_checkpoint` writes what a Hugging Face directory holds: config.json, generation_config.json, weights (sharded
when asked), tokenizer.json and tokenizer_config.json. Every byte is a token (ids 0 … 255), three specials follow,
and the ids above them are pairs of letters that encoding never yields but decoding shows, so any output has a text.
Weights are scaled so that the next token depends on the whole context, and the specials' rows are small, so that
greedy output does not end by accident; equal arguments give equal files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from safetensors.torch import save_file

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT_ID, IM_START_ID, IM_END_ID = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyShape:
    """Shape of the toy model. `extra` is merged into config.json last (rope_scaling, sliding_window, …)."""

    architecture: str = "LlamaForCausalLM"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    intermediate: int = 128
    vocab: int = 512
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    shards: int = 1
    dtype: str = "float32"
    extra: tuple[tuple[str, Any], ...] = ()


def make_toy_checkpoint(directory: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a toy checkpoint into `directory` (made when missing) and return its path.

    `overrides` are fields of `ToyShape`; `extra` may be a dict. Raises TypeError for an unknown one, KeyError for
    an architecture that has no toy.
    """
    if isinstance(overrides.get("extra"), dict):
        overrides["extra"] = tuple(overrides["extra"].items())
    shape = replace(ToyShape(), **overrides)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", _config(shape))
    generation = {"bos_token_id": IM_START_ID, "eos_token_id": [IM_END_ID, ENDOFTEXT_ID]}
    _write_json(path / "generation_config.json", generation)
    _write_json(path / "tokenizer.json", _tokenizer(shape.vocab))
    _write_json(path / "tokenizer_config.json", _tokenizer_config(shape))
    _write_weights(path, dict(_weights(shape, seed)), shape.shards)
    return path


def _config(shape: ToyShape) -> dict[str, Any]:
    config = {
        "architectures": [shape.architecture],
        "model_type": _MODEL_TYPES[shape.architecture],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": _head_dim(shape),
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "torch_dtype": shape.dtype,
        "bos_token_id": IM_START_ID,
        "eos_token_id": IM_END_ID,
    }
    if shape.architecture == "MistralForCausalLM":
        config["sliding_window"] = None  # transformers' own default is 4096
    return config | dict(shape.extra)


def _head_dim(shape: ToyShape) -> int:
    return shape.head_dim or shape.hidden // shape.heads


def _weights(shape: ToyShape, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, shape.dtype)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul(gain / columns**0.5).to(dtype)

    def vector(size: int, mean: float) -> torch.Tensor:
        return torch.randn(size, generator=generator).mul(0.1).add(mean).to(dtype)

    def vocabulary() -> torch.Tensor:
        rows = matrix(shape.vocab, hidden, 3.0)
        rows[ENDOFTEXT_ID : IM_END_ID + 1] *= 0.1
        return rows

    hidden, head_dim = shape.hidden, _head_dim(shape)
    qkv_bias = shape.attention_bias or shape.architecture == "Qwen2ForCausalLM"
    yield "model.embed_tokens.weight", vocabulary()
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", vector(hidden, 1.0)
        yield at + "post_attention_layernorm.weight", vector(hidden, 1.0)
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            yield at + f"self_attn.{name}_proj.weight", matrix(heads * head_dim, hidden, 2.0)
            if qkv_bias:
                yield at + f"self_attn.{name}_proj.bias", vector(heads * head_dim, 0.0)
        yield at + "self_attn.o_proj.weight", matrix(hidden, shape.heads * head_dim, 2.0)
        if shape.attention_bias and shape.architecture != "Qwen2ForCausalLM":
            yield at + "self_attn.o_proj.bias", vector(hidden, 0.0)
        if shape.architecture == "Qwen3ForCausalLM":
            yield at + "self_attn.q_norm.weight", vector(head_dim, 1.0)
            yield at + "self_attn.k_norm.weight", vector(head_dim, 1.0)
        for name, rows, columns in (
            ("gate", shape.intermediate, hidden),
            ("up", shape.intermediate, hidden),
            ("down", hidden, shape.intermediate),
        ):
            yield at + f"mlp.{name}_proj.weight", matrix(rows, columns, 2.0)
            if shape.mlp_bias:
                yield at + f"mlp.{name}_proj.bias", vector(rows, 0.0)
    yield "model.norm.weight", vector(hidden, 1.0)
    if not shape.tied:
        yield "lm_head.weight", vocabulary()


def _write_weights(path: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(weight.numel() * weight.element_size() for weight in weights.values())
    _write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _tokenizer(vocab: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer without merges, in the format of the `tokenizers` library."""
    tokens = [*_byte_alphabet(), *SPECIALS, *("".join(pair) for pair in product(ascii_lowercase, repeat=2))]
    added = [_added_token(256 + i, text) for i, text in enumerate(SPECIALS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens[:vocab])},
            "merges": [],
        },
    }


def _added_token(token_id: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": True}


def _tokenizer_config(shape: ToyShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


def _byte_alphabet() -> list[str]:
    """One printable character per byte, as GPT-2's byte-level encoding assigns them, in byte order."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
