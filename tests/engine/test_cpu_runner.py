"""The compiled step computes what the torch model computes, on weights as they come, and a token's row never depends
on who else is in the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_rig import BLOCK, all_logits, block_table, make_runner, random_tokens

from engine.assemble import assemble
from engine.config import EngineConfig
from engine.cpu_runner import CpuRunner, refusal
from engine.kernels.cpu import build
from engine.kernels.cpu.pack import packed
from engine.kv import KVLayout, KVPool
from engine.loaders import Checkpoint, open_checkpoint
from engine.quantised import quantise
from engine.runner import ModelRunner
from engine.toy import make_toy_checkpoint
from engine.types import Chunk, StepPlan

try:
    build.load()
except build.Unavailable as reason:
    pytest.skip(f"no compiled step here: {reason}", allow_module_level=True)

TOY_NOISE = 5e-2  # of bf16, in a model of random weights; the real one is held to 2e-2 elsewhere
TOKENS = random_tokens(75)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied, grouped 4 to 1": {"tied": True, "kv_heads": 1},
    "odd vocabulary": {"vocab": 515},
    "head size 32": {"head_dim": 32},
    "head size 64": {"head_dim": 64, "heads": 3, "kv_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "windows": {"architecture": "MistralForCausalLM", "extra": {"sliding_window": 20}},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32},
}


def cpu_runner(
    checkpoint: Checkpoint, *, kv_dtype: str = "float32", packed: bool = False, threads: int = 2
) -> CpuRunner:
    config = checkpoint.config
    layout = KVLayout(64, config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, kv_dtype)
    pool = KVPool(layout)
    pool.tensor.fill_(torch.nan)

    def read(name: str) -> Any:
        tensor = checkpoint.read(name)
        return quantise(tensor) if packed and tensor.ndim == 2 else tensor

    return CpuRunner(config, read, pool, threads=threads)


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_toy_checkpoint(tmp_path_factory.mktemp("toy")))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_torch_model_within_bf16(tmp_path: Path, family: str) -> None:
    path = make_toy_checkpoint(tmp_path, **FAMILIES[family])
    want = all_logits(make_runner(path), TOKENS)
    assert far(all_logits(cpu_runner(open_checkpoint(path)), TOKENS), want) < TOY_NOISE


def test_eight_bit_weights_equal_the_torch_model_within_quantisation(tmp_path: Path, toy: Checkpoint) -> None:
    want = all_logits(make_runner(make_toy_checkpoint(tmp_path)), TOKENS)
    assert far(all_logits(cpu_runner(toy, packed=True), TOKENS), want) < TOY_NOISE


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("bfloat16", TOY_NOISE), ("float16", 1e-2)])
def test_the_pools_dtype_is_only_a_rounding(toy: Checkpoint, kv_dtype: str, tolerance: float) -> None:
    want = all_logits(cpu_runner(toy), TOKENS)
    assert far(all_logits(cpu_runner(toy, kv_dtype=kv_dtype), TOKENS), want) < tolerance


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1, 5, 16, 33, 74])
def test_chunks_of_any_size_equal_the_whole_bit_for_bit(toy: Checkpoint, budget: int, packed: bool) -> None:
    runner = cpu_runner(toy, packed=packed)
    whole = all_logits(runner, TOKENS)
    assert torch.equal(all_logits(runner, TOKENS, budget=budget, first_block=20), whole)


def test_neighbours_and_threads_change_nothing(toy: Checkpoint) -> None:
    one, two = cpu_runner(toy, threads=1), cpu_runner(toy, threads=2)
    alone = all_logits(one, TOKENS)[-1]
    table = block_table(75, 0)
    two.run(StepPlan((Chunk("a", TOKENS[:74], 0, table, "none"),)))
    others = tuple(Chunk(str(i), random_tokens(9 + i, seed=i), 0, block_table(20, 10 + 3 * i)) for i in range(5))
    rows = two.run(StepPlan((*others[:2], Chunk("a", TOKENS[74:], 74, table), *others[2:])))
    assert torch.equal(rows[2], alone)


def test_a_long_context_in_parts_equals_one_chunk(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_toy_checkpoint(tmp_path, max_positions=4096))
    tokens = random_tokens(900)
    config = checkpoint.config
    pool = KVPool(KVLayout(80, config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, "float32"))
    runner = CpuRunner(config, checkpoint.read, pool, threads=2)
    whole = all_logits(runner, tokens)[-1:]
    table = block_table(900, 3)
    last = runner.run(StepPlan((Chunk("r", tokens[899:], 899, table),)))
    assert far(last, whole) < 1e-3
    assert torch.equal(runner.run(StepPlan((Chunk("r", tokens, 0, table),))), whole), "alone or with all rows, the same"


def test_rows_come_in_the_order_of_the_plan_and_only_the_wanted_ones(toy: Checkpoint) -> None:
    runner = cpu_runner(toy)
    whole = all_logits(runner, TOKENS[:40])
    table, other = block_table(40, 0), block_table(40, 20)
    runner.run(StepPlan((Chunk("a", TOKENS[:30], 0, table, "none"),)))
    chunks = (Chunk("b", TOKENS[:8], 0, other, "none"), Chunk("a", TOKENS[30:40], 30, table, "all"))
    assert torch.equal(runner.run(StepPlan(chunks)), whole[30:])
    assert runner.run(StepPlan(chunks[:1])).shape == (0, 512)
    chunks = (
        Chunk("a", TOKENS[:30], 0, table, "last"),
        Chunk("b", TOKENS[:8], 0, other, "none"),
        Chunk("c", TOKENS[:12], 0, block_table(12, 30), "all"),
        Chunk("d", TOKENS[:5], 0, block_table(5, 40)),
        Chunk("e", TOKENS[:3], 0, block_table(3, 50), "none"),
    )
    assert torch.equal(runner.run(StepPlan(chunks)), torch.cat([whole[29:30], whole[:12], whole[4:5]]))
    rest = Chunk("b", TOKENS[8:20], 8, other, "all")
    assert torch.equal(runner.run(StepPlan((rest,))), whole[8:20]), "what nobody wanted has its KV nevertheless"


def test_what_is_not_a_number_shows_in_the_logits_of_its_sequence_only(toy: Checkpoint) -> None:
    runner = cpu_runner(toy)
    good, bad = block_table(40, 0), block_table(40, 20)
    for table in (good, bad):
        runner.run(StepPlan((Chunk("a", TOKENS[:32], 0, table, "none"),)))
    runner.pool.tensor[bad[0]] = torch.nan
    rows = runner.run(StepPlan((Chunk("a", TOKENS[32:33], 32, good), Chunk("b", TOKENS[32:33], 32, bad))))
    assert rows[0].isfinite().all()
    assert rows[1].isnan().any()


@pytest.mark.parametrize(
    "chunk",
    [Chunk("a", (1,), 16, (0,)), Chunk("a", (1,), 0, (64,)), Chunk("a", (512,), 0, (0,)), Chunk("a", (-1,), 0, (0,))],
)
def test_what_lies_outside_is_refused_before_anything_is_written(toy: Checkpoint, chunk: Chunk) -> None:
    runner = cpu_runner(toy)
    with pytest.raises(ValueError, match=r"outside|blocks"):
        runner.run(StepPlan((chunk,)))
    assert runner.pool.tensor.isnan().all()


def test_tiles_hold_every_format_of_a_matrix() -> None:
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    eight = quantise(weight)
    four = replace(eight, codes=eight.codes >> 4, bits=4)
    sizes = [made.data.numel() for made in (packed(weight), packed(eight), packed(four))]
    assert sizes == [2 * 2 * 1024, 2 * 2 * 576, 2 * 2 * 320]
    with pytest.raises(ValueError, match="whole groups"):
        packed(weight[:, :40])


def test_what_the_step_does_not_cover_is_said(tmp_path: Path) -> None:
    config = open_checkpoint(make_toy_checkpoint(tmp_path)).config
    assert refusal(config) is None
    assert "multiples" in str(refusal(replace(config, hidden_size=72)))
    assert "head_dim" in str(refusal(replace(config, head_dim=8, num_heads=8)))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"dtype": "bfloat16"}, CpuRunner),
        ({"dtype": "bfloat16", "weights": "dense"}, CpuRunner),
        ({"dtype": "bfloat16", "kernels": "torch"}, ModelRunner),
        ({"dtype": "float32"}, ModelRunner),
        ({"dtype": "float32", "weights": "packed"}, CpuRunner),
    ],
)
def test_the_engine_takes_it_only_where_the_numbers_allow(tmp_path: Path, settings: dict[str, str], kind: type) -> None:
    config = EngineConfig(model=str(make_toy_checkpoint(tmp_path)), num_blocks=8, threads=1, **settings)  # type: ignore[arg-type]
    assert type(assemble(config)[0]) is kind


def test_without_a_compiler_torch_runs_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    build.load.cache_clear()
    config = EngineConfig(model=str(make_toy_checkpoint(tmp_path)), num_blocks=8, threads=1, dtype="bfloat16")
    assert type(assemble(config)[0]) is ModelRunner
    assert "no C++ compiler" in caplog.text
    build.load.cache_clear()
