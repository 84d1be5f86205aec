"""What a checkpoint says about itself: one frozen description for every supported family.

Two readers, one for Hugging Face's config.json and one for GGUF's metadata, end in the same `ModelConfig`; families are
rows of a table and differ in defaults and in which parts a layer has, nothing else. Whatever this engine would
compute differently from the checkpoint's author (an unknown activation, RoPE type, quantisation or architecture) is
refused here by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies differ from the plain ones. Fields that a kind does not use keep their defaults.

    `kind`: none, linear, dynamic, yarn, llama3, or divisors (GGUF: each frequency is divided by its own factor).
    `attention_factor` None: derived from the factor, as the YaRN paper does.
    """

    kind: str = "none"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of a decoder. `windows` has one entry per layer: the sliding window in tokens, or None."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    """As the checkpoint states it; `context_length` is what scaling makes of it."""
    rope_theta: float
    rope_scaling: RopeScaling
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")

    @property
    def context_length(self) -> int:
        """Longest sequence the checkpoint is meant for.

        Linear and dynamic scaling stretch the stated length. YaRN and llama3 state either the stretched length, next
        to the original one, or only the original one.
        """
        scaling = self.rope_scaling
        if scaling.kind in ("linear", "dynamic"):
            return int(self.max_positions * scaling.factor)
        if scaling.kind in ("yarn", "llama3"):
            return max(self.max_positions, int(scaling.original_max_positions * scaling.factor))
        return self.max_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What config.json leaves out because the architecture implies it."""

    name: str
    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 2048
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    layered_window: bool = False
    """Qwen: the window needs `use_sliding_window` and applies from layer `max_window_layers` on."""


_LLAMA = _Family(name="llama")
_MISTRAL = _Family(name="mistral", kv_heads=8, max_positions=131072, window=4096)
_QWEN2 = _Family(name="qwen2", kv_heads=32, max_positions=32768, window=4096, layered_window=True, qkv_bias=True)
_QWEN3 = _Family(
    name="qwen3", kv_heads=32, head_dim=128, max_positions=32768, window=4096, layered_window=True, qk_norm=True
)
HF_FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
}
GGUF_FAMILIES = {"llama": _LLAMA, "qwen2": _QWEN2, "qwen3": _QWEN3}


def read_hf_config(directory: Path) -> ModelConfig:
    """The description of a Hugging Face directory. Raises ModelError for what is missing or not supported."""
    config = _read_json(directory / "config.json")
    generation_file = directory / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    return parse_hf_config(config, generation)


def parse_hf_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """As `read_hf_config`, from the two files' contents."""
    family = _family(HF_FAMILIES, config.get("architectures") or [config.get("model_type")])
    _refuse_unsupported(config)
    heads = _number(config, "num_attention_heads")
    layers = _number(config, "num_hidden_layers")
    hidden = _number(config, "hidden_size")
    max_positions = int(_given(config, "max_position_embeddings", family.max_positions))
    rope = _rope_parameters(config)
    attention_bias = bool(config.get("attention_bias", False)) and family.name in ("llama", "qwen3")
    return ModelConfig(
        architecture=family.name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_kv_heads(config, family, heads),
        head_dim=int(_given(config, "head_dim", family.head_dim or hidden // heads)),
        intermediate_size=_number(config, "intermediate_size"),
        vocab_size=_number(config, "vocab_size"),
        max_positions=max_positions,
        rope_theta=float(_given(rope, "rope_theta", _given(config, "rope_theta", 10_000.0))),
        rope_scaling=_rope_scaling(rope, config, max_positions),
        norm_eps=float(_given(config, "rms_norm_eps", 1e-6)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family.name == "llama",
        qk_norm=family.qk_norm,
        windows=_hf_windows(config, family, layers),
        eos_token_ids=_ids(generation.get("eos_token_id"), config.get("eos_token_id")),
        bos_token_id=config.get("bos_token_id"),
    )


def parse_gguf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_divisors: tuple[float, ...] = ()
) -> ModelConfig:
    """The description of a GGUF file.

    `metadata`: its key-value pairs; `shapes`: its tensors by name, rows first; `rope_divisors`: the contents of its
    `rope_freqs.weight`. Raises ModelError for what is missing or not supported.
    """
    name = str(metadata.get("general.architecture"))
    family = _family(GGUF_FAMILIES, [name])
    values = {key.removeprefix(name + "."): value for key, value in metadata.items() if key.startswith(name + ".")}
    if values.get("expert_count"):
        raise ModelError(f"{name}.expert_count is {values['expert_count']}; mixtures of experts are not supported")
    heads = _number(values, "attention.head_count")
    hidden = _number(values, "embedding_length")
    layers = _number(values, "block_count")
    head_dim = int(_given(values, "attention.key_length", hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(_given(values, key, head_dim)) != head_dim:
            raise ModelError(f"{name}.{key} is {values[key]}, the head size {head_dim}; they must be equal")
    if "token_embd.weight" not in shapes:
        raise ModelError("tensor token_embd.weight is missing")
    return ModelConfig(
        architecture=family.name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(_given(values, "attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=_number(values, "feed_forward_length"),
        vocab_size=shapes["token_embd.weight"][0],
        max_positions=_number(values, "context_length"),
        rope_theta=float(_given(values, "rope.freq_base", 10_000.0)),
        rope_scaling=_gguf_rope_scaling(name, values, rope_divisors),
        norm_eps=float(_given(values, "attention.layer_norm_rms_epsilon", 1e-6)),
        tied_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=family.qk_norm,
        windows=_gguf_windows(name, values, family, layers),
        eos_token_ids=_ids(*(metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _family(families: Mapping[str, _Family], names: Sequence[Any]) -> _Family:
    for name in names:
        if name in families:
            return families[name]
    given = ", ".join(str(name) for name in names)
    raise ModelError(f"architecture {given} is not supported; supported are {', '.join(families)}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = _given(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act {activation} is not supported; it must be silu")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unnamed")
        raise ModelError(f"quantization_config ({method}) is not supported; use plain weights or a GGUF file")


def _kv_heads(config: Mapping[str, Any], family: _Family, heads: int) -> int:
    if "num_key_value_heads" in config:
        return int(config["num_key_value_heads"] or heads)
    return family.kv_heads or heads


# Sliding windows


def _hf_windows(config: Mapping[str, Any], family: _Family, layers: int) -> tuple[int | None, ...]:
    if family.window is None:
        return (None,) * layers
    window = _window(config.get("sliding_window", family.window))
    if not family.layered_window:
        if set(config.get("layer_types") or ()) - {"sliding_attention"}:
            raise ModelError(f"layer_types of mixed kinds are not supported for {family.name}")
        return (window,) * layers
    if not config.get("use_sliding_window", False):
        window = None
    first = int(_given(config, "max_window_layers", 28))
    default = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    kinds = config.get("layer_types") or default
    if len(kinds) != layers:
        raise ModelError(f"layer_types has {len(kinds)} entries for {layers} layers")
    return tuple(_layer_window(kind, window) for kind in kinds)


def _layer_window(kind: str, window: int | None) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise ModelError(f"layer type {kind} is not supported; it must be full_attention or sliding_attention")
    if window is None:
        raise ModelError("layer_types names sliding_attention, but sliding_window is not set or not in use")
    return window


def _gguf_windows(name: str, values: Mapping[str, Any], family: _Family, layers: int) -> tuple[int | None, ...]:
    window = _window(values.get("attention.sliding_window"))
    if window and family.layered_window:
        raise ModelError(f"{name}.attention.sliding_window is not supported: the file does not say for which layers")
    return (window,) * layers


def _window(value: Any) -> int | None:
    return int(value) if value else None


# RoPE scaling

_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_REQUIRED = {"linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scaling section, whichever of its three spellings is used (`rope_scaling` with `type` or `rope_type`)."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError("rope_parameters per layer type are not supported")
    partial = _given(rope, "partial_rotary_factor", _given(config, "partial_rotary_factor", 1.0))
    if float(partial) != 1.0:
        raise ModelError(f"partial_rotary_factor {partial} is not supported; it must be 1")
    return dict(rope)


def _rope_scaling(rope: Mapping[str, Any], config: Mapping[str, Any], max_positions: int) -> RopeScaling:
    kind = str(_given(rope, "rope_type", _given(rope, "type", "default")))
    if kind not in _SCALINGS:
        raise ModelError(f"RoPE type {kind} is not supported; it must be one of {', '.join(_SCALINGS)}")
    if kind == "default":
        return RopeScaling()
    for key in _REQUIRED.get(kind, ()):
        if rope.get(key) is None:
            raise ModelError(f"RoPE type {kind} needs {key}")
    inner = _given(rope, "original_max_position_embeddings", max_positions)
    original = int(_given(config, "original_max_position_embeddings", inner))
    given = {key: rope[key] for key in _SCALINGS[kind] if rope.get(key) is not None}
    given.setdefault("factor", max_positions / original)
    return RopeScaling(kind=kind, original_max_positions=original, **given)


def _gguf_rope_scaling(name: str, values: Mapping[str, Any], divisors: tuple[float, ...]) -> RopeScaling:
    kind = str(_given(values, "rope.scaling.type", "none"))
    if divisors:
        if kind not in ("none", "linear") or float(_given(values, "rope.scaling.factor", 1.0)) != 1.0:
            raise ModelError(f"{name}.rope.scaling.type {kind} beside rope_freqs.weight is not supported")
        return RopeScaling(kind="divisors", divisors=divisors)
    factor = float(_given(values, "rope.scaling.factor", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{name}.rope.scaling.type {kind} is not supported; it must be none, linear or yarn")
    original = int(_given(values, "rope.scaling.original_context_length", _number(values, "context_length")))
    if kind == "linear":  # the stated context length is the stretched one already
        return RopeScaling(kind="divisors", divisors=(factor,) * (_rotary_size(values) // 2))
    return RopeScaling(kind=kind, factor=factor, original_max_positions=original)


def _rotary_size(values: Mapping[str, Any]) -> int:
    hidden, heads = _number(values, "embedding_length"), _number(values, "attention.head_count")
    return int(_given(values, "attention.key_length", hidden // heads))


# Reading


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} does not hold an object")
    return value


def _number(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{key} is {value!r} in the model's description; it must be a positive whole number")
    return value


def _given(values: Mapping[str, Any], key: str, default: Any) -> Any:
    value = values.get(key)
    return default if value is None else value


def _ids(*groups: Any) -> tuple[int, ...]:
    """Token ids from numbers, lists of numbers and nothings; each once, in order."""
    ids = [token for group in groups for token in (group if isinstance(group, list) else [group])]
    return tuple(dict.fromkeys(int(token) for token in ids if token is not None))
