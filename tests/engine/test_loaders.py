"""A good checkpoint loads from either format; a bad one is refused before anything runs, by file and tensor name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from model_rig import all_logits, make_runner, random_tokens
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.loaders import load_model
from engine.toy import make_toy_checkpoint
from engine.weights import tensors

TOKENS = random_tokens(24)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return make_toy_checkpoint(tmp_path / "whole")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_toy_checkpoint(tmp_path / "sharded", shards=3)


def logits(path: Path) -> torch.Tensor:
    return all_logits(make_runner(path), TOKENS)


def reference(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def change_weights(path: Path, **changes: torch.Tensor | None) -> None:
    """Set (or with None remove) tensors of model.safetensors; dots in names are written as two underscores."""
    file = path / "model.safetensors"
    weights = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in weights.items() if value is not None}, file, metadata={"format": "pt"})


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path)
    return str(caught.value)


def test_a_sharded_checkpoint_equals_the_whole_one_and_transformers(whole: Path, sharded: Path) -> None:
    assert torch.equal(logits(whole), logits(sharded))
    assert (logits(whole) - reference(whole)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_kept_in_the_dtype_asked_for_and_norms_in_float32(whole: Path, dtype: str) -> None:
    model = load_model(whole, dtype=dtype).model
    assert str(model.dtype) == f"torch.{dtype}"
    assert {str(tensor.dtype) for tensor in tensors(model.weights)} == {f"torch.{dtype}", "torch.float32"}
    assert model.weights.norm.weight.dtype == torch.float32


def test_a_bfloat16_checkpoint_loads_exactly_into_float32(tmp_path: Path) -> None:
    narrow = make_toy_checkpoint(tmp_path, dtype="bfloat16")
    assert torch.equal(load_model(narrow).model.weights.lm_head, load_file(narrow / "model.safetensors")[HEAD].float())


# Tied embeddings


def test_tied_without_a_head_shares_the_embedding(tmp_path: Path) -> None:
    path = make_toy_checkpoint(tmp_path, tied=True)
    weights = load_model(path).model.weights
    assert weights.lm_head is weights.embedding
    assert (logits(path) - reference(path)).abs().max() < 1e-4


def test_tied_with_an_equal_head_shares_the_embedding(tmp_path: Path) -> None:
    path = make_toy_checkpoint(tmp_path, tied=True)
    embedding = load_file(path / "model.safetensors")[EMBEDDING]
    change_weights(path, lm_head__weight=embedding.clone())
    weights = load_model(path).model.weights
    assert weights.lm_head is weights.embedding


def test_tied_with_another_head_serves_the_files_head_as_transformers_does(tmp_path: Path) -> None:
    path = make_toy_checkpoint(tmp_path, tied=True)
    before = logits(path)
    change_weights(path, lm_head__weight=torch.randn(512, 64))
    assert (logits(path) - reference(path)).abs().max() < 1e-4
    assert (logits(path) - before).abs().max() > 0.1


def test_untied_without_a_head_is_refused(whole: Path) -> None:
    change_weights(whole, lm_head__weight=None)
    assert refusal(whole) == "tensor lm_head.weight is missing from the checkpoint"


# Parameters and tensors


def test_every_parameter_must_be_filled(whole: Path) -> None:
    for name in load_file(whole / "model.safetensors"):
        copy = Path(shutil.copytree(whole, whole.parent / "copy", dirs_exist_ok=True))
        change_weights(copy, **{name: None})
        assert name in refusal(copy)


def test_a_left_over_tensor_is_refused_unless_known_harmless(whole: Path) -> None:
    change_weights(whole, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert load_model(whole).config.num_layers == 2
    change_weights(whole, model__layers__0__self_attn__q_proj__bias=torch.ones(64))
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(whole)


def test_a_tensor_of_another_shape_or_kind_is_refused(whole: Path) -> None:
    change_weights(whole, model__layers__1__mlp__up_proj__weight=torch.ones(127, 64))
    assert "model.layers.1.mlp.up_proj.weight has shape [127, 64]" in refusal(whole)
    change_weights(whole, model__layers__1__mlp__up_proj__weight=torch.ones(128, 64, dtype=torch.int8))
    assert "model.layers.1.mlp.up_proj.weight has dtype I8" in refusal(whole)


@pytest.mark.parametrize(("layers", "name"), [(1, "model.layers.1."), (3, "model.layers.2.")])
def test_a_wrong_layer_count_is_refused(whole: Path, layers: int, name: str) -> None:
    change_json(whole / "config.json", num_hidden_layers=layers)
    assert name in refusal(whole)


# Files


def test_a_missing_shard_is_refused(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    message = refusal(sharded)
    assert "model-00002-of-00003.safetensors" in message
    assert "model.layers.0" in message


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_cut_off_file_is_refused(sharded: Path, cut: int) -> None:
    file = sharded / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    message = refusal(sharded)
    assert file.name in message
    assert "tensor" in message


@pytest.mark.parametrize("kept", [0, 5, 100])
def test_a_file_cut_off_in_its_header_is_refused(whole: Path, kept: int) -> None:
    file = whole / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert file.name in refusal(whole)


def test_swapped_shards_are_refused(sharded: Path) -> None:
    first, second = (sharded / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    first.rename(sharded / "aside")
    second.rename(first)
    (sharded / "aside").rename(second)
    message = refusal(sharded)
    assert first.name in message
    assert "tensor" in message


def test_an_index_that_names_an_absent_file_or_forgets_a_tensor_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    original = json.loads(index.read_text())["weight_map"]
    change_json(index, weight_map=original | {"model.norm.weight": "model-00009-of-00003.safetensors"})
    assert "model-00009-of-00003.safetensors" in refusal(sharded)
    change_json(index, weight_map={name: file for name, file in original.items() if name != "model.norm.weight"})
    assert "model.norm.weight is not listed" in refusal(sharded)
    index.write_text("{")
    assert "model.safetensors.index.json" in refusal(sharded)


def test_a_stray_weight_file_is_refused_but_not_the_authors_consolidated_one(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / "consolidated.safetensors")
    assert load_model(sharded).config.num_layers == 2
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / "extra.safetensors")
    assert "extra.safetensors" in refusal(sharded)


def test_pickled_weights_are_never_loaded(whole: Path) -> None:
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    message = refusal(whole)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message


def test_paths_that_hold_no_model_are_refused(tmp_path: Path, whole: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "neither" in refusal(whole / "config.json")
    (whole / "config.json").write_text("[1")
    assert "config.json" in refusal(whole)
    (whole / "config.json").unlink()
    assert "config.json" in refusal(whole)


# Digest


def test_the_digest_follows_content_and_description_and_not_the_path(whole: Path, tmp_path: Path) -> None:
    digest = load_model(whole).digest
    assert load_model(Path(shutil.copytree(whole, tmp_path / "elsewhere"))).digest == digest
    assert load_model(make_toy_checkpoint(tmp_path / "other", seed=1)).digest != digest
    change_json(whole / "config.json", rope_theta=20_000.0)
    assert load_model(whole).digest != digest


def test_one_changed_value_changes_the_digest(whole: Path) -> None:
    digest = load_model(whole).digest
    file = whole / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert load_model(whole).digest != digest


# GGUF

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(source: Path, target: Path, arch: str, *, quantised: bool = False, **metadata: float) -> Path:
    """What a converter makes of a toy checkpoint: its names, its metadata, and for `llama` interleaved q and k rows."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(258)
    writer.add_eot_token_id(256)
    writer.add_bos_token_id(257)
    for key, value in metadata.items():
        writer.add_uint32(f"{arch}.{key.replace('__', '.')}", int(value))
    for name, tensor in load_file(source / "model.safetensors").items():
        add_tensor(writer, name, tensor.numpy(), config, interleave=arch == "llama", quantised=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    values: np.ndarray[Any, Any],
    config: dict[str, Any],
    *,
    interleave: bool,
    quantised: bool,
) -> None:
    stem, kind = name.rsplit(".", 1)
    layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
    part = stem if layer is None else stem.split(".", 3)[3]
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
    if interleave and heads:
        pairs = values.reshape(config[heads], 2, -1, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    prefix = "" if layer is None else f"blk.{layer}."
    kind_of = gguf.GGMLQuantizationType.Q8_0
    if quantised and values.ndim == 2:
        writer.add_tensor(f"{prefix}{_GGUF_NAMES[part]}.{kind}", gguf.quantize(values, kind_of), raw_dtype=kind_of)
    else:
        writer.add_tensor(f"{prefix}{_GGUF_NAMES[part]}.{kind}", np.ascontiguousarray(values))


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("llama", {}),
        ("llama", {"tied": True, "attention_bias": True}),
        ("llama", {"head_dim": 24, "heads": 6, "kv_heads": 3}),
        ("qwen2", {"architecture": "Qwen2ForCausalLM"}),
        ("qwen3", {"architecture": "Qwen3ForCausalLM", "head_dim": 32}),
    ],
    ids=["llama", "llama tied with biases", "llama head size", "qwen2", "qwen3"],
)
def test_a_gguf_equals_the_directory_it_was_made_from(tmp_path: Path, arch: str, shape: dict[str, Any]) -> None:
    source = make_toy_checkpoint(tmp_path / "source", **shape)
    file = write_gguf(source, tmp_path / "model.gguf", arch)
    assert torch.equal(logits(file), logits(source))
    config = load_model(file).config
    assert (config.eos_token_ids, config.bos_token_id) == ((258, 256), 257)


def test_a_quantised_gguf_is_dequantised(tmp_path: Path, whole: Path) -> None:
    file = write_gguf(whole, tmp_path / "model.gguf", "llama", quantised=True)
    kept = load_model(file).model.weights.lm_head
    original = load_file(whole / "model.safetensors")[HEAD]
    assert 0 < (kept - original).abs().max() < 0.02 * original.abs().max()


def test_a_truncated_gguf_names_the_tensor(tmp_path: Path, whole: Path) -> None:
    file = write_gguf(whole, tmp_path / "model.gguf", "llama")
    content = file.read_bytes()
    for kept in (len(content) - 1000, len(content) // 2):
        file.write_bytes(content[:kept])
        message = refusal(file)
        assert "model.gguf is truncated: tensor" in message
    for kept in (0, 3, 500):
        file.write_bytes(content[:kept])
        assert "model.gguf" in refusal(file)


@pytest.mark.parametrize(
    ("arch", "metadata", "words"),
    [
        ("falcon", {}, "falcon"),
        ("llama", {"expert_count": 8}, "expert_count"),
        ("llama", {"rope__dimension_count": 8}, "rope.dimension_count"),
        ("qwen2", {"attention__sliding_window": 64}, "sliding_window"),
    ],
)
def test_a_gguf_that_would_be_computed_differently_is_refused(
    tmp_path: Path, whole: Path, arch: str, metadata: dict[str, float], words: str
) -> None:
    assert words in refusal(write_gguf(whole, tmp_path / "model.gguf", arch, **metadata))


def test_the_window_of_a_llama_gguf_is_honoured(tmp_path: Path, whole: Path) -> None:
    file = write_gguf(whole, tmp_path / "model.gguf", "llama", attention__sliding_window=8)
    assert load_model(file).config.windows == (8, 8)
