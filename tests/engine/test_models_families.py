"""Every family and every variation gives transformers' logits, on tiny random checkpoints that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_rig import all_logits, make_runner, random_tokens

from engine.errors import ModelError
from engine.model_config import parse_hf_config

CLOSE = 1e-4
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def make_checkpoint(directory: Path, family: str, **changes: Any) -> Path:
    config = getattr(transformers, f"{family}Config")(**(SMALL | changes))
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # transformers starts these at one and zero
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Set keys of config.json; a value of None removes the key."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def reference(directory: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def distance(directory: Path, *, length: int = 40, budget: int = 4096) -> float:
    tokens = random_tokens(length, SMALL["vocab_size"])
    ours = all_logits(make_runner(directory), tokens, budget=budget)
    return (ours - reference(directory, tokens)).abs().max().item()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_equals_transformers_tied_or_not(tmp_path: Path, family: str, tied: bool) -> None:
    assert distance(make_checkpoint(tmp_path, family, tie_word_embeddings=tied)) < CLOSE


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 6])
def test_every_ratio_of_query_to_kv_heads_equals_transformers(tmp_path: Path, ratio: int) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12 // ratio}
    assert distance(make_checkpoint(tmp_path, "Llama", **heads), budget=16) < CLOSE


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3"])
def test_a_head_size_of_its_own_equals_transformers(tmp_path: Path, family: str) -> None:
    assert distance(make_checkpoint(tmp_path, family, head_dim=20)) < CLOSE


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}], ids=["attention", "mlp"])
def test_biases_of_llama_equal_transformers(tmp_path: Path, changes: dict[str, bool]) -> None:
    assert distance(make_checkpoint(tmp_path, "Llama", **changes)) < CLOSE


def test_attention_bias_of_qwen3_equals_transformers(tmp_path: Path) -> None:
    assert distance(make_checkpoint(tmp_path, "Qwen3", attention_bias=True)) < CLOSE


@pytest.mark.parametrize("budget", [1, 7, 16, 4096])
def test_the_sliding_window_of_mistral_is_honoured_in_every_chunking(tmp_path: Path, budget: int) -> None:
    directory = make_checkpoint(tmp_path, "Mistral", sliding_window=11)
    assert distance(directory, budget=budget) < CLOSE
    edit_config(directory, sliding_window=4096)
    ours = all_logits(make_runner(directory), random_tokens(40, 96))
    assert (ours - reference(directory, random_tokens(40, 96))).abs().max() < CLOSE


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_the_window_of_qwen_applies_from_its_first_windowed_layer_on(tmp_path: Path, family: str) -> None:
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    directory = make_checkpoint(tmp_path, family, **window)
    assert make_runner(directory).model.config.windows == (None, 9)
    assert distance(directory, budget=16) < CLOSE


def test_a_prompt_of_several_tiles_equals_transformers_with_and_without_a_window(tmp_path: Path) -> None:
    for window in (None, 50):
        directory = make_checkpoint(tmp_path / str(window), "Mistral", sliding_window=window)
        assert distance(directory, length=200) < CLOSE
        assert distance(directory, length=200, budget=150) < CLOSE


SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn without original": {"rope_type": "yarn", "factor": 4.0},
    "yarn with mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 16},
    "yarn with attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9, "truncate": False},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_equals_transformers_in_each_spelling(tmp_path: Path, name: str, spelling: str) -> None:
    directory = make_checkpoint(tmp_path, "Llama", max_position_embeddings=64, head_dim=16)
    scaling = dict(SCALINGS[name])
    if spelling == "type":
        scaling["type"] = scaling.pop("rope_type")
    key = "rope_parameters" if spelling == "rope_parameters" else "rope_scaling"
    edit_config(directory, rope_parameters=None)
    edit_config(directory, rope_theta=5000.0, **{key: scaling})
    tokens = random_tokens(200, 96)
    ours, theirs = all_logits(make_runner(directory), tokens), reference(directory, tokens)
    for position in (10, 190):
        assert (ours[position] - theirs[position]).abs().max() < CLOSE


def test_scalings_differ_from_each_other_so_that_none_is_ignored(tmp_path: Path) -> None:
    tokens, seen = random_tokens(200, 96), []
    make_checkpoint(tmp_path, "Llama", max_position_embeddings=64, head_dim=16)
    for scaling in SCALINGS.values():
        edit_config(tmp_path, rope_parameters=dict(scaling, rope_theta=5000.0))
        seen.append(all_logits(make_runner(tmp_path), tokens)[190])
    gaps = [(a - b).abs().max().item() for i, a in enumerate(seen) for b in seen[:i]]
    assert sum(gap > 1e-3 for gap in gaps) >= len(gaps) - 1, "only yarn with and without `original` may coincide"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"head_dim": 7}, "even"),
    ],
)
def test_what_would_be_computed_differently_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    config = SMALL | {"architectures": ["LlamaForCausalLM"]}
    assert parse_hf_config(config, {}).num_layers == 2
    with pytest.raises(ModelError, match=words):
        parse_hf_config(config | changes, {})


def test_end_tokens_come_from_both_files_and_the_context_from_the_scaling() -> None:
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    parsed = parse_hf_config(config | {"rope_scaling": SCALINGS["linear"]}, {"eos_token_id": [7, 2]})
    assert (parsed.eos_token_ids, parsed.context_length) == ((7, 2), 256)
    assert parse_hf_config(config | {"rope_scaling": SCALINGS["yarn"]}, {}).context_length == 256
    assert parse_hf_config(config, {}).context_length == 64
