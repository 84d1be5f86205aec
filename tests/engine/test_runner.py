"""A token's logits depend on its own sequence and on nothing else: not on chunking, neighbours or the pool's past."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_rig import BLOCK, all_logits, block_table, greedy, make_runner, random_tokens

from engine.kv import KVLayout, KVPool
from engine.runner import ModelRunner
from engine.toy import make_toy_checkpoint
from engine.types import Chunk, StepPlan

CLOSE = 1e-4
TOKENS = random_tokens(75)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def runner(toy: Path) -> ModelRunner:
    return make_runner(toy)


@pytest.mark.parametrize("budget", [1, 5, 15, 16, 17, 64, 74])
def test_chunks_of_any_size_equal_the_whole(runner: ModelRunner, budget: int) -> None:
    whole = all_logits(runner, TOKENS)
    runner.pool.tensor.fill_(torch.nan)
    assert (all_logits(runner, TOKENS, budget=budget) - whole).abs().max() < CLOSE


def test_a_batch_of_prompts_chunks_and_decodes_equals_each_alone(runner: ModelRunner) -> None:
    plans = {"prompt": (0, 20), "chunk": (32, 30), "decode": (40, 1), "long decode": (70, 1), "first": (0, 1)}
    sequences = {
        name: random_tokens(start + count, seed=seed) for seed, (name, (start, count)) in enumerate(plans.items())
    }
    alone = {name: all_logits(runner, tokens)[-1] for name, tokens in sequences.items()}
    runner.pool.tensor.fill_(torch.nan)
    chunks = []
    for place, (name, (start, _)) in enumerate(plans.items()):
        tokens, table = sequences[name], block_table(len(sequences[name]), 10 * place)
        if start:
            runner.run(StepPlan((Chunk(name, tokens[:start], 0, table, "none"),)))
        chunks.append(Chunk(name, tokens[start:], start, table))
    together = runner.run(StepPlan(tuple(chunks)))
    for row, name in enumerate(plans):
        assert (together[row] - alone[name]).abs().max() < CLOSE, name


def test_rows_come_in_the_order_of_the_plan(runner: ModelRunner) -> None:
    whole = all_logits(runner, TOKENS[:40])
    table, other = block_table(40, 0), block_table(40, 20)
    runner.run(StepPlan((Chunk("a", TOKENS[:30], 0, table, "none"),)))
    rows = runner.run(
        StepPlan(
            (
                Chunk("b", TOKENS[:3], 0, other, "all"),
                Chunk("a", TOKENS[30:35], 30, table, "none"),
                Chunk("c", TOKENS[:7], 0, block_table(7, 40)),
            )
        )
    )
    assert rows.shape == (4, 512)
    assert rows.dtype == torch.float32
    assert (rows - torch.cat((whole[:3], whole[6:7]))).abs().max() < CLOSE


def test_a_step_without_wanted_rows_still_writes_its_kv(runner: ModelRunner) -> None:
    table = block_table(17, 5)
    rows = runner.run(StepPlan((Chunk("a", TOKENS[:16], 0, table, "none"),)))
    assert rows.shape == (0, 512)
    assert not runner.pool.tensor[table[0]].isnan().any()


def test_blocks_moved_to_another_pool_serve_there(toy: Path, runner: ModelRunner) -> None:
    expected = greedy(runner, TOKENS[:33], 6)
    other = make_runner(toy)
    table, moved = block_table(40, 0), block_table(40, 30)
    first = int(runner.run(StepPlan((Chunk("r", TOKENS[:33], 0, table),)))[0].argmax())
    size = runner.pool.layout.block_bytes
    for source, target in zip(table, moved, strict=True):
        other.pool.bytes()[target * size : (target + 1) * size] = runner.pool.bytes()[
            source * size : (source + 1) * size
        ]
    tokens = [first]
    for position in range(33, 38):
        tokens.append(int(other.run(StepPlan((Chunk("r", (tokens[-1],), position, moved),)))[0].argmax()))
    assert tokens == expected


def test_greedy_output_of_the_toy_is_not_degenerate(runner: ModelRunner) -> None:
    first, second = greedy(runner, TOKENS[:20], 12), greedy(runner, TOKENS[1:21], 12)
    assert len(set(first)) > 6
    assert first != second
    assert all(0 <= token < 512 for token in first)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_narrow_weights_or_kv_stay_near_float32(toy: Path, runner: ModelRunner, dtype: str, kv_dtype: str) -> None:
    exact = all_logits(runner, TOKENS)
    narrow = all_logits(make_runner(toy, dtype=dtype, kv_dtype=kv_dtype), TOKENS)
    assert narrow.dtype == torch.float32
    assert 0 < (narrow - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_the_pool_is_page_first_aligned_zero_and_writable_as_bytes() -> None:
    pool = KVPool(KVLayout(6, 3, 2, 8, BLOCK, "bfloat16"))
    assert pool.tensor.shape == (6, 2, 3, 2, BLOCK, 8)
    assert pool.tensor.is_contiguous()
    assert pool.tensor.data_ptr() % 4096 == 0
    assert not pool.tensor.any()
    view = pool.bytes()
    assert (view.readonly, view.format, len(view)) == (False, "B", 6 * pool.layout.block_bytes)
    view[4 * pool.layout.block_bytes] = 1
    assert pool.tensor.flatten(1).any(dim=1).tolist() == [False, False, False, False, True, False]


def test_two_layouts_differ_in_words_only_when_kv_cannot_be_shared() -> None:
    one = KVLayout(6, 3, 2, 8, 16, "float32")
    assert one.describe() == KVLayout(9, 3, 2, 8, 32, "float32").describe()
    others = [
        KVLayout(6, 4, 2, 8, 16, "float32"),
        KVLayout(6, 3, 1, 8, 16, "float32"),
        KVLayout(6, 3, 2, 8, 16, "bfloat16"),
    ]
    assert len({one.describe(), *(other.describe() for other in others)}) == 4
    with pytest.raises(KeyError):
        KVLayout(6, 3, 2, 8, 16, "int8")
